"""Save a version and start the engine anew from it: the strategy of `CheckpointTransport(folder, restart=True)`.

`CheckpointTransport` without `restart` loads each version into the running engines: see strategies/copy.py and
transports/files.py.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from weightsync.checkpoint.locked_folder import VersionFolder
from weightsync.checkpoint.safetensors import MAX_SHARD_BYTES
from weightsync.checkpoint.save import save_tensors
from weightsync.checkpoint.sidecars import with_configs
from weightsync.config import check_count
from weightsync.engines.server import VllmServer
from weightsync.errors import ConfigError, UnsupportedError
from weightsync.fleet import connect
from weightsync.fleet.engines_of_ranks import OtherRanks
from weightsync.net.update import Update
from weightsync.report import EngineReport, PushReport
from weightsync.sources.base import Model
from weightsync.strategies.base import OF_COPIES, Options, UpdateStrategy
from weightsync.strategies.copy import CopyWeights
from weightsync.strategies.non_finite import FiniteCheck
from weightsync.transports.files import FilesTransport

logger = logging.getLogger(__name__)

_STORES = "--kv-transfer-config", "--ec-transfer-config"
_OTHER_SOURCES = re.compile("(?i)dummy|gguf|ipc_cache|mistral|npcache|pt|(runai_streamer_)?sharded(_state)?|tensorizer")
"""Formats of random weights, of an earlier start or a URI, and of other files than a version's safetensors."""
_ENDS_WITH_ITS_SERVER = {
    "MoRIIOConnector",
    "MooncakeConnector",
    "MultiConnector",
    "NixlConnector",
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
}
_OUTLIVES = re.compile(r"secondary.tiers|spec.name")  # stores of an OffloadingConnector outside of the server
_LEAVE_OUT = "the next version could answer from keys and values of this version. Leave the option out"
_CONNECTOR = re.compile(r"[ke][vc]_connector\W+(\w+)")


@dataclass(frozen=True)
class CheckpointTransport:
    """A transport that also keeps a checkpoint of each version.

        CheckpointTransport("/shared/run-1", tokenizer=tokenizer)

    After a push of version 7, `folder/version-00000007` equals the output of `save_pretrained`. The folder has
    safetensors, an index for several files, the config, the generation config, and the given tokenizer. The folder
    appears when everything is on the disk, before the engines generate again. Every version has all tensors, and the
    configs and the tokenizer as they are at its push.

    Args:
        folder: The folder of all versions, made if it is missing. All ranks and workers must see it under this path.
            Only one trainer may use it at a time.
        keep_last: The number of newest versions to keep.
        max_shard_bytes: The most bytes of tensors in a file. A larger tensor (with `restart`: bucket) has its own file.
        restart: Whether a push restarts the engine from the saved version. A restart serves models and quantisations
            that a push refuses. The engine must be a `weightsync.engines.VllmServer`. Files have the trainer's
            dtypes, unless the selection has others.
        config: An object with `save_pretrained`, for the files beside the weights. None: the config of a transformers
            model (with `quantize`: no config).
        generation_config: The same for the generation config.
        tokenizer: An object with `save_pretrained`. None: no tokenizer.

    Raises:
        ConfigError: A number is below 1, or `config` is a model.
    """

    folder: str | os.PathLike[str]
    _: KW_ONLY
    keep_last: int = 2
    max_shard_bytes: int = MAX_SHARD_BYTES
    restart: bool = False
    config: Any = None
    generation_config: Any = None
    tokenizer: Any = None

    def __post_init__(self) -> None:
        check_count("keep_last", self.keep_last, "the written version must stay")
        check_count("max_shard_bytes", self.max_shard_bytes, "a file needs room for at least one byte")
        if isinstance(self.config, nn.Module):
            raise ConfigError("config is a model; give its config: config=model.config")

    @property
    def demands(self) -> str | None:
        """The caller's duty besides `push`."""
        return "server" if self.restart else None

    def open(self, options: Options) -> UpdateStrategy:
        """Return the strategy: `SaveAndRestart`, or `CopyWeights` over files."""
        options.selection.refuse("this CheckpointTransport, whose versions are whole", "keep", "frozen", "only_trained")
        if self.restart:
            return SaveAndRestart(options, self)
        beside = (self.config, self.generation_config, self.tokenizer)
        folder, takes_configs = Path(self.folder).absolute(), options.quantize is None
        transport = FilesTransport(folder, self.keep_last, self.max_shard_bytes, beside, takes_configs)
        return CopyWeights(options, transport)


