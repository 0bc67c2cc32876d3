"""The kernels for GPUs, run on a CPU by Triton's interpreter: `TRITON_INTERPRET=1 python tests/interpreted_kernels.py`.

In a process of its own, because Triton asks for that variable as it is imported. Says what it has compared.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import test_copies
import test_digest
import torch

from weightsync.kernels import copies_triton, digest_triton
from weightsync.kernels.digest import PARTS, WHOLE, digest


def copies(of: torch.dtype, to: torch.dtype) -> int:
    """Copies between random views; gives how many there were."""
    sizes = [size for size in test_copies.SIZES if 0 not in size]
    pairs, wholes = test_copies.some_pairs(of, to, "cpu", sizes)
    assert all(copies_triton.can_launch(*pair) for pair in pairs)
    for lightly in (False, True):
        test_copies.check(pairs, wholes, links=3, batched=copies_triton.Launches, lightly=lightly)
    return len(pairs)


def digests(start: int) -> int:
    sizes = [0, 5, 8, 4096, PARTS * test_digest.PART_BYTES, 2 * PARTS * test_digest.PART_BYTES + 70_007, 9]
    runs = [test_digest.noise(start + size, seed)[start:] for seed, size in enumerate(sizes)]
    for part in (WHOLE, 0, 7, PARTS - 1):
        launch = digest_triton.Launch(runs, sampled=part != WHOLE)
        launch.begin(max(part, 0))
        found = launch.found()
        assert found == [digest(run, part) for run in runs]
    return len(runs)


if __name__ == "__main__":
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment, misc]
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=3)  # type: ignore[assignment]
    same = [torch.int64, torch.float32, torch.bfloat16, torch.float8_e4m3fn]  # of each size one
    print(sum(copies(dtype, dtype) for dtype in same), "copies")
    casts = [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)]  # to bfloat16 it does not round
    print(sum(copies(*dtypes) for dtypes in casts), "casts")
    print(sum(digests(start) for start in (0, 1, 2, 4)), "digests")
