"""The encoding of byte runs for `encoding=`: a run travels whole, or as its difference from the last push.

Both ends keep the last runs. A message is a head, followed by a run or a difference. A run includes its digest. Two
facts identify the base of a difference: the push's number, and the base's digest.

    head    kind, bytes that follow, and for a difference the push and the digest of its base: 4 integers of 8 bytes

Encoding has to pay. The first push is whole, and measures the speed of the link. A run is sent whole for the next
pushes if encoding costs more time than it saves. All runs are, after a push slower than an unencoded one.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable

import torch

from weightsync.errors import ProtocolError
from weightsync.kernels.delta import decode, encode
from weightsync.transports.base import DIGEST_BYTES, SLOTS

HEAD_BYTES = 32
_WHOLE, _DIFFERENCE = 0, 1
_PAYS_BELOW = 1.5e8
"""Link speed in bytes per second. Over faster links encoding gains nothing: comparing takes both ends longer."""
_SLOW_ANYWAY = 5e7
"""Link speed in bytes per second. Below it encoding pays anyway.

A first push has more to do than later ones, and measures too low a speed. At a speed from here to `_PAYS_BELOW` the
second push is unencoded and measured too.
"""
_FIRST_REST, _LONGEST_REST = 2, 64
"""Numbers of pushes."""


class Encoder:
    """The runs of one trainer rank's last push, and the choice between a difference and the whole run.

    encodes: whether the current push sends messages. Otherwise it sends plain runs.
    pushes: the number of pushes that have ended.
    """

    def __init__(self, measures: bool) -> None:
        """Begin without any sent run. Unless it `measures`, the encoder sends every difference shorter than its run."""
        self.encodes = False
        self._measures = measures
        self.pushes = 0
        self._bases: dict[Hashable, torch.Tensor] = {}
        self._whole_left, self._rest = 1, _FIRST_REST
        self._resting: dict[Hashable, tuple[int, int]] = {}  # by run: pushes left to rest, and the next rest's length
        self._bytes_per_s = 0.0  # of the last unencoded push

    def begin(self) -> None:
        """Begin a push."""
        self.encodes = self._whole_left == 0
        self._nbytes, self._started = 0, time.perf_counter()

    def message(self, key: Hashable, run: torch.Tensor) -> torch.Tensor:
        """Return the message of a run."""
        base, (left, rest) = self._bases.get(key), self._resting.get(key, (0, _FIRST_REST))
        if base is None or left:
            self._resting[key] = max(left - 1, 0), rest
            return _message(_WHOLE, run, 0, None)
        started = time.thread_time()  # CPU time: other processes' load must not count against the difference
        difference = encode(run, base, self._bytes_per_s)
        saved = 0 if difference is None else run.numel() - difference.numel()
        if self._measures and saved <= (time.thread_time() - started) * self._bytes_per_s:
            self._resting[key] = rest, min(2 * rest, _LONGEST_REST)
        else:
            self._resting.pop(key, None)
        if difference is None:
            return _message(_WHOLE, run, 0, None)
        return _message(_DIFFERENCE, difference, self.pushes, base)

    def keep(self, key: Hashable, run: torch.Tensor, again: bool) -> None:
        """Keep a run after it was sent. `again`: later pushes send the run too."""
        self._nbytes += run.numel()
        if self._whole_left > 1 or not again:
            return
        if key in self._bases:
            self._bases[key].copy_(run)
        else:
            self._bases[key] = run.clone()

    def end(self) -> None:
        """End a push. The receivers then hold all of its runs."""
        self.pushes += 1
        if not self._measures:
            self._whole_left = 0
            return
        bytes_per_s = self._nbytes / max(time.perf_counter() - self._started, 1e-9)
        if not self.encodes:
            self._bytes_per_s = bytes_per_s
            self._whole_left -= 1
            if self.pushes == 1 and _SLOW_ANYWAY < bytes_per_s < _PAYS_BELOW:
                self._whole_left = 1
            elif self._whole_left == 0 and bytes_per_s > _PAYS_BELOW:
                self._whole_left = _LONGEST_REST
        elif bytes_per_s < self._bytes_per_s:
            self._whole_left, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)
        else:
            self._rest = _FIRST_REST
        if self._whole_left > 1:
            self._bases.clear()

    def reconnect(self) -> None:
        """Go on with workers of several connections. They have equal runs, with digests of unlike pushes."""
        drop_digests(self._bases.values())


class ReceiveBuffers:
    """A worker's buffers for the messages of two chunks.

    A message may be shorter than its room. The head has the length.
    """

    def __init__(self, slot_bytes: int, runs: int) -> None:
        """Allocate for chunks of `slot_bytes` bytes and `runs` runs. Without runs there are no messages."""
        nbytes = slot_bytes + runs * HEAD_BYTES if runs else 0
        self._boxes = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(SLOTS)]

    def room(self, number: int, position: int, first: int, end: int) -> torch.Tensor:
        """Return the room for a run's message.

        position: the number of the run in its chunk.
        first, end: the bytes of the run in the slot.
        """
        return self._boxes[number % SLOTS][first + position * HEAD_BYTES : end + (position + 1) * HEAD_BYTES]


def drop_digests(runs: Iterable[torch.Tensor]) -> None:
    """Zero the digests of runs. The next push compares all bytes."""
    for run in runs:
        run[-DIGEST_BYTES:].zero_()


def length(message: torch.Tensor) -> int:
    """Return the length of a message within its room. Raises `ProtocolError` for an impossible length."""
    nbytes = _head(message)[1]
    if not 0 <= nbytes <= message.numel() - HEAD_BYTES:
        raise ProtocolError(f"a message has {nbytes} bytes, and room for {message.numel() - HEAD_BYTES}")
    return HEAD_BYTES + nbytes


def read(message: torch.Tensor, run: torch.Tensor, pushes: int) -> None:
    """Decode a message into `run`. Before the call `run` has the bytes of the last of `pushes` pushes.

    Raises `ProtocolError`, before anything is written, for a malformed message, or a difference from another base.
    """
    body = message[HEAD_BYTES : length(message)]
    kind, nbytes, base_pushes, base_digest = _head(message)
    if kind == _WHOLE and nbytes == run.numel():
        run.copy_(body)
    elif kind == _DIFFERENCE:
        if (base_pushes, base_digest) != (pushes, _digest(run)):
            raise ProtocolError(
                f"a difference has push {base_pushes} as its base, and push {pushes} was the last here, or brought "
                "other bytes. Push again: the next push sends everything"
            )
        decode(body, run)
    else:
        raise ProtocolError(f"a message of kind {kind} has {nbytes} bytes for a run of {run.numel()}")


def _message(kind: int, body: torch.Tensor, pushes: int, base: torch.Tensor | None) -> torch.Tensor:
    numbers = [kind, body.numel(), pushes, 0 if base is None else _digest(base)]
    return torch.cat([torch.tensor(numbers).to(body.device).view(torch.uint8), body])


def _head(message: torch.Tensor) -> list[int]:
    numbers: list[int] = message[:HEAD_BYTES].clone().view(torch.int64).tolist()
    return numbers


def _digest(run: torch.Tensor) -> int:
    return int(run[-DIGEST_BYTES:].clone().view(torch.int64))
