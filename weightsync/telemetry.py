"""Metrics and spans for operators: Prometheus metrics of pushes, on both sides, and OpenTelemetry spans.

Metrics go into prometheus_client's registry of this process, or into the files of $PROMETHEUS_MULTIPROC_DIR. Whatever
exposes prometheus_client's registry exposes these metrics. Spans go to the trainer's tracer provider. If a package is
not installed, its part does nothing. docs/operate/monitoring.md lists all names.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

from weightsync.errors import WeightSyncError
from weightsync.net.update import Timeline
from weightsync.net.wire import Done
from weightsync.report import PushReport

logger = logging.getLogger(__name__)

_MAKING = threading.Lock()
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_PHASES = ("plan", "control", "gather", "transfer", "verify", "load", "pause", "total")
_WORKER_PHASES = ("transfer", "verify", "load")


@contextmanager
def _recording() -> Iterator[None]:
    """Log an exception of the body: recorders, and their folders, must end neither a push nor an engine."""
    try:
        yield
    except Exception:
        logger.exception("a push is missing in the metrics or spans of this process")


@_recording()
def push_succeeded(step: Timeline, report: PushReport) -> None:
    """Record a push. Rank 0 calls it."""
    if (metrics := _metrics(_TrainerMetrics)) is not None:
        for phase in _PHASES:
            metrics.push_seconds.labels(phase).observe(getattr(report, f"{phase}_s"))
        metrics.push_bytes.inc(report.nbytes)
        metrics.push_sent_bytes.inc(report.sent_bytes)
        metrics.push_version.set(report.version)
        metrics.push_left_out.set(len(report.left_out))
        for engine in report.engines:
            metrics.push_pause.labels(engine.name).observe(engine.pause_s)
    _trace(step, report)


@_recording()
def push_failed(step: Timeline, error: WeightSyncError) -> None:
    """Record a failed push. Rank 0 calls it."""
    if (metrics := _metrics(_TrainerMetrics)) is not None:
        metrics.push_failures.labels(type(error).__name__, error.phase or "").inc()
    _trace(step, error)


@_recording()
def engine_serves(worker: str, version: int, loaded: Done | None = None) -> None:
    """Record a worker's version, and its bytes and seconds of this push in `loaded`."""
    if (metrics := _metrics(_EngineMetrics)) is None:
        return
    metrics.engine_version.labels(worker).set(version)
    metrics.engine_poisoned.labels(worker).set(0)
    if loaded is not None:
        metrics.engine_bytes.labels(worker).inc(loaded.nbytes)
        for phase in _WORKER_PHASES:
            metrics.engine_seconds.labels(worker, phase).observe(getattr(loaded, f"{phase}_s"))


@_recording()
def engine_failed(worker: str, error: WeightSyncError | None, poisoned: bool) -> None:
    """Record a failed push on a worker, and whether its weights are a mixture.

    error: None if the push failed elsewhere: the failure is counted there.
    """
    if (metrics := _metrics(_EngineMetrics)) is not None:
        if error is not None:
            metrics.engine_failures.labels(worker, type(error).__name__).inc()
        metrics.engine_poisoned.labels(worker).set(poisoned)


class _TrainerMetrics:
    """Rank 0's metrics. An engine's process must not create them: it would report zero pushes."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        seconds = partial(Histogram, buckets=_BOUNDS_S)
        newest = partial(Gauge, multiprocess_mode="mostrecent")
        self.push_seconds = seconds("weightsync_push_seconds", "Seconds of a push by phase as in PushReport", ["phase"])
        self.push_pause = seconds("weightsync_push_engine_pause_seconds", "Seconds of an engine's pause", ["engine"])
        self.push_bytes = Counter("weightsync_push_bytes", "Bytes of the pushed weights, sent or not")
        self.push_sent_bytes = Counter("weightsync_push_sent_bytes", "Bytes sent by the trainer's ranks")
        self.push_failures = Counter("weightsync_push_failures", "Failed pushes by error and phase", ["error", "phase"])
        self.push_version = newest("weightsync_push_version", "The version pushed last")
        self.push_left_out = newest("weightsync_push_left_out", "Engines without the last version")


class _EngineMetrics:
    """A worker's metrics."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        newest = partial(Gauge, labelnames=["worker"], multiprocess_mode="mostrecent")
        self.engine_seconds = Histogram(
            "weightsync_engine_seconds", "Seconds of a worker's push by phase", ["worker", "phase"], buckets=_BOUNDS_S
        )
        self.engine_bytes = Counter("weightsync_engine_bytes", "Bytes written to a worker by pushes", ["worker"])
        self.engine_failures = Counter("weightsync_engine_failures", "Workers' errors by class", ["worker", "error"])
        self.engine_version = newest("weightsync_engine_version", "The version served by a worker")
        self.engine_poisoned = newest("weightsync_engine_poisoned", "1 for a worker with a mixture of weights")


def _metrics(side: type) -> Any:
    """Return this side's metrics of this process, or None if prometheus_client is not installed or fails."""
    with _MAKING:  # prometheus_client's registry refuses a second metric of the same name
        return _make_metrics(side)


@cache
def _make_metrics(side: type) -> Any:
    with _recording(), suppress(ImportError):
        return side()
    return None


def _trace(step: Timeline, outcome: PushReport | WeightSyncError) -> None:
    """Record the spans of a finished push, below the current span. Do nothing if opentelemetry is not installed."""
    try:
        from opentelemetry import trace
    except ImportError:
        return
    tracer = trace.get_tracer("weightsync")
    push = tracer.start_span("weightsync push", start_time=step.started_ns)
    if not push.is_recording():
        return
    inside = trace.set_span_in_context(push)

    def record(name: str, begin_ns: int, end_ns: int, **attributes: Any) -> None:
        named = {f"weightsync.{key}": value for key, value in attributes.items()}
        tracer.start_span(f"weightsync {name}", inside, attributes=named, start_time=begin_ns).end(end_ns)

    for span in step.spans:
        record(span.phase, span.begin_ns, span.end_ns or span.begin_ns)
    sending_ns = next((span.begin_ns for span in step.spans if span.phase == "transfer"), step.started_ns)
    for rank, sent_s in enumerate(step.sent_s):
        record("rank", sending_ns, sending_ns + _ns(sent_s), rank=rank)
    if isinstance(outcome, PushReport):
        push.set_attributes({"weightsync.version": outcome.version, "weightsync.nbytes": outcome.nbytes})
        for one in outcome.workers:
            seconds = {f"{phase}_s": getattr(one, f"{phase}_s") for phase in _WORKER_PHASES}
            end_ns = sending_ns + _ns(sum(seconds.values()))
            record("worker", sending_ns, end_ns, worker=one.name, nbytes=one.nbytes, **seconds)
    else:
        push.record_exception(outcome)
        push.set_status(trace.StatusCode.ERROR, str(outcome))
    push.end()


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)
