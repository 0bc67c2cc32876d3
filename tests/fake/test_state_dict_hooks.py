"""Modules that save other values than their tensors have are refused. Hooks that save the tensors themselves pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from weightsync import TensorSelection, UnsupportedError
from weightsync.sources import open_source
from weightsync.tools.testing import check_source

NAME = "layers.0.norm.weight"


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6))
        self.register_buffer("seen", torch.rand(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Layer(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.proj = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.norm(x))


class Net(nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(norm or Norm()), Layer(Norm())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class SavesMore(Norm):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"] + 1


class SavesItself(Norm):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = torch.ones(3)

    def get_extra_state(self) -> Any:
        return {"steps": 3}

    def set_extra_state(self, state: Any) -> None:
        return


class OwnStateDict(Norm):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state[f"{kwargs['prefix']}weight"] = state[f"{kwargs['prefix']}weight"] * 2
        return state


def private(change: Callable[[dict[str, Any]], Any], at: str = "layers.0.norm") -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Net()
        model.get_submodule(at)._register_state_dict_hook(lambda module, state, prefix, metadata: change(state))
        return model

    return make


def public(change: Callable[[nn.Module, dict[str, Any], str], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Net()
        norm = model.layers[0].norm  # type: ignore[union-attr]
        norm.register_state_dict_post_hook(lambda module, state, prefix, metadata: change(norm, state, prefix))
        return model

    return make


def before(change: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Net()
        norm = model.layers[0].norm  # type: ignore[union-attr]
        norm.register_state_dict_pre_hook(lambda module, prefix, keep_vars: change(module))
        return model

    return make


def of_the_instance() -> nn.Module:
    model = Net()
    own = model.state_dict

    def state_dict(*args: Any, **kwargs: Any) -> Any:
        return {name: tensor.neg() for name, tensor in own(*args, **kwargs).items()}

    model.state_dict = state_dict  # type: ignore[method-assign]
    return model


def replaced(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor + 1 if name == NAME else tensor for name, tensor in state.items()}


def swapped(state: dict[str, Any]) -> None:
    state[NAME], state["layers.1.norm.weight"] = state["layers.1.norm.weight"], state[NAME]


def renamed(state: dict[str, Any]) -> None:
    state["norm.gamma"] = state.pop(NAME)


def dropped(state: dict[str, Any]) -> None:
    del state[NAME]


def with_value(state: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    state[NAME] = change(state[NAME])


def read(state: dict[str, Any]) -> None:
    assert state[NAME].sum().item() > 0


def assign(module: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module.weight = nn.Parameter(change(module.weight.detach()))


COMPUTED: dict[str, Callable[[], nn.Module]] = {
    "a post hook": public(lambda norm, state, prefix: state.update({f"{prefix}weight": state[f"{prefix}weight"] + 1})),
    "a private hook": private(lambda state: with_value(state, lambda tensor: tensor * 2)),
    "a hook that returns": private(replaced),
    "a hook of a parent": private(replaced, at="layers.0"),
    "a hook of the model": private(replaced, at=""),
    "a hook that writes": private(lambda state: with_value(state, lambda tensor: tensor.clone().add_(1))),
    "a hook that swaps": private(swapped, at=""),
    "a hook that reverses": private(lambda state: with_value(state, lambda tensor: tensor.flip(0))),
    "a hook that takes a part": private(lambda state: with_value(state, lambda tensor: tensor[:3])),
    "a hook that narrows": private(lambda state: with_value(state, torch.Tensor.bfloat16)),
    "a hook that reads, and computes": private(lambda state: (read(state), with_value(state, lambda t: t + 1))[1]),
    "a hook before": before(lambda module: assign(module, lambda tensor: tensor + 1)),
    "an own _save_to_state_dict": lambda: Net(SavesMore()),
    "an own state_dict": lambda: Net(OwnStateDict()),
    "a state_dict of the instance": of_the_instance,
}
HARMLESS: dict[str, Callable[[], nn.Module]] = {
    "none": Net,
    "a hook that renames": private(renamed),
    "a hook that drops": private(dropped),
    "a hook that copies": private(lambda state: with_value(state, torch.Tensor.clone)),
    "a hook that moves to a CPU": private(lambda state: with_value(state, lambda tensor: tensor.to("cpu", copy=True))),
    "a hook that widens": private(lambda state: with_value(state, torch.Tensor.double)),
    "a hook that returns all": private(lambda state: dict(state), at=""),
    "a hook that adds": private(lambda state: state.update({"more": torch.ones(2)})),
    "a hook that reads": private(read),
    "a hook of its own module": public(lambda norm, state, prefix: state.update({f"{prefix}weight": norm.weight.data})),
    "a hook before": before(lambda module: module.weight.grad),
    "an own _save_to_state_dict": lambda: Net(SavesItself()),
}


def names_sent(model: nn.Module) -> list[str]:
    return open_source("fsdp", TensorSelection()).read(model).manifest.names


@pytest.mark.parametrize("make", COMPUTED.values(), ids=COMPUTED)
def test_a_value_that_is_computed_as_it_is_saved_is_refused(make: Callable[[], nn.Module]) -> None:
    model = make()
    before = {name: tensor.clone() for name, tensor in nn.Module.state_dict(Net()).items()}
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    with pytest.raises(UnsupportedError, match="saves another value under its name") as caught:
        open_source("fsdp", TensorSelection()).read(model)
    assert NAME in caught.value.tensors
    assert before.keys() >= set(caught.value.tensors)
    assert all(torch.equal(param, values[name]) for name, param in model.named_parameters())


@pytest.mark.parametrize("make", HARMLESS.values(), ids=HARMLESS)
def test_a_value_that_is_saved_as_it_is_travels(make: Callable[[], nn.Module]) -> None:
    model = make()
    expected = {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    check_source(lambda selection: open_source("fsdp", selection), model, expected)


def test_what_is_excluded_may_be_computed() -> None:
    model = COMPUTED["a post hook"]()
    shards = open_source("fsdp", TensorSelection(exclude=(NAME,))).read(model).shards
    assert NAME not in {shard.meta.name for shard in shards}


def test_a_hook_that_comes_later_is_noticed() -> None:
    model = Net()
    source = open_source("fsdp", TensorSelection())
    source.read(model)
    model.layers[0].norm._register_state_dict_hook(lambda module, state, *_: replaced(state))  # type: ignore[union-attr]
    with pytest.raises(UnsupportedError, match="saves another value"):
        source.read(model)


def test_a_hook_that_cannot_be_followed_is_refused() -> None:
    def fail(state: dict[str, Any]) -> None:
        raise KeyError("an option of its own")

    with pytest.raises(UnsupportedError, match=r"cannot follow the `state_dict` of Norm .KeyError: 'an option"):
        names_sent(private(fail)())


def test_wrappers_of_trainers_are_no_hooks_of_a_model() -> None:
    run_ranks(_wrapped, 2)


def _wrapped(rank: int) -> None:
    for make, fails in ((Net, False), (COMPUTED["a private hook"], True), (HARMLESS["a hook that copies"], False)):
        for wrap in (_fsdp2, _fsdp1, _fsdp1_flat, DistributedDataParallel, checkpoint_wrapper, torch.compile):
            torch.manual_seed(0)
            model = wrap(make())
            if fails:
                with pytest.raises(UnsupportedError, match="saves another value"):
                    names_sent(model)
            else:
                assert NAME in names_sent(model)


def _fsdp2(model: nn.Module) -> nn.Module:
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    return fully_shard(model)


def _fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def _fsdp1_flat(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
