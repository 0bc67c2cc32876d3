"""The command `weightsync`."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from rich.console import Console

from weightsync import __version__
from weightsync.bench.cases import BACKENDS, BUCKETERS, DTYPES, TRANSPORTS
from weightsync.bench.shapes import SHAPES
from weightsync.bucketing import make_bucketer
from weightsync.errors import ConfigError, WeightSyncError
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

    weightsync bench --shape 0.5B --transport ipc broadcast
        How long a push takes, by phase, beside vLLM's own ways and the limits of this machine.

    weightsync doctor
        Check this machine, then push to a live engine and back. With --engine URL --model DIR: yours.

    weightsync bridge
        Where the engine that `python -m weightsync.vllm.serve` runs has its parameters.

Exit status: 0 when all is well, 1 when something failed, 2 when the call itself cannot work.
"""


_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

_BENCH = """\
Starts vLLM servers and trainers of models without data, and times whole pushes, on the trainer's
clock. The first push of a case, which also connects, is reported apart, and so are warm-up pushes
left out. After the timing each engine is pushed the weights that it was started from, and must
answer as it did then: same token ids, same log-probabilities.

    weightsync bench --shape tiny --transport ipc broadcast checkpoint
        Without a GPU too: a few minutes. Peers on the same work are measured beside.

    weightsync bench --shape 0.5B 8B 70B --tp 1 2 4 --gpus 8 --dry-run
        What would be measured, what a push takes at least, and what memory it needs.

    weightsync bench --shape 0.5B 1.5B 4B --output-json times.json --report report
        Time against bytes, as JSON, Markdown and plots.

bucketer=parameter over broadcast is one tensor at a time, as trainers did by hand. Exit status 1
when a push failed or left other answers than a cold start.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit status."""
    parser = argparse.ArgumentParser(
        prog="weightsync", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"weightsync {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    _add_demo(commands)
    _add_plan(commands)
    _add_bench(commands)
    _add_doctor(commands)
    _add_bridge(commands)
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 2
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
        "Example: weightsync plan ~/models/Qwen3-8B --tp 2. With --simulate, predicts how long a push would take on "
        "other machines. Example: weightsync plan 70B --simulate hosts=8,ranks=32,engines=4,tp=8",
    )
    plan.add_argument(
        "model_dir", metavar="MODEL_DIR", type=Path, help="a folder with a Hugging Face config.json, or that file"
    )
    # None where nothing is said: --simulate refuses these, with whatever value.
    plan.add_argument("--tp", type=int, metavar="N", help="tensor parallel workers of the engine; default: 1")
    plan.add_argument("--expert-parallel", action="store_true", help="experts are spread over the workers, whole")
    plan.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float16", "float32", "half", "float"),
        metavar="DTYPE",
        help="the engine's, as vLLM's --dtype: auto, bfloat16, float16, float32; default: auto, which is the config's",
    )
    plan.add_argument(
        "--bucketer",
        choices=BUCKETERS,
        metavar="HOW",
        help="what travels together. module: as many whole modules as --max-bytes holds; threshold: as many tensors, "
        "where only what fuses stays together; parameter: one tensor at a time. Default: module",
    )
    plan.add_argument(
        "--max-bytes", metavar="SIZE", type=_size, help="of a bucket, in bytes or as 64MiB, 1GB; default: 256MiB"
    )
    plan.add_argument("--all", action="store_true", help="every layer, every worker, every bucket")
    plan.add_argument(
        "--simulate",
        metavar="TOPOLOGY",
        action="append",
        help="predict the seconds of a push over each transport instead, also for a MODEL_DIR that is only a size such "
        "as 70B or 1T. hosts=1,gpus_per_host=8,ranks=8,engines=1,tp=8 is the default; give any part of it, the rest "
        "stays: hosts=8 alone has 8 ranks and one engine on 64 GPUs. Speeds too, see docs/scaling.md. May be repeated",
    )
    plan.set_defaults(run=_plan)


