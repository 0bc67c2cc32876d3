"""Engines and trainers that start from checkpoints in the forms that the hub has: pushed equals cold for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hub_checkpoints
import peft
import pytest
import tiny_models
import torch
from engine_state import State, differing, state_of
from engines import TIMEOUT_S, Answer, Engines, Remote, Trainer, Trainers, assert_same
from safetensors.torch import load_file

from weightsync import WeightSync, save
from weightsync.errors import ManifestError

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine


def push_and_compare(engines: Engines, form: str, folder: Path, load_format: str) -> list[str]:
    """Return in what a pushed engine differs from a cold one."""
    # All before an engine starts: where vLLM runs transformers' own classes, it changes them in its process.
    new, checkpoint = (hub_checkpoints.write(form, weights, folder / weights) for weights in "BA")
    model = hub_checkpoints.trainer(form, checkpoint)
    cold, expected = ask_cold(engines, new)
    engines.start(checkpoint, load_format=load_format)
    assert engines.ask() != cold
    engines.model = model
    engines.sync = WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S)
    tiny_models.fill(engines.model, "B")
    engines.sync.push(engines.model)
    assert_same(engines.ask(), cold, form)
    return differing(state_of(engines.live_model()), expected)


def ask_cold(engines: Engines, checkpoint: Path) -> tuple[Answer, State]:
    engines.start(checkpoint)
    return engines.ask(), state_of(engines.live_model())


# A start with random weights leaves more to do. The loader unties the embeddings for a stored head alone.
STARTS = [(form, "dummy") for form in hub_checkpoints.FORMS] + [
    (form, "auto") for form in hub_checkpoints.FORMS if "with its head" in form
]


@pytest.mark.parametrize(("form", "load_format"), STARTS)
def test_pushed_equals_cold(engines: Remote, tmp_path: Path, form: str, load_format: str):
    assert engines.call(push_and_compare, form, tmp_path, load_format, timeout_s=240) == []


STREAMED = ["DeepSeek-V3, with one more layer", "Llama 2, with rotary frequencies, beside pickles"]


def push_files(engines: Engines, form: str, folder: Path) -> None:
    cold, _ = ask_cold(engines, hub_checkpoints.write(form, "B", folder / "B"))
    engines.start(hub_checkpoints.write(form, "A", folder / "A"))
    assert engines.ask() != cold
    with WeightSync("stream", "ipc", engines.llm, timeout_s=TIMEOUT_S) as sync:
        sync.push(load_file(folder / "B" / hub_checkpoints.FILE))
    assert_same(engines.ask(), cold, form)


@pytest.mark.parametrize("form", STREAMED)
def test_what_a_cold_start_passes_over_may_come(engines: Remote, tmp_path: Path, form: str):
    """A stream gives all that a checkpoint's file has."""
    engines.call(push_files, form, tmp_path, timeout_s=240)


# ---------------------------------------------------------------------------------------------------------------
# An engine that ties its output layer to its embedding, and trainers that do not, and the other way round

TIED = "qwen3-tied"


def with_own_head(engines: Engines, checkpoint: Path) -> torch.nn.Parameter:
    """Make the trainer's model one whose output layer is apart from its embedding, though equal. Returns its weight."""
    model = tiny_models.build(TIED, "B")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # type: ignore[union-attr]
    engines.model = model
    return model.lm_head.weight  # type: ignore[union-attr, return-value]


def push_own_heads(engines: Engines, folder: Path, stored: bool, load_format: str) -> list[str]:
    """Push equal heads, other ones and equal ones again. Returns what was said of the other ones."""
    form = hub_checkpoints.FORMS["Qwen3-0.6B, tied, and with its head" if stored else "Gemma-3-1B, tied"][1]
    cold, _ = ask_cold(engines, form(tiny_models.build(TIED, "B"), folder / "B"))
    engines.start(form(tiny_models.build(TIED, "A"), folder / "A"), load_format=load_format)
    head = with_own_head(engines, folder)
    said = []
    for backend, what in (("fsdp", engines.model), ("stream", dict(engines.model.state_dict()))):
        with WeightSync(backend, "ipc", engines.llm, timeout_s=TIMEOUT_S) as sync:
            sync.push(what)
            assert_same(engines.ask(), cold, f"an equal head from {backend}")
            with torch.no_grad():
                head[7] += 1
            with pytest.raises(
                ManifestError, match=r"lm_head\.weight: it differs from model\.embed_tokens\.weight"
            ) as no:
                sync.push(what)
            said.append(str(no.value))
            assert engines.refusal() == ""
            assert_same(engines.ask(), cold, "after the refusal")
            with torch.no_grad():
                head.copy_(engines.model.model.embed_tokens.weight)
            sync.push(what)
            assert_same(engines.ask(), cold, "equal again")
    return said


