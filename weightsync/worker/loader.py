"""The receiver of one engine worker: it loads chunks from a transport into the model.

    meet -> make_plan -> connect -> run -> commit -> run -> commit ...
                      -> export  -> run -> commit -> run -> commit ...      if the trainer writes into the parameters

Nothing writes before `run`. From `run` on the model is a mixture, and `POISONED` until `commit`. After any other end of
a push it stays `POISONED`, and only a whole push heals it.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import prod
from typing import Any

import torch
from msgspec.structs import replace

from weightsync.errors import ManifestError, PeerError, ProtocolError, UnsupportedError, first_few
from weightsync.kernels.first_use import prepare_kernels
from weightsync.net import timeouts
from weightsync.net.runtime import Deadline, collector_paused, submit
from weightsync.net.wire import CLEAN, POISONED, VERSION_VARIABLE, Connect, Done, Go, PlanRequest
from weightsync.planning.layout import Manifest, ShardLocation, itemsize
from weightsync.planning.load_plan import LoadPlan
from weightsync.transports import open_receiver
from weightsync.transports.base import FIRST_USES, Seal, TransportReceiver, Wait, finish_stream
from weightsync.transports.shared_handles import export, take_back
from weightsync.worker.changed_runs import ChangedRuns
from weightsync.worker.engine_model import EngineModel, any_worker
from weightsync.worker.load_paths import NO_CHUNK, Arrivals, FusedQuantize, InPlace, LoadPath, NativeLoader, ReloadPath
from weightsync.worker.load_planner import IN_PLACE, NATIVE_LOADER, RELOAD, LoadPlanner, TracedLoad, matching
from weightsync.worker.trace import Fill, named_tensors, paddings
from weightsync.worker.verify import FrozenDigests, Verifier, bytes_of

logger = logging.getLogger(__name__)

Tell = Callable[[Exception], object]
"""A function that tells the trainer of an error before it is raised."""
NewDeadline = Callable[[], Deadline]
"""A function for the deadline of a wait. The wait begins with the call."""


class Receiver:
    """One worker's receiver. It lives as long as the engine, and two threads must not use it at once.

    model: the model that it loads into.
    version: the last committed version. Before the first commit: the version of the engine's first weights, or 0.
    state: CLEAN or POISONED.
    """

    def __init__(self, model: EngineModel) -> None:
        self.version = int(os.environ.get(VERSION_VARIABLE) or "0")
        self.state = CLEAN
        self.model = model
        self._kernels = submit("kernels", partial(prepare_kernels, model.device))
        self._planner = LoadPlanner(model)
        self._source: TransportReceiver | None = None
        self._plan: _BoundPlan | _ExportedParameters | None = None
        self._exported: dict[int, torch.UntypedStorage] = {}  # by identity
        self._clear_kv_cache: Callable[[], bool] | None = None  # between `begin_push` and `run`
        self._unproven: set[str] = set()
        """The parameters and buffers of all pushes since the last commit."""
        self._pushed_buffers: set[str] = set()
        """The buffers of all pushes. Each later push must fill them too: a cold start would not have them."""
        self.loaded: Done | None = None
        """The outcome of a loaded push that awaits its commit."""

    def await_kernels(self) -> None:
        """Wait until the kernels of a push are compiled and loaded. That begins with this object."""
        self._kernels.result()

    def meet(self, message: PlanRequest, deadline: Deadline) -> None:
        """Begin to meet the other members of the transport, in the background, if the trainer invites to it.

        `connect` raises the errors. `disconnect` ends the meeting.
        """
        if message.invitation:
            self._open(message.transport).meet(message.invitation, deadline)

    @collector_paused()
    def make_plan(self, manifest: Manifest, keep: Sequence[str] = ()) -> LoadPlan:
        """Trace the model's loader for these tensors. Writes nothing, and remembers the last answer.

        keep: patterns of the parameters that no push fills.

        Raises:
            ConfigError, ManifestError: No tensor can have such a dtype, or be as large.
            UnsupportedError: The model has modules that cannot be reloaded.
        """
        if (traced := self._planner.traced) is None or (traced.manifest, traced.keep) != (manifest, keep):
            _check_sizes(manifest)
            self._plan = None
            with self.model.scope():
                traced = self._planner.make(manifest, keep)
        return traced.answer

    @collector_paused()
    def connect(self, message: Connect, wait: Wait, deadline: Deadline, tell: Tell = lambda error: None) -> None:
        """Map or join the transport's memory and connections, and prepare every copy. Writes nothing into the model.

        Replaces the previous connection.

        Raises:
            PlacementError, ProtocolError: The chunks do not fit the load plan.
            DigestError: The mapped memory is not the trainer's.
        """
        if (traced := self._planner.traced) is None:
            raise ProtocolError("Connect came before PlanRequest")
        if not 0 <= message.frozen < max(len(message.chunks), 1):
            raise ProtocolError(
                f"{message.frozen} of {len(message.chunks)} chunks travel only in the first push, expected fewer: one "
                "must be in every push"
            )
        source = self._open(message.transport)
        self._plan = self.loaded = None
        self.await_kernels()
        with self.model.scope():
            # In a thread: connecting is mostly waiting for other members, and the copies need the plan alone.
            arrivals = submit("arrivals", partial(Arrivals, self.model, traced, source, message))
            with _fail_together(self.model, wait, deadline, tell):
                source.connect(message.storages, message.fields, wait, deadline)
                plan = _BoundPlan(arrivals.result(), message)
            plan.bind()
        self._plan = plan

    def _open(self, transport: str) -> TransportReceiver:
        """Return the worker's end of a transport. It replaces that of another transport."""
        if self._source is None or self._source.name != transport:
            self.disconnect()
            self._source = open_receiver(transport, self.model.device)
            self._source.name = transport
        return self._source

    def export(self, rank: int) -> tuple[list[tuple[int, str, dict[str, Any]]], list[ShardLocation]]:
        """Give a trainer write access to the live parameters, in place of `connect`.

        Parameters on a CPU move to shared memory.

        Args:
            rank: the worker's number in the engine.

        Returns:
            [storage, kind, fields] of each storage, and the location of each tensor of the manifest in the storages.

        Raises:
            UnsupportedError: Modules have parameters in another layout than the loader's.
            PlacementError: Memory cannot be shared.
        """
        if (traced := self._planner.traced) is None:
            raise ProtocolError("ExportParameters came before PlanRequest")
        if others := [group.names[0] for group, path in traced.load_path.items() if path != IN_PLACE]:
            raise UnsupportedError(
                f"{len(others)} modules keep their weights in a kernel's format, such as {others[0]}, and a trainer "
                'cannot share these. Use transport="ipc", or start an unquantised engine on a CPU with '
                'quantization="weightsync_plain"'
            )
        self.disconnect()
        with self.model.scope():
            live = named_tensors(self.model.live)
            numbers: dict[int, int] = {}  # by identity of a storage
            storages: list[tuple[int, str, dict[str, Any]]] = []
            locations: list[ShardLocation] = []
            for copy in traced.placed:
                storage = live[copy.param].untyped_storage()
                if storage._cdata not in numbers:
                    numbers[storage._cdata] = len(storages)
                    storages.append((len(storages), *export(storage)))
                    self._exported[storage._cdata] = storage
                number, dtype = numbers[storage._cdata], str(live[copy.param].dtype).removeprefix("torch.")
                locations.append(ShardLocation(copy.name, copy.box, rank, number, copy.offset, copy.stride, dtype))
            self._planner.locate()  # the first sharing of memory moves it, and no CUDA graph has captured a CPU's
            self._plan = _ExportedParameters(paddings(self.model.pristine(), traced.trace), live)
        return storages, locations

    def take_back(self) -> None:
        """Detach the parameters, on a CPU, from the exported memory. Their addresses stay.

        Raises `PlacementError`.
        """
        for number, storage in [*self._exported.items()]:
            take_back(storage)
            del self._exported[number]

    def begin_push(self) -> None:
        """Check the engine's kernels and kept parameters, and begin to search its KV cache. Writes nothing.

        Raises:
            UnsupportedError: A kernel has changed since `make_plan`, the engine has lost a kept parameter, or values of
                an earlier push would stay.
            EngineError: Requests are between this engine and another.
        """
        if (traced := self._planner.traced) is not None:
            with self.model.scope():
                self._planner.kernels.check()
                self.model.check_kept(traced.answer.kept)
                self._refuse_left(traced)
                self.model.check_requests()
                self._clear_kv_cache = self.model.search_kv_cache()

    def _refuse_left(self, traced: TracedLoad) -> None:
        """Raise `UnsupportedError` if values of an earlier push would stay, apart from those of a kept module."""
        chosen = matching(self._pushed_buffers, traced.keep)
        if left := self._pushed_buffers.difference(chosen).union(self._unproven) - traced.filled:
            raise UnsupportedError(
                f"an earlier push had tensors for {first_few(sorted(left))}, and this one has none: their values would "
                "stay. Push the whole model, without TensorSelection(buffers=False), or restart the engine"
            )

    def run(self, go: Go, wait: Wait, new_deadline: NewDeadline, tell: Tell = lambda error: None) -> Done:
        """Run one whole push, after `begin_push`. The trainer writes exported parameters itself, except for constants.

        Blocks until every chunk is verified and loaded. The model is `POISONED` before the first byte is written, and
        stays so if this raises.
        """
        if (traced := self._planner.traced) is None or (plan := self._plan) is None:
            raise ProtocolError("Go came before Connect")
        if go.version <= self.version:
            raise ProtocolError(
                f"version {go.version} is not newer than {self.version}, the version of this engine: versions only grow"
            )
        if self._clear_kv_cache is None:
            self.begin_push()
        clear, self._clear_kv_cache = self._clear_kv_cache, None
        self.state, self.loaded = POISONED, None
        self._unproven |= traced.filled
        self._pushed_buffers |= traced.buffers
        with self.model.scope():
            self.model.restore_lost()
            if plan.reloads:
                self._planner.addresses.note()
            done = plan.run(go, wait, new_deadline, tell)
            loaded = time.perf_counter()
            plan.begin_proof(go)
            # The GPU may copy on meanwhile.
            started = time.perf_counter()
            self._planner.addresses.check(plan.buffers, everything=plan.reloads)
            if clear is not None and clear():
                logger.warning("cleared the KV cache: weights before version %d may have left NaN in it", go.version)
            checked = time.perf_counter()
            plan.finish_checks()
            finish_stream(self.model.device)
        verify_s = done.verify_s + started - loaded + time.perf_counter() - checked
        self.loaded = replace(done, load_s=done.load_s + checked - started, verify_s=verify_s)
        return self.loaded

    def commit(self, version: int) -> float:
        """Declare the model complete at `version`. Return the seconds spent on derived state.

        If it raises, the model stays `POISONED`.

        Raises:
            ProtocolError: This version was not loaded.
            UnsupportedError: A tensor of the engine has moved.
        """
        if (plan := self._plan) is None or self.loaded is None or self.loaded.version != version:
            raise ProtocolError(f"Commit of version {version} before all of its chunks were loaded")
        started = time.perf_counter()
        with self.model.scope():
            is_refreshed = self.model.refresh_derived_state()
            finish_stream(self.model.device)
            if is_refreshed:
                self._planner.addresses.check(plan.buffers, everything=plan.reloads)
        if plan.is_whole_push:
            self._planner.outlived.clear()
        plan.note_commit()
        self._unproven.clear()
        self.version, self.state, self.loaded = version, CLEAN, None
        return time.perf_counter() - started

    def disconnect(self) -> None:
        """Unmap memory, leave connections, and forget a push under way. `state` does not change."""
        self._plan = self.loaded = self._clear_kv_cache = None
        if self._source is not None:
            self._source.close()
            self._source = None


