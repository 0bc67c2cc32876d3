"""Checkpoints: each version is whole or not there, says what the engine got, and is what other programs load."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import megatron_models
import peft
import pytest
import tiny_models
import torch
import vision_models
import zero
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold, fail_once_after, trainer_model
from megatron_models import Mesh
from ranks import FORKSERVER, run_ranks
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel

import weightsync
from weightsync import (
    CheckpointTransport,
    ConfigError,
    DigestError,
    ManifestError,
    PlacementError,
    PushReport,
    TensorSelection,
    WeightSync,
    WeightSyncError,
)
from weightsync.checkpoint import shard_files
from weightsync.checkpoint.safetensors import INDEX, runs
from weightsync.checkpoint.shard_files import check_seen
from weightsync.checkpoint.sidecars import files_beside
from weightsync.planning.layout import Manifest, TensorMeta
from weightsync.transports.files import FilesTransport
from weightsync.worker.loader import Receiver


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by way of its index when it has one."""
    if (folder / INDEX).exists():
        files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Saver:
    """Something with a `save_pretrained`."""

    def __init__(self, file: str, content: dict[str, Any]) -> None:
        self.file, self.content = file, content

    def save_pretrained(self, folder: str) -> None:
        path = Path(folder, self.file)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(self.content))


# ---------------------------------------------------------------------------------------------------------------
# With an engine that is not vLLM


@pytest.fixture
def host() -> ModuleHost:
    return ModuleHost(TinyEngineModel, checkpoint(1))


@pytest.fixture
def engine(host: ModuleHost) -> Iterator[FakeEngine]:
    with closing(FakeEngine(host)) as engine:
        yield engine


class Pusher:
    """A trainer that pushes the tensors of `checkpoint(seed)`, a module in each bucket, a few buckets in each file."""

    def __init__(self, engine: Any, folder: Path, selection: TensorSelection | None = None, **options: Any) -> None:
        transport = CheckpointTransport(folder, max_shard_bytes=300, **options)
        self.sync = WeightSync("fsdp", transport, engine, selection=selection, max_bytes=1, timeout_s=10.0)
        self.model = trainer_model(checkpoint(1))

    def push(self, seed: int, version: int | None = None) -> PushReport:
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                param.copy_(checkpoint(seed)[name])
        return self.sync.push(self.model, version)


def assert_serves(host: ModuleHost, seed: int) -> None:
    expected = cold(checkpoint(seed)).state_dict()
    for name, tensor in host.live.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_each_push_leaves_a_version_and_the_last_ones_are_kept(host: ModuleHost, engine: FakeEngine, tmp_path: Path):
    (tmp_path / "version-abc").mkdir()  # not ours
    (tmp_path / "version-00000000.txt").touch()
    others = names_in(tmp_path)
    pusher = Pusher(engine, tmp_path, keep_last=2)
    with pusher.sync:
        for seed in (2, 3, 4):
            report = pusher.push(seed)
            assert_serves(host, seed)
            assert_equal(read(tmp_path / f"version-{report.version:08}"), checkpoint(seed))
        assert report.chunks > len(list((tmp_path / "version-00000003").glob("*.safetensors"))) > 1
        assert_equal(read(tmp_path / "version-00000002"), checkpoint(3))
        incoming = [name for name in names_in(tmp_path) if name.startswith(".incoming-")]
    assert len(incoming) == 1
    assert names_in(tmp_path) == sorted([*others, ".lock", "version-00000002", "version-00000003"])


