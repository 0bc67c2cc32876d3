"""One trainer rank of `weightsync bench`, which starts it with torchrun's variables and tells it what to do by lines of
JSON on its standard input: {"do": "save", "folder": ...}, {"do": "build"}, {"do": "fill", "weights": ...},
{"do": "push"}. Each is answered by a line of JSON; a push by its seconds."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weightsync.bench.cases import CHECKPOINT_ENGINE, FILES, NATIVE, WEIGHTSYNC, Case
from weightsync.bench.models import fill, make_trainer, save_checkpoint, share_memory
from weightsync.bench.results import PHASES
from weightsync.sync import WeightSync
from weightsync.transports.checkpoint import CheckpointTransport
from weightsync.trial import listen_for_orders, request

Seconds = dict[str, float]
Push = Callable[[], Seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description="a trainer rank of `weightsync bench`, which starts it")
    parser.add_argument("--model", required=True, help="folder of a config.json")
    parser.add_argument("--case", required=True, type=json.loads, help="the fields of a Case, as JSON")
    parser.add_argument("--engine", action="append", default=[], help="URL of a server; rank 0 calls them all")
    parser.add_argument("--device", required=True)
    parser.add_argument("--folder", required=True, type=Path, help="for files that travel")
    parser.add_argument("--timeout-s", required=True, type=float)
    options = parser.parse_args()
    orders, answers = listen_for_orders()
    logging.basicConfig(level=logging.WARNING)

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        case, device = Case(**options.case), torch.device(options.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(1)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        model: Any = None
        push: Push | None = None
        for line in orders:
            order = json.loads(line)
            match order["do"]:
                case "save":
                    save_checkpoint(options.model, order["weights"], Path(order["folder"]), device)
                    answer()
                case "build":
                    model = make_trainer(case.backend, options.model, getattr(torch, case.dtype), device)
                    if case.way == WEIGHTSYNC and case.transport == "ipc" and device.type == "cpu":
                        share_memory(model, case.backend)
                    push = make_push(case, model, options.engine, options.folder, options.timeout_s)
                    answer()
                case "fill":
                    fill(model, case.backend, order["weights"], device)
                    if device.type == "cuda":
                        torch.cuda.synchronize()  # peers read on streams of their own, and no push is to wait for it
                    answer()
                case "push":
                    assert push is not None
                    answer(seconds=push())
    except Exception as error:
        logging.getLogger(__name__).exception("this trainer rank has failed")
        answer(error=f"{type(error).__name__}: {error}")
        sys.exit(1)


def make_push(case: Case, model: Any, urls: list[str], folder: Path, timeout_s: float) -> Push:
    """Collective. What brings the model's weights of the moment into the engines, and gives the seconds it took."""
    if case.way == FILES:
        return lambda: push_files(model, urls, folder, timeout_s)
    if case.way in NATIVE:
        from weightsync.vllm.native import native_push

        backend, packed = NATIVE[case.way]
        return native_push(model, backend, packed, urls[0], case.tp, timeout_s)
    if case.way == CHECKPOINT_ENGINE:
        from weightsync.bench.checkpoint_engine import checkpoint_engine_push

        return checkpoint_engine_push(model, urls, case.tp, timeout_s)
    assert case.way == WEIGHTSYNC
    transport: Any = CheckpointTransport(folder) if case.transport == "checkpoint" else case.transport
    sync = WeightSync(
        case.backend, transport, urls, bucketer=case.bucketer, timeout_s=timeout_s, progress=False
    )  # as long as this process lives

    def push() -> Seconds:
        report = vars(sync.push(model))
        return {name: report[name] for name in (*PHASES, "pause_s", "total_s") if name in report}

    return push


def push_files(model: Any, urls: list[str], folder: Path, timeout_s: float) -> Seconds:
    """Collective. What trainers do without a library: gather the state dict on rank 0, save it as transformers does,
    and let vLLM reload the files. The prefix cache is reset, as after any change of weights."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    started = time.perf_counter()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder, state_dict=state)
    del state
    saved = time.perf_counter()
    if dist.get_rank() == 0:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        for url in urls:
            request(url, "POST", "/collective_rpc", reload, timeout_s)
            request(url, "POST", "/reset_prefix_cache", None, timeout_s)
    now = time.perf_counter()
    return {"save_s": saved - started, "load_s": now - saved, "total_s": now - started}


if __name__ == "__main__":
    main()