class _ExportedParameters:
    """The plan of pushes in which the trainer writes the parameters. The worker sets the loader's constants in them."""

    reloads, is_whole_push, buffers = False, True, ()

    def __init__(self, fills: Sequence[Fill], live: Mapping[str, torch.Tensor]) -> None:
        self._constants = [(fill, live[fill.param].data) for fill in fills]

    def run(self, go: Go, wait: Wait, new_deadline: NewDeadline, tell: Tell) -> Done:
        """Set the constants, as `InPlace.begin` does."""
        for fill, data in self._constants:
            fill.apply(data)
        return Done(go.version, 0, 0.0, 0.0, 0.0)

    def begin_proof(self, go: Go) -> None:
        """Do nothing: the worker reads no memory of the trainer."""

    def finish_checks(self) -> None:
        """Do nothing: there are no chunks."""

    def note_commit(self) -> None:
        """Do nothing: each push fills all parameters."""


class _BoundPlan:
    """The load plan, bound to one connection. It is prepared once, when a trainer connects, and used in every push.

    is_committed: a push over this connection was committed, and none has begun since.
    is_whole_push: the last push had all chunks.
    """

    def __init__(self, arrivals: Arrivals, message: Connect) -> None:
        self.is_committed = False
        self.is_whole_push = False
        self._arrivals = arrivals
        source = arrivals.source
        self.changed: ChangedRuns | None = None
        if source.sends_changes:
            self.changed = ChangedRuns(arrivals)
            source.keep_runs(self.changed.kept)
            self.changed.bind()
        self.verifier = Verifier(source, [arrival.runs for arrival in message.chunks], message.in_place)
        self.verifier.prove(message.proof)
        self.frozen = FrozenDigests(_frozen_tensors(arrivals, message) if message.frozen else [])
        in_place = InPlace(arrivals)
        self.buffers = in_place.buffers
        self._paths: list[LoadPath] = [in_place, FusedQuantize(arrivals), ReloadPath(arrivals), NativeLoader(arrivals)]

    @property
    def reloads(self) -> bool:
        """Whether a push post-processes modules. Post-processing may move more tensors than the parameters."""
        return not {RELOAD, NATIVE_LOADER}.isdisjoint(self._arrivals.traced.load_path.values())

    def bind(self) -> None:
        """Prepare every copy. Collective among workers with parts of the same modules."""
        self._arrivals.agree_on_last_chunks()
        for path in self._paths:
            path.bind()
        self._collective = self._arrivals.collective_chunks()
        self._blocking = self._collective.union(*(path.blocking() for path in self._paths))
        self._first_uses = {*self._arrivals.chunks(True)[:FIRST_USES]}.union(
            *(each.first_uses() for each in self._paths)
        )

    def begin_proof(self, go: Go) -> None:
        """Begin to compare the memory that is read in place, behind the copies."""
        self.verifier.begin_proof(go)

    def finish_checks(self) -> None:
        """Raise `DigestError` if any bytes of the push differ from the trainer's. Waits for the GPU."""
        self.verifier.finish()

    def note_commit(self) -> None:
        """Note the commit of the push, and the digests of the parameters that only a whole push fills."""
        self.is_committed = True
        if self.is_whole_push:
            self.frozen.note()

    def run(self, go: Go, wait: Wait, new_deadline: NewDeadline, tell: Tell) -> Done:
        """Load every chunk of a push as it arrives, and begin to verify it. `finish_checks` must follow.

        Workers agree that none of them has failed before they load a chunk with collective steps.
        """
        is_first = not self.is_committed
        due = self._arrivals.chunks(is_first)
        self._meetings = sum(number in self._collective for number in (NO_CHUNK, *due))  # meetings still ahead
        try:
            if go.sample is not None and self.is_committed:
                self.frozen.check()
            self.is_committed, self.is_whole_push = False, due == self._arrivals.chunks(True)
            return self._run(go, wait, new_deadline, due, is_first)
        except Exception as error:
            if self._meetings > 0:  # meetings in which the other workers wait for this one
                tell(error)
                if self._arrivals.model.device.type == "cuda":
                    self._arrivals.source.close()  # the stream and other workers may wait for a chunk that never comes
                any_worker(True, self._arrivals.model.all_reduce_max, self._arrivals.model.device)
            raise

    @contextmanager
    def _meeting(self, wait: Wait, deadline: Deadline) -> Iterator[None]:
        """Enter a body in which workers wait for each other. Raise if a worker has failed."""
        left, self._meetings = self._meetings - 1, 0  # a worker that fails in a meeting must not begin another one
        if any_worker(False, self._arrivals.model.all_reduce_max, self._arrivals.model.device):
            _await_cause(wait, deadline)
        yield
        self._meetings = left

    def _run(self, go: Go, wait: Wait, new_deadline: NewDeadline, due: Sequence[int], is_first: bool) -> Done:
        nbytes, load_s, source = 0, 0.0, self._arrivals.source
        seal = None if go.sample is None else Seal(go.sample, go.version)
        self.verifier.begin()
        loaded, transfer_s, verify_s = self._receive_changes(go, wait, new_deadline)
        since = time.perf_counter()
        with self._meeting(wait, new_deadline()) if NO_CHUNK in self._collective else nullcontext():
            for path in self._paths:
                path.begin()
        if self.changed is not None and loaded:
            nbytes += self._load_changes(self.changed, wait, new_deadline)
            load_s, since = time.perf_counter() - since, time.perf_counter()
        for number in source.chunks(due[len(loaded) :], wait, new_deadline):
            if number in self._blocking or (is_first and number in self._first_uses):
                await_stream(self._arrivals.model.device, number, source.waiting_for, wait, new_deadline())
            arrived = time.perf_counter()
            self.verifier.check_chunk(number, seal)
            verified = time.perf_counter()
            with self._meeting(wait, new_deadline()) if number in self._collective else nullcontext():
                nbytes += sum(path.load(number) for path in self._paths)
            loaded.append(number)
            transfer_s, verify_s = transfer_s + arrived - since, verify_s + verified - arrived
            since = time.perf_counter()
            load_s += since - verified
        if loaded != list(due):
            raise ProtocolError(f"{len(loaded)} of {len(due)} chunks of version {go.version} came, or in another order")
        if unfinished := [name for path in self._paths for name in path.unfinished()]:
            raise ProtocolError(f"version {go.version} came, but these are incomplete: {', '.join(unfinished[:5])}")
        return Done(go.version, nbytes, transfer_s, verify_s, load_s)

    def _receive_changes(self, go: Go, wait: Wait, new_deadline: NewDeadline) -> tuple[list[int], float, float]:
        """Receive and check the changed words, if they come in place of chunks.

        Returns these chunks, and the seconds of the transfer and of the checks.
        """
        if (changed := self.changed) is None:
            return [], 0.0, 0.0
        changing = self._arrivals.chunks(False)
        started = time.perf_counter()
        changed.clear()
        came = self._arrivals.source.changes(
            changing, wait, new_deadline, lambda changes: changed.add(changes, go.sample)
        )
        arrived = time.perf_counter()
        if not came:
            changed.clear()
            return [], arrived - started, 0.0
        changed.finish_checks()
        return [*changing], arrived - started, time.perf_counter() - arrived

    def _load_changes(self, changed: ChangedRuns, wait: Wait, new_deadline: NewDeadline) -> int:
        """Write changed words, and load the kept chunks. Return the number of bytes read."""
        nbytes = changed.write()
        in_place, *others = self._paths
        for number in self._arrivals.chunks(False):
            with self._meeting(wait, new_deadline()) if number in self._collective else nullcontext():
                nbytes += sum(path.load(number) for path in others)
                if number in changed.kept:
                    nbytes += in_place.load(number)
        return nbytes


