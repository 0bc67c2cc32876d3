"""The first use of the kernels in a process, ahead of a push.

It imports Triton, compiles the kernels that nearly every push launches, and loads them into the GPU. In a process that
has not used Triton this takes most of a second.
"""

from __future__ import annotations

import torch

from weightsync.kernels.copies import BatchedCopy
from weightsync.kernels.digest import WHOLE, Digests
from weightsync.kernels.finite import find_non_finite

_NBYTES = 1 << 16


@torch.no_grad()
def prepare_kernels(device: torch.device) -> None:
    """Use the kernels of aligned copies, digests and sums on a GPU once. For a CPU do nothing. From any thread."""
    if device.type != "cuda":
        return
    with torch.cuda.device(device):
        source = torch.zeros(_NBYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        BatchedCopy([(target, source, 0)]).run()
        Digests([target]).of(WHOLE)
        find_non_finite([target.view(torch.bfloat16)])