class SaveAndRestart(UpdateStrategy):
    """A strategy that saves a version to the disk for each push, ends the server, and restarts it from the version.

    The server serves until the version is complete. A later failure leaves the server ended. The next push starts it.
    """

    def __init__(self, options: Options, transport: CheckpointTransport) -> None:
        if options.quantize is not None:
            raise ConfigError("restart=True saves the trainer's own tensors; leave quantize out")
        options.refuse("this CheckpointTransport", *OF_COPIES, "pause", "hold_s")
        options.selection.refuse("restart=True, whose engine starts from the version alone", "exclude")
        self._options = options
        self._finite = FiniteCheck(options, options.source)
        self._transport = transport
        self._folder: VersionFolder | None = None  # rank 0 only

    def run(self, update: Update, model: Model) -> PushReport:
        ranks, options, transport = update.ranks, self._options, self._transport
        server: VllmServer | None = None  # rank 0 only
        with update.timeline.during("plan"):
            OtherRanks(options.engines, options.timeout_s).meet(ranks, refuse="restart=True")
            self._finite.refuse(update, model)
            version, away_s, incoming, target = 0, 0.0, Path(), Path()
            if ranks.rank == 0:
                server = self._server(model)
                folder = self._folder = self._folder or VersionFolder(Path(transport.folder).absolute())
                version, away_s = update.choose_version(folder.newest()), server.start_timeout_s
                incoming, target = folder.incoming(), folder.named(version)
            version, away_s = ranks.broadcast([version, away_s], "plan")
        beside = (transport.config, transport.generation_config, transport.tokenizer)
        nbytes = save_tensors(
            update, model, self._finite.source, incoming, target, options.selection, transport.max_shard_bytes, beside
        )
        report: PushReport | None = None
        with update.timeline.during("restart"):
            if server is not None:
                server.restart(target, version)
                (engine,) = connect(server, options.timeout_s)
                engine.set_version(str(version))
                folder.prune(transport.keep_last)  # not before: a failed start keeps all older versions
                restart_s = update.timeline.seconds("restart")
                paused = EngineReport(engine.name, restart_s)
                report = update.timeline.report((), [paused], version=version, nbytes=nbytes, load_s=restart_s)
                logger.info("saved and restarted %s", report)
            self._finite.warn(update, version, self._finite.look())
            pushed: PushReport = ranks.broadcast(report, "restart", PushReport, away_s)
        return pushed

    def close(self) -> None:
        """Release the folder. Leave the server running: it is the user's."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def _server(self, model: Model) -> VllmServer:
        """Return the server, on rank 0. Raise an error if it could not start from a saved version of `model`."""
        server, transport = self._options.engines.given, self._transport
        if not isinstance(server, VllmServer):
            raise ConfigError(
                "restart=True ends and starts the engine: expected a weightsync.engines.VllmServer of this "
                f"process, got a {type(server).__name__}"
            )
        check_options(server.options)
        if transport.tokenizer is None and not server.has_option("--tokenizer", "--skip-tokenizer-init"):
            raise ConfigError(
                "the restarted server would have no tokenizer: give CheckpointTransport(tokenizer=...), or start the "
                "server with --tokenizer, or with --skip-tokenizer-init"
            )
        *_, config, _, _ = with_configs(model, transport.config, None, None)
        if config is None and not server.has_option("--hf-config-path"):
            raise ConfigError(
                "the restarted server would have no config: give CheckpointTransport(config=...), or start the server "
                "with --hf-config-path"
            )
        return server


def check_options(options: Sequence[str]) -> None:
    """Raise `UnsupportedError` for a server that may not load the saved version, or may keep an older KV cache."""
    words = [word for option in options for word in option.split("=", 1)]
    names = [word.replace("_", "-") for word in words]

    def gives(name: str, *known: str) -> bool:  # vLLM's parser takes abbreviations
        option = name.partition(".")[0]
        return len(option) > 3 and option.startswith("--") and any(one.startswith(option) for one in known)

    for name, value in zip(names, [*words, ""][1:], strict=True):
        if gives(name, "--load-format", "--config-format") and _OTHER_SOURCES.fullmatch(value):
            raise UnsupportedError(
                f"the server is started with {name} {value}, and would not load the saved version: leave the option out"
            )
        if gives(name, "--config"):
            raise UnsupportedError(
                f"the server is started with {name}. Its file may have options for another source of weights, or for "
                "a store of keys and values: give the options themselves"
            )
        if gives(name, "--kv-offloading-backend") and value == "lmcache":
            raise UnsupportedError(f"the server is started with {name} {value}, a store that outlives it: {_LEAVE_OUT}")
    found = _CONNECTOR.findall(" ".join(words).replace("kv-connector", "kv_connector"))
    ends = found and _ENDS_WITH_ITS_SERVER.issuperset(found) and not any(map(_OUTLIVES.search, words))
    if not ends and any(gives(name, *_STORES) for name in names):
        raise UnsupportedError(
            f"the server is started with {' or '.join(_STORES)} for {', '.join(found) or 'a connector'}: {_LEAVE_OUT}"
        )
