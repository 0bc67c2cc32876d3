"""The frameworks' own Ray actors in the tests of recipes, around tiny models and real engines on CPUs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ray
import tiny_models
import torch
from engines import ANSWER_TOKENS, NOT_COMPILED, PROMPTS, answer_of
from ray.util.placement_group import placement_group
from recipe_ranks import MODEL, answer
from sources import FRAMEWORKS, RECIPES, ROOT, importable
from torch import distributed as dist
from torch.distributed import device_mesh


def start_ray(framework: str, sources: Path = FRAMEWORKS) -> None:
    """Start Ray with GPUs that are numbers alone."""
    folders = [ROOT, RECIPES, *(ROOT / "tests" / each for each in ("support", "integrations_frameworks"))]
    os.environ |= {**NOT_COMPILED, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    os.environ |= {"FRAMEWORK": framework, "FRAMEWORKS": str(sources)}
    importable(framework, sources)
    ray.init(num_cpus=8, num_gpus=4, include_dashboard=False, object_store_memory=100 * 2**20)


def check(ask: Any, fill: Any, sync: Any) -> None:
    """Push other weights than the engine has, and then those that it was started from."""
    cold = ask()
    for weights in "AB":
        ray.get(fill(weights))
        sync()
        assert (ask() == cold) == (weights == "B"), f"the answers after a push of {weights}"


def openrlhf(rank: int, checkpoint: Path) -> None:
    start_ray("openrlhf")
    import openrlhf_policy
    import weightsync_openrlhf
    from openrlhf.trainer.ray.launcher import RayActorGroup
    from vllm import SamplingParams

    weightsync_openrlhf.install()
    from openrlhf.cli import train_ppo_ray

    assert issubclass(weightsync_openrlhf.class_of(train_ppo_ray.PolicyModelActor), weightsync_openrlhf.Policy)
    engines = train_ppo_ray.create_vllm_engines(1, 1, str(checkpoint), 0, False, True, True, 256, None, 0.9)
    trainers = RayActorGroup(1, 2, ray.remote(num_gpus=1)(openrlhf_policy.Policy))
    ray.get(trainers.async_init_model_from_pretrained(None, str(checkpoint), 10, engines))
    greedy = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, logprobs=5, ignore_eos=True)

    def ask() -> Any:
        return [answer_of(ray.get(engines[0].generate.remote(prompt, greedy))) for prompt in PROMPTS]

    def sync() -> None:
        ray.get(trainers.async_run_method(method_name="broadcast_to_vllm"))

    check(ask, lambda weights: trainers.async_run_method("fill", weights), sync)
    ray.shutdown()


def nemo_rl(rank: int, checkpoint: Path) -> None:
    start_ray("nemo_rl")
    from nemo_rl.models.generation.vllm.checkpoint_engine import VllmCheckpointEngineRpcMixin
    from nemo_rl.models.policy.workers.checkpoint_engine import PolicyCheckpointEngineMixin
    from nemo_rl.weight_sync.factory import create_weight_synchronizer

    class Policy(PolicyCheckpointEngineMixin):
        def __init__(self, rank: int, store: str) -> None:
            _count_memory()
            self.rank = rank
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
            self.model = tiny_models.shard(tiny_models.build(MODEL, "A"))

        def _checkpoint_engine_weight_iterator(self, kv_scales: Any = None) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self.model.state_dict().items():
                yield name, tensor.full_tensor()

        async def fill(self, weights: str) -> None:
            tiny_models.fill(self.model, weights)

    class Generation(VllmCheckpointEngineRpcMixin):
        def __init__(self, options: dict[str, Any]) -> None:
            from vllm import LLM, SamplingParams

            _count_memory()
            extension = "nemo_extension.WorkerExtension"
            self.llm = LLM(str(checkpoint), worker_extension_cls=extension, skip_tokenizer_init=True, **options)
            self.greedy = SamplingParams(
                max_tokens=ANSWER_TOKENS, temperature=0, logprobs=5, ignore_eos=True, detokenize=False
            )

        def ask(self) -> Any:
            prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
            return [answer_of(self.llm.generate([prompt], self.greedy, use_tqdm=False)[0]) for prompt in prompts]

    engine = "weightsync_nemo_rl:WeightSyncEngine"
    config = {
        "vllm_cfg": {"async_engine": False},
        "vllm_kwargs": {"weight_transfer_config": {"backend": "weightsync"}},
        "refit_transport": engine,
        "refit_cfg": {engine: {"transport": "ipc", "timeout_s": 120.0}},
    }
    small = {"dtype": "bfloat16", "max_model_len": 256, "enforce_eager": True, "kv_cache_memory_bytes": 64 * 2**20}
    options = {"env_vars": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}
    worker = ray.remote(Generation).options(name="vllm_policy-0-0", runtime_env=options)
    workers = [worker.remote({**small, **config["vllm_kwargs"]})]
    store = str(checkpoint.parent / "store")
    policy = SimpleNamespace(worker_group=_Group([ray.remote(Policy).remote(rank, store) for rank in range(2)]))
    policy.prepare_refit_info = dict
    generation = SimpleNamespace(cfg=config, dp_size=1, worker_group=_Group(workers), prepare_refit_info=lambda _: None)
    synchronizer = create_weight_synchronizer(policy, generation, "vllm", colocated=False)
    synchronizer.init_communicator()
    check(
        lambda: ray.get(workers[0].ask.remote()),
        lambda weights: policy.worker_group.run_all_workers_single_data("fill", weights=weights),
        synchronizer.sync_weights,
    )
    synchronizer.shutdown()
    ray.shutdown()


class _Group:
    """What NeMo-RL's synchroniser calls of a RayWorkerGroup."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    def run_all_workers_single_data(self, method: str, run_rank_0_only_axes: Any = None, **data: Any) -> list[Any]:
        return [getattr(worker, method).remote(**data) for worker in self.workers]

    def run_all_workers_multiple_data(
        self, method: str, *, method_args: list[Any], run_rank_0_only_axes: Any, common_kwargs: dict[str, Any]
    ) -> list[Any]:
        pairs = zip(self.workers, method_args, strict=True)
        return [getattr(worker, method).remote(method_args=args, **common_kwargs) for worker, args in pairs]