@pytest.mark.parametrize(("stored", "load_format"), [(False, "auto"), (True, "auto"), (True, "dummy")])
def test_a_tied_engine_takes_a_head_that_equals_the_embedding_and_no_other(
    engines: Remote, tmp_path: Path, stored: bool, load_format: str
):
    for said in engines.call(push_own_heads, tmp_path, stored, load_format, timeout_s=240):
        assert "Nothing was written" in said
        assert "tie_word_embeddings=false" in said


def with_copies(*modules: str) -> Any:
    """A trainer of a tied model with trained copies of these modules, as PEFT's `modules_to_save` makes them."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=[*modules])
    model = peft.get_peft_model(tiny_models.build(TIED, "B"), config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "modules_to_save" in name:
                param.add_(0.05 * torch.randn(param.shape, generator=torch.Generator().manual_seed(1)))
    return model


def save_and_push_copies(engines: Engines, folder: Path) -> None:
    for number, modules in enumerate([("lm_head",), ("embed_tokens",), ("lm_head", "embed_tokens")]):
        merged = tiny_models.save(with_copies(*modules).merge_and_unload(), folder / f"merged-{number}")
        expected, _ = ask_cold(engines, merged)
        save(with_copies(*modules), folder / f"saved-{number}")
        engines.start(folder / f"saved-{number}")
        assert_same(engines.ask(), expected, f"a start from saved copies of {modules}")
        with WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S) as sync:
            sync.push(tiny_models.build(TIED, "A"))
            sync.push(with_copies(*modules))
            assert_same(engines.ask(), expected, f"a push of copies of {modules}")


def test_an_output_layer_that_peft_has_copied_is_served(engines: Remote, tmp_path: Path):
    engines.call(save_and_push_copies, tmp_path, timeout_s=240)


def push_into_an_untied_engine(engines: Engines, folder: Path) -> bool:
    """The checkpoint has another head than its embedding, though its config says tied. Returns whether vLLM unties."""
    another = hub_checkpoints.with_another_head
    untied, _ = ask_cold(engines, another(tiny_models.build(TIED, "B"), folder / "B"))
    tied, _ = ask_cold(engines, tiny_models.save(tiny_models.build(TIED, "B"), folder / "tied"))
    if untied == tied:
        return False
    engines.start(another(tiny_models.build(TIED, "A"), folder / "A"))
    with_own_head(engines, folder)
    for transport in ("ipc", "broadcast"):
        with WeightSync("fsdp", transport, engines.llm, timeout_s=TIMEOUT_S) as sync:
            engines.model = tiny_models.build(TIED, "B")
            sync.push(engines.model)
            assert_same(engines.ask(), tied, "a tied trainer")
            with_own_head(engines, folder).data.copy_(engines.model.model.embed_tokens.weight.flip(0))
            sync.push(engines.model)
            assert_same(engines.ask(), untied, "a trainer with a head of its own")
    return True


def test_an_untied_engine_takes_tied_trainers_and_others(engines: Remote, tmp_path: Path):
    if not engines.call(push_into_an_untied_engine, tmp_path, timeout_s=240):
        pytest.skip("this vLLM ties what its config says is tied, whatever the checkpoint has")


def start_with_head(engines: Engines, folder: Path, tp: int) -> Answer:
    """Start an engine whose checkpoint stores the head of tied embeddings. Returns what a cold one answers to "B"."""
    write = hub_checkpoints.FORMS["Qwen3-0.6B, tied, and with its head"][1]
    engines.start(write(tiny_models.build(TIED, "B"), folder / "B"), tensor_parallel_size=tp)
    cold = engines.ask()
    engines.start(write(tiny_models.build(TIED, "A"), folder / "A"), tensor_parallel_size=tp)
    return cold


def connect(trainer: Trainer, apart: bool) -> None:
    """Make an FSDP2 trainer, whose head is its embedding, or equal to it and `apart`."""
    trainer.release()
    model = tiny_models.build(TIED, "B")
    if apart:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # type: ignore[union-attr]
    trainer.model = tiny_models.shard(model)
    trainer.sync = WeightSync("fsdp", "ipc", trainer.engine, timeout_s=TIMEOUT_S)


def push(trainer: Trainer) -> None:
    trainer.sync.push(trainer.model)


def change_last_row(trainer: Trainer) -> None:
    """The last rank alone has it."""
    local = trainer.model.lm_head.weight.to_local()
    if trainer.rank == trainer.size - 1:
        with torch.no_grad():
            local[-1] += 1


def test_ranks_and_workers_have_their_parts_of_both(engines: Remote, trainers: Trainers, tmp_path: Path):
    cold = engines.call(start_with_head, tmp_path, 2, timeout_s=240)
    for apart in (False, True):
        trainers.call(connect, apart)
        trainers.call(push)
        assert_same(engines.call(Engines.ask), cold, f"a head apart: {apart}")
    trainers.call(change_last_row)
    with pytest.raises(ManifestError, match=r"lm_head\.weight: it differs from model\.embed_tokens\.weight"):
        trainers.call(push)
    assert_same(engines.call(Engines.ask), cold, "after the refusal")
