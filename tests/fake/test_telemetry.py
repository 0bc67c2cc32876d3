"""What operators watch of pushes: metrics on both sides, spans, and the dashboard's names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, fail_once_after, trainer_model
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from ranks import run_ranks

from weightsync import WeightSync, WeightSyncError, telemetry

ROOT = Path(__file__).resolve().parents[2]
PHASES = {"plan", "control", "gather", "transfer", "verify", "load", "pause", "total"}


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with closing(FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))) as engine:
        yield engine


@pytest.fixture
def sample() -> Any:
    """A function that returns by how much a sample has grown since the test began, or a gauge's value."""
    before = {(s.name, *sorted(s.labels.items())): s.value for family in REGISTRY.collect() for s in family.samples}

    def grown(name: str, **labels: str) -> float:
        value = REGISTRY.get_sample_value(name, labels)
        assert value is not None, f"{name} {labels}"
        return value - before.get((name, *sorted(labels.items())), 0.0)

    return grown


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def test_metrics_of_pushes_that_succeed(engine: FakeEngine, sample: Any) -> None:
    with WeightSync("fsdp", "ipc", engine, timeout_s=30.0) as sync:
        reports = [sync.push(trainer_model(checkpoint(seed))) for seed in (2, 3)]
    for phase in PHASES:
        assert sample("weightsync_push_seconds_count", phase=phase) == 2
    assert sample("weightsync_push_seconds_sum", phase="total") == pytest.approx(sum(r.total_s for r in reports))
    (name,) = {paused.name for report in reports for paused in report.engines}
    paused_s = sum(report.engines[0].pause_s for report in reports)
    assert sample("weightsync_push_engine_pause_seconds_sum", engine=name) == pytest.approx(paused_s)
    assert sample("weightsync_push_bytes_total") == sum(report.nbytes for report in reports)
    assert sample("weightsync_push_sent_bytes_total") == 0  # workers read them themselves
    assert value("weightsync_push_version") == 2
    assert value("weightsync_push_left_out") == 0
    assert value("weightsync_engine_version", worker="tp=0") == 2
    assert value("weightsync_engine_poisoned", worker="tp=0") == 0
    assert sample("weightsync_engine_bytes_total", worker="tp=0") == sum(r.workers[0].nbytes for r in reports)
    assert sample("weightsync_engine_seconds_count", worker="tp=0", phase="load") == 2


def test_an_engine_goes_on_from_the_version_that_it_started_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_VERSION", "9")
    with closing(FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))) as engine:
        assert value("weightsync_engine_version", worker="tp=0") == 9
        with WeightSync("fsdp", "ipc", engine, timeout_s=30.0) as sync:
            assert sync.push(trainer_model(checkpoint(2))).version == 10
    assert value("weightsync_engine_version", worker="tp=0") == 10


def test_metrics_of_a_push_that_fails_and_of_the_one_that_heals(engine: FakeEngine, sample: Any) -> None:
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", "ipc", engine, timeout_s=30.0) as sync:
        sync.push(model)
        fail_once_after(engine.sessions[0].receiver, 0)
        with pytest.raises(WeightSyncError, match="no memory left"):
            sync.push(model)
        assert value("weightsync_engine_poisoned", worker="tp=0") == 1
        assert sample("weightsync_engine_failures_total", worker="tp=0", error="WeightSyncError") == 1
        assert sample("weightsync_push_failures_total", error="WeightSyncError", phase="update") == 1
        sync.push(model)
        assert value("weightsync_engine_poisoned", worker="tp=0") == 0


def test_a_worker_does_not_count_what_another_one_ran_into(sample: Any) -> None:
    model = trainer_model(checkpoint(2))
    hosts = [ModuleHost(TinyEngineModel, checkpoint(1), rank=rank, world=2) for rank in range(2)]
    with closing(FakeEngine(*hosts)) as engine, WeightSync("fsdp", "ipc", engine, timeout_s=30.0) as sync:
        sync.push(model)
        fail_once_after(engine.sessions[0].receiver, 0)
        with pytest.raises(WeightSyncError, match="no memory left"):
            sync.push(model)
        assert sample("weightsync_engine_failures_total", worker="tp=0", error="WeightSyncError") == 1
        assert value("weightsync_engine_failures_total", worker="tp=1", error="WeightSyncError") is None
        assert value("weightsync_engine_poisoned", worker="tp=1") == 1
        sync.push(model)
        assert value("weightsync_engine_poisoned", worker="tp=1") == 0


WORKER = """
import sys
from weightsync import telemetry
from weightsync.net.wire import Done
from weightsync.errors import DigestError
name = sys.argv[1]
telemetry.engine_serves(name, 0)
telemetry.engine_serves(name, 7, Done(7, 100, 0.5, 0.25, 1.0))
telemetry.engine_serves(name, 8, Done(8, 100, 0.5, 0.25, 1.0))
telemetry.engine_failed(name, DigestError("other bytes"), name == "tp=1")
"""


