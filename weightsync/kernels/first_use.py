"""The first use of the kernels in a process, ahead of a push.

It imports Triton, compiles the kernels that nearly every push launches, and loads them into the GPU. In a process that
has not used Triton this takes most of a second. Loading a kernel may wait for the GPU, and in a push the GPU may wait
for another member of a broadcast.
"""

from __future__ import annotations

import torch

from weightsync.kernels.copies import BatchedCopy
from weightsync.kernels.digest import WHOLE, Digests
from weightsync.kernels.finite import find_non_finite

_NBYTES = 1 << 16


@torch.no_grad()
def prepare_kernels(device: torch.device) -> None:
    """Use the kernels of aligned copies, digests, comparisons and sums on a GPU once. For a CPU do nothing.

    From any thread.
    """
    if device.type != "cuda":
        return
    with torch.cuda.device(device):
        source = torch.zeros(_NBYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        BatchedCopy([(target, source, 0)]).run()
        digests, words = Digests([target]), target.view(torch.int64)
        digests.of(WHOLE)
        written, ends = words[:1].clone(), torch.zeros(1, dtype=torch.int64, device=device)
        digests.write(WHOLE, written)
        words.index_copy_(0, ends, written)
        digests.compare(WHOLE, words[:1])
        find_non_finite([target.view(torch.bfloat16)])