def test_an_older_version_is_there_until_the_engine_serves_the_new_one(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pusher = Pusher(engine, tmp_path, keep_last=1)
    versions, commit = ["version-00000001", "version-00000002"], Receiver.commit
    seen: list[str] = []

    def look_and_commit(*args: Any) -> float:
        seen.extend(path.name for path in sorted(tmp_path.glob("version-*")))
        return commit(*args)

    def refuse(*_: Any) -> float:
        raise MemoryError("no memory left to commit")

    with pusher.sync:
        pusher.push(2)
        with monkeypatch.context() as patch:
            patch.setattr(Receiver, "commit", refuse)
            with pytest.raises(WeightSyncError, match="no memory left"):
                pusher.push(3)
        assert names_in(tmp_path) == [".lock", *versions]
        monkeypatch.setattr(Receiver, "commit", look_and_commit)
        pusher.push(4)
        assert seen == [*versions, "version-00000003"]
    assert names_in(tmp_path) == [".lock", "version-00000003"]


class TextAlone(TinyEngineModel):
    """A loader that passes over a tower, as vLLM's do for a tower that was left out."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        has_tower = hasattr(self, "visual")
        super().load_weights((name, tensor) for name, tensor in weights if has_tower or not name.startswith("visual."))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 3))


@contextmanager
def syncing_without(tower: type[nn.Module], folder: Path, max_bytes: int) -> Iterator[tuple[ModuleHost, WeightSync]]:
    """Yield an engine's host, left without a tower, and a `WeightSync` that leaves versions in a folder."""
    host = ModuleHost(TextAlone, checkpoint(1))
    host.left_out["visual"] = tower
    transport = CheckpointTransport(folder, max_shard_bytes=300)
    with (
        closing(FakeEngine(host)) as engine,
        WeightSync("fsdp", transport, engine, max_bytes=max_bytes, timeout_s=10.0) as sync,
    ):
        yield host, sync


@pytest.mark.parametrize("max_bytes", [1, 2**20])
def test_a_version_has_the_part_that_the_engine_does_not_run(tmp_path: Path, max_bytes: int):
    with syncing_without(Tower, tmp_path, max_bytes) as (host, sync):
        for seed in (2, 3):
            everything = {**checkpoint(seed), "visual.weight": torch.full((4, 3), float(seed))}
            version = sync.push(trainer_model(everything)).version
            assert_equal(read(tmp_path / f"version-{version:08}"), everything)
            assert_serves(host, seed)


class TiedTower(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Parameter(torch.empty(4, 3))


@pytest.mark.parametrize("max_bytes", [1, 2**20])
def test_a_version_has_tensors_tied_by_hand_under_each_name(tmp_path: Path, max_bytes: int):
    """Also those that the engine does not run. Nothing but the trainer's code ties them, so a cold start has both."""
    with syncing_without(TiedTower, tmp_path, max_bytes) as (host, sync):
        for seed in (2, 3):
            everything = {**checkpoint(seed), "visual.weight": torch.full((4, 3), float(seed))}
            everything["visual.again"] = everything["visual.weight"]
            everything["layers.1.norm.weight"] = everything["layers.0.norm.weight"]
            model: Any = trainer_model(everything)
            model.visual.again = model.visual.weight
            model.layers.get_submodule("1.norm").weight = model.layers.get_submodule("0.norm").weight
            version = sync.push(model).version
            assert_equal(read(tmp_path / f"version-{version:08}"), everything)
            for name, tensor in cold({n: t for n, t in everything.items() if "visual" not in n}).state_dict().items():
                assert torch.equal(host.live.state_dict()[name], tensor), name


class OwnHead(TinyEngineModel):
    """A loader that reads an output layer into the embedding, where the engine ties the two."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights((name.replace("head.", "embed."), tensor) for name, tensor in weights)


def test_a_version_has_the_output_layer_that_the_engine_ties(tmp_path: Path):
    """The trainer's two tensors are equal. Its config unties them, so the version needs both."""
    host = ModuleHost(OwnHead, checkpoint(1))
    everything = {**checkpoint(2), "head.weight": checkpoint(2)["embed.weight"]}
    with closing(FakeEngine(host)) as engine:
        with WeightSync("fsdp", CheckpointTransport(tmp_path), engine, timeout_s=10.0) as sync:
            sync.push(trainer_model(everything))
        assert_equal(read(tmp_path / "version-00000001"), everything)
        assert_serves(host, 2)


def test_one_file_needs_no_index(engine: FakeEngine, tmp_path: Path):
    with WeightSync("fsdp", CheckpointTransport(tmp_path), engine, timeout_s=10.0) as sync:
        sync.push(trainer_model(checkpoint(2)))
    assert names_in(tmp_path / "version-00000001") == ["model.safetensors"]
    assert_equal(load_file(tmp_path / "version-00000001" / "model.safetensors"), checkpoint(2))


def test_versions_go_on_where_the_folder_is(engine: FakeEngine, tmp_path: Path):
    with Pusher(engine, tmp_path).sync as sync:
        sync.push(trainer_model(checkpoint(2)), 7)
    with closing(FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))) as fresh:
        pusher = Pusher(fresh, tmp_path)
        with pytest.raises(ConfigError, match="version 7 is not newer than 7"):
            pusher.push(3, version=7)
        assert fresh.log == [], "it was refused after something had been done"
        assert pusher.push(3).version == 8
        pusher.sync.close()
    assert_equal(read(tmp_path / "version-00000007"), checkpoint(2))


def test_config_and_tokenizer_are_saved_with_the_dtype_of_the_weights(engine: FakeEngine, tmp_path: Path):
    config = Saver("config.json", {"architectures": ["X"], "dtype": "float32", "text_config": {"dtype": "float32"}})
    tokenizer = Saver("templates/chat.json", {"a": 1})
    selection = TensorSelection(dtypes={"embed*": "bfloat16", "layers.*.attn.*": "bfloat16"})
    pusher = Pusher(engine, tmp_path, selection, config=config, tokenizer=tokenizer)
    with pusher.sync:
        pusher.push(2)
    folder = tmp_path / "version-00000001"
    saved = json.loads((folder / "config.json").read_text())
    assert (saved["dtype"], saved["text_config"]["dtype"]) == ("bfloat16", "bfloat16")
    assert json.loads((folder / "templates/chat.json").read_text()) == {"a": 1}
    assert read(folder)["embed.weight"].dtype == torch.bfloat16


def test_each_version_has_the_config_and_the_tokenizer_of_its_push(engine: FakeEngine, tmp_path: Path):
    config = Saver("config.json", {"architectures": ["X"], "rope": 1})
    tokenizer = Saver("templates/chat.json", {"a": 1})
    pusher = Pusher(engine, tmp_path, config=config, tokenizer=tokenizer)
    pusher.model.generation_config = Saver("generation_config.json", {"eos": 1})
    with pusher.sync:
        pusher.push(2)
        config.content["architectures"] = None
        with pytest.raises(ConfigError, match=r"set config.architectures"):
            pusher.push(3)
        config.content = {"architectures": ["X"], "rope": 2}
        tokenizer.content = {"a": 2}
        pusher.model.generation_config.content = {"eos": 2}  # type: ignore[union-attr]
        pusher.push(3)
    for version in (1, 2):
        folder = tmp_path / f"version-{version:08}"
        assert json.loads((folder / "config.json").read_text())["rope"] == version
        assert json.loads((folder / "generation_config.json").read_text()) == {"eos": version}
        assert json.loads((folder / "templates/chat.json").read_text()) == {"a": version}


