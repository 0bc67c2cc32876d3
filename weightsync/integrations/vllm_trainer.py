"""weightsync behind vLLM's own interface for trainers, from vLLM 0.27 on.

    info = WeightSyncTrainerInitInfo(rank=rank)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)  # on every rank
    trainer.send_weights()  # on every rank

The servers run with `--weight-transfer-config '{"backend": "weightsync"}'`. `source` is any `WeightSource` of vLLM's.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from weightsync.errors import ConfigError, UnsupportedError
from weightsync.net.ranks import place_among
from weightsync.net.wire import BACKEND
from weightsync.report import PushReport
from weightsync.strategies import demands_of
from weightsync.sync import WeightSync

if "config" in WeightTransferTrainerFactory.trainer_init.__annotations__:
    raise UnsupportedError(
        "vLLM 0.26 has another interface for trainers; use vLLM 0.27 or later, or push the WeightSource yourself: "
        'WeightSync("stream", ...).push(source)'
    )


@dataclass
class WeightSyncTrainerInitInfo(TrainerInitInfo):
    """vLLM's init info for `backend="weightsync"`.

    Attributes:
        rank: This process's rank among the trainer's ranks, as in `torch.distributed`.
        transport: As for `WeightSync`, without adapters and "single_copy".
        engine: As for `WeightSync`. None: the engines of vLLM's own clients, by HTTP or as Ray actors.
        options: Further options of `WeightSync`.
    """

    backend: ClassVar[str] = BACKEND
    transport: Any = "ipc"
    engine: Any = None
    options: dict[str, Any] = field(default_factory=dict)


class WeightSyncTrainerEngine(TrainerWeightTransferEngine[WeightSyncTrainerInitInfo]):
    """vLLM's trainer engine with a `WeightSync`. `trainer_init` makes it. It connects in the first `send_weights`."""

    init_info_cls = WeightSyncTrainerInitInfo

    def __init__(self, *, client: Any, source: Any, is_sender: bool, sync: WeightSync) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.sync = sync

    @classmethod
    def trainer_init(
        cls, init_info: WeightSyncTrainerInitInfo, *, client: Any, source: Any = None
    ) -> WeightSyncTrainerEngine:
        """Return this rank's engine. Every rank calls this.

        Raises:
            ConfigError: No source, a transport that demands more than pushes, a client of unknown engines, or another
                rank than torch.distributed's.
        """
        if source is None:
            raise ConfigError('backend="weightsync" reads a WeightSource: give trainer_init its `source`')
        if demands_of(init_info.transport) is not None:
            raise ConfigError(
                f"transport={init_info.transport!r} demands more than `send_weights`: use WeightSync itself"
            )
        rank, size = place_among(init_info.options.get("ranks"))
        if rank != init_info.rank:
            raise ConfigError(f"rank={init_info.rank}, but this process is rank {rank} of {size} in torch.distributed")
        engine = init_info.engine
        if engine is None and rank == 0:
            engine = _engines_of(client)
        sync = WeightSync("stream", init_info.transport, engine, **init_info.options)
        return cls(client=client, source=source, is_sender=init_info.is_sender, sync=sync)

    @property
    def last_report(self) -> PushReport | None:
        """The report of the last `send_weights`."""
        return self.sync.last_report

    def send_weights(self) -> None:
        """Make every engine serve the source's current weights. Every rank calls this. Raises as `WeightSync.push`.

        Engines are paused for it and resumed, or the trainer does both, with `options={"pause": "caller"}`.
        """
        self.sync.push(self.source)

    def shutdown(self) -> None:
        """Disconnect from the engines."""
        self.sync.close()


def _engines_of(client: Any) -> Any:
    """Return the engines behind a client of vLLM's."""
    for name in ("base_url", "handles"):
        if (found := getattr(client, name, None)) is not None:
            return found
    raise ConfigError(
        f"a {type(client).__name__} does not tell its engines' addresses: give them as "
        "WeightSyncTrainerInitInfo(engine=[...])"
    )


with suppress(ValueError):  # vLLM's plug-in has registered it
    WeightTransferTrainerFactory.register_engine(BACKEND, WeightSyncTrainerEngine)
