"""Workers that hold a trainer's model, for tests of `weightsync.hybrid` with real engines."""

from __future__ import annotations

from pathlib import Path

import megatron_models
import tiny_models
import torch
from hybrid_protocols import ALL_MICRO_DP, PP_ONLY
from safetensors.torch import load_file
from tensordict import TensorDict

from weightsync import MegatronBackend
from weightsync.hybrid import Dispatch, Place, Worker, register


class Fsdp(Worker):
    def init_model(self, model: str, weights: str) -> None:
        torch.set_num_threads(1)
        self.model = tiny_models.shard(tiny_models.build(model, weights))

    @register(Dispatch.ONE_TO_ALL)
    def change(self, weights: str) -> None:
        tiny_models.fill(self.model, weights)


class Megatron(Worker):
    """Two tensor-parallel ranks, or the ranks of another mesh."""

    backend = MegatronBackend(vocab_size=251)

    def init_model(self, model: str, folder: Path, tp: int = 2, pp: int = 1) -> None:
        torch.set_num_threads(1)
        self.folder, self.config = folder, tiny_models.CONFIGS[model]()
        self.model = megatron_models.build(self.config, megatron_models.Mesh(tp, pp), torch.bfloat16, padding=5)

    @register(Dispatch.ONE_TO_ALL)
    def change(self, weights: str) -> None:
        megatron_models.load(self.model, self.config, load_file(self.folder / weights / "model.safetensors"))

    def place(self) -> Place:
        from megatron.core import parallel_state

        tp = parallel_state.get_tensor_model_parallel_rank()
        collects = parallel_state.is_pipeline_last_stage() and tp == 0
        stage = parallel_state.get_pipeline_model_parallel_rank()
        return Place(parallel_state.get_data_parallel_rank(), collects, tp, stage)

    @register(PP_ONLY)
    def names(self) -> list[str]:
        return [name for chunk in self.model for name, _ in chunk.named_parameters()]

    @register(ALL_MICRO_DP)
    def generate(self, batch: TensorDict) -> TensorDict:
        """Return of each row the rank that it went to."""
        return TensorDict({"rank": torch.full(batch.batch_size, self.rank)}, batch.batch_size)
