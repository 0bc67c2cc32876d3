"""Options from files and command lines."""

from __future__ import annotations

import inspect
import re
from contextlib import closing
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import torch
import yaml
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold
from transformers import HfArgumentParser

from weightsync import ConfigError, TensorSelection, WeightSync, WeightSyncConfig
from weightsync.config import read_config, read_selection


def test_a_config_has_the_options_of_weight_sync_and_their_defaults() -> None:
    given = inspect.signature(WeightSync).parameters.values()
    required = {each.name: each.default for each in given}
    own = {
        each.name: inspect.Parameter.empty if each.default is MISSING else each.default
        for each in fields(WeightSyncConfig)
    }
    assert own == required


TEXT = """
backend: stream
max_bytes: 256
verify: full
timeout_s: 30
selection:
  exclude: [left_out]
  dtypes: {"*.norm.weight": float32}
"""


@pytest.mark.parametrize("kind", [dict, WeightSyncConfig], ids=["mapping", "config"])
def test_a_push_by_a_config_that_yaml_has_filled(kind: Any) -> None:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    config = kind(**yaml.safe_load(TEXT))
    with closing(engine), WeightSync.from_config(config, engine=engine) as sync:
        report = sync.push({**checkpoint(2), "left_out": checkpoint(2)["embed.weight"]})
    assert report.chunks > 1
    assert all(map(torch.equal, engine.hosts[0].live.parameters(), cold(checkpoint(2)).parameters()))


def test_a_command_line_fills_a_config() -> None:
    words = "--backend fsdp --transport broadcast --engine http://a:1 http://b:2 --max_bytes 1000 --progress false"
    (config,) = HfArgumentParser(WeightSyncConfig).parse_args_into_dataclasses(words.split())
    assert config == WeightSyncConfig("fsdp", "broadcast", ["http://a:1", "http://b:2"], max_bytes=1000, progress=False)


def test_sizes_may_have_units() -> None:
    assert [WeightSyncConfig("fsdp", max_bytes=each).max_bytes for each in ("64MiB", "100", 7)] == [64 << 20, 100, 7]
    (config,) = HfArgumentParser(WeightSyncConfig).parse_args_into_dataclasses(["--backend=fsdp", "--max_bytes=1kB"])
    assert config.max_bytes == 1000


def test_annotations_are_types_that_omegaconf_knows() -> None:
    """OmegaConf 2.3 takes plain types, lists of them and unions of them. It refuses `Literal`."""
    allowed = {str, int, float, bool, type(None), Any, list[str]}
    assert not {
        name: hint
        for name, hint in get_type_hints(WeightSyncConfig).items()
        if not allowed.issuperset(get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint])
    }


def test_choices_are_checked_and_shown_on_a_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        HfArgumentParser(WeightSyncConfig).parse_args_into_dataclasses(["--backend", "fsdp", "--pause", "never"])
    assert re.search(r"invalid choice: 'never' \(choose from '?keep'?, '?wait", capsys.readouterr().err)


def test_a_structured_config_of_omegaconf() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    own = omegaconf.OmegaConf.create({"backend": "fsdp", "max_bytes": "64MiB", "selection": {"exclude": ["a"]}})
    config = omegaconf.OmegaConf.merge(omegaconf.OmegaConf.structured(WeightSyncConfig), own)
    given = WeightSyncConfig(**read_config(config))
    assert (given.max_bytes, read_selection(given.selection)) == (64 << 20, TensorSelection(exclude=("a",)))
    assert omegaconf.OmegaConf.structured(given).selection == {"exclude": ["a"]}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"backend": "fsdp", "transprot": "ipc"}, "a WeightSyncConfig has no transprot; its fields are backend, "),
        ({"backend": "fsdp", "selection": {"freeze": []}}, "a TensorSelection has no freeze; its fields are exclude, "),
        ({"backend": "fsdp", "selection": {"frozen": "a.*"}}, "expected a sequence of patterns"),
        ({"backend": "fsdp", "selection": ["a"]}, "expected a TensorSelection"),
        ({"backend": "fsdp", "timeout_s": "300"}, "positive seconds"),
        ({"backend": "fsdp", "timeout_s": float("inf")}, "timeout_s=inf; it must be positive seconds, 86400 at most"),
        ({"backend": "fsdp", "max_bytes": "1 gig"}, "'1 gig': expected bytes, such as 268435456 or 256MiB"),
        ({"backend": "fsdp", "max_bytes": 1.5}, "max_bytes=1.5; it must be a whole number of bytes, such as 67108864"),
        ({"backend": "fsdp", "max_bytes": True}, "max_bytes=True; it must be a whole number"),
        ({"backend": "fsdp", "hold_s": 0}, "hold_s=0; it must be positive seconds, or None for no limit"),
        ({"backend": "fsdp", "progress": "no"}, "progress='no'; it must be true, false or None"),
        ({"backend": "fsd"}, "backend='fsd'; choose one of fsdp, deepspeed, megatron, stream"),
        ({"backend": None}, 'backend=None. Choose "fsdp"'),
        ({"backend": "fsdp", "pause": "never"}, "choose one of keep, wait, abort"),
        ("fsdp", "expected a WeightSyncConfig or a mapping of its fields"),
    ],
)
def test_a_config_has_the_errors_of_weight_sync(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        WeightSync.from_config(config)


@pytest.mark.parametrize("option", ["backend", "bucketer"])
def test_a_config_alone_refuses_names_of_no_choice(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}='modul'; choose one of "):
        WeightSyncConfig(**{"backend": "fsdp", option: "modul"})


def test_a_selection_stays_what_it_is() -> None:
    selection = TensorSelection(exclude=("a",))
    assert WeightSyncConfig("fsdp", selection=selection).selection is selection
