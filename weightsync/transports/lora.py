"""Adapters as PEFT's files, in memory (`/dev/shm`) or in a folder, where engines load them from.

    folder/.lock                    held by the trainer that writes here
    folder/.incoming-3f2a9c01/      an adapter that is not complete
    folder/policy-7-3f2a9c01/       version 7 of the adapter "policy": adapter_model.safetensors, adapter_config.json

The number at the end is drawn anew for each, so that no name and no path ever stands for two adapters, whatever becomes
of trainers and engines: an engine keeps what it has computed with an adapter under its name.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from weightsync.checkpoint.files import lock, unlock
from weightsync.errors import ConfigError, PlacementError

_MEMORY = Path("/dev/shm")
_PRIVATE = "weightsync-lora-"
_LOCK = ".lock"
_INCOMING = ".incoming-"
_REMOVED = ".removed-"


@dataclass(frozen=True)
class LoraTransport:
    """Pushes adapters alone: `WeightSync("fsdp", LoraTransport(), engine)`, or `transport="lora"` for the defaults.

    Each push loads the model's active LoRA adapter into the running engines under a new name, and the base stays as it
    is. `WeightSync.adapter` says what to ask the engines for. The engines must have been started with `enable_lora`.

    name: what the adapters' names begin with, such as "policy-7-3f2a9c01".
    folder: where they are written, each a folder that PEFT and vLLM load; is made when it is missing, and all engines
        must see it under this path. One trainer at a time. None means memory of this host, which is given back by
        `WeightSync.close`; then the engines must run on this host too, as the same user.
    keep_last: how many of the newest versions can be asked for.

    Raises `ConfigError` for arguments that cannot work.
    """

    name: str = "policy"
    folder: str | os.PathLike[str] | None = None
    keep_last: int = 2

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name, re.ASCII):
            raise ConfigError(f"name={self.name!r}; it is part of a file's name: letters, digits, and _ . - inside")
        if self.keep_last < 1:
            raise ConfigError(f"keep_last={self.keep_last}: the version that was just pushed must stay")


class AdapterFolder:
    """Where one trainer's rank 0 writes adapters; nobody else writes there. Raises `PlacementError` when it cannot be
    used, `ConfigError` when another trainer has it."""

    def __init__(self, transport: LoraTransport) -> None:
        self.is_private = transport.folder is None
        self._name = transport.name
        self._pattern = re.compile(rf"{re.escape(transport.name)}-(\d+)-[0-9a-f]{{8}}")
        where = _MEMORY if transport.folder is None else Path(transport.folder).absolute()
        held: int | None = None
        try:
            if self.is_private:
                # It is locked before it has a name that others look for.
                hidden = Path(mkdtemp(prefix=f".{_PRIVATE}", dir=where))
                held = lock(hidden / _LOCK)
                self.path = hidden.rename(where / hidden.name.removeprefix("."))
            else:
                self.path = where
                self.path.mkdir(parents=True, exist_ok=True)
                held = lock(self.path / _LOCK)
            if held is None:
                raise ConfigError(
                    f"another trainer writes adapters to {where}: close its WeightSync first, or use another folder"
                )
            for left in (*self.path.glob(f"{_INCOMING}*"), *self.path.glob(f"{_REMOVED}*")):
                shutil.rmtree(left)
        except OSError as error:
            if held is not None:
                unlock(held)
            raise PlacementError(f"cannot write adapters to {where}: {error}") from error
        self._lock = held

    def incoming(self) -> Path:
        """A new path to write an adapter at, before it has its name."""
        return self.path / f"{_INCOMING}{secrets.token_hex(4)}"

    def named(self, version: int) -> Path:
        """A new path for version `version` of the adapter."""
        return self.path / f"{self._name}-{version}-{secrets.token_hex(4)}"

    def version(self, name: str) -> int | None:
        """The version that the adapter of this name is; None for another's."""
        match = self._pattern.fullmatch(name)
        return None if match is None else int(match[1])

    def earlier(self) -> list[Path]:
        """The adapters that trainers before this one have left, the oldest first: in its folder, or in memory, when
        they were killed."""
        roots = list(self._abandoned()) if self.is_private else [self.path]
        paths = [path for root in roots for path in self._adapters(root)]
        return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.name))

    def _adapters(self, root: Path) -> list[Path]:
        return [path for path in root.iterdir() if self.version(path.name) is not None]

    def _abandoned(self) -> Iterator[Path]:
        for root in _MEMORY.glob(f"{_PRIVATE}*"):
            with suppress(OSError):  # another user's, or somebody else removes it just now
                if root != self.path and (held := lock(root / _LOCK)) is not None:
                    unlock(held)
                    if any(not path.name.startswith(".") for path in root.iterdir()):
                        yield root
                    else:
                        shutil.rmtree(root)

    def remove(self, path: Path) -> None:
        """Remove an adapter: its name first, then its files. Somebody else may have. Raises `OSError`."""
        hidden = path.with_name(f"{_REMOVED}{secrets.token_hex(4)}")
        with suppress(FileNotFoundError):
            path.rename(hidden)
            shutil.rmtree(hidden)
        with suppress(FileNotFoundError):
            if path.parent != self.path and not self._adapters(path.parent):
                shutil.rmtree(path.parent)

    def close(self) -> None:
        """Let another trainer have it."""
        unlock(self._lock)
