"""Time the kernels of changed words on a GPU, beside a copy: `python benchmarks/changed_words.py [GB]`."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from weightsync.kernels.changed_words import (
    CHECKSUM,
    NONE,
    ChangeFinder,
    ChangeWriter,
    Piece,
    Region,
    table_bytes,
)

SHARES = (0.0, 0.001, 0.01, 0.1)
PIECE_WORDS = 1 << 28
DRAWN_AT_ONCE = 1 << 26


def change(tensors: list[torch.Tensor], share: float) -> None:
    """Change a share of the words."""
    for tensor in tensors:
        for words in tensor.view(torch.int16).split(DRAWN_AT_ONCE):
            words.bitwise_xor_((torch.rand(words.shape, device=words.device) < share).to(torch.int16))


def milliseconds(call: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def main(gigabytes: float) -> None:
    words = [PIECE_WORDS] * max(int(gigabytes * 5e8 / PIECE_WORDS), 1)
    new = [torch.randint(-30000, 30000, (n,), dtype=torch.int16, device="cuda").view(torch.bfloat16) for n in words]
    base, memory = ([tensor.clone() for tensor in new] for _ in range(2))
    finder = ChangeFinder([Piece(*pair) for pair in zip(new, base, strict=True)])
    regions = [Region(number, 0, len(own), own.view(torch.uint8)) for number, own in enumerate(memory)]
    writer, nbytes = ChangeWriter(words, regions), 2 * sum(words)
    body = torch.empty(table_bytes(finder.tiles) + nbytes // 4, dtype=torch.uint8, device="cuda")
    copied = [milliseconds(lambda: [to.copy_(of) for to, of in zip(memory, base, strict=True)]) for _ in range(3)]
    sys.stdout.write(f"{nbytes / 1e9:.1f} GB; a copy takes {min(copied):.2f} ms\n")
    for share in (SHARES[0], *SHARES):  # the first round warms up
        change(new, share)
        find_ms = milliseconds(lambda: finder.find(0, body, 0))
        size, checksum = 3 * int(finder.words), int(finder.checksum())
        own, sums = body[: table_bytes(finder.tiles) + size], []
        check_ms = milliseconds(lambda: sums.append(writer.check(own, 0)))  # noqa: B023
        write_ms = milliseconds(lambda: writer.write(own))  # noqa: B023
        assert (int(sums[0]) ^ checksum) & CHECKSUM == 0
        assert all(a.view(torch.int16).equal(b.view(torch.int16)) for a, b in zip(new, memory, strict=True))
        sys.stdout.write(
            f"{share:6.1%} changed: find {find_ms:5.2f} ms, check {check_ms:4.2f}, write {write_ms:4.2f}\n"
        )
    unproven_ms = milliseconds(lambda: finder.find(0, body, NONE))
    sys.stdout.write(f"unchanged, without a proof: find {unproven_ms:.2f} ms\n")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 4.0)
