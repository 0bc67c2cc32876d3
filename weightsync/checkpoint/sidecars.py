"""The files that a checkpoint has beside its weights: config, generation config, tokenizer."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from weightsync.errors import ConfigError
from weightsync.planning.layout import Manifest, itemsize
from weightsync.sources.base import Model, one_module

_CONFIG = "config.json"
_TIE, _LM_HEAD = "tie_word_embeddings", "lm_head.weight"
_ENDS = r"(lm_head|head|embed_out|output|output_layer)\.weight"
_HEAD, _LIKE_HEAD = re.compile(rf"([a-z]\w*\.)*{_ENDS}"), re.compile(rf"(.*\.)?{_ENDS}")
"""The names of output layers, and these with the names in numbered layers, such as a drafter's."""
Ties = tuple[tuple[str, str], ...]
"""Ties as in `Manifest.tied`."""


def files_beside(things: Iterable[Any], manifest: Manifest) -> dict[str, bytes]:
    """Return the files that `save_pretrained` of these objects writes, by file name. None objects are left out.

    `config.json` gets the dtype of the checkpoint's weights, for any dtype of the trainer. Raises `ConfigError` if it
    names no class, or if it does not tie the trainer's tied output layer.
    """
    with TemporaryDirectory() as folder:
        for thing in (each for each in things if each is not None):
            thing.save_pretrained(folder)
        found = {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
    if _CONFIG in found:
        config = json.loads(found[_CONFIG])
        if not config.get("architectures"):
            raise ConfigError(
                "the config names no class, and an engine cannot start without one: set config.architectures = "
                "[type(model).__name__]"
            )
        _settle_output_layer(config, manifest)
        if (dtype := _dtype_of_weights(manifest)) is not None:
            _set_dtype(config, dtype)
        found[_CONFIG] = json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"
    return found


def apart_when_loaded(manifest: Manifest, model: Model) -> Ties:
    """Return the manifest's ties without those of a loaded model.

    Output layers may be tied by the config, and other tensors by the class of a transformers model. A class loads a
    tied tensor under one of its names, engines load the embedding, and the files must have that name.
    """
    from weightsync.sources.module_tree import as_built

    ties: dict[str, str] = {}
    with suppress(Exception):  # no such class, or FSDP1 hides its parameters: then the files have each name
        if manifest.tied:  # or a model of many modules would be walked for nothing
            built: Any = as_built(one_module(model))
            # By the config as it is now. `all_tied_weights_keys` goes by the config at the model's construction.
            ties = built.get_expanded_tied_weights_keys(all_submodels=True)
    apart = [(other, name) for other, name in manifest.tied if ties.get(other) not in (name, ties.get(name, name))]
    return tuple(pair for pair in apart if not _is_head(pair))


def _is_head(pair: tuple[str, str]) -> bool:
    """Return whether the other name alone is an output layer. Two heads may be tied, such as a drafter's."""
    return _HEAD.fullmatch(pair[0]) is not None and not _LIKE_HEAD.fullmatch(pair[1])


def _settle_output_layer(config: dict[str, Any], manifest: Manifest) -> None:
    """Untie a config whose files have an output layer of its own, such as a copy by PEFT's `modules_to_save`.

    Older vLLM would load the embedding in its place. Raises `ConfigError` for a tied output layer, absent from the
    files, under a config without the tie.
    """
    pairs = list(filter(_is_head, manifest.tied))
    if pairs and config.get(_TIE) is not True and not _ties(config):
        raise ConfigError(
            f"{' is tied to '.join(pairs[0])}, and the config unties them once it is loaded. A loaded checkpoint would "
            "have another output layer: set config.tie_word_embeddings = True, or untie the two"
        )
    if _LM_HEAD in manifest and not any(_LM_HEAD in pair for pair in manifest.tied) and _ties(config):
        for part in filter(None, (config, config.get("text_config"))):
            part[_TIE] = False


def _ties(config: dict[str, Any]) -> bool:
    """Return whether a model of this config has a tied output layer, as transformers and vLLM load it.

    Each class has its own default. The text part's value counts only if the class has none, or takes it over.
    """
    tied = config.get(_TIE, (config.get("text_config") or {}).get(_TIE, True))
    with suppress(Exception):  # transformers does not have the class, or refuses the config
        from transformers import CONFIG_MAPPING

        loaded = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config))
        tied = getattr(loaded, _TIE, getattr(loaded.get_text_config(), _TIE, False))
    return bool(tied)


def _dtype_of_weights(manifest: Manifest) -> str | None:
    """Return the floating dtype of most of the bytes, or None if everything is quantised."""
    nbytes: Counter[str] = Counter()
    for meta in manifest:
        if "float" in meta.dtype and itemsize(meta.dtype) > 1:
            nbytes[meta.dtype] += meta.nbytes
    return nbytes.most_common(1)[0][0] if nbytes else None


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Set the dtype in a config, and in its parts (text, vision) with a dtype.

    Transformers 4 calls it `torch_dtype`.
    """
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    for part in config.values():
        if isinstance(part, dict) and ("torch_dtype" in part or "dtype" in part):
            _set_dtype(part, dtype)


def with_configs(model: Model, config: Any, generation_config: Any, tokenizer: Any) -> list[Any]:
    """Return the objects to save beside the weights. A transformers model's own configs replace missing ones."""
    from weightsync.sources.module_tree import own_class, unwrapped  # DTensor costs more to import than all the rest

    if isinstance(model, nn.Module):
        own = unwrapped(model)
        if config is None and hasattr(getattr(own, "config", None), "save_pretrained"):
            config = copy.deepcopy(own.config)
            config.architectures = [own_class(own).__name__]
            if "bitsandbytes" in str(getattr(config, "quantization_config", "")).lower():
                del config.quantization_config  # such weights are saved dequantised
        if generation_config is None and hasattr(getattr(own, "generation_config", None), "save_pretrained"):
            generation_config = own.generation_config
        if getattr(own_class(own), "_auto_class", None) is not None:  # of `trust_remote_code`
            return [_ModelCode(own_class(own), config), config, generation_config, tokenizer]
    return [config, generation_config, tokenizer]


@dataclass(frozen=True)
class _ModelCode:
    """The Python files of a model's class. Saving them enters the class in the config, so they come before it."""

    kind: type[nn.Module]
    config: Any

    def save_pretrained(self, folder: str) -> None:
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(self.kind.__new__(self.kind), folder, config=self.config)