def _check_sizes(manifest: Manifest) -> None:
    """Raise `ManifestError` for a tensor too large for torch, and `ConfigError` for a dtype that torch lacks."""
    for meta in manifest:
        if prod(length or 1 for length in meta.shape) * itemsize(meta.dtype) > sys.maxsize:
            why = f"shape {meta.shape}: no address space has as many bytes"
            raise ManifestError(f"{meta.name}: {why}", mismatched={meta.name: why})


def _frozen_tensors(arrivals: Arrivals, message: Connect) -> list[torch.Tensor]:
    """Return the bytes of the live parameters that only the frozen chunks fill. Frozen chunks are the last ones."""
    trace = arrivals.traced.trace
    frozen = {location.name for arrival in message.chunks[-message.frozen :] for location in arrival.locations}
    filled = {copy.param for copy in trace.copies if copy.name in frozen}
    filled |= {param for param, names in trace.computed.items() if names and frozen.issuperset(names)}
    live = named_tensors(arrivals.model.live)
    # Post-processing may have replaced the parameter. Sleep discards both, so checking the replacement suffices.
    found = [run for name in sorted(filled) if name in live and (run := bytes_of(live[name])) is not None]
    if filled and not found and arrivals.model.may_discard:
        raise UnsupportedError(
            "no frozen tensor lies in a parameter of the engine that can be watched, and sleep(level=2) may discard "
            "it. Leave TensorSelection.frozen out, or start the engine without enable_sleep_mode"
        )
    return found


