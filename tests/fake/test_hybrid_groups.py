"""`weightsync.hybrid` on a real Ray, with an engine without vLLM."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import pytest
import ray
import ray_workers
import torch
from fake_engine import checkpoint, cold
from hybrid_workers import Adam, FailingRole, Gated, Neighbour, Policy, StandIn, Versioned, prompts_of
from tensordict import TensorDict

from weightsync import SingleCopyTransport
from weightsync.errors import ConfigError, EngineError, ManifestError, PeerError, PlacementError, SyncTimeoutError
from weightsync.hybrid import (
    GroupSync,
    ResourcePool,
    RolloutGroup,
    Rollouts,
    SavedJob,
    Worker,
    WorkerError,
    WorkerGroup,
    column,
    newest_job,
    save_job,
    worker_group,
)
from weightsync.hybrid.batch import unpack

pytestmark = [pytest.mark.forks, pytest.mark.filterwarnings("ignore")]
NODE_CPUS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        root = Path(__file__).parents[2]
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (root, root / "examples", root / "tests" / "support"))))
        with ray_workers.started_here():
            # A GPU by which Ray counts, and no more.
            ray.init(
                num_cpus=NODE_CPUS,
                num_gpus=1,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=200 * 10**6,
            )
            yield
            ray.shutdown()


@pytest.fixture(scope="module")
def pool(cluster: None) -> ResourcePool:
    return ResourcePool([2], gpus=0)


@pytest.fixture(scope="module")
def actor(pool: ResourcePool) -> Iterator[WorkerGroup]:
    with WorkerGroup(pool, Policy, 1, timeout_s=120.0) as group:
        yield group


@pytest.fixture(scope="module")
def engine(pool: ResourcePool, actor: WorkerGroup) -> Iterator[RolloutGroup]:
    with RolloutGroup(pool, model="none", actor=StandIn, enable_sleep_mode=True, timeout_s=120.0) as group:
        yield group


def check_states(engine: RolloutGroup, seed: int) -> None:
    """Fail unless every engine has what one has that was started from these weights."""
    expected = cold(checkpoint(seed)).state()
    for state in ray.get([each.state.remote() for each in engine.actors]):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def batch_of(count: int) -> TensorDict:
    return TensorDict({"number": torch.arange(count), "text": column([f"row {n}" for n in range(count)])}, [count])


def test_workers_are_ranks_of_one_torch_distributed(actor: WorkerGroup):
    first, second = actor.where()
    assert first["total"] == second["total"] == 3
    assert first["pid"] != second["pid"]
    assert [(each["RANK"], each["WORLD_SIZE"], each["LOCAL_RANK"]) for each in (first, second)] == [
        ("0", "2", "0"),
        ("1", "2", "1"),
    ]
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"]
    assert first["MASTER_PORT"] == second["MASTER_PORT"]


def test_batches_are_split_and_joined(actor: WorkerGroup):
    found = actor.scale(batch_of(5), by=3)
    assert found["scaled"].tolist() == [0, 3, 6, 9, 12]
    assert found.get("text").tolist() == batch_of(5).get("text").tolist()
    with pytest.raises(ConfigError, match="1 rows cannot be split over 2"):
        actor.scale(batch_of(1))


def test_calls_that_nobody_waits_for_run_in_order(actor: WorkerGroup):
    begun = time.monotonic()
    later = [actor.note.remote(["a", "b"], [0.5, 0.0]), actor.note.remote(["c", "d"], [0.0, 0.0])]
    assert time.monotonic() - begun < 0.5
    assert later[1].result() == [["a", "c"], ["b", "d"]]
    assert later[0].result() == [["a"], ["b"]]


def test_roles_live_in_the_same_processes(actor: WorkerGroup):
    neighbour = WorkerGroup(actor, Neighbour)
    assert neighbour.ask() == 0
    for each in actor.where("Neighbour"):
        assert each["roles"] == {"Neighbour": each["pid"]}
    with pytest.raises(ConfigError, match="have a Neighbour already"):
        WorkerGroup(neighbour, Neighbour)
    with pytest.raises(WorkerError, match="no model"):
        WorkerGroup(actor, FailingRole)
    assert actor.nothing() == 0


def test_errors_name_the_rank_and_show_where(actor: WorkerGroup):
    address = ray.util.get_node_ip_address()
    with pytest.raises(WorkerError, match=r"Policy\.fail raised KeyError") as theirs:
        actor.fail("theirs", 1)
    assert theirs.value.who == f"Policy rank 1 on {address}"
    assert "hybrid_workers.py" in str(theirs.value)
    with pytest.raises(ManifestError, match="one is missing") as ours:
        actor.fail("ours", 0)
    assert (ours.value.who, ours.value.missing) == (f"Policy rank 0 on {address}", ["q"])
    assert "hybrid_workers.py" in str(ours.value.__cause__)
    assert actor.nothing() == 0  # the processes go on


def test_what_a_failure_keeps_from_beginning_does_not_take_its_place(
    actor: WorkerGroup, engine: RolloutGroup, tmp_path: Path
):
    with pytest.raises(WorkerError, match=r"Policy\.fail raised KeyError"), engine.follow(actor):
        actor.fail("theirs", 1, tmp_path / "end")
    with pytest.raises(PeerError, match=r"Policy rank 0 on .* cannot begin Late\.init_model"):
        WorkerGroup(actor, type("Late", (Neighbour,), {}))
    (tmp_path / "end").touch()
    wait_until_idle(actor)


def test_a_failure_that_nobody_asked_for_keeps_others_from_beginning(actor: WorkerGroup, tmp_path: Path):
    later = actor.fail.remote("theirs", 1, tmp_path / "end")
    while later.pending.failure() is None:
        time.sleep(0.05)
    with pytest.raises(PeerError, match=r"cannot begin Policy\.where: Policy\.fail has failed in another process"):
        actor.where()
    (tmp_path / "end").touch()
    wait_until_idle(actor)
    with pytest.raises(WorkerError):
        later.result()


@pytest.mark.parametrize("is_known", [True, False])
def test_a_push_raises_the_failure_of_a_step_that_nobody_asked_for(
    actor: WorkerGroup, engine: RolloutGroup, tmp_path: Path, is_known: bool
):
    with engine.follow(actor) as sync:
        version = sync.push().version
        later = actor.fail.remote("theirs", 1)
        while is_known and later.pending.failure() is None:
            time.sleep(0.05)
        if is_known:
            assert actor.nothing() == 0  # other calls go on, as Ray's do
        with pytest.raises(WorkerError, match=r"(?s)KeyError.*was not asked for, so the push has not begun"):
            sync.push()
        assert sync.push().version == version + 1
        actor.fail.remote("ours", 0)
        with pytest.raises(ManifestError, match="was not asked for, so the checkpoint has not begun"):
            save_job(tmp_path, {}, actor)
        with pytest.raises(WorkerError):
            actor.fail.remote("theirs", 1).result()
        assert sync.push().version == version + 2


def test_a_push_raises_all_unasked_failures_at_once(actor: WorkerGroup, engine: RolloutGroup):
    with engine.follow(actor) as sync:
        for rank in (0, 1, 0):
            actor.fail.remote("theirs", rank)
        with pytest.raises(WorkerError, match="nor those of 2 more failed calls, so the push has not begun"):
            sync.push()
        actor.unreadable.remote()  # is not read here: only failures are
        sync.push()


def test_a_push_does_not_begin_before_a_late_step_has_ended(
    actor: WorkerGroup, engine: RolloutGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with engine.follow(actor) as sync:
        with monkeypatch.context() as patch:
            patch.setattr(actor.processes, "timeout_s", 0.5)
            actor.fail.remote("theirs", 2, tmp_path / "end")
        with pytest.raises(
            SyncTimeoutError, match=r"no answer to Policy\.fail within 0\.5 s .* the push has not begun"
        ):
            sync.push()
        (tmp_path / "end").touch()
        wait_until_idle(actor)
        sync.push()


def wait_until_idle(actor: WorkerGroup) -> None:
    while True:
        try:
            assert actor.nothing() == 0
            return
        except PeerError:
            time.sleep(0.1)


def test_only_registered_methods_are_there(actor: WorkerGroup):
    with pytest.raises(AttributeError, match="unregistered"):
        actor.unregistered()


@pytest.mark.parametrize("transport", [None, "broadcast"])
def test_a_push_makes_engines_serve_the_workers_weights(
    actor: WorkerGroup, engine: RolloutGroup, transport: str | None
):
    with engine.follow(actor, transport=transport) as sync:
        assert sync.transport == (transport or "ipc")
        assert sync.reason
        for seed in (2, 3):
            actor.change(seed)
            report = sync.push()
            assert report.nbytes > 0
            check_states(engine, seed)


def test_engines_wake_around_a_push(actor: WorkerGroup, engine: RolloutGroup):
    with engine.follow(actor) as sync:
        sync.push()
        ray.get(engine.actors[0].calls.remote())
        sync.sleep()  # without GPUs there is no memory to share
        assert not engine.is_asleep
        engine.sleep(level=2)
        with pytest.raises(ConfigError, match="dropped by sleep of level 2: push before generate"):
            engine.generate(prompts_of(2), n=1)
        sync.push()
        assert not engine.is_asleep
        slept, woke, *push, last = ray.get(engine.actors[0].calls.remote())
        assert (slept, woke, last) == (("sleep", 2), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"]))
        # Caches are reset by a thread of their own.
        assert sorted(push) == [
            "finish_weight_update",
            "reset_prefix_cache",  # twice: before the update and after it
            "reset_prefix_cache",
            "start_weight_update",
            "update_weights",
        ]


def test_a_push_that_fails_leaves_the_cache_asleep(actor: WorkerGroup, engine: RolloutGroup):
    with engine.follow(actor) as sync:
        newest = sync.push().version
        ray.get(engine.actors[0].calls.remote())
        engine.sleep(level=2)
        with pytest.raises(ConfigError, match="version"):
            sync.push(version=newest)
        assert engine.is_asleep
        assert woken(engine) == [["weights"]]
        sync.push()
        assert woken(engine) == [["kv_cache"]]
        engine.sleep()
        with pytest.raises(ConfigError, match="the engines are asleep: call wake_up or push"):
            engine.generate(prompts_of(2), n=1)
        engine.wake_up()
        assert woken(engine) == [["weights"], ["kv_cache"]]
        assert not engine.is_asleep


@pytest.mark.parametrize("level", [1, 2])
def test_engines_whose_sleep_failed_are_asleep_until_they_are_woken(
    actor: WorkerGroup, engine: RolloutGroup, level: int
):
    with engine.follow(actor) as sync:
        sync.push()
        ray.get(engine.actors[0].fail_once.remote("sleep"))
        with pytest.raises(WorkerError, match="sleep raised RuntimeError") as failed:
            engine.sleep(level)
        assert failed.value.who == engine.names[0]
        assert engine.is_asleep
        refusal = "asleep: call wake_up or push" if level == 1 else "dropped by sleep of level 2"
        with pytest.raises(ConfigError, match=refusal):
            engine.generate(prompts_of(2), n=1)
        if level == 1:
            engine.wake_up()
        else:
            sync.push()
        check_awake(engine)


@pytest.mark.parametrize("late", [False, True])
def test_engines_that_woke_are_awake_although_another_failed(actor: WorkerGroup, engine: RolloutGroup, late: bool):
    with engine.follow(actor) as sync:
        sync.push()
        engine.sleep()
        ray.get(engine.actors[0].fail_once.remote("wake_up", late))
        with pytest.raises(WorkerError, match="wake_up raised RuntimeError") as failed:
            sync.push()
        assert failed.value.who == engine.names[0]
        asleep = [{"kv_cache"} if late else {"weights", "kv_cache"}, {"kv_cache"}]
        assert ray.get([each.sleeping.remote() for each in engine.actors]) == asleep
        engine.wake_up()
        check_awake(engine)


def check_awake(engine: RolloutGroup) -> None:
    """Fail unless all engines are awake and answer."""
    assert not engine.is_asleep
    assert ray.get([each.sleeping.remote() for each in engine.actors]) == [set()] * len(engine.actors)
    assert len(engine.generate(prompts_of(2), n=1)) == 2


def test_workers_and_engines_take_turns_on_a_gpu(cluster: None):
    pool = ResourcePool([1])
    engine = RolloutGroup(pool, model="none", actor=StandIn, timeout_s=120.0)
    with WorkerGroup(pool, Policy, 1, timeout_s=120.0) as actor:
        with pytest.raises(ConfigError, match="make the WorkerGroup before the RolloutGroup"):
            engine.follow(actor)
        engine.close()
        with RolloutGroup(pool, model="none", actor=StandIn, timeout_s=120.0) as engine:
            assert ray.get(engine.actors[0].gpus_and_sleep_mode.remote()) == ("0", True)
            with pytest.raises(PlacementError, match="'broadcast' needs a GPU for each"):
                engine.follow(actor, transport="broadcast")
            with engine.follow(actor) as sync:
                sync.sleep()
                assert engine.is_asleep
                sync.push()
                assert not engine.is_asleep
                check_states(engine, 1)
    pool.close()


def woken(engine: RolloutGroup) -> list[list[str]]:
    """Return what was woken since the calls were asked for."""
    return [call[1] for call in ray.get(engine.actors[0].calls.remote()) if call[0] == "wake_up"]


def test_engines_answer_in_the_order_of_the_prompts(pool: ResourcePool, engine: RolloutGroup):
    assert len(engine.actors) == 2  # one for each place
    ray.get([each.calls.remote() for each in engine.actors])
    prompts = prompts_of(5)
    batch = engine.generate(prompts, n=2)
    for row in range(10):
        prompt = prompts["prompts"][row // 2][prompts["prompt_mask"][row // 2]].tolist()
        answer = batch["answers"][row][batch["answer_mask"][row]].tolist()
        assert answer == [*prompt, row % 2]
        assert batch["sampled_logprobs"][row].sum() == -0.5 * len(answer)
    assert batch.get("text").tolist() == [f"prompt {row // 2}" for row in range(10)]
    assert sorted(call[1] for each in engine.actors for call in ray.get(each.calls.remote())) == [2, 3]


def test_what_cannot_work_is_refused_before_anything_starts(pool: ResourcePool, engine: RolloutGroup):
    before = reserved()
    refused: list[tuple[type[Exception], str, Any]] = [
        (PlacementError, "larger than the cluster", lambda: ResourcePool([NODE_CPUS + 1])),
        (PlacementError, "larger than the cluster", lambda: ResourcePool([2], gpus=1)),
        (
            PlacementError,
            r"found no node for \[2\] of them within 1 s",
            lambda: ResourcePool([2], gpus=0, timeout_s=1.0),
        ),
        (ConfigError, "expected the number of processes", lambda: ResourcePool([])),
        (ConfigError, "expected 0 or 1", lambda: ResourcePool([1], gpus=2)),
        (ConfigError, "two WorkerGroups claim the same places", lambda: WorkerGroup(pool, Policy, 1)),
        (ConfigError, "two RolloutGroups claim the same places", lambda: RolloutGroup(pool, model="none")),
        (ConfigError, "does not fit a pool", lambda: RolloutGroup(pool, model="none", tensor_parallel_size=4)),
        (ConfigError, "pipeline_parallel_size=2", lambda: RolloutGroup(pool, model="none", pipeline_parallel_size=2)),
        (ConfigError, "without rows", lambda: engine.generate(prompts_of(0), n=1)),
        (ConfigError, "no subclass of", lambda: WorkerGroup(pool, StandIn)),
    ]
    for kind, words, call in refused:
        with pytest.raises(kind, match=words):
            call()
    assert reserved() == before


def reserved() -> set[str]:
    """Return the places that are taken, or waited for."""
    return {name for name, each in ray.util.placement_group_table().items() if each["state"] != "REMOVED"}


def test_pools_split_and_merge(pool: ResourcePool, engine: RolloutGroup):
    whole, beside = ResourcePool([4], gpus=0, cpus=0.01), ResourcePool([1], gpus=0, cpus=0.01)
    half, *quarters = whole.split([2, 1, 1])
    with (
        WorkerGroup(half, Policy, 2, timeout_s=120.0) as trainer,
        RolloutGroup(quarters[0], model="none", actor=StandIn, timeout_s=120.0) as engines,
        engines.follow(trainer) as sync,
    ):
        sync.push()
        check_states(engines, 2)
        engines.add(half.split([1, 1])[1])  # beside the second rank
        sync.push()
        check_states(engines, 2)
        assert len(engines.actors) == 2
        for taken in (half, whole, half.merge(quarters[1])):
            with pytest.raises(ConfigError, match="two WorkerGroups claim the same places"):
                WorkerGroup(taken, Policy, 1)
        with pytest.raises(ConfigError, match="two RolloutGroups claim the same places"):
            RolloutGroup(whole, model="none", actor=StandIn)
        assert whole.is_shared
        assert not quarters[1].is_shared
    merged = beside.merge(*quarters, half)
    assert merged.processes == (1, 4)
    with WorkerGroup(merged, Policy, 3, timeout_s=120.0) as trainer:
        assert [each["total"] for each in trainer.where()] == [15] * 5
        assert trainer.scale(batch_of(5))["scaled"].tolist() == [*range(5)]
    refused: list[tuple[str, Any]] = [
        ("4 places cannot be split into .* expected all", lambda: whole.split([2, 1])),
        ("cannot be split into", lambda: whole.split([4, 0])),
        ("they have places in common", lambda: half.merge(whole)),
        ("processes have 0 GPUs and 0.01 CPUs, 0 GPUs and 1 CPUs", lambda: whole.merge(pool)),
        ("close the pools that it was made of", merged.close),
    ]
    for words, call in refused:
        with pytest.raises(ConfigError, match=words):
            call()
    for each in (whole, beside):
        each.close()


def test_engines_on_some_of_the_workers_gpus_take_turns_with_them(actor: WorkerGroup):
    train = ResourcePool([1])
    with WorkerGroup(train, Policy, 1, timeout_s=120.0) as critic:
        (part,) = train.split([1])
        with RolloutGroup(part, model="none", actor=StandIn, timeout_s=120.0) as engine:
            assert ray.get(engine.actors[0].gpus_and_sleep_mode.remote()) == ("0", True)
            for trainer in (critic, actor):  # on the engine's GPU, and elsewhere
                with engine.follow(trainer) as sync:
                    sync.sleep()
                    assert engine.is_asleep
                    sync.push()
            with pytest.raises(ConfigError, match="workers share the engines' GPUs"):
                Rollouts(engine, [], behind=1)
    train.close()


@pytest.fixture(scope="module")
def three_places(cluster: None) -> Iterator[RolloutGroup]:
    pool = ResourcePool([3], gpus=0, cpus=0.3)
    with RolloutGroup(pool, model="none", actor=StandIn, enable_sleep_mode=True, timeout_s=120.0) as group:
        yield group
    pool.close()


@pytest.fixture
def others(three_places: RolloutGroup) -> RolloutGroup:
    """Three engines beside those that share the workers' pool."""
    if len(three_places.actors) < 3:
        three_places.add()
    return three_places


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_each_sync_of_an_actor_pushes_to_its_own_engines(
    actor: WorkerGroup, engine: RolloutGroup, others: RolloutGroup, transport: str
):
    with engine.follow(actor, transport=transport) as first, others.follow(actor, transport=transport) as second:
        for seed, sync in ((4, second), (5, first), (6, second)):
            actor.change(seed)
            sync.push()
            check_states(others, 6 if seed == 6 else 4)
            if seed > 4:
                check_states(engine, 5)
        newest = engine.follow(actor, transport=transport)
        with pytest.raises(ConfigError, match="no longer follow this GroupSync of Policy"):
            first.push()
        check_states(engine, 5)
        first.close()
        newest.push()
        check_states(engine, 6)
        newest.close()
        with pytest.raises(ConfigError, match="it was closed"):
            newest.push()
        actor.change(7)
        second.push()
        check_states(others, 7)


