"""What a rank holds, as placements."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.layout import Placement
from weightsync.senders.base import Piece
from weightsync.transports.base import Region


def place(pieces: Sequence[Piece], rank: int) -> dict[Placement, Region]:
    """This rank's placements and what is behind them; its storages are numbered from 1."""
    numbers: dict[int, int] = {}
    placed: dict[Placement, Region] = {}
    for piece in pieces:
        tensor = piece.tensor
        number = numbers.setdefault(tensor.untyped_storage().data_ptr(), len(numbers) + 1)
        placement = Placement(
            piece.meta.name,
            piece.box,
            rank,
            number,
            int(tensor.storage_offset()),
            tuple(tensor.stride()),
            piece.meta.dtype,
        )
        placed[placement] = Region(tensor, piece.compute)
    return placed
