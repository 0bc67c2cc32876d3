"""Pushed equals cold under one controller: an `LLM` on the trainer's own places, an `AsyncLLM` on others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import ray_workers
import tiny_models
import torch
from engines import NOT_COMPILED, PROMPTS
from hybrid_trainers import Fsdp, Megatron
from tensordict import TensorDict

from weightsync.errors import PeerError
from weightsync.hybrid import ResourcePool, RolloutGroup, WorkerGroup, save_job, take
from weightsync.vllm.rollout import AsyncRolloutEngine

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]
MODEL = "qwen3"
LONG = 200
"""Tokens that take an engine several times as long as a push."""
EXAMPLES = Path(__file__).parents[2] / "examples"
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 256,
    "kv_cache_memory_bytes": 64 * 2**20,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "timeout_s": 300.0,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        support = Path(__file__).parents[1] / "support"
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (support, support.parents[1], EXAMPLES))))
        for name, value in NOT_COMPILED.items():
            patch.setenv(name, value)
        patch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
        with ray_workers.started_here():
            ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 10**6)
            yield
            ray.shutdown()


@pytest.fixture
def reserve(cluster: None) -> Iterator[Callable[..., ResourcePool]]:
    """Give pools, and close them after the test, so that the next one finds room."""
    pools: list[ResourcePool] = []

    def make(*args: Any, **kwargs: Any) -> ResourcePool:
        pools.append(ResourcePool(*args, **kwargs))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {weights: tiny_models.save(tiny_models.build(MODEL, weights), folder / weights) for weights in "AB"}


def answers(engine: RolloutGroup) -> list[tuple[list[int], list[float]]]:
    """Return what each prompt is answered by each engine. One prompt at a time, as in the other tests."""
    found = []
    for prompt in PROMPTS:
        count = len(engine.actors)  # one prompt for each engine
        prompts = TensorDict({"prompts": torch.tensor([prompt] * count)}, [count])
        batch = engine.generate(prompts, max_tokens=4, temperature=0, ignore_eos=True)
        found += list(zip(batch["answers"].tolist(), batch["sampled_logprobs"].tolist(), strict=True))
    return found


def lose(engine: RolloutGroup) -> None:
    """Kill a process of vLLM's below the group's only actor. The group finds the actor dead."""
    ray.get(engine.actors[0].__ray_call__.remote(ray_workers.kill_below))
    with pytest.raises(PeerError, match="died before it answered generate"):
        answers(engine)


def test_pushed_equals_cold_in_both_placements(reserve: Callable[..., ResourcePool], checkpoints: dict[str, Path]):
    """The controller's part stays as it is when the trainer, the placement or the transport is another one."""
    shared, apart = reserve([2]), reserve([1])
    trainers: list[tuple[Any, ...]] = [(Fsdp, "B"), (Megatron, checkpoints["A"].parent)]
    with (
        WorkerGroup(shared, Fsdp, MODEL, "B", timeout_s=300.0) as first,
        RolloutGroup(shared, model=str(checkpoints["A"]), tensor_parallel_size=2, **ENGINE) as colocated,
        RolloutGroup(apart, model=str(checkpoints["B"]), actor=AsyncRolloutEngine, **ENGINE) as split,
    ):
        cold = {colocated: answers(colocated), split: answers(split)}
        first.close()
        for worker, weights in trainers:
            with WorkerGroup(shared, worker, MODEL, weights, timeout_s=300.0) as trainer:
                for engine, start, other in ((colocated, "A", "B"), (split, "B", "A")):
                    for transport in ("ipc", "broadcast"):
                        with engine.follow(trainer, transport=transport, max_bytes=1 << 16) as sync:
                            trainer.change(other)
                            assert sync.push().chunks > 1
                            assert answers(engine) != cold[engine]
                            trainer.change(start)
                            sync.push()
                            assert answers(engine) == cold[engine]
        lose(colocated)