def prompts_per_engine(group: RolloutGroup) -> list[int]:
    """Return how many prompts each engine has answered since this was asked."""
    calls = ray.get([each.calls.remote() for each in group.actors])
    return [sum(call[1] for call in each if call[0] == "generate") for each in calls]


def kill(engine: Any) -> None:
    """Kill an engine's actor, and wait until it is dead: `ray.kill` returns before, and the engine may still answer."""
    ray.kill(engine)
    with suppress(ray.exceptions.RayActorError):
        while True:
            ray.get(engine.calls.remote())


def test_a_group_goes_on_without_engines_that_die_and_takes_others_in(actor: WorkerGroup, others: RolloutGroup):
    with others.follow(actor, on_engine_failure="drop") as sync:
        actor.change(2)
        assert sync.push().left_out == ()
        first, second, third = others.names
        kill(others.actors[0])
        batch = others.generate(prompts_of(6), n=1)  # which the others answer, those of the dead one too
        assert batch.get("text").tolist() == [f"prompt {row}" for row in range(6)]
        assert others.names == [second, third]
        kill(others.actors[0])
        report = sync.push()
        assert report.left_out == (second,)
        assert others.names == [third]
        assert sync.push().left_out == ()

        added = others.add()
        assert others.names == [third, *added]
        assert not {first, second} & {*added}
        prompts_per_engine(others)
        others.generate(prompts_of(6), n=1)
        assert prompts_per_engine(others) == [6, 0, 0]  # the new ones have not been pushed to
        with pytest.raises(ConfigError, match="no place is free"):
            others.add()
        actor.change(3)
        sync.push()
        check_states(others, 3)
        others.generate(prompts_of(6), n=1)
        assert all(prompts_per_engine(others))

        others.remove(third)
        actor.change(4)
        assert sync.push().left_out == ()
        assert others.names == added
        check_states(others, 4)
        with pytest.raises(ConfigError, match="is no engine of the group"):
            others.remove(third)
        others.remove(added[0])
        with pytest.raises(ConfigError, match="the only engine of the group"):
            others.remove(added[1])