def test_a_version_has_no_file_of_an_earlier_tokenizer(engine: FakeEngine, tmp_path: Path):
    config = Saver("config.json", {"architectures": ["X"]})
    tokenizer = Saver("templates/chat.json", {"a": 1})
    pusher = Pusher(engine, tmp_path, config=config, tokenizer=tokenizer)
    with pusher.sync:
        pusher.push(2)
        assert pusher.sync.catch_up(pusher.model) is None
        tokenizer.file = "tokenizer.json"
        pusher.push(3)
    folder = tmp_path / "version-00000002"
    assert_equal(read(folder), checkpoint(3))
    beside = {name for name in names_in(folder) if not name.endswith(".safetensors")}
    assert beside == {"config.json", "tokenizer.json", INDEX}


def test_a_folder_that_was_removed_is_found_before_a_weight_is_written(
    host: ModuleHost, engine: FakeEngine, tmp_path: Path
):
    pusher = Pusher(engine, tmp_path)
    with pusher.sync:
        pusher.push(2)
        (incoming,) = tmp_path.glob(".incoming-*")
        shutil.rmtree(incoming)
        with pytest.raises(PlacementError, match="cannot write a checkpoint") as raised:
            pusher.push(3)
        assert "POISONED" not in str(raised.value)
        assert_serves(host, 2)
        pusher.push(4)
    assert_equal(read(tmp_path / "version-00000002"), checkpoint(4))


def test_a_push_that_is_refused_after_its_preparation_leaves_no_files(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pusher = Pusher(engine, tmp_path)
    with pusher.sync:
        pusher.push(2)
        (incoming,) = tmp_path.glob(".incoming-*")
        with monkeypatch.context() as patch:
            patch.setattr(FilesTransport, "begin_send", mock.Mock(side_effect=ConfigError("refused")))
            with pytest.raises(ConfigError, match="refused"):
                pusher.push(3)
            assert names_in(incoming) == ["rank-0"]
        assert pusher.push(4).version == 2
    assert_equal(read(tmp_path / "version-00000002"), checkpoint(4))


def test_engines_generate_while_a_refused_push_removes_its_files(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pusher = Pusher(engine, tmp_path)
    ends = list[str]()
    with pusher.sync:
        pusher.push(2)
        with monkeypatch.context() as patch:
            patch.setattr(FilesTransport, "begin_send", mock.Mock(side_effect=ConfigError("refused")))
            patch.setattr(FilesTransport, "withdraw", lambda _: ends.append(engine.log[-1]))
            with pytest.raises(ConfigError, match="refused"):
                pusher.push(3)
    assert ends == ["resume"]


def test_a_catch_up_without_engines_leaves_no_files(engine: FakeEngine, tmp_path: Path):
    with closing(FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))) as other:
        pusher = Pusher([engine, other], tmp_path)
        with pusher.sync:
            pusher.push(2)
            (incoming,) = tmp_path.glob(".incoming-*")
            for removed in (None, other):
                if removed is not None:
                    pusher.sync.engines.remove(removed)
                assert pusher.sync.catch_up(pusher.model) is None
                assert names_in(incoming) == ["rank-0"]
            pusher.push(3)
    assert_equal(read(tmp_path / "version-00000002"), checkpoint(3))


def test_a_models_own_configs_are_saved_where_none_are_given(engine: FakeEngine, tmp_path: Path):
    from transformers import PretrainedConfig

    pusher = Pusher(engine, tmp_path)
    pusher.model.config = PretrainedConfig()
    pusher.model.generation_config = Saver("generation_config.json", {"a": 1})
    with pusher.sync:
        pusher.push(2)
    saved = json.loads((tmp_path / "version-00000001" / "config.json").read_text())
    assert (saved["architectures"], saved["dtype"]) == ([type(pusher.model).__name__], "float32")
    assert (tmp_path / "version-00000001" / "generation_config.json").exists()


def test_a_version_has_the_configs_of_the_model_that_was_pushed(engine: FakeEngine, tmp_path: Path):
    """The second model has the first one's tensors, so nothing is negotiated anew."""
    pusher = Pusher(engine, tmp_path)
    other = nn.Module()
    for name, child in pusher.model.named_children():
        other.add_module(name, child)
    for model, number in ((pusher.model, 1), (other, 2)):
        model.config = Saver("config.json", {"architectures": ["X"], "rope": number})
        model.generation_config = Saver("generation_config.json", {"eos": number})
    with pusher.sync:
        for version, (model, number) in enumerate([(pusher.model, 1), (other, 2), (pusher.model, 1)], 1):
            assert pusher.sync.push(model).version == version
            folder = tmp_path / f"version-{version:08}"
            assert json.loads((folder / "config.json").read_text())["rope"] == number
            assert json.loads((folder / "generation_config.json").read_text()) == {"eos": number}


def test_a_config_without_a_class_is_refused_before_anything_is_written(
    host: ModuleHost, engine: FakeEngine, tmp_path: Path
):
    pusher = Pusher(engine, tmp_path / "new", config=Saver("config.json", {"architectures": None}))
    with pytest.raises(ConfigError, match=r"set config.architectures"):
        pusher.push(2)
    assert names_in(tmp_path / "new") == [".lock"]
    assert engine.log == []
    assert_serves(host, 1)