def _add_bench(commands: Commands) -> None:
    bench = commands.add_parser(
        "bench",
        usage="%(prog)s [--shape NAME ...] [--transport NAME ...] [--dry-run] [OPTION ...]",
        help="measure pushes beside vLLM's own ways and the machine's limits",
        description=_BENCH,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    matrix = bench.add_argument_group("what is measured: every combination of these, each may have several values")

    def axis(name: str, default: Any, text: str, **more: Any) -> None:
        if "choices" in more:  # once, and not in each place where argparse would list them
            more["metavar"] = "NAME"
            text += f": {', '.join(more['choices'])}"
        matrix.add_argument(name, nargs="+", default=[default], help=f"{text}; default: {default}", **more)

    axis("--shape", "tiny", "the model's, without weights", choices=tuple(SHAPES))
    axis("--backend", "fsdp", "how the trainer holds it", choices=BACKENDS)
    axis("--ranks", 1, "trainer processes", type=int, metavar="N")
    axis("--dtype", "bfloat16", "the trainer's, beside the engines' bfloat16", choices=DTYPES)
    axis("--transport", "ipc", "how bytes reach the engines", choices=TRANSPORTS)
    axis("--bucketer", "module", "what travels together", choices=BUCKETERS)
    axis("--engines", 1, "that a push goes to", type=int, metavar="N")
    axis("--tp", 1, "tensor parallel workers of each engine", type=int, metavar="N")
    axis("--quantization", "none", "what engines make of it, as vLLM's --quantization", metavar="SCHEME")
    matrix.add_argument(
        "--no-peers",
        dest="peers",
        action="store_false",
        help="leave out what is not weightsync: files, vLLM's, checkpoint-engine",
    )
    bench.add_argument(
        "--num-iters", metavar="N", type=int, default=5, help="pushes that are timed, for each case; default: 5"
    )
    bench.add_argument("--num-iters-warmup", metavar="N", type=int, default=1, help="pushes before them; default: 1")
    bench.add_argument(
        "--gpus",
        metavar="N",
        type=int,
        help="how many to use, 0 for CPUs; default: all. A dry run may assume any number",
    )
    bench.add_argument("--dry-run", action="store_true", help="print the plan, lower bounds and memory; start nothing")
    bench.add_argument("--output-json", metavar="FILE", type=Path, help="one object for each case, every repeat in it")
    bench.add_argument("--report", metavar="DIR", type=Path, help="write report.md and plots (PNG) into this folder")
    bench.set_defaults(run=_bench)


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


def _add_bridge(commands: Commands) -> None:
    bridge = commands.add_parser(
        "bridge",
        help="show an engine's vllm_bridge_config.json, and check it",
        description="Prints which engine has written the file, where each of its workers has its parameters, and "
        "whether these processes still run. Without FILE it looks in $LOGDIR, the working directory, and the user's "
        "runtime directory. Example: weightsync bridge ./vllm_bridge_config.json",
    )
    bridge.add_argument("file", metavar="FILE", type=Path, nargs="?", help="default: the first that is found")
    bridge.set_defaults(run=_bridge)


def _demo(options: argparse.Namespace, console: Console) -> bool:
    from weightsync.cli import demo

    return demo.run(options.transport, options.steps, options.layers, console)


def _plan(options: argparse.Namespace, console: Console) -> bool:
    from weightsync.cli import plan_report

    if options.simulate:
        _check_simulated(options)
        return plan_report.simulate(options.model_dir, options.simulate, console)
    kind, max_bytes = options.bucketer or "module", options.max_bytes
    if max_bytes is None and kind != "parameter":
        max_bytes = DEFAULT_MAX_BYTES
    return plan_report.run(
        options.model_dir,
        1 if options.tp is None else options.tp,
        options.expert_parallel,
        make_bucketer(kind, max_bytes),
        options.dtype or "auto",
        options.all,
        console,
    )


def _check_simulated(options: argparse.Namespace) -> None:
    """Raise `ConfigError` for an option of `plan` that a prediction would ignore."""
    in_topology = {"tp": f"tp={options.tp}", "max_bytes": "bucket_mib=N"}
    for name in ("tp", "expert_parallel", "dtype", "bucketer", "max_bytes", "all"):
        if (value := getattr(options, name)) is not None and value is not False:
            way_out = f"put {in_topology[name]} into the topology" if name in in_topology else "leave it out"
            raise ConfigError(f"--{name.replace('_', '-')} says nothing to --simulate: {way_out}")


def _size(text: str) -> int:
    """Bytes, from "268435456" or "256MiB"."""
    number = text.rstrip("BGKMik")
    try:
        return int(number) * _UNITS[text[len(number) :]]
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r}: expected bytes, such as 268435456 or 256MiB") from None


def _bench(options: argparse.Namespace, console: Console) -> bool:
    from weightsync.cli import bench

    return bench.run(options, console)


def _doctor(options: argparse.Namespace, console: Console) -> bool:
    from weightsync.cli import doctor

    return doctor.run(
        options.engine, options.model, options.transport, options.no_engine, options.quantization, console
    )


def _bridge(options: argparse.Namespace, console: Console) -> bool:
    from weightsync.cli import bridge_report

    return bridge_report.run(options.file, console)


def _terminated(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)