def _count_memory() -> None:
    """Answer what NeMo-RL asks of an accelerator to size buffers, which weightsync does not use."""
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=2**30)


def skyrl_senders(rank: int, sources: Path, url: str, placement: str) -> None:
    start_ray("skyrl_senders", sources)
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.backends.skyrl_train.weight_sync import weight_senders
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase
    from skyrl.backends.skyrl_train.workers.worker import PPORayActorGroup
    from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils.utils import ResolvedPlacementGroup

    class Policy(FSDPPolicyWorkerBase):
        def init_worker_process_group(self) -> None:
            dist.init_process_group("gloo")
            on_cpus = partial(device_mesh.init_device_mesh, "cpu")
            with mock.patch.object(device_mesh, "init_device_mesh", lambda device, **shape: on_cpus(**shape)):
                super().init_worker_process_group()

        def init_model(self) -> None:
            self._is_lora = self._is_multimodal_lm_only = False
            self.model = SimpleNamespace(model=tiny_models.shard(tiny_models.build(MODEL, "A", torch.float32)))

        def fill(self, weights: str) -> None:
            tiny_models.fill(self.model.model, weights)

        def backload_to_gpu(self, **_: Any) -> None: ...

        def offload_to_cpu(self, **_: Any) -> None: ...

        def teardown(self) -> None:
            weight_senders.teardown_engine(self._weight_sync_engine)

    config = SkyRLTrainConfig()
    config.trainer.algorithm.temperature = 1.0
    colocated = config.trainer.placement.colocate_all = placement == "colocated"
    config.generator.inference_engine.offload_kv_for_weight_sync = placement == "asleep"
    place = placement_group([{"GPU": 1, "CPU": 1}] * 2)
    ray.get(place.ready())
    trainers = PPORayActorGroup(
        config.trainer, 1, 2, ray.remote(num_gpus=1)(Policy), ResolvedPlacementGroup(place), 0.5, colocate_all=colocated
    )
    ray.get(trainers.async_init_model())
    client = RemoteInferenceClient(url, [url], data_parallel_size=1, model_name="policy")
    dispatch = WorkerDispatch(config, trainers, inference_engine_client=client)

    async def sync() -> None:
        if colocated:
            await client.sleep()
        await dispatch.save_weights_for_sampler()
        await client.teardown()

    dispatch.init_weight_sync_state(client)
    check(
        lambda: answer(url),
        lambda weights: trainers.async_run_ray_method("pass_through", "fill", weights),
        lambda: asyncio.run(sync()),
    )
    ray.get(trainers.async_run_ray_method("pass_through", "teardown"))
    ray.shutdown()
