"""Kernels in Triton: only where it is installed, for CUDA devices, and off until `attention_backend="triton"` is given."""
