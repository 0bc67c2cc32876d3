"""Arithmetic over many tensors at once: copies, digests, quantisation. It runs on GPUs in Triton, on CPUs in torch."""
