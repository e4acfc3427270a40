"""Transformer families and their Hugging Face checkpoints."""