def test_an_output_layer_that_the_config_unties_is_not_left_out(engine: FakeEngine, tmp_path: Path):
    """The layer has the embedding's memory, and is saved under the embedding's name alone."""
    config = Saver("config.json", {"architectures": ["X"], "tie_word_embeddings": False})
    pusher = Pusher(engine, tmp_path / "versions", config=config)
    pusher.model.lm_head = nn.Linear(1, 1, bias=False)
    pusher.model.lm_head.weight = pusher.model.embed.weight  # type: ignore[union-attr]
    words = "lm_head.weight is tied to embed.weight, and the config unties them"
    with pusher.sync:
        with pytest.raises(ConfigError, match=words):
            pusher.push(2)
        with pytest.raises(ConfigError, match=words):
            weightsync.save(pusher.model, tmp_path / "saved", config=config)
        config.content["tie_word_embeddings"] = True
        pusher.push(2)
        weightsync.save(pusher.model, tmp_path / "saved", config=config)
    for folder in (tmp_path / "versions/version-00000001", tmp_path / "saved"):
        assert_equal(read(folder), checkpoint(2))
        assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True


def test_the_embedding_is_saved_if_the_output_layer_comes_first(tmp_path: Path):
    """Engines that tie the two load the embedding, and pass over the output layer."""
    tensors = checkpoint(2)
    model = trainer_model({"lm_head.weight": tensors["embed.weight"], **tensors})
    model.lm_head.weight = model.embed.weight  # type: ignore[union-attr]
    for ties in (True, False):
        config = Saver("config.json", {"architectures": ["X"], "tie_word_embeddings": ties})
        weightsync.save(model, tmp_path / str(ties), config=config)
        assert read(tmp_path / str(ties)).keys() == {"lm_head.weight", *tensors}


@pytest.mark.parametrize(
    ("left_out", "saved", "is_refused"),
    [
        ("embed_out.weight", "gpt_neox.embed_in.weight", True),
        ("model.embed_tokens.weight", "lm_head.weight", False),
        ("transformer.output_layer.weight", "transformer.embedding.word_embeddings.weight", True),
        ("output.weight", "model.tok_embeddings.weight", True),
        ("mtp.lm_head.weight", "lm_head.weight", False),
        ("lm_head.weight", "mtp.layers.0.shared_head.head.weight", False),
        ("b.weight", "a.weight", False),
        ("layers.0.output.weight", "layers.1.output.weight", False),
        ("layers.0.output.weight", "a.weight", False),
        ("v_head.weight", "a.weight", False),
    ],
)
def test_a_tied_output_layer_is_known_by_its_name(left_out: str, saved: str, is_refused: bool):
    content = {"architectures": ["X"], "tie_word_embeddings": False}
    manifest = Manifest((TensorMeta(saved, (4, 2), "float32"),), ((left_out, saved),))
    with pytest.raises(ConfigError, match=f"{left_out} is tied to {saved}") if is_refused else nullcontext():
        files_beside([Saver("config.json", content)], manifest)


@pytest.mark.parametrize(
    ("model_type", "whole", "text", "is_refused"),
    [
        ("qwen3", None, None, True),
        ("gemma2", None, None, False),
        ("gemma2", False, None, True),
        ("qwen2_vl", False, True, False),  # this class takes its text part's value over
        ("qwen3_vl", False, True, True),
        ("qwen3_vl_moe", None, None, True),
        ("mistral3", None, False, False),
        ("blip-2", None, True, False),
        ("blip-2", None, False, True),
        ("of another package", None, None, False),
        ("of another package", False, True, True),
    ],
)
def test_a_config_ties_the_output_layer_if_its_class_does_on_loading(
    model_type: str, whole: bool | None, text: bool | None, is_refused: bool
):
    content: dict[str, Any] = {"architectures": ["X"], "model_type": model_type}
    if whole is not None:
        content["tie_word_embeddings"] = whole
    if text is not None:
        content["text_config"] = {"tie_word_embeddings": text}
    manifest = Manifest((TensorMeta("embed.weight", (4, 2), "float32"),), (("lm_head.weight", "embed.weight"),))
    with pytest.raises(ConfigError, match="unties them once it is loaded") if is_refused else nullcontext():
        files_beside([Saver("config.json", content)], manifest)


def test_a_config_that_transformers_refuses_is_taken_as_it_says():
    content = {"architectures": ["X"], "model_type": "llama", "rms_norm_eps": 1}  # which has to be a float there
    manifest = Manifest((TensorMeta("embed.weight", (4, 2), "float32"),), (("lm_head.weight", "embed.weight"),))
    files_beside([Saver("config.json", content)], manifest)
    with pytest.raises(ConfigError, match="unties them"):
        files_beside([Saver("config.json", {**content, "tie_word_embeddings": False})], manifest)


def test_a_push_that_fails_leaves_the_last_version_and_no_other(host: ModuleHost, engine: FakeEngine, tmp_path: Path):
    pusher = Pusher(engine, tmp_path)
    pusher.push(2)
    fail_once_after(engine.sessions[0].receiver, 2)
    with pytest.raises(WeightSyncError, match="no memory left"):
        pusher.push(3)
    assert names_in(tmp_path) == [".lock", "version-00000001"]
    assert_equal(read(tmp_path / "version-00000001"), checkpoint(2))
    assert pusher.push(4).version == 2
    assert_serves(host, 4)
    assert_equal(read(tmp_path / "version-00000002"), checkpoint(4))
    pusher.sync.close()


