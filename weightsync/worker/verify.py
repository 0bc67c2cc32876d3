"""Verification of the bytes read by a worker against the trainer's digests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count

import torch

from weightsync.errors import DigestError, FrozenLostError, ProtocolError
from weightsync.kernels.digest import WHOLE, Digests
from weightsync.net.wire import Go
from weightsync.planning.grouping import grouped
from weightsync.planning.wire_types import ByteRange
from weightsync.transports.base import DIGEST_BYTES, Seal, TransportReceiver
from weightsync.transports.proof import MemoryFingerprint

_NOTED_SAMPLE = 0
"""The sample of the parameters to compare. Sleep takes all of their memory, so any sample shows it."""


class Verifier:
    """The digest checks of one connection: of each chunk's runs, and of memory that is read in place."""

    def __init__(
        self, source: TransportReceiver, runs: Sequence[Sequence[ByteRange]], in_place: Sequence[ByteRange]
    ) -> None:
        # The runs on each device, chunk by chunk.
        own = [[*grouped(those, lambda run: source.storage(run.rank, run.storage).device).values()] for those in runs]
        numbers = count()
        self._chunks = [[(next(numbers), those, _sent_behind(source, those)) for those in chunk] for chunk in own]
        self._digests = Digests(*([_bytes(source, run) for run in those] for chunk in own for those in chunk))
        if several := next((sent for chunk in self._chunks for *_, sent in chunk if len(sent) > 1), None):
            torch.cat(several)  # loads its kernel now, while no chunk is on its way
        self._suspects: list[tuple[int, list[ByteRange], torch.Tensor]] = []
        self._proving: Callable[[], int | None] = lambda: None
        mapped = grouped(in_place, lambda run: run.rank)
        self._mapped_ranks = list(mapped)
        self._proof = MemoryFingerprint([[_bytes(source, run) for run in those] for those in mapped.values()])

    def prove(self, digests: Sequence[int]) -> None:
        """Compare all bytes of the memory that is read in place. Skip this for an empty list.

        Raises:
            DigestError: This worker has mapped other memory than the trainer's.
        """
        if digests and (rank := self._begin_search(digests, WHOLE)()) is not None:
            raise DigestError(
                f"this worker has mapped other memory than that of trainer rank {rank}: its bytes differ. Nothing was "
                "loaded. Push again, and restart the engine if the error returns"
            )

    def begin(self) -> None:
        """Begin a push."""
        self._suspects.clear()
        self._proving = lambda: None

    def check_chunk(self, number: int, seal: Seal | None) -> None:
        """Compare the runs of a chunk with the digests behind them. `seal` None: the chunk has no digests.

        Raises `DigestError` at once for runs in CPU memory. For runs in GPU memory `finish` raises it, because nothing
        here waits.
        """
        if seal is None:
            return
        for group, runs, expected in self._chunks[number]:
            sent = expected[0] if len(expected) == 1 else torch.cat(expected)
            differs = self._digests.compare(seal.sample, sent.view(torch.int64), group, seal.seed(number))
            self._suspects.append((number, runs, differs))
            if not differs.is_cuda:
                self._refuse_suspects()

    def begin_proof(self, go: Go) -> None:
        """Begin to compare the memory that is read in place, behind the copies on the GPU's current stream."""
        if go.place_sample is not None:
            self._proving = self._begin_search(go.digests, go.place_sample)

    def finish(self) -> None:
        """Raise `DigestError` if any bytes of this push differ from the trainer's. Waits for the GPU."""
        self._refuse_suspects()
        if (rank := self._proving()) is not None:
            raise DigestError(
                f"the mapped memory of trainer rank {rank} no longer holds its tensors: the trainer must have freed a "
                "tensor and allocated another one. The weights are a mixture; push again"
            )

    def _refuse_suspects(self) -> None:
        suspects, self._suspects = self._suspects, []
        if not suspects:
            return
        differs = torch.cat([flags for _, _, flags in suspects]).tolist()
        runs = [(number, run) for number, runs, _ in suspects for run in runs]
        for (number, run), is_other in zip(runs, differs, strict=True):
            if is_other:
                raise DigestError(
                    f"chunk {number} from trainer rank {run.rank} arrived with another digest: its {run.nbytes} bytes "
                    "changed on the way, or never came. The weights may be a mixture; push again"
                )

    def _begin_search(self, digests: Sequence[int], sample: int) -> Callable[[], int | None]:
        """Begin to digest mapped memory. Return a function for the first rank with another digest than in `digests`.

        digests: numbers in the order of the ranks.
        """
        if unproven := [rank for rank in self._mapped_ranks if rank >= len(digests)]:
            raise ProtocolError(
                f"memory of trainer rank {unproven[0]} is read in place, but digests came from {len(digests)} ranks"
            )
        ranks, rest = self._mapped_ranks, self._proof.begin(sample)

        def find() -> int | None:  # without this verifier: it keeps the function, and a cycle would keep the mapping
            return next((rank for rank, digest in zip(ranks, rest(), strict=True) if digest != digests[rank]), None)

        return find


class FrozenDigests:
    """The digests of parameters that only a whole push fills.

    vLLM's sleep at level 2 gives their memory back and leaves it unfilled. A push without frozen chunks would not
    restore it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._digests = Digests(tensors)
        self._noted: list[int] | None = None

    def note(self) -> None:
        """Note the parameters as they are."""
        self._noted = self._digests.of(_NOTED_SAMPLE)

    def check(self) -> None:
        """Raise `FrozenLostError` if a parameter differs from the last note."""
        if self._noted is not None and self._digests.of(_NOTED_SAMPLE) != self._noted:
            raise FrozenLostError(
                "the engine has lost weights of the first push, as by sleep(level=2). Push again: the next push sends "
                "everything"
            )


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return a digest of each tensor without gaps by name. Sleep at level 2 changes it, see `_NOTED_SAMPLE`."""
    runs = {name: run for name, each in tensors.items() if (run := bytes_of(each)) is not None}
    return dict(zip(runs, Digests([*runs.values()]).of(_NOTED_SAMPLE), strict=True))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the bytes of a tensor, whatever the order of its dimensions in memory. None: there are gaps in it.

    vLLM keeps weights in 8 bits transposed.
    """
    data = tensor.data.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return data.reshape(-1).view(torch.uint8) if data.is_contiguous() else None


def _bytes(source: TransportReceiver, run: ByteRange) -> torch.Tensor:
    return source.storage(run.rank, run.storage)[run.first : run.first + run.nbytes]


def _sent_behind(source: TransportReceiver, runs: Sequence[ByteRange]) -> list[torch.Tensor]:
    """Return the digests behind the runs."""
    return [source.storage(r.rank, r.storage)[r.first + r.nbytes :][:DIGEST_BYTES] for r in runs]
