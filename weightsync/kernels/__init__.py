"""Arithmetic over many tensors at once: copies, digests, quantisation; on GPUs in Triton, on CPUs in torch."""
