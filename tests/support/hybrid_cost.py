"""Measure what the controller adds to a call and to a push. The figures in docs/evidence/controller.md are its output.

    PYTHONPATH=.:tests/support python tests/support/hybrid_cost.py

Two workers and an engine without vLLM, on one host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import ray
import torch
from hybrid_workers import Policy, StandIn
from tensordict import TensorDict

from weightsync.hybrid import Dispatch, ResourcePool, RolloutGroup, WorkerGroup, column, register


class Timed(Policy):
    @register(Dispatch.ONE_TO_ALL)
    def push_by_hand(self, count: int) -> list[float]:
        (name,) = self._syncs
        return [timed(lambda: self.push(name, None)) for _ in range(count)]

    @register(Dispatch.DP)
    def give_back(self, batch: TensorDict) -> TensorDict:
        return batch

    @register(Dispatch.DP)
    def size_of(self, batch: TensorDict) -> int:
        return len(batch)


@ray.remote(num_cpus=0)
class Bare:
    """What Ray alone costs: the bytes of a batch there and back."""

    def give_back(self, data: Any) -> Any:
        return data


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)


def report(what: str, ms: list[float]) -> None:
    print(f"{what:50} median {median(ms):6.2f} ms, least {min(ms):6.2f} ms")


def main() -> None:
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=400 * 10**6)
    group = WorkerGroup(ResourcePool([2]), Timed, 1)
    engine = RolloutGroup(ResourcePool([1]), model="none", actor=StandIn)
    tokens = TensorDict({"tokens": torch.zeros(512, 256, dtype=torch.long), "rewards": torch.zeros(512)}, [512])
    texts = TensorDict({"text": column(["a text"] * 512)}, [512])
    large = TensorDict({"hidden": torch.zeros(4096, 2048)}, [4096])
    bare = [Bare.remote() for _ in range(2)]

    def ray_alone(nbytes: int) -> Callable[[], object]:
        part = np.zeros(nbytes // 2, np.uint8)
        return lambda: ray.get([actor.give_back.remote(part) for actor in bare])

    calls: dict[str, Callable[[], object]] = {
        "RANK_ZERO, nothing in it": group.nothing,
        "ONE_TO_ALL, nothing in it": lambda: group.fail("none", -1),
        "DP, 1 MB of tokens there and back": lambda: group.give_back(tokens),
        "Ray alone, the same bytes": ray_alone(512 * 257 * 8),
        "DP, 512 texts there and back": lambda: group.give_back(texts),
        "DP, 34 MB there and back": lambda: group.give_back(large),
        "Ray alone, the same bytes as these": ray_alone(4096 * 2048 * 4),
        "34 MB from call to call, fetched between": lambda: group.size_of(group.give_back(large)),
        "34 MB from call to call, as an argument": lambda: group.size_of(group.give_back.remote(large)),
    }
    for what, call in calls.items():
        report(what, [timed(call) for _ in range(60)][10:])
    with engine.follow(group) as sync:
        sync.push()  # names the engines to the workers
        alone, controlled = [], []
        for _ in range(5):
            alone += group.push_by_hand(20)[0]
            controlled += [timed(sync.push) for _ in range(20)]
    report("push by hand", alone[5:])
    report("push by the controller", controlled[5:])
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    ray.shutdown()


if __name__ == "__main__":
    main()
