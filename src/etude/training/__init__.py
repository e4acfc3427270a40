"""The training service: continued pretraining, long context, SFT with MTP, and the RL trainer."""
