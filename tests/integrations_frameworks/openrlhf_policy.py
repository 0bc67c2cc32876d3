"""The recipe's policy actor with a model under ZeRO-3 on CPUs, where OpenRLHF's own wants an accelerator."""

import inspect
from types import SimpleNamespace
from typing import Any

import tiny_models
import weightsync_openrlhf
import zero
from recipe_ranks import MODEL
from torch import distributed as dist

(Theirs,) = weightsync_openrlhf.Policy.__bases__


class OnCpus(Theirs):
    def init_model_from_pretrained(self, *args: Any) -> None:
        given = inspect.signature(Theirs.init_model_from_pretrained).bind(self, *args).arguments
        assert "vllm_engines" not in given
        dist.init_process_group("gloo")
        self.actor = SimpleNamespace(model=zero.initialize(tiny_models.build(MODEL, "A"), zero.config(3)))
        self.trainer = SimpleNamespace(use_cuda_ipc=True)

    def fill(self, weights: str) -> None:
        model = self.actor.model.module
        with zero.prepare().zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            tiny_models.fill(model, weights)


class Policy(weightsync_openrlhf.Policy, OnCpus): ...
