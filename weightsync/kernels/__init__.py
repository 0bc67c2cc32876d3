"""Arithmetic over whole tensors: digests."""