def test_a_push_interrupts_rollouts_and_they_go_on(reserve: Callable[..., ResourcePool], checkpoints: dict[str, Path]):
    """An engine that was pushed to in the middle of its requests answers the next ones as a cold one."""
    train, rollout = reserve([1]), reserve([1])
    options = {"actor": AsyncRolloutEngine, **ENGINE, "max_model_len": 512}
    with RolloutGroup(rollout, model=str(checkpoints["B"]), **options) as engine:
        cold = answers(engine)
    with (
        WorkerGroup(train, Fsdp, MODEL, "A", timeout_s=300.0) as trainer,
        RolloutGroup(rollout, model=str(checkpoints["A"]), **options) as engine,
        engine.follow(trainer) as sync,
    ):
        sync.push()
        prompts = TensorDict({"prompts": torch.tensor([PROMPTS[0]] * 16)}, [16])
        generate = partial(engine.generate.remote, prompts, temperature=0, ignore_eos=True)
        old = generate(max_tokens=LONG).result()
        interrupted = generate(max_tokens=LONG)
        generate(max_tokens=1).result()  # so the ones before have a token
        trainer.change("B")
        assert sync.push().version == 2
        assert interrupted.pending.late() == ("generate", engine.names)
        mixed, new = interrupted.result(), generate(max_tokens=8).result()
        assert (mixed["version"].unique().tolist(), new["version"].unique().tolist()) == ([1], [2])
        assert torch.equal(mixed["answers"][:, 0], old["answers"][:, 0])
        assert not torch.equal(mixed["answers"], old["answers"])
        assert not torch.equal(mixed["answers"][:, :8], new["answers"])
        several = engine.generate(prompts, n=3, max_tokens=4, seed=7)
        assert several["answer_mask"].sum(1).tolist() == [4] * 48
        assert answers(engine) == cold
        sync.close()
        check_that_no_answer_is_cut(trainer, engine, prompts)
        lose(engine)


def check_that_no_answer_is_cut(trainer: WorkerGroup, engine: RolloutGroup, prompts: TensorDict) -> None:
    """Fail unless answers come whole when a push by "abort", and then sleep, find them half done."""
    generate = partial(engine.generate.remote, prompts, temperature=0, ignore_eos=True)
    with engine.follow(trainer, pause="abort") as sync:
        new = generate(max_tokens=1).result()
        trainer.change("A")
        sync.push()
        interrupted = generate(max_tokens=LONG)
        several = engine.generate.remote(take(prompts, range(4)), n=3, max_tokens=LONG, ignore_eos=True)
        generate(max_tokens=1).result()  # so the ones before have a token
        trainer.change("B")
        sync.push()
        begun_anew = interrupted.result()
        assert begun_anew["answer_mask"].sum(1).tolist() == [LONG] * 16
        assert torch.equal(begun_anew["answers"][:, 0], new["answers"][:, 0])
        assert several.result()["answer_mask"].sum(1).tolist() == [LONG] * 12
    finished = generate(max_tokens=LONG)
    generate(max_tokens=1).result()
    ray.get(engine.actors[0].sleep.remote(1))
    assert finished.result()["answer_mask"].sum(1).tolist() == [LONG] * 16
    ray.get(engine.actors[0].wake_up.remote(["weights", "kv_cache"]))


def test_a_job_goes_on_from_its_checkpoint(
    reserve: Callable[..., ResourcePool], checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The step after a checkpoint gives engines the same weights, whether the job has ended meanwhile or not."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from hybrid_grpo import Policy, resume

    draw = torch.Generator().manual_seed(0)
    columns = {each: torch.randint(251, (4, 4), generator=draw) for each in ("prompts", "answers")}
    more = {"answer_mask": torch.ones(4, 4), "advantages": torch.tensor([1.0, -1.0, 2.0, -2.0])}
    batch = TensorDict({**columns, **more, "sampled_logprobs": torch.full((4, 4), -5.0)}, [4])
    name = str(checkpoints["A"])
    train, rollout = reserve([2], cpus=0.5), reserve([1])
    found = []
    for job in range(2):
        with (
            WorkerGroup(train, Policy, name, 1e-2, 0.2, timeout_s=300.0) as trainer,
            RolloutGroup(rollout, model=name, **ENGINE) as engine,
            engine.follow(trainer) as sync,
        ):
            assert resume(tmp_path, trainer, sync) == job
            if job == 0:
                trainer.update(batch)
                sync.push(5)
                save_job(tmp_path, {"taken": 1, "version": engine.version}, trainer)
            saved = answers(engine)
            trainer.update(batch)
            assert sync.push().version == 6
            found.append((saved, answers(engine)))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_verls_protocols_reach_the_stages_of_a_megatron_model(reserve: Callable[..., ResourcePool], tmp_path: Path):
    pool = reserve([2])
    with WorkerGroup(pool, Megatron, MODEL, tmp_path, tp=1, pp=2, timeout_s=300.0) as trainer:
        first, last = trainer.names()
        assert "embedding.word_embeddings.weight" in first
        assert "output_layer.weight" in last
        assert not {"embedding.word_embeddings.weight"} & {*last}
        rows = TensorDict({"number": torch.arange(3)}, [3])
        assert trainer.generate(rows)["rank"].tolist() == [0, 1, 1]
