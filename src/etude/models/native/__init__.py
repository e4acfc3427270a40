"""Kernels of the models in C."""
