"""The command `weightsync`."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

from rich.console import Console

from weightsync import __version__
from weightsync.bucketing import make_bucketer
from weightsync.errors import WeightSyncError
from weightsync.sync import DEFAULT_MAX_BYTES

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_DESCRIPTION = """\
weightsync moves updated policy weights from an RL trainer into a running vLLM:

    WeightSync(backend="fsdp", transport="ipc", engine="http://localhost:8000").push(model)

and the engine answers as one that was started cold from these weights. The commands show that it
does, and help where it does not:

    weightsync demo
        Train a tiny model, push it to a live vLLM after each step, and prove that the engine answers
        as one that was started cold from the last weights. A minute or two, no network, no GPU needed.

    weightsync plan ~/models/Qwen3-8B --tp 2
        What vLLM would do with a model's tensors, from its config.json alone: which region goes
        where, what fuses, which buckets travel.

    weightsync doctor
        Check this machine, then push to a live engine and back. With --engine URL --model DIR: yours.

Exit status: 0 when all is well, 1 when something failed, 2 when the call itself cannot work.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit status."""
    parser = argparse.ArgumentParser(
        prog="weightsync", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"weightsync {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_plan(commands)
    _add_doctor(commands)
    options = parser.parse_args(arguments)
    console = Console()
    signal.signal(signal.SIGTERM, _terminated)  # so that children are ended, as after a Ctrl-C
    try:
        return 0 if options.run(options, console) else 1
    except WeightSyncError as error:
        Console(stderr=True).print(f"[bold red]weightsync {options.command}[/bold red]:", end=" ")
        Console(stderr=True).print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        return 130


def _add_demo(commands: Commands) -> None:
    demo = commands.add_parser(
        "demo",
        help="train two ranks, push to a live vLLM, prove it equal to a cold start",
        description="Two trainer processes hold a tiny Qwen3 under FSDP2 and teach it to count; a vLLM server in its "
        "own process gets the new weights after each step. At the end a second vLLM is started cold from the trainer's "
        "last weights, and both must give the same token ids and log-probabilities. Uses GPUs where there are any. "
        "Example: weightsync demo --transport broadcast",
    )
    demo.add_argument("--transport", choices=("ipc", "broadcast"), default="ipc", help="default: ipc")
    demo.add_argument("--steps", type=int, default=3, help="how many times to train and push; default: 3")
    demo.add_argument("--layers", type=int, default=4, help="layers of the model; default: 4")
    demo.set_defaults(run=_demo)


def _add_plan(commands: Commands) -> None:
    plan = commands.add_parser(
        "plan",
        help="print the load plan, the fuse groups and the buckets of a model",
        description="Builds the Hugging Face model and vLLM's model without memory, runs vLLM's own loader over them "
        "and prints what it would copy where. Needs no weights, no GPU and no running engine. "
        "Example: weightsync plan ~/models/Qwen3-8B --tp 2",
    )
    plan.add_argument("model_dir", metavar="MODEL_DIR", type=Path, help="a folder with a Hugging Face config.json")
    plan.add_argument("--tp", type=int, default=1, help="tensor parallel workers of the engine; default: 1")
    plan.add_argument("--expert-parallel", action="store_true", help="experts are spread over the workers, whole")
    plan.add_argument("--dtype", default="auto", help="the engine's dtype, as vLLM's --dtype; default: the config's")
    plan.add_argument(
        "--bucketer", choices=("module", "threshold", "parameter"), default="module", help="default: module"
    )
    plan.add_argument("--max-bytes", type=int, help="size of a bucket; default: 256 MiB")
    plan.add_argument("--all", action="store_true", help="every layer, every worker, every bucket")
    plan.set_defaults(run=_plan)


def _add_doctor(commands: Commands) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check this machine, then push to a live engine and back",
        description="Checks versions, GPUs, shared memory and settings; then pushes to a vLLM: its own weights "
        "(nothing may change), other weights (the answers must change), and its own again (they must come back "
        "exactly). Starts a tiny engine for that, or takes yours. Example: weightsync doctor --engine "
        "http://localhost:8000 --model ~/models/Qwen3-8B",
    )
    doctor.add_argument(
        "--engine",
        metavar="URL",
        help="a running vLLM server; while the checks run it serves wrong weights, at the end those of --model",
    )
    doctor.add_argument("--model", metavar="DIR", type=Path, help="the checkpoint that --engine serves")
    doctor.add_argument("--transport", choices=("ipc", "broadcast"), default="ipc", help="default: ipc")
    doctor.add_argument("--no-engine", action="store_true", help="check the machine only")
    doctor.add_argument(
        "--quantization",
        metavar="SCHEME",
        help="start the engine with vLLM's --quantization SCHEME, compare it with a cold start too, and say how far "
        "its log-probabilities are from an unquantised engine's",
    )
    doctor.set_defaults(run=_doctor)


def _demo(options: argparse.Namespace, console: Console) -> bool:
    from weightsync.cli import demo

    return demo.run(options.transport, options.steps, options.layers, console)


def _plan(options: argparse.Namespace, console: Console) -> bool:
    from weightsync.cli import plan_report

    max_bytes = options.max_bytes
    if max_bytes is None and options.bucketer != "parameter":
        max_bytes = DEFAULT_MAX_BYTES
    bucketer = make_bucketer(options.bucketer, max_bytes)
    return plan_report.run(
        options.model_dir, options.tp, options.expert_parallel, bucketer, options.dtype, options.all, console
    )


def _doctor(options: argparse.Namespace, console: Console) -> bool:
    from weightsync.cli import doctor

    return doctor.run(
        options.engine, options.model, options.transport, options.no_engine, options.quantization, console
    )


def _terminated(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)
