"""Samples of memory that two processes see: each run has its turn, and samples repeat."""

from __future__ import annotations

import torch

from weightsync.transports.proof import MemoryFingerprint


def runs(count: int, nbytes: int) -> list[torch.Tensor]:
    return list(torch.arange(count * nbytes, dtype=torch.int64).to(torch.uint8).split(nbytes))


def test_samples_of_ranks_with_unlike_numbers_of_runs_repeat_together():
    proof = MemoryFingerprint([runs(4100, 8), runs(6200, 8), []])
    found = [proof.of(sample) for sample in range(16)]
    assert found[8:] == found[:8]
    assert found[0] != found[1]


def test_each_run_has_its_turn():
    own = runs(2100, 8)
    proof = MemoryFingerprint([own])
    for run in (own[0], own[1500], own[-1]):
        before = [proof.of(sample) for sample in range(4)]
        run[3] += 1
        assert sum(proof.of(sample) != old for sample, old in enumerate(before)) == 1
