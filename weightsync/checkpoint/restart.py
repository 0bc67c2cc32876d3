"""The slow and simple way: save a version, and start the engine anew from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from weightsync.checkpoint.files import prune, version_name, versions
from weightsync.engines import connect
from weightsync.errors import ConfigError, PlacementError
from weightsync.ranks import RankGroup
from weightsync.report import PushReport
from weightsync.server import VllmServer
from weightsync.transports.checkpoint import CheckpointTransport

Save = Callable[..., None]
"""`weightsync.save` of the model, which is given the folder and what the transport says of the files."""


def push_and_restart(
    transport: CheckpointTransport,
    server: object,
    ranks: RankGroup,
    save_to: Save,
    version: int | None,
    timeout_s: float,
    in_phase: Callable[[str], AbstractContextManager[None]],
) -> PushReport:
    """Collective: every trainer rank calls this. Rank 0's `server` serves the version when it returns. Until the
    version is complete on the disk the server keeps running; a failure after that leaves it ended, and the next push
    starts it.

    `in_phase` names what is being done, for whoever reports an error. Raises `ConfigError` for a server that is not
    ours to end, and as `save` and `VllmServer.restart` do.
    """
    started = time.perf_counter()
    with in_phase("plan"):
        if ranks.rank == 0:
            if not isinstance(server, VllmServer):
                raise ConfigError(
                    "restart=True ends the engine and starts it anew, so it must be a weightsync.server.VllmServer of "
                    f"this process; got a {type(server).__name__}"
                )
            try:
                transport.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise PlacementError(f"cannot write checkpoints to {transport.folder}: {error}") from error
            newest = max(versions(transport.folder), default=0)
            if version is not None and version <= newest:
                raise ConfigError(f"version {version} is not newer than {newest}: versions only grow")
            version = newest + 1 if version is None else version
        away_s = server.start_timeout_s if isinstance(server, VllmServer) else 0.0
        number, away_s = ranks.share([version, away_s], "plan")
    target = transport.folder / version_name(number)
    config, generation_config, tokenizer = transport.saved_beside
    save_to(
        target,
        max_shard_bytes=transport.max_shard_bytes,
        config=config,
        generation_config=generation_config,
        tokenizer=tokenizer,
    )
    saved = time.perf_counter()
    with in_phase("restart"):
        nbytes = 0
        if isinstance(server, VllmServer):
            prune(transport.folder, transport.keep_last)
            nbytes = sum(file.stat().st_size for file in target.glob("*.safetensors"))
            server.restart(target)
            connect(server, timeout_s)[0].set_version(str(number))
        now = time.perf_counter()
        told = [nbytes, saved - started, now - saved, now - started]
        nbytes, save_s, restart_s, total_s = ranks.share(told, "restart", away_s=away_s)
    return PushReport(
        version=number,
        nbytes=nbytes,
        control_s=restart_s,
        gather_s=save_s,
        load_s=restart_s,
        pause_s=restart_s,
        total_s=total_s,
    )
