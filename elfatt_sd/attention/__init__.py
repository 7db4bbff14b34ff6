"""Attention and merging on tensors alone."""