def test_a_servers_metrics_have_those_of_its_workers(tmp_path: Path) -> None:
    """A server reads the files that its workers write, which are other processes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for worker in ("tp=0", "tp=1"):
        subprocess.run([sys.executable, "-c", WORKER, worker], env=environment, check=True, timeout=120)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    for worker, poisoned in (("tp=0", 0), ("tp=1", 1)):
        assert registry.get_sample_value("weightsync_engine_version", {"worker": worker}) == 8
        assert registry.get_sample_value("weightsync_engine_poisoned", {"worker": worker}) == poisoned
        assert registry.get_sample_value("weightsync_engine_bytes_total", {"worker": worker}) == 200
        seconds = {"worker": worker, "phase": "load"}
        assert registry.get_sample_value("weightsync_engine_seconds_sum", seconds) == 2
        failures = {"worker": worker, "error": "DigestError"}
        assert registry.get_sample_value("weightsync_engine_failures_total", failures) == 1


# ---------------------------------------------------------------------------------------------------------------
# Spans


def push_with_spans(rank: int) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1))) if rank == 0 else None
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", "ipc", engine, timeout_s=30.0) as sync:
        with trace.get_tracer("the trainer").start_as_current_span("step") as step:
            report = sync.push(model)
        spans = exporter.get_finished_spans()
        if engine is None:
            assert [span.name for span in spans] == ["step"]
        exporter.clear()
        if engine is not None:
            fail_once_after(engine.sessions[0].receiver, 0)
        with pytest.raises(WeightSyncError, match="no memory left"):
            sync.push(model)
    if engine is None:
        return
    engine.close()
    by_name = {span.name: span for span in spans}
    push = by_name["weightsync push"]
    assert push.parent.span_id == step.get_span_context().span_id
    assert push.attributes == {"weightsync.version": 1, "weightsync.nbytes": report.nbytes}
    parts = [span for span in spans if span.name not in ("step", "weightsync push")]
    assert {"plan", "connect", "pause", "transfer", "load", "commit"} <= {
        span.name.removeprefix("weightsync ") for span in parts
    }
    for part in parts:
        assert part.parent.span_id == push.context.span_id
        assert push.start_time <= part.start_time <= part.end_time
    assert [span.attributes for span in parts if span.name == "weightsync rank"] == [
        {"weightsync.rank": 0},
        {"weightsync.rank": 1},
    ]
    (worker,) = [span for span in parts if span.name == "weightsync worker"]
    assert worker.attributes["weightsync.nbytes"] == report.workers[0].nbytes
    failed = {span.name: span for span in exporter.get_finished_spans()}["weightsync push"]
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert failed.events[0].attributes["exception.type"].endswith("WeightSyncError")


def test_spans_of_a_push_over_ranks_and_workers() -> None:
    run_ranks(push_with_spans, 2)


# ---------------------------------------------------------------------------------------------------------------
# Without the packages, and the names that people rely on

PUSH = """
from contextlib import closing
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, trainer_model
from weightsync import WeightSync
engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
with closing(engine), WeightSync("fsdp", "ipc", engine, timeout_s=30.0) as sync:
    print(sync.push(trainer_model(checkpoint(2))).version)
"""


def push_in_a_process(code: str, **environment: str) -> str:
    """Push in a process that runs `code` first. Return the text of its standard error."""
    paths = [str(ROOT), str(ROOT / "tests" / "support")]
    environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", code + PUSH]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert ran.stdout == "1\n", ran.stderr
    return ran.stderr


def test_pushes_work_without_the_packages() -> None:
    push_in_a_process('import sys\nsys.modules["prometheus_client"] = sys.modules["opentelemetry"] = None')


@pytest.mark.parametrize("name", ["PROMETHEUS_MULTIPROC_DIR", "OTEL_PYTHON_TRACER_PROVIDER"])
def test_pushes_work_where_nothing_can_be_recorded(name: str) -> None:
    assert "a push is missing in the metrics or spans" in push_in_a_process("", **{name: "/nonexistent"})


def test_each_side_has_its_own_metrics_alone(tmp_path: Path) -> None:
    show = "from prometheus_client import generate_latest; print(generate_latest().decode())"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", f"{WORKER}\n{show}", "tp=0"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert "weightsync_engine_version" in ran.stdout, ran.stderr
    assert "weightsync_push" not in ran.stdout


def test_bytes_that_a_delta_does_not_send_are_not_counted_as_sent(engine: FakeEngine, sample: Any) -> None:
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", "broadcast", engine, encoding="delta", timeout_s=30.0) as sync:
        reports = [sync.push(model) for _ in range(3)]
    assert sample("weightsync_push_sent_bytes_total") == sum(report.sent_bytes for report in reports)
    assert reports[-1].sent_bytes < reports[0].sent_bytes
    assert sample("weightsync_push_bytes_total") == sum(report.nbytes for report in reports)


def names() -> set[str]:
    for side in (telemetry._TrainerMetrics, telemetry._EngineMetrics):
        telemetry._metrics(side)
    return {family.name for family in REGISTRY.collect() if family.name.startswith("weightsync_")}


def named_in(text: str) -> set[str]:
    return {re.sub("_(total|sum|count|bucket)$", "", name) for name in re.findall(r"\bweightsync_\w+", text)}


def test_the_dashboard_and_the_page_name_every_metric_and_no_other() -> None:
    dashboard = json.loads((ROOT / "docs/operate/grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert named_in(" ".join(queries)) == names()
    assert named_in((ROOT / "docs/reference/metrics.md").read_text()) == names()
    assert named_in((ROOT / "docs/operate/alerts.yml").read_text()) < names()