def test_an_engine_that_is_lost_gets_no_prompts_until_a_push_reaches_it(actor: WorkerGroup, others: RolloutGroup):
    pids = ray.get([each.__ray_call__.remote(lambda _: os.getpid()) for each in others.actors])
    with others.follow(actor, on_engine_failure="drop", timeout_s=5.0) as sync:
        sync.push()
        everyone, lost = others.names, others.names[1]
        os.kill(pids[1], signal.SIGSTOP)
        try:
            assert sync.push().left_out == (lost,)
            assert lost not in others.names
            assert len(others.generate(prompts_of(4), n=1)) == 4
        finally:
            os.kill(pids[1], signal.SIGCONT)
        actor.change(2)
        while sync.push().left_out:
            time.sleep(0.2)
        assert others.names == everyone
        check_states(others, 2)


def test_results_are_arguments_and_the_controller_fetches_the_last_alone(
    actor: WorkerGroup, engine: RolloutGroup, monkeypatch: pytest.MonkeyPatch
):
    fetched: list[Any] = []
    monkeypatch.setattr(worker_group, "unpack", lambda value: fetched.append(value) or unpack(value))
    neighbour = WorkerGroup(actor, type("Another", (Neighbour,), {}))
    for count in (1, 5, 6):  # with two ranks: one of padding alone, one row of padding, none
        batch = batch_of(count)
        scaled = actor.echo.remote(actor.echo.remote(batch))  # results of results
        added = actor.add.remote(scaled, second=batch)
        assert not fetched
        found = added.result()
        assert len(fetched) == 2
        fetched.clear()
        assert found["sum"].tolist() == [2 * number for number in range(count)]
        assert found["rows"].tolist() == [-(-count // 2)] * count
    first = weakref.ref(scaled.pending)
    del scaled, added
    actor.nothing()
    gc.collect()
    assert first() is None  # so Ray keeps no results of a chain that has ended
    answers = engine.generate.remote(prompts_of(5), n=2)
    for result in (neighbour.texts.remote(answers), neighbour.texts.remote(batch=answers)):
        assert result.result() == [f"prompt {row // 2}" for row in range(10)]
    assert neighbour.count(actor.echo.remote(batch_of(3))) == 3  # at rank 0 alone
    assert engine.generate(engine.generate.remote(prompts_of(2), n=1), n=1)["answers"].shape == (2, 5)


def test_results_of_several_calls_are_dealt_out_to_ranks(actor: WorkerGroup):
    parts = [actor.echo.remote(batch_of(count)) for count in (2, 3)]
    assert actor.numbers(parts) == [[0, 1], [0, 1, 2]]
    with pytest.raises(ConfigError, match="a CallFuture is inside of another argument"):
        actor.numbers([parts, parts])
    with pytest.raises(ConfigError, match=r"got batches of \[2, 3\] rows") as refused:
        actor.add(parts[0], parts[1])
    assert refused.value.who.startswith("Policy rank")


def test_a_call_that_gets_no_argument_raises_the_first_cause_and_does_not_run(
    actor: WorkerGroup, engine: RolloutGroup, others: RolloutGroup
):
    before = actor.note(["", ""], [0, 0])
    failed = actor.fail.remote("theirs", 1)
    with pytest.raises(WorkerError, match=r"Policy\.fail raised KeyError") as theirs:
        actor.note.remote(failed, [0, 0]).result()
    assert theirs.value.who.startswith("Policy rank 1 on ")
    wait_until_idle(actor)
    names, victim = others.names, others.actors[1]
    answers = others.generate.remote(prompts_of(3), n=1, wait_s=1)
    noted = actor.note.remote(answers, [0, 0])
    noted_again = actor.note.remote(noted, [0, 0])
    kill(victim)
    for call in (noted_again, noted):
        with pytest.raises(PeerError, match=rf"{names[1]} died before it answered generate"):
            call.result()
    wait_until_idle(actor)
    assert [each[:-1] for each in actor.note(["", ""], [0, 0])] == before
    others.remove(names[1])
    assert len(others.generate(prompts_of(3), n=1)) == 3


def test_a_call_that_waits_for_an_argument_names_the_late_actor(
    actor: WorkerGroup, engine: RolloutGroup, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr(actor.processes, "timeout_s", 0.5)
        waiting = actor.scale.remote(engine.generate.remote(prompts_of(1), n=1, wait_s=2))
    with pytest.raises(SyncTimeoutError, match=rf"no answer to generate within 0\.5 s from {engine.names[0]}"):
        waiting.result()
    wait_until_idle(actor)


def test_without_drop_a_dead_engine_stays_until_it_is_removed(
    actor: WorkerGroup, others: RolloutGroup, monkeypatch: pytest.MonkeyPatch
):
    with others.follow(actor) as sync:
        sync.push()
        dead = others.names[0]
        kill(others.actors[0])
        with pytest.raises(PeerError, match=f"{dead} died before it answered generate"):
            others.generate(prompts_of(3), n=1)
        with pytest.raises(EngineError):
            sync.push()
        others.remove(dead)
        assert len(others.generate(prompts_of(3), n=1)) == 3
        actor.change(3)
        sync.push()
        check_states(others, 3)
        before = others.names
        with monkeypatch.context() as patch:
            patch.setattr(actor.processes, "nodes", ["here", "there"])
            with pytest.raises(PlacementError, match="'ipc' is for ranks and engines on one host"):
                others.add()
        assert others.names == before
        assert len(others.add()) == 1


@pytest.mark.parametrize("level", [1, 2])
def test_generate_names_an_engine_that_died_asleep(actor: WorkerGroup, others: RolloutGroup, level: int):
    with others.follow(actor) as sync:
        sync.push()
        dead = others.names[0]
        others.sleep(level)
        kill(others.actors[0])
        with pytest.raises(PeerError, match=f"{dead} died before it answered wake_up"):
            others.wake_up()
        with pytest.raises(PeerError, match=f"{dead} died before it answered generate") as failed:
            others.generate(prompts_of(3), n=1)
        assert failed.value.who == dead
        others.remove(dead)
        if level == 2:
            with pytest.raises(ConfigError, match="dropped by sleep of level 2: push before generate"):
                others.generate(prompts_of(3), n=1)
            sync.push()
        others.wake_up()
        assert len(others.generate(prompts_of(3), n=1)) == 3
        others.add()


@pytest.fixture(scope="module")
def versioned(cluster: None) -> Iterator[RolloutGroup]:
    pool = ResourcePool([2], gpus=0, cpus=0.02)
    with RolloutGroup(pool, model="none", actor=Versioned, timeout_s=120.0) as group:
        yield group
    pool.close()


def test_sleep_and_wake_up_that_would_do_nothing_are_refused(engine: RolloutGroup, versioned: RolloutGroup):
    refused: list[tuple[str, Any]] = [
        ("level=0; expected 1", lambda: engine.sleep(level=0)),
        ("tags='weights'; expected a list of 'weights', 'kv_cache' or both", lambda: engine.wake_up("weights")),
        ("have no sleep mode, and sleep would free no memory", versioned.sleep),
    ]
    for words, call in refused:
        with pytest.raises(ConfigError, match=words):
            call()
        assert not engine.is_asleep
        assert not versioned.is_asleep


def numbered(count: int) -> Iterator[TensorDict]:
    """Yield batches of three prompts, each with its number."""
    for number in range(count):
        yield TensorDict({"prompts": torch.full((3, 2), number), "number": torch.full((3,), number)}, [3])


@pytest.mark.parametrize("behind", [0, 1, 3])
def test_rollouts_are_as_many_versions_behind_as_they_may_be(actor: WorkerGroup, versioned: RolloutGroup, behind: int):
    with versioned.follow(actor) as sync:
        first = sync.push().version
        rollouts = Rollouts(versioned, numbered(6), behind=behind)
        for number, batch in enumerate(rollouts):
            assert batch["number"].tolist() == [number] * 3
            assert batch["version"].tolist() == [max(first, versioned.version - behind)] * 3
            assert batch["answers"].flatten().tolist() == batch["version"].tolist()
            sync.push()
        assert (rollouts.taken, rollouts.asked_again) == (6, 0)
        assert next(rollouts, None) is None


def test_rollouts_that_are_too_old_are_asked_again(actor: WorkerGroup, versioned: RolloutGroup):
    with versioned.follow(actor) as sync:
        sync.push()
        rollouts = Rollouts(versioned, numbered(4), behind=1)
        for number, batch in enumerate(rollouts):
            assert batch["number"].tolist() == [number] * 3
            assert batch["answers"].flatten().tolist() == [versioned.version] * 3
            sync.push()
            sync.push(versioned.version + 100)  # one push, whatever its number
        assert rollouts.asked_again == 3
        for wrong in (-1, -5):
            with pytest.raises(ConfigError, match="expected 0 or more pushes"):
                Rollouts(versioned, [], behind=wrong)


def test_engines_answer_while_workers_train(actor: WorkerGroup, versioned: RolloutGroup, tmp_path: Path):
    rollouts = Rollouts(versioned, numbered(3), behind=2)
    assert next(rollouts)["number"].tolist() == [0] * 3
    training = actor.fail.remote("none", -1, tmp_path / "end")
    answered = 0
    while answered < 6:  # the two batches in flight
        answered += sum(prompts_per_engine(versioned))
        time.sleep(0.05)
    assert training.pending.late()[1]
    (tmp_path / "end").touch()
    training.result()
    assert [batch["number"][0].item() for batch in rollouts] == [1, 2]


def test_an_error_costs_no_rollouts(actor: WorkerGroup, versioned: RolloutGroup):
    rollouts = Rollouts(versioned, numbered(5), behind=1)
    found = [next(rollouts)]
    dead = versioned.names[0]
    kill(versioned.actors[0])
    for _ in range(2):
        with pytest.raises(PeerError, match=f"{dead} died before it answered generate"):
            found += (next(rollouts) for _ in range(3))  # the batch in flight may be answered already
    versioned.remove(dead)
    found += rollouts
    assert [batch["number"][0].item() for batch in found] == [0, 1, 2, 3, 4]
    versioned.add()


def job(folder: Path, steps: int, ends: bool = False) -> dict[int, Any]:
    """Train until this step, from the newest checkpoint on. Return the weights and rows by the step's number."""
    train, rollout = (ResourcePool([count], gpus=0, cpus=0.01) for count in (2, 1))
    found = {}
    try:
        with (
            WorkerGroup(train, Adam, timeout_s=120.0) as trainer,
            RolloutGroup(rollout, model="none", actor=Versioned, timeout_s=120.0) as engine,
            engine.follow(trainer) as sync,
        ):
            saved = newest_job(folder)
            taken = 0
            if saved is not None:
                saved.load(trainer)
                taken = saved.state["taken"]
                sync.push(saved.state["version"])
            else:
                sync.push()
            rollouts = Rollouts(engine, islice(numbered(steps), taken, None), behind=0)
            for step, batch in enumerate(rollouts, taken):
                trainer.update(batch)
                sync.push()
                rows = [batch[name].tolist() for name in ("number", "version", "answers")]
                found[step] = trainer.weights(), rows, ray.get(engine.actors[0].state.remote())
                if ends and step == 3:
                    (folder / "die").touch()
                if step % 2:
                    save_job(folder, {"taken": taken + rollouts.taken, "version": engine.version}, trainer)
    finally:
        train.close()
        rollout.close()
    return found


def test_a_job_that_died_while_it_saved_goes_on_as_if_it_had_not(cluster: None, tmp_path: Path):
    whole = job(tmp_path / "whole", 6)
    folder = tmp_path / "resumed"
    with pytest.raises(PeerError, match=r"Adam rank 1 on [\d.]+ died before it answered Adam\.save_state"):
        job(folder, 6, ends=True)
    whole_one, remains, _ = sorted(each.name for each in folder.iterdir())
    assert (whole_one, remains[:9], remains[-8:]) == ("00000001", "00000002.", ".partial")
    (folder / "die").unlink()
    resumed = job(folder, 6)
    assert [*resumed] == [2, 3, 4, 5]
    for step in resumed:
        assert whole[step][1] == resumed[step][1]
        for one, other in zip(whole[step][::2], resumed[step][::2], strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)
    changed = [not torch.equal(whole[3][0][name], whole[5][0][name]) for name in whole[3][0]]
    assert all(changed)
    assert sorted(each.name for each in folder.iterdir()) == ["00000002", "00000003"]
    assert newest_job(folder) == SavedJob(folder / "00000003", {"taken": 6, "version": 7})


def test_jobs_that_cannot_be_saved_or_loaded_are_refused(actor: WorkerGroup, tmp_path: Path):
    assert newest_job(tmp_path / "none") is None
    for state, keep, words in (({"rows": torch.ones(1)}, 1, "must be JSON, and .*Tensor"), ({}, 0, "at least 1")):
        with pytest.raises(ConfigError, match=words):
            save_job(tmp_path / "none", state, actor, keep=keep)
    assert not (tmp_path / "none").exists()
    with pytest.raises(WorkerError, match="Policy has no save_state"):
        save_job(tmp_path, {}, actor)
    assert newest_job(tmp_path) is None
    with pytest.raises(ConfigError, match="has no state of Policy; it has "):
        save_job(tmp_path, {}).load(actor)


def test_a_relative_folder_is_the_controllers(actor: WorkerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    adam = WorkerGroup(actor, Adam)
    monkeypatch.chdir(tmp_path)  # the workers have started elsewhere
    saved = save_job("job", {}, adam)
    assert newest_job("job") == saved == SavedJob(tmp_path / "job" / "00000001", {})
    assert sorted(each.name for each in (saved.path / "Adam").iterdir()) == ["rank-0.pt", "rank-1.pt"]
    saved.load(adam)
    (tmp_path / "link").symlink_to("job")
    assert save_job("link", {}).path == tmp_path / "link" / "00000002"


def push_until_it_fails(sync: GroupSync) -> NoReturn:
    while True:
        sync.push()


def test_a_group_grows_and_shrinks_while_rollouts_are_in_flight(actor: WorkerGroup, tmp_path: Path):
    pool, gate = ResourcePool([3], gpus=0, cpus=0.02), tmp_path / "gate"
    gate.touch()
    small, rest = pool.split([1, 2])
    with (
        RolloutGroup(small, model="none", actor=Gated, gate=gate, timeout_s=120.0) as engine,
        engine.follow(actor) as sync,
    ):
        sync.push()
        rollouts = Rollouts(engine, numbered(8), behind=2, wait_s=0.1)
        found = [next(rollouts)]

        gate.unlink()
        (first,) = engine.names
        added = engine.add(rest, wait=False)
        actor.change(2)
        sync.push()
        found.append(next(rollouts))
        assert engine.names == [first]
        assert len(engine.actors) == 1
        with pytest.raises(ConfigError, match=f"{first} is the only engine"):
            engine.remove(first)
        gate.touch()
        while len(engine.names) < 3:
            sync.push()
        assert engine.names == [first, *added]
        check_states(engine, 2)
        prompts_per_engine(engine)
        found.append(next(rollouts))
        assert all(prompts_per_engine(engine))

        later = engine.generate.remote(prompts_of(6), wait_s=1)
        engine.remove(first)
        assert len(later.result()) == 6
        found += rollouts
        assert [batch["number"].tolist() for batch in found] == [[number] * 3 for number in range(8)]
        assert engine.names == added

        gate.write_text("no memory")
        (failed,) = engine.add(small, wait=False)
        with pytest.raises(PeerError, match=rf"(?s){failed} died before it answered start.*no memory"):
            push_until_it_fails(sync)
        actor.change(3)
        sync.push()
        check_states(engine, 3)
        gate.write_text("")
        engine.add(small)  # its place is free again
    pool.close()


def test_transports_that_a_group_cannot_use_are_refused(actor: WorkerGroup, engine: RolloutGroup):
    for transport in ("single_copy", SingleCopyTransport()):
        with pytest.raises(ConfigError, match=r"steps inside of `writing\(\)`"):
            engine.follow(actor, transport=transport)
    with pytest.raises(ConfigError, match="engines follow a WorkerGroup, got a str"):
        engine.follow("single_copy")  # type: ignore[arg-type]


def test_ppo_has_the_losses_that_it_has_in_one_process(
    actor: WorkerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import hybrid_ppo as ppo
    from hybrid_grpo import tiny_model

    name = tiny_model(tmp_path / "model")
    roles: list[tuple[type[Worker], tuple[Any, ...]]] = [
        (ppo.Actor, (name, 1e-2)),
        (ppo.Reference, (name,)),
        (ppo.Critic, (name, 1e-2)),
        (ppo.Reward, (16,)),
    ]
    groups = [WorkerGroup(actor, role, *arguments) for role, arguments in roles]
    alone = [alone_in_this_process(role, *arguments) for role, arguments in roles]
    found: list[list[tuple[float, float]]] = [[], []]
    draw = torch.Generator().manual_seed(0)
    for _ in range(10):
        ids = torch.randint(16, (7, 12), generator=draw)  # an odd number of rows for two ranks
        mask = torch.arange(8) < torch.randint(1, 9, (7, 1), generator=draw)
        batch = TensorDict({"prompts": ids[:, :4], "answers": ids[:, 4:], "answer_mask": mask}, [7])
        for losses, workers in zip(found, (groups, alone), strict=True):
            after = ppo.step(batch, *workers, 0.01)
            losses.append((after["actor_loss"].sum().item(), after["critic_loss"].sum().item()))
    controlled, single = map(torch.tensor, found)
    assert (controlled - single).abs().max() < 5e-5  # processors add in other orders
    # Each loss is another one, so that a step that is left out would be seen.
    assert (single[1:] - single[:-1]).abs().min() > 1e-4


def alone_in_this_process(role: type[Worker], *arguments: Any) -> Worker:
    worker = role()
    worker.rank, worker.world_size, worker.device = 0, 1, torch.device("cpu")
    worker.init_model(*arguments)
    return worker


def test_a_worker_that_dies_is_noticed_and_replaced(actor: WorkerGroup, engine: RolloutGroup):
    # The last test, because the group is closed.
    begun = time.monotonic()
    with pytest.raises(PeerError, match=r"Policy rank 1 on [\d.]+ died before it answered Policy\.fail"):
        actor.fail("kill", 1)
    assert time.monotonic() - begun < 20
    with pytest.raises(PeerError):
        actor.where()
    actor.close()
    for call in (actor.where, lambda: WorkerGroup(actor, FailingRole)):
        with pytest.raises(ConfigError, match="closed"):
            call()
    with WorkerGroup(engine.pool, Policy, 4) as successor, engine.follow(successor) as sync:
        sync.push()
        check_states(engine, 4)
