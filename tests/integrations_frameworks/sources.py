"""The sources of frameworks that `make test-frameworks` fetches, and modules in the place of what else they import.

A framework is imported in a process of its own: what it lacks here changes how its neighbours would be imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
import typing
from pathlib import Path
from typing import Any

import typing_extensions

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = ROOT / ".frameworks"
RECIPES = ROOT / "examples/frameworks"

FOLDERS = {
    "skyrl": ("SkyRL", "SkyRL/skyrl-gym"),
    "skyrl_senders": ("SkyRL-senders", "SkyRL-senders/skyrl-gym"),
    "openrlhf": ("OpenRLHF",),
    "prime_rl": ("prime-rl/src", "prime-rl/packages/prime-rl-configs/src"),
    "nemo_rl": ("RL",),
}
SKYRLS = "cloudpathlib datasets flash_attn jaxtyping omegaconf orjson pandas torchdata zstandard"
ABSENT = {
    "skyrl": SKYRLS,
    "skyrl_senders": SKYRLS,
    "openrlhf": "flash_attn pylatexenc torchdata",
    "prime_rl": "fla modelexpress pydantic_config pynvml renderers ring_flash_attn tenacity torchtitan verifiers wandb",
    "nemo_rl": "pynvml",
}
"""What a recipe's modules import beside torch, Ray, vLLM and DeepSpeed, and call nothing of on the way to a push."""


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes modules of which every name is an empty class."""

    def __init__(self, roots: str) -> None:
        self._roots = roots.split()

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        known = name.partition(".")[0] in self._roots
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *_, **__: None, "__class_getitem__": lambda *_: None})


def importable(framework: str, folder: Path = FRAMEWORKS) -> None:
    """Let this process import a framework and its recipe."""
    sys.path[:0] = [str(RECIPES), *(str(folder / each) for each in FOLDERS[framework])]
    sys.meta_path.append(Absent(ABSENT[framework]))
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]  # pydantic wants it before Python 3.12
    if framework == "nemo_rl":
        # The package itself refuses transformers that it does not know. Its modules do not.
        policy = types.ModuleType("nemo_rl.models.policy")
        policy.__path__ = [str(folder / "RL/nemo_rl/models/policy")]
        sys.modules[policy.__name__] = policy
