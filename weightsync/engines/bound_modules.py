"""The check that each module of an adapter is bound to one of the engine's modules.

vLLM reports an adapter as loaded even if it has bound none of its modules, and then generates as without it. So the
engine's workers are asked for their bindings twice: before the adapter is loaded, and after.
"""

from __future__ import annotations

from typing import Any

from weightsync.engines.base import LoraAdapter
from weightsync.errors import EngineError, UnsupportedError, first_few
from weightsync.net.wire import BoundModules, typed


def ask_worker(worker: Any, path: str, number: int) -> dict[str, Any]:
    """Return the worker's `BoundModules`. `collective_rpc` takes this function if the workers have no such method."""
    from weightsync.vllm.adapters import adapter_modules

    return adapter_modules(worker, path, number)


def check_bound(adapter: LoraAdapter, answers: Any, who: str) -> None:
    """Raise `UnsupportedError` unless each of the adapter's modules is bound, on some worker, to a module of its own.

    answers: the answers of all workers, not parsed yet. Raises `EngineError` for a worker's error.
    """
    found = typed(answers, list[BoundModules])
    if error := next((one.error for one in found if one.error), "" if found else "no worker answers"):
        raise EngineError(f"the engine cannot take the adapter {adapter.name}: {error}", who=who)
    others = [set(one.unbound) for one in found]
    unbound = [name for name in found[0].unbound if all(name in other for other in others)]
    twice = list(dict.fromkeys(name for one in found for name in one.twice))
    modules = list(dict.fromkeys(name for one in found for name in one.modules))
    for names, problem in (
        (twice, "share a module of the engine with another module"),
        (unbound, "are not in the engine, and would have no effect"),
    ):
        if names:
            raise UnsupportedError(
                f"{len(names)} modules of the adapter {adapter.name} {problem}: {first_few(names)}. The engine binds "
                f"adapters to {first_few(modules) or 'nothing'}. Let PEFT wrap the engine's own model, such as an "
                "AutoModelForCausalLM, not its backbone or a module around it. Or give the modules their names in the "
                "engine's checkpoint, TensorSelection(rename=...). Leave other modules out of target_modules",
                who=who,
                phase="load",
                adapter_modules=names,
                engine_modules=modules,
            )