def test_the_files_of_a_killed_trainer_are_replaced(engine: FakeEngine, tmp_path: Path):
    left = tmp_path / ".incoming-0123abcd" / "3"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half of it")
    with Pusher(engine, tmp_path).sync as sync:
        sync.push(trainer_model(checkpoint(2)))
        assert not left.exists()
    assert names_in(tmp_path) == [".lock", "version-00000001"]


@pytest.mark.parametrize("pushes", [0, 2])
def test_a_full_disk_is_found_before_the_engine_is_touched(
    host: ModuleHost, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pushes: int
):
    def no_room(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    pusher = Pusher(engine, tmp_path)
    for _ in range(pushes):
        pusher.push(1)
    engine.log.clear()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_room)
        words = r"cannot write a checkpoint of \d+ bytes to .*No space left on device"
        with pytest.raises(PlacementError, match=words):
            pusher.push(2)
    assert_serves(host, 1)
    assert "CLEAN" in engine.sessions[0].status()
    assert engine.log.count("pause keep") == engine.log.count("resume")  # whether it was is the order of two threads
    assert not (engine.version() or "").startswith("POISONED")
    assert names_in(tmp_path) == [".lock", *(f"version-{version:08}" for version in range(1, pushes + 1))]
    assert pusher.push(2).version == pushes + 1
    assert_serves(host, 2)
    pusher.sync.close()


def push_and_die(folder: Path) -> None:
    """Kill this process in the middle of its second push."""
    write, calls = shard_files.write, []

    def write_and_die(*args: Any) -> Any:
        done = write(*args)
        calls.append(args[0].name)
        if calls.count("2") == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    shard_files.write = write_and_die
    with closing(FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))) as engine:
        transport = CheckpointTransport(folder, max_shard_bytes=300)
        sync = WeightSync("fsdp", transport, engine, max_bytes=1, timeout_s=10.0)
        model = trainer_model(checkpoint(2))
        sync.push(model)
        sync.push(model)


def test_a_trainer_that_is_killed_leaves_the_last_version_and_the_next_one_goes_on(engine: FakeEngine, tmp_path: Path):
    trainer = FORKSERVER.Process(target=push_and_die, args=(tmp_path,), daemon=True)
    trainer.start()
    trainer.join(60)
    assert trainer.exitcode == -signal.SIGKILL
    (left,) = tmp_path.glob(".incoming-*")
    assert any((left / "2").iterdir())
    assert_equal(read(tmp_path / "version-00000001"), checkpoint(2))
    pusher = Pusher(engine, tmp_path)
    with pusher.sync:
        assert pusher.push(4).version == 2
    assert names_in(tmp_path) == [".lock", "version-00000001", "version-00000002"]
    assert_equal(read(tmp_path / "version-00000002"), checkpoint(4))


def test_a_version_appears_whole(engine: FakeEngine, tmp_path: Path):
    """Whatever has its last name can be read, from the first moment."""
    seen: dict[str, dict[str, torch.Tensor]] = {}
    errors: list[Exception] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            for path in tmp_path.glob("version-*"):
                try:
                    if path.name not in seen:
                        seen[path.name] = read(path)
                except Exception as error:
                    errors.append(error)
            time.sleep(0.0005)  # or the pushes would have to wait for this thread

    pusher = Pusher(engine, tmp_path, keep_last=99)
    watcher = threading.Thread(target=look)
    watcher.start()
    with pusher.sync:
        for seed in range(2, 8):
            pusher.push(seed)
    deadline = time.monotonic() + 30
    while len(seen) < 6 and not errors and time.monotonic() < deadline:
        time.sleep(0.01)
    over.set()
    watcher.join()
    assert not errors
    assert len(seen) == 6
    for name, tensors in seen.items():
        assert_equal(tensors, checkpoint(int(name[-8:]) + 1))


def test_a_folder_has_one_trainer(engine: FakeEngine, tmp_path: Path):
    first = Pusher(engine, tmp_path)
    first.push(2)
    with closing(FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))) as other:
        second = Pusher(other, tmp_path)
        with pytest.raises(ConfigError, match=f"another trainer writes checkpoints to {tmp_path}"):
            second.push(3)
        assert first.push(4).version == 2
        first.sync.close()
        assert second.push(5).version == 3
        second.sync.close()


