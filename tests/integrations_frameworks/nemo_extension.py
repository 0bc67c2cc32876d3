"""What vLLM's workers are extended by in NeMo-RL's test."""

import torch
from nemo_rl.models.generation.vllm.checkpoint_engine import VllmCheckpointEngineMixin

torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: 0  # a build without CUDA has none


class WorkerExtension(VllmCheckpointEngineMixin):
    """NeMo-RL's, without what it loads weights by itself with, whose names collide with those of newer workers."""

    def _maybe_process_fp8_kv_cache(self) -> None: ...
