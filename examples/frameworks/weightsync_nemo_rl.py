"""A checkpoint engine of NeMo-RL's, which `refit_transport` names."""

import re
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import ray
import torch
from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine

from weightsync import WeightSync

# NeMo-RL's actors that hold an engine: one of each group, and every one where an engine has one GPU.
ENGINE = re.compile(r"vllm_policy-(grp\d+-0|\d+-\d+)")


def engines() -> list[Any]:
    return [ray.get_actor(name) for name in sorted(ray.util.list_named_actors()) if ENGINE.fullmatch(name)]


class WeightSyncEngine(CheckpointEngine):
    def __init__(self, bucket_size: int, release_after_refit: bool, **options: Any) -> None:
        self.options = {"transport": "broadcast", **options}
        self.weightsync: WeightSync | None = None

    def prepare(self) -> dict[str, Any]:
        return {}

    def init_policy_process_group(self, **_: Any) -> None:
        self.weightsync = WeightSync("stream", engine=engines, **self.options)

    def init_rollout_process_group(self, **_: Any) -> None: ...

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        await self.weightsync.push_async(without_gradients(weights))

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        return  # weightsync's plug-in in vLLM's workers loads them
        yield

    def finalize(self) -> None:
        if self.weightsync is not None:
            self.weightsync.close()


@torch.no_grad()  # a push reads the stream in a thread of its own
def without_gradients(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from weights
