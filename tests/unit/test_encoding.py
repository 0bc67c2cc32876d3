"""What a rank sends of a run, when it pays to send a difference, and what a worker refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from weightsync.errors import ProtocolError
from weightsync.transports import encoding
from weightsync.transports.encoding import HEAD_BYTES, Encoder, ReceiveBuffers, length, read

NBYTES = 1 << 20
SLOW, FAST = 25e6, 1e9


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(encoding, "time", SimpleNamespace(perf_counter=clock, thread_time=clock))
    return clock


class Link:
    """A rank that pushes one run over a link, which carries so many bytes in a second."""

    def __init__(self, clock: Clock, bytes_per_s: float, measures: bool = True) -> None:
        self.clock, self.bytes_per_s = clock, bytes_per_s
        self.encoder = Encoder(measures)
        self.run = noise(0)
        self.held = torch.zeros_like(self.run)
        self.pushes = 0

    def push(self, more_s: float = 0.0) -> int:
        """Return how many bytes travelled, after a push that took some seconds more than the link did."""
        self.encoder.begin()
        data = self.encoder.message("run", self.run) if self.encoder.encodes else self.run
        self.encoder.keep("run", self.run, again=True)
        self.clock.now_s += data.numel() / self.bytes_per_s + more_s
        self.encoder.end()
        read(data, self.held, self.pushes) if self.encoder.encodes else self.held.copy_(data)
        self.pushes += 1
        assert torch.equal(self.held, self.run)
        return data.numel()

    def change(self, count: int) -> None:
        words = self.run.view(torch.int16)
        words[torch.randint(0, words.numel(), (count,), generator=torch.Generator().manual_seed(self.pushes))] += 1


def noise(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_differences_follow_the_first_push_over_a_slow_link(clock: Clock):
    link = Link(clock, SLOW)
    assert link.push() == NBYTES
    for _ in range(3):
        link.change(100)
        assert link.push() < NBYTES / 100


@pytest.mark.parametrize(("bytes_per_s", "first_s", "encodes"), [(100e6, 0.0, True), (FAST, 0.01, False)])
def test_a_link_that_may_be_fast_is_measured_again_in_the_second_push(
    clock: Clock, bytes_per_s: float, first_s: float, encodes: bool
):
    link = Link(clock, bytes_per_s)
    assert [link.push(more_s=first_s), link.push()] == [NBYTES] * 2
    assert (link.push() < NBYTES) == encodes


def test_a_fast_link_carries_everything_until_it_is_slow(clock: Clock):
    link = Link(clock, FAST)
    assert [link.push() for _ in range(10)] == [NBYTES] * 10
    link.bytes_per_s = SLOW
    assert [link.push() for _ in range(55)] == [NBYTES] * 55  # the first push, and 64
    assert link.push() < NBYTES / 100


def test_a_link_of_any_speed_carries_differences_where_nothing_is_measured(clock: Clock):
    link = Link(clock, FAST, measures=False)
    assert link.push() == NBYTES
    assert link.push(more_s=100.0) < NBYTES / 100
    assert link.push() < NBYTES / 100


def test_pushes_that_are_slower_than_whole_ones_are_followed_by_ever_more_of_those(clock: Clock):
    link = Link(clock, SLOW)
    link.push()
    for rest in (2, 4, 8, 16, 32, 64, 64):
        assert link.push(more_s=10.0) < NBYTES / 100
        assert [link.push() for _ in range(rest)] == [NBYTES] * rest
    assert link.push() < NBYTES / 100  # and it pays again
    assert link.push(more_s=10.0) < NBYTES / 100
    assert [link.push(), link.push()] == [NBYTES] * 2
    assert link.push() < NBYTES / 100


def test_a_run_without_a_shorter_difference_rests(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    tried = []
    monkeypatch.setattr(encoding, "encode", lambda new, base, bytes_per_s: tried.append(link.pushes))
    link = Link(clock, SLOW)
    for number in range(20):
        link.run = noise(number)
        link.push(more_s=0.0 if number else 1.0)  # so that no later push is the slower one
    assert tried == [1, 4, 9, 18]


def test_memory_goes_back_where_nothing_is_encoded(clock: Clock):
    link = Link(clock, FAST)
    link.push()
    assert not link.encoder._bases
    slow = Link(clock, SLOW)
    slow.push()
    assert len(slow.encoder._bases) == 1


def test_the_rooms_of_two_chunks_do_not_overlap():
    mailbox = ReceiveBuffers(1024, 2)
    for number in (0, 1):
        mailbox.room(number, 0, 0, 520).fill_(1 + number)
        mailbox.room(number, 1, 768, 1024).fill_(3 + number)
    for number in (0, 1):
        assert (mailbox.room(number, 0, 0, 520) == 1 + number).all()
        assert (mailbox.room(number, 1, 768, 1024) == 3 + number).all()
        assert mailbox.room(number, 1, 768, 1024).numel() == 256 + HEAD_BYTES


def test_a_difference_from_another_base_writes_nothing():
    run = torch.arange(512, dtype=torch.int16).view(torch.uint8)
    encoder, held = Encoder(measures=False), run.clone()
    for _ in range(2):
        encoder.begin()
        if encoder.encodes:
            run = run.clone()
            run[0] += 1
            message = encoder.message("run", run)
        encoder.keep("run", run, again=True)
        encoder.end()
    room = torch.cat([message, torch.zeros(1024, dtype=torch.uint8)])
    assert length(room) == message.numel() < 100
    for pushes, other in [(0, held), (2, held), (1, held + 1)]:
        before = other.clone()
        with pytest.raises(ProtocolError, match="the next push sends everything"):
            read(room, other, pushes)
        assert torch.equal(other, before)
    read(room, held, 1)
    assert torch.equal(held, run)


@pytest.mark.parametrize("numbers", [(0, 2000, 0, 0), (0, -1, 0, 0), (1, 2000, 1, 0), (2, 8, 0, 0), (0, 8, 0, 0)])
def test_a_message_that_is_none_writes_nothing(numbers: tuple[int, ...]):
    message = torch.cat([torch.tensor(numbers).view(torch.uint8), torch.zeros(1024, dtype=torch.uint8)])
    assert message.numel() == HEAD_BYTES + 1024
    run = torch.ones(1024, dtype=torch.uint8)
    with pytest.raises(ProtocolError):
        read(message, run, 0)
    assert torch.equal(run, torch.ones(1024, dtype=torch.uint8))
