"""A digest of bytes that notices what a wrong plan does to them: shifted, swapped, repeated or stale blocks.

Not cryptographic. The bytes are read as 64-bit words w[0], w[1], ...; the digest is sum(w[i] * k[i]) modulo 2**64,
where every weight k[i] is odd (so no single wrong word goes unnoticed) and depends on i (so order counts). Sums may
be taken in any order, so a CPU and a GPU agree to the bit.
"""

from __future__ import annotations

import functools

import torch

_CHUNK_WORDS = 1 << 18
_GOLDEN = 0x9E3779B97F4A7C15
_STEP = 0xD1B54A32D192ED03
_MASK = (1 << 64) - 1


def digest(data: torch.Tensor) -> int:
    """The digest of a contiguous 1-D uint8 tensor, an unsigned 64-bit number. The last word is padded with zeros."""
    words = data.numel() // 8
    total, scale = 0, 1
    body = data[: words * 8]
    if data.data_ptr() % 8 or data.storage_offset() % 8:
        body = body.clone()  # only whole words of a storage can be viewed as words
    body = body.view(torch.int64)
    for start in range(0, words, _CHUNK_WORDS):
        chunk = body[start : start + _CHUNK_WORDS]
        partial = int((chunk * _weights(data.device)[: chunk.numel()]).sum())
        total = (total + scale * partial) & _MASK
        scale = (scale * _STEP) & _MASK
    rest = bytes(data[words * 8 :].tolist())
    return (total + int.from_bytes(rest, "little") * ((words * 2 + 1) * _GOLDEN | 1)) & _MASK


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    index = torch.arange(_CHUNK_WORDS, dtype=torch.int64, device=device)
    mixed = index * (_GOLDEN - (1 << 64))
    mixed = (mixed ^ (mixed >> 29)) * (_STEP - (1 << 64))
    return mixed | 1
