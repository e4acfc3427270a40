"""Block-scaled number formats: NVFP4 for the forward pass of experts, MXFP8 for the backward pass."""
