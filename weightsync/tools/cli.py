"""weightsync moves updated policy weights from an RL trainer into a running vLLM:

    WeightSync(backend="fsdp", transport="ipc", engine="http://localhost:8000").push(model)

Then the engine answers like an engine started cold from the pushed weights. The commands prove this, and help after a
failure:

    weightsync serve Qwen/Qwen3-0.6B
        Start a vLLM server that trainers can push to.

    weightsync demo
        Train a tiny model, and push it to a live vLLM after each step. At the end the engine must answer like an engine
        started cold from the last weights. The demo takes a minute or two, and needs no network and no GPU.

    weightsync plan ~/models/Qwen3-8B --tp 2
        Show how vLLM loads a model's tensors, from the model's config.json alone. The output has the place of each
        tensor's regions in vLLM's parameters, the fused tensors, and the buckets of a push.

    weightsync bench --shape 0.5B --transport ipc broadcast
        Measure the phases of pushes, beside vLLM's own weight updates and the machine's limits.

    weightsync doctor
        Check this machine, start an engine, push other weights to it, and push its first weights again. With --engine
        URL, check the connections to that running engine instead. With --engine URL and --model DIR, also push to that
        engine.

    weightsync handles
        Show and check the file in which `weightsync serve` writes its engine's parameter handles.

Exit status: 0 when all is well, 1 when something failed, 2 when the call itself cannot work.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from weightsync import __version__
from weightsync.config import read_bytes
from weightsync.errors import ConfigError, WeightSyncError
from weightsync.tools.bench import __doc__ as bench_text
from weightsync.tools.bench.cases import (
    BACKENDS,
    BUCKETERS,
    CLIENTS,
    DTYPES,
    ENCODINGS,
    GRAPHS,
    LOAD_FORMATS,
    PEERS,
    TRANSPORTS,
    WAYS,
)
from weightsync.tools.bench.shapes import SHAPES

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: Sequence[str]) -> int:
    """Run the command line, and return the exit status. Nothing heavy is imported before a command runs."""
    parser = argparse.ArgumentParser(
        prog="weightsync", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"weightsync {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for add in (_add_serve, _add_demo, _add_plan, _add_place, _add_bench, _add_doctor, _add_handles):
        add(commands)
    serves = arguments[:1] == ["serve"]  # it has options of vLLM's
    options = parser.parse_args(arguments[:1] if serves else arguments)
    if options.command is None:
        parser.print_help()
        return 2
    from rich.console import Console

    # As standard error does: a locale may lack letters of a path.
    with suppress(AttributeError, OSError):  # standard output is closed, or no file
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        if serves:
            import_module("weightsync.vllm.serve").serve(arguments[1:])
            return 0
        signal.signal(signal.SIGTERM, _terminated)  # end children, as after a Ctrl-C
        return 0 if import_module(options.module).run(options, Console()) else 1
    except WeightSyncError as error:
        Console(stderr=True).print(f"[bold red]weightsync {options.command}[/bold red]:", end=" ")
        Console(stderr=True).print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 2 if isinstance(error, (ValueError, NotImplementedError)) else 1


def _add_serve(commands: Commands) -> None:
    commands.add_parser(
        "serve", help="start a vLLM server that trainers can push to; takes all options of `vllm serve`"
    )


def _add_demo(commands: Commands) -> None:
    demo = commands.add_parser(
        "demo",
        help="train two ranks, push to a live vLLM, prove it equal to a cold start",
        description="Two trainer processes hold a tiny Qwen3 under FSDP2 and teach it to count. A vLLM server gets "
        "the new weights after each step. At the end a second vLLM is started cold from the trainer's last weights. "
        "Both must give the same token ids and log-probabilities. Uses GPUs where there are any. Example: weightsync "
        "demo --transport broadcast",
    )
    demo.add_argument("--transport", choices=("ipc", "broadcast", "nixl"), default="ipc", help="default: ipc")
    demo.add_argument("--steps", type=int, default=3, help="how many times to train and push; default: 3")
    demo.add_argument("--layers", type=int, default=4, help="layers of the model; default: 4")
    demo.set_defaults(module="weightsync.tools.demo")


def _add_plan(commands: Commands) -> None:
    plan = commands.add_parser(
        "plan",
        help="print the load plan, the fuse groups and the buckets of a model",
        description="Builds the Hugging Face model and vLLM's model without memory, runs vLLM's own loader over them "
        "and prints its copies. Needs no weights, no GPU and no running engine. Example: weightsync plan "
        "~/models/Qwen3-8B --tp 2. With --simulate, predicts how long a push would take on other machines. Example: "
        "weightsync plan 70B --simulate hosts=8,ranks=32,engines=4,tp=8",
    )
    option = plan.add_argument
    option(
        "model_dir",
        metavar="MODEL_DIR",
        type=Path,
        help="a folder with a Hugging Face config.json, the file, or a bench's shape",
    )
    # None if not given: --simulate refuses these options with any value.
    option("--tp", type=int, metavar="N", help="tensor parallel workers of the engine; default: 1")
    option("--expert-parallel", action="store_true", help="spread whole experts over the workers")
    dtypes = ("auto", "bfloat16", "float16", "float32", "half", "float")
    text = "the engine's, as vLLM's --dtype: auto, bfloat16, float16, float32; default: auto, which is the config's"
    option("--dtype", choices=dtypes, metavar="DTYPE", help=text)
    text = (
        "how tensors share a bucket. module: as many whole modules as --max-bytes holds; threshold: as many tensors, "
        "keeping only fused ones together; parameter: one tensor at a time. Default: module"
    )
    option("--bucketer", choices=BUCKETERS, metavar="HOW", help=text)
    option(
        "--max-bytes", metavar="SIZE", type=_size, help=("of a bucket, in bytes or as 64MiB, 1GB; default: as a push")
    )
    option("--all", action="store_true", help="every layer, every worker, every bucket")
    text = (
        "predict the seconds of a push over each transport instead, also for a MODEL_DIR that is only a size such as "
        "70B or 1T. Default: hosts=1,gpus_per_host=8,ranks=8,engines=1,tp=8. Give any part of it: hosts=8 alone has 8 "
        "ranks and one engine on 64 GPUs. Speeds too, see docs/evidence/scaling.md. May be repeated"
    )
    option("--simulate", metavar="TOPOLOGY", action="append", help=text)
    plan.set_defaults(module="weightsync.tools.plan")


def _add_place(commands: Commands) -> None:
    place = commands.add_parser(
        "place",
        help="search for the fastest placement of the models of a job under one controller",
        description="Reads the roles of a job with measured seconds. Searches for pools, GPUs and parallel sizes with "
        "the least predicted seconds of a step. Shows placements made by hand beside it. Runs nothing. Example: "
        "weightsync place examples/place_ppo.json",
    )
    text = "a JSON file, see docs/use/controller.md"
    place.add_argument("job", metavar="JOB", type=Path, help=text)
    place.set_defaults(module="weightsync.tools.place")


def _add_bench(commands: Commands) -> None:
    bench = commands.add_parser(
        "bench",
        usage="%(prog)s [--shape NAME ...] [--transport NAME ...] [--dry-run] [OPTION ...]",
        help="measure pushes beside vLLM's own ways and the machine's limits",
        description=bench_text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    matrix = bench.add_argument_group("cases: every combination of these options, each with one or more values")

    def axis(name: str, default: Any, text: str, **more: Any) -> None:
        if "choices" in more:  # argparse would list them at each place
            more["metavar"] = "NAME"
            text += f": {', '.join(more['choices'])}"
        matrix.add_argument(name, nargs="+", default=[default], help=f"{text}; default: {default}", **more)

    text = f"weightsync, or peers that carry the same weights: {', '.join(map(repr, PEERS))}; default: all"
    matrix.add_argument("--way", nargs="+", choices=WAYS, default=WAYS, metavar="NAME", help=text)
    axis("--shape", "tiny", "the model's, without weights", choices=tuple(SHAPES))
    axis("--backend", "plain", "how the trainer holds it", choices=BACKENDS)
    axis("--ranks", 1, "trainer processes", type=int, metavar="N")
    axis("--dtype", "bfloat16", "the trainer's, beside the engines' bfloat16", choices=DTYPES)
    axis("--transport", "ipc", "how bytes reach the engines", choices=TRANSPORTS)
    axis("--bucketer", "module", "how tensors share a bucket", choices=BUCKETERS)
    axis("--engines", 1, "engines of a push", type=int, metavar="N")
    axis("--tp", 1, "tensor parallel workers of each engine", type=int, metavar="N")
    axis("--data-parallel-size", 1, "replicas of the model in each engine, of --tp workers each", type=int, metavar="N")
    text = "divide experts among all workers of an engine"
    flag: Any = {"action": "store_const", "const": [True], "default": [False]}
    matrix.add_argument("--enable-expert-parallel", dest="expert_parallel", help=text, **flag)
    axis("--load-format", "auto", "engines start from a checkpoint, or without weights", choices=LOAD_FORMATS)
    axis("--encoding", "none", "the form of the bytes over broadcast", choices=ENCODINGS)
    axis("--changed", 1.0, "the share of values changed by a step; below 1 at random", type=float, metavar="SHARE")
    axis("--quantization", "none", "the engines' quantisation, as vLLM's --quantization", metavar="SCHEME")
    text = "how the trainer calls engines, a server or an LLM in its process, by plug-in or worker extension"
    axis("--client", "http", text, choices=CLIENTS)
    option = bench.add_argument
    option("--layers", metavar="N", type=int, help="the first layers of each model alone; default: all")
    text = "models instead of --shape: a JSON file of config.json's by name, such as benchmarks/families.json"
    option("--families", metavar="FILE", type=Path, help=text)
    text = "cases at once, to see sooner whether answers are right; times then mean nothing; default: 1"
    option("--jobs", metavar="N", type=int, default=1, help=text)
    option("--num-iters", metavar="N", type=int, default=5, help="timed pushes in each loop; default: 5")
    option("--num-iters-warmup", metavar="N", type=int, default=1, help="pushes before the timed ones; default: 1")
    option("--max-bytes", metavar="SIZE", type=_size, help="of a chunk, in bytes or as 64MiB, 1GB; default: as a push")
    option("--cuda-graphs", choices=GRAPHS, metavar="HOW", help=f"{', '.join(GRAPHS)}; default: decode, on CPUs off")
    option("--trainer-on-cpu", action="store_true", help="the trainer has its weights in CPU memory, engines on GPUs")
    option("--gpus", metavar="N", type=int, help="how many to use, 0 for CPUs; default: all. A dry run may assume any")
    option("--folder", metavar="DIR", help="where checkpoints and logs lie meanwhile; default: the temporary folder")
    option("--dry-run", action="store_true", help="print the cases and lower bounds; start nothing")
    option("--json", metavar="FILE", type=Path, help="write one object for each case, with every push in it")
    text = "show files that --json has written instead of measuring"
    option("--from", metavar="FILE", dest="results", type=Path, nargs="+", help=text)
    option("--plot", metavar="FILE", type=Path, help="draw cases, peers and lower bounds into this .svg or .png")
    bench.set_defaults(module="weightsync.tools.bench.run")


def _add_doctor(commands: Commands) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check this machine, then push to a live engine and back",
        description="Checks versions, GPUs, shared memory and settings. Then pushes to a vLLM: its own weights (no "
        "answer may change), other weights (answers must change), its own again (the first answers must return). "
        "Starts a tiny engine for this, or takes yours. With --engine alone every connection of a push is tried, and "
        "nothing is pushed. Example: weightsync doctor --engine http://localhost:8000 --model ~/models/Qwen3-8B",
    )
    option = doctor.add_argument
    option("--engine", metavar="URL", help="a running vLLM server; its connections are tried from both sides")
    text = "the checkpoint of --engine, which serves these weights afterwards"
    option("--model", metavar="DIR", type=Path, help=text)
    option("--transport", choices=("ipc", "broadcast", "nixl"), default="ipc", help="default: ipc")
    option("--no-engine", action="store_true", help="check the machine only")
    text = "start the engine so, compare it with a cold start too, and print its distance from an unquantised engine"
    option("--quantization", metavar="SCHEME", help=text)
    doctor.set_defaults(module="weightsync.tools.doctor")


def _add_handles(commands: Commands) -> None:
    handles = commands.add_parser(
        "handles",
        help="show an engine's handle file, and check it",
        description="Prints the engine of the file, the parameters of each worker, and whether these processes still "
        "run. Without FILE it looks in $LOGDIR, the working directory, and the user's runtime directory. Example: "
        "weightsync handles ./vllm_bridge_config.json",
    )
    handles.add_argument("file", metavar="FILE", type=Path, nargs="?", help="default: the first file found")
    handles.set_defaults(module="weightsync.tools.handles")


def _size(text: str) -> int:
    """Return bytes, from "268435456" or "256MiB"."""
    try:
        return read_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _terminated(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)
