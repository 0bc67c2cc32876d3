"""The kernels for GPUs, run on a CPU by Triton's interpreter: `TRITON_INTERPRET=1 python tests/interpreted_kernels.py`.

In a process of its own, because Triton asks for that variable as it is imported. Says what it has compared.
"""

from __future__ import annotations

import contextlib
import random

import test_copies
import test_digest
import torch

from weightsync.kernels import copies_triton, digest_triton
from weightsync.kernels.digest import PARTS, WHOLE, digest
from weightsync.testing.promises import same_bytes


def copies(of: torch.dtype, to: torch.dtype) -> int:
    """Copies between random views, as many as there were; each must leave every byte as `copy_` does."""
    draw, pairs, wholes = random.Random(f"{of} {to}"), [], []
    for number, size in enumerate(test_copies.SIZES):
        room = 4 * int(torch.tensor(size).prod()) + 4096 * len(size) + 128
        whole, data = (test_copies.filled(room, dtype, "cpu", number) for dtype in (to, of))
        if 0 not in size:
            pairs.append((test_copies.a_view(whole, size, draw), test_copies.a_view(data, size, draw)))
            wholes.append(whole)
    before = [whole.clone() for whole in wholes]
    for target, source in pairs:
        target.copy_(source)
    expected = [whole.clone() for whole in wholes]
    for whole, old in zip(wholes, before, strict=True):
        whole.copy_(old)
    assert all(copies_triton.can_launch(*pair) for pair in pairs)
    copies_triton.Launches([(*pair, number % 3) for number, pair in enumerate(pairs)]).run()
    for pair, whole, wanted in zip(pairs, wholes, expected, strict=True):
        assert same_bytes(whole, wanted), (of, to, pair[0].shape, pair[0].stride(), pair[1].stride())
    return len(pairs)


def digests(start: int) -> int:
    sizes = [0, 5, 8, 4096, PARTS * test_digest.PART_BYTES, 2 * PARTS * test_digest.PART_BYTES + 70_007, 9]
    runs = [test_digest.noise(start + size, seed)[start:] for seed, size in enumerate(sizes)]
    for part in (WHOLE, 0, 7, PARTS - 1):
        found = digest_triton.Launch(runs, sampled=part != WHOLE).of(max(part, 0))
        assert found == [digest(run, part) for run in runs]
    return len(runs)


if __name__ == "__main__":
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment, misc]
    same = [torch.int64, torch.float32, torch.bfloat16, torch.float8_e4m3fn]  # of each size one
    print(sum(copies(dtype, dtype) for dtype in same), "copies")
    casts = [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)]  # to bfloat16 it does not round
    print(sum(copies(*dtypes) for dtypes in casts), "casts")
    print(sum(digests(start) for start in (0, 1, 2, 4)), "digests")