def test_a_worker_that_does_not_see_the_folder_says_so(
    host: ModuleHost, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def look(incoming: Path, who: str) -> None:
        check_seen(incoming / "elsewhere" if "worker" in who else incoming, who)

    monkeypatch.setattr(shard_files, "check_seen", look)
    with pytest.raises(PlacementError, match="the folder of checkpoints under the same path"):
        Pusher(engine, tmp_path).push(2)
    assert engine.log == []
    assert_serves(host, 1)


def test_a_file_that_is_changed_on_the_way_is_noticed(
    host: ModuleHost, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write = shard_files.write

    def write_and_spoil(folder: Path, shards: Any, regions: Any, *args: Any) -> Any:
        regions = list(regions)
        done = write(folder, shards, regions, *args)
        (location, values), *_ = regions
        _, starts = runs(shards.manifest[location.name].shape, location.box)
        with (folder / shards.file_of[location.name]).open("r+b") as file:
            file.seek(shards.in_file[location.name] + starts[0] * values.element_size())
            file.write(b"\x13")
        return done

    monkeypatch.setattr(shard_files, "write", write_and_spoil)
    with pytest.raises(DigestError, match="arrived with another digest"):
        Pusher(engine, tmp_path).push(2)
    assert_serves(host, 1)


def test_arguments_that_cannot_work(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"pass transport=weightsync.CheckpointTransport\(folder\)"):
        WeightSync("fsdp", "checkpoint")
    with pytest.raises(ConfigError, match="keep_last=0"):
        CheckpointTransport(tmp_path, keep_last=0)
    with pytest.raises(ConfigError, match="max_shard_bytes='5GB'; it must be a whole number"):
        CheckpointTransport(tmp_path, max_shard_bytes="5GB")
    with pytest.raises(ConfigError, match=r"config=model\.config"):
        CheckpointTransport(tmp_path, config=nn.Linear(1, 1))


# ---------------------------------------------------------------------------------------------------------------
# Saving without an engine


def test_a_plain_module_is_saved(tmp_path: Path):
    expected = checkpoint(3)
    selection = TensorSelection(exclude=("*.norm.*",), dtypes={"embed*": "bfloat16"})
    weightsync.save(trainer_model(expected), tmp_path / "a" / "b", selection=selection, max_shard_bytes=200)
    expected = {name: tensor for name, tensor in expected.items() if ".norm." not in name}
    expected["embed.weight"] = expected["embed.weight"].bfloat16()
    assert_equal(read(tmp_path / "a" / "b"), expected)
    assert names_in(tmp_path / "a") == ["b"]
    assert (tmp_path / "a" / "b" / INDEX).exists()


def test_new_folders_are_on_the_disk_with_what_is_saved_in_them(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    synced: set[str] = set()
    fsync = os.fsync

    def note(fd: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    weightsync.save(trainer_model(checkpoint(2)), tmp_path / "a" / "b" / "c")
    with WeightSync("fsdp", CheckpointTransport(tmp_path / "d" / "e"), engine, timeout_s=10.0) as sync:
        sync.push(trainer_model(checkpoint(2)))
    assert synced >= {str(tmp_path / folder) for folder in ("", "a", "a/b", "d", "d/e")}


def test_the_folder_of_checkpoints_may_be_a_link(engine: FakeEngine, tmp_path: Path):
    (tmp_path / "there").mkdir()
    (tmp_path / "here").symlink_to(tmp_path / "there")
    weightsync.save(trainer_model(checkpoint(2)), tmp_path / "here" / "saved")
    with WeightSync("fsdp", CheckpointTransport(tmp_path / "here"), engine, timeout_s=10.0) as sync:
        sync.push(trainer_model(checkpoint(2)))
    for name in ("saved", "version-00000001"):
        assert_equal(read(tmp_path / "there" / name), checkpoint(2))


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path):
    target = tmp_path / "saved"
    target.mkdir()
    weightsync.save(trainer_model(checkpoint(1)), target)
    with pytest.raises(ConfigError, match="exists and is not empty"):
        weightsync.save(trainer_model(checkpoint(2)), target)
    assert_equal(read(target), checkpoint(1))
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    with pytest.raises(ConfigError, match="is a link, or exists and is not empty"):
        weightsync.save(trainer_model(checkpoint(2)), tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="exists and is not empty"):
        weightsync.save(trainer_model(checkpoint(2)), tmp_path / "file")
    with pytest.raises(PlacementError, match=r"cannot make .* File exists"):
        weightsync.save(trainer_model(checkpoint(2)), tmp_path / "file" / "below")
    with pytest.raises(ManifestError, match=r"embed.weight: the trainer has float32, the selection says int8"):
        weightsync.save(
            trainer_model(checkpoint(2)), tmp_path / "wrong", selection=TensorSelection(dtypes={"embed*": "int8"})
        )
    with pytest.raises(ConfigError, match="names no class"):
        weightsync.save(trainer_model(checkpoint(2)), tmp_path / "new" / "below", config=Saver("config.json", {}))
    assert names_in(tmp_path) == ["empty", "file", "link", "saved"]


def save_sharded(rank: int, folder: str) -> None:
    model = tiny_models.shard(tiny_models.build("qwen3-moe", "B"))
    if rank > 0:  # rank 0 alone asks the class for its ties
        model.get_expanded_tied_weights_keys = mock.Mock(side_effect=NotImplementedError)
    weightsync.save(model, Path(folder, "new"), tokenizer=Saver("tokenizer.json", {}), max_shard_bytes=100_000)
    assert Path(folder, "new", INDEX).exists()

    def fail(_: str) -> None:
        raise OSError("the disk is gone")

    tokenizer = Saver("tokenizer.json", {})
    tokenizer.save_pretrained = fail  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match=r"the disk is gone \[trainer rank 0, phase save\]"):
        weightsync.save(model, Path(folder, "failed"), tokenizer=tokenizer, timeout_s=20.0)


def test_two_ranks_save_what_transformers_loads(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    run_ranks(save_sharded, 2, str(tmp_path))
    assert names_in(tmp_path) == ["new"]
    expected = tiny_models.build("qwen3-moe", "B")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert type(loaded) is type(expected)
    assert_equal(loaded.state_dict(), expected.state_dict())
    # The same files, as far as names and tensors go, as transformers' own.
    own = tiny_models.save(expected, tmp_path / "own")
    assert_equal(read(tmp_path / "new"), read(own))
    assert set(names_in(own)) - {"model.safetensors"} <= set(names_in(tmp_path / "new"))
    new, old = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("new", "own"))
    assert new == old


def test_a_model_tied_by_hand_is_loaded_as_it_was(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    model = tiny_models.build("qwen3", "A")
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(ConfigError, match=r"set config.tie_word_embeddings = True"):
        weightsync.save(model, tmp_path / "new")
    model.config.tie_word_embeddings = True
    weightsync.save(model, tmp_path / "new")
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "new").state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("kind", "first", "second", "tied"),
    [
        ("qwen3", "layers.0", "layers.1", ["mlp.up_proj.weight"]),
        ("llama", "layers.0", "layers.1", ["input_layernorm.weight", "post_attention_layernorm.weight"]),
        # In the checkpoint each expert has tensors of its own.
        ("qwen3-moe", "layers.0", "layers.1", ["mlp.experts.gate_up_proj"]),
        # In the checkpoint these two are one tensor.
        ("hrm-text", "L_module.layers.0", "H_module.layers.0", ["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
        # A part alone of such a tensor.
        ("hrm-text", "L_module.layers.0", "H_module.layers.0", ["mlp.up_proj.weight", "self_attn.q_proj.weight"]),
    ],
)
def test_layers_tied_by_hand_are_loaded_as_they_were(
    kind: str, first: str, second: str, tied: list[str], tmp_path: Path
):
    from transformers import AutoModelForCausalLM

    model = tiny_models.tied(kind, first, second, *tied)
    weightsync.save(model, tmp_path / "new", max_shard_bytes=100_000)
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "new").state_dict(), model.state_dict())


def bert() -> Any:
    """A model whose class ties a weight and a bias of the output layer."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 20, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    return BertForMaskedLM(BertConfig(num_hidden_layers=1, **sizes))


def with_checkpointing(model: Any) -> Any:
    model.cls = checkpoint_wrapper(model.cls)
    return model


def with_adapters(model: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["word_embeddings"]))


@pytest.mark.parametrize("wrap", [with_checkpointing, with_adapters])
def test_ties_of_the_class_are_found_in_wrapped_modules(wrap: Any, tmp_path: Path):
    weightsync.save(wrap(bert()), tmp_path / "new")
    left_out = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert read(tmp_path / "new").keys() == bert().state_dict().keys() - left_out


def test_a_class_is_not_asked_for_ties_that_a_model_does_not_have(tmp_path: Path):
    """Answering walks all modules, and a mixture of experts has tens of thousands."""
    model = trainer_model(checkpoint(2))
    model.get_expanded_tied_weights_keys = mock.Mock(return_value={})
    weightsync.save(model, tmp_path / "new")
    model.get_expanded_tied_weights_keys.assert_not_called()
    model.layers.get_submodule("1.norm").weight = model.layers.get_submodule("0.norm").weight
    weightsync.save(model, tmp_path / "tied")
    model.get_expanded_tied_weights_keys.assert_called_once()


def save_flat(rank: int, folder: str) -> None:
    """FSDP1 takes the parameters away from their modules, and the class finds none to tie."""
    torch.manual_seed(1)
    model = FullyShardedDataParallel(bert(), device_id=torch.device("cpu"), use_orig_params=False)
    weightsync.save(model, folder)


def test_ties_of_a_class_without_its_parameters_are_saved_under_each_name(tmp_path: Path):
    run_ranks(save_flat, 2, str(tmp_path / "new"))
    torch.manual_seed(1)
    assert_equal(read(tmp_path / "new"), bert().state_dict())


def test_ties_of_the_class_are_saved_once(tmp_path: Path):
    from transformers import BertForMaskedLM

    model = bert()
    weightsync.save(model, tmp_path / "new")
    left_out = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert read(tmp_path / "new").keys() == model.state_dict().keys() - left_out
    assert_equal(BertForMaskedLM.from_pretrained(tmp_path / "new").state_dict(), model.state_dict())
    model.config.tie_word_embeddings = False  # the config has the last word
    weightsync.save(model, tmp_path / "untied")
    assert_equal(BertForMaskedLM.from_pretrained(tmp_path / "untied").state_dict(), model.state_dict())


def test_a_class_finds_each_name_that_its_own_save_writes(tmp_path: Path):
    """The class registers the output layer first, and loads the embedding."""
    from transformers import XLMRobertaConfig, XLMRobertaForMaskedLM, XLMRobertaModel

    sizes = {"vocab_size": 20, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    model = XLMRobertaForMaskedLM(XLMRobertaConfig(num_hidden_layers=1, **sizes))
    weightsync.save(model, tmp_path / "new")
    model.save_pretrained(tmp_path / "own")
    assert read(tmp_path / "new").keys() >= read(tmp_path / "own").keys()
    loaded = XLMRobertaModel.from_pretrained(tmp_path / "new", add_pooling_layer=False)
    assert_equal(loaded.state_dict(), model.roberta.state_dict())


@pytest.mark.parametrize(
    ("kind", "is_refused"), [("qwen2-vl", False), ("qwen3-vl", True), ("llava", False), ("gemma3", True)]
)
def test_a_vision_model_tied_by_hand_is_refused_if_transformers_would_untie_it(
    kind: str, is_refused: bool, tmp_path: Path
):
    from transformers import AutoModelForImageTextToText

    model = vision_models.make_vision_model(kind, tmp_path / "own", torch.device("cpu"))
    model.lm_head.weight = model.get_input_embeddings().weight
    content = json.loads((tmp_path / "own" / "config.json").read_text())
    for part, tie in ((content, False), (content["text_config"], True)):
        part["tie_word_embeddings"] = tie
    with pytest.raises(ConfigError, match="unties them once it is loaded") if is_refused else nullcontext():
        weightsync.save(model, tmp_path / "new", config=Saver("config.json", content))
    if is_refused:
        model.config.tie_word_embeddings = True
        weightsync.save(model, tmp_path / "new")
        (tmp_path / "new" / "config.json").write_text(json.dumps(content))
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "new")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight) is not is_refused


def test_adapters_are_saved_merged(tmp_path: Path):
    def wrapped() -> Any:
        torch.manual_seed(1)
        options = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
        return peft.get_peft_model(tiny_models.build("llama-tied", "A"), peft.LoraConfig(**options))

    weightsync.save(wrapped(), tmp_path / "new")
    wrapped().merge_and_unload().save_pretrained(tmp_path / "own")
    assert_equal(read(tmp_path / "new"), read(tmp_path / "own"))
    new, own = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("new", "own"))
    assert new == own


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize("kind", ["lm_head", "embed_tokens", None])
def test_the_config_of_an_output_layer_of_its_own_is_untied(kind: str | None, tmp_path: Path):
    """Engines before vLLM 0.30 or so would load the embedding in its place."""
    model: Any = tiny_models.build("llama-tied", "A")
    if kind is not None:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=[kind]))
    weightsync.save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tie_word_embeddings"] is (kind is None)
    assert ("lm_head.weight" in read(tmp_path)) is (kind is not None)


@pytest.mark.parametrize(
    ("content", "has_text"),
    [({"tie_word_embeddings": True}, False), ({"model_type": "qwen2_vl"}, True), ({"model_type": "gemma2"}, False)],
)
def test_each_part_of_a_config_is_untied(content: dict[str, Any], has_text: bool):
    text = {"text_config": {"tie_word_embeddings": True}} if has_text else {}
    manifest = Manifest(tuple(TensorMeta(name, (4, 2), "float32") for name in ("embed.weight", "lm_head.weight")))
    files = files_beside([Saver("config.json", {"architectures": ["X"], **content, **text})], manifest)
    found = json.loads(files["config.json"])
    assert found["tie_word_embeddings"] is False
    assert found.get("text_config", {}).get("tie_word_embeddings", False) is False


def save_zero3(rank: int, folder: str) -> None:
    engine = zero.initialize(tiny_models.build("qwen3", "A"), zero.config(3))
    weightsync.save(engine, folder, "deepspeed", selection=TensorSelection(dtypes={"*": "bfloat16"}))


def test_zero_3_saves_its_partitions(tmp_path: Path):
    run_ranks(save_zero3, 2, str(tmp_path / "new"))
    tiny_models.save(tiny_models.build("qwen3", "A"), tmp_path / "own")
    assert_equal(read(tmp_path / "new"), read(tmp_path / "own"))
    assert names_in(tmp_path / "new") == names_in(tmp_path / "own")


def save_megatron(rank: int, folder: str) -> None:
    config = tiny_models.CONFIGS["qwen3"]()
    config.architectures = ["Qwen3ForCausalLM"]
    for name, mesh in (("tp", Mesh(tp=2)), ("pp", Mesh(pp=2))):
        model = megatron_models.build(config, mesh, torch.bfloat16, padding=5)
        megatron_models.load(model, config, load_file(Path(folder, "own", "model.safetensors")))
        weightsync.save(
            model, Path(folder, name), weightsync.MegatronBackend(vocab_size=config.vocab_size), config=config
        )


def test_megatron_saves_rows_and_columns_and_stages(tmp_path: Path):
    tiny_models.save(tiny_models.build("qwen3", "B"), tmp_path / "own")
    run_ranks(save_megatron, 2, str(tmp_path))
    for name in ("tp", "pp"):
        assert_equal(read(tmp_path / name), read(tmp_path / "own"))
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "bfloat16"


def push_sharded(rank: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = trainer_model(checkpoint(2))
    for layer in (0, 1):  # FSDP2 shards no scalars
        norm = model.get_submodule(f"layers.{layer}.norm")
        norm.register_buffer("seen", norm._parameters.pop("seen").detach())  # type: ignore[union-attr]
    fully_shard(model)
    host = ModuleHost(TinyEngineModel, checkpoint(1)) if rank == 0 else None
    engine = FakeEngine(host) if host is not None else None
    transport = CheckpointTransport(folder, max_shard_bytes=300)
    with WeightSync("fsdp", transport, engine, max_bytes=1, timeout_s=30.0) as sync:
        for version in (1, 2):
            sync.push(model)
            assert_equal(read(Path(folder, f"version-{version:08}")), checkpoint(2))
            if host is not None:
                assert_serves(host, 2)
    if engine is not None:
        engine.close()


def test_two_ranks_write_their_uneven_shards_at_once(tmp_path: Path):
    run_ranks(push_sharded, 2, str(tmp_path))
    assert names_in(tmp_path) == [".lock", "version-00000001", "version-00000002"]