@contextmanager
def _fail_together(model: EngineModel, wait: Wait, deadline: Deadline, tell: Tell) -> Iterator[None]:
    """Make the body fail on all workers or on none, because the next step is collective among them.

    A worker tells the trainer of its failure at once. Other workers may wait for it in the body. They end when the
    trainer has told them, or after the body.
    """
    cause: Exception | None = None
    try:
        yield
    except Exception as error:
        cause = error
        if model.all_reduce_max is not None:
            tell(error)
    if any_worker(cause is not None, model.all_reduce_max, model.device) and cause is None:
        _await_cause(wait, deadline)
    if cause is not None:
        raise cause


def await_stream(device: torch.device, number: int, waiting_for: Sequence[str], wait: Wait, deadline: Deadline) -> None:
    """Wait until a GPU has done all queued work, the transfer of a chunk included.

    The engine's next step may wait for the GPU, and has no deadline.

    Raises:
        SyncTimeoutError: The deadline has passed. It names the peers in `waiting_for`.
        WeightSyncError: As `wait` does.
    """
    if device.type != "cuda":
        return
    done = torch.cuda.current_stream(device).record_event()
    while not done.query():
        if deadline.passed():
            raise deadline.expired(f"chunk {number} did not arrive on {device}", "transfer", [*waiting_for])
        wait(timeouts.STREAM_POLL_S)


def _await_cause(wait: Wait, deadline: Deadline) -> None:
    """Raise the trainer's error. Another worker has told the trainer of its failure."""
    while not deadline.passed():
        wait(timeouts.CHUNK_LOOK_S)
    raise PeerError("another worker of this engine failed, and the trainer did not send its error")
