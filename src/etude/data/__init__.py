"""Corpora, tokenizers, packing, and the translation between messages and tokens."""
