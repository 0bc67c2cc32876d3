"""Every architecture of vLLM's registry that transformers can train: a load plan, or a refusal that says why.

`docs/evidence/registry.md` is what this module found. A run fails when the document says something else; to write it:

    WEIGHTSYNC_WRITE_DOCS=1 python -m pytest tests/engine/test_registry.py

That run asks for one worker and for two, any other for two. No engine runs. A process of its own asks vLLM's loader, so
that a crash or a hang is a finding too.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill, shorten
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import registry_models
from engines import VllmRemote, know_class

from weightsync.errors import ConfigError, UnsupportedError, WeightSyncError
from weightsync.planning.layout import Box, Manifest, coverage

if TYPE_CHECKING:
    from weightsync.vllm.plan_offline import WorkerPlan

pytestmark = pytest.mark.forks

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/evidence/registry.md"
ON_CPU, ON_GPU = (
    ROOT / "benchmarks" / "results" / name for name in ("2026-11-25-cpu-families.json", "2026-11-25-h200-families.json")
)
WRITES = os.environ.get("WEIGHTSYNC_WRITE_DOCS") == "1"
WORKERS = (1, 2) if WRITES else (2,)  # two read all that one reads, in parts; one is asked where time does not matter
TEXT, MULTIMODAL = "text generation", "multimodal"
SUFFIXES = {TEXT: "ForCausalLM", MULTIMODAL: "ForConditionalGeneration"}
LONGEST_REASON = 140
PATIENCE_S = 120.0

NO_CONVOLUTION = "Its mixer reads a dimension of the convolution that the packed weight lacks (`IndexError`)."
NO_ANSWERS = {
    "FalconMambaForCausalLM": NO_CONVOLUTION,
    "JambaForCausalLM": NO_CONVOLUTION,
    "MambaForCausalLM": NO_CONVOLUTION,
    "MiMoV2FlashForCausalLM": "Its attention calls Triton.",
    "MiniMaxM2ForCausalLM": "The router for CPUs has no sigmoid without groups of experts (`AssertionError`).",
}
"""Why vLLM's engine for CPUs does not answer. It does so without weightsync too."""

PLANS, PASSED_OVER, MISFIT, REFUSED, NO_ENGINE, NO_TRAINER, FAULT = KINDS = (
    "a complete plan",
    "a complete plan without what vLLM's loader passes over",
    "do not fit vLLM's model",
    "refused by weightsync",
    "vLLM makes no model",
    "transformers makes no model",
    "a fault of weightsync",
)


@dataclass(frozen=True)
class Outcome:
    """What became of an architecture, one of `KINDS`, and why."""

    kind: str
    why: str = ""


class Planner:
    """Lives in a process of its own, which has vLLM imported."""

    connections = ()

    def __init__(self) -> None:
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"  # of the hundreds of configs each has something to warn of
        registry_models.stand_in("torchvision", "torchaudio")
        import transformers

        # Or a config is written out, with all of its parts, into errors that huggingface_hub then drops.
        transformers.PretrainedConfig.__repr__ = object.__repr__
        patch("torch.cpu._is_amx_tile_supported", return_value=False).start()  # the document is of CPUs without AMX

    def registry(self) -> tuple[list[str], list[str], int]:
        """Return the architectures for text and the multimodal ones of vLLM's registry, and how many it has in all."""
        from vllm.model_executor.models import registry

        text, multimodal = dict(registry._TEXT_GENERATION_MODELS), dict(registry._MULTIMODAL_MODELS)
        for architecture, place in registry._TRANSFORMERS_SUPPORTED_MODELS.items():
            (multimodal if "MultiModal" in place[1] else text)[architecture] = place
        return list(text), [name for name in multimodal if name not in text], len(registry._VLLM_MODELS)

    def has_trainer(self, architecture: str) -> bool:
        return registry_models.trainer_class(architecture) is not None

    def tested(self) -> set[str]:
        """Return the architectures that `test_models.py` pushes to."""
        import tiny_models
        from test_models import FAMILIES
        from transformers import AutoModelForCausalLM

        return {AutoModelForCausalLM._model_mapping[type(tiny_models.CONFIGS[name]())].__name__ for name in FAMILIES}

    def versions(self) -> str:
        import torch
        import transformers
        import vllm

        return (
            f"vLLM {vllm.__version__}, transformers {transformers.__version__}, "
            f"torch {torch.__version__.partition('+')[0]}"
        )

    def ask(self, architecture: str, workers: tuple[int, ...] = WORKERS) -> Outcome:
        """Return the better of two: a model made from its config may be saved under other names than a published one,
        whose names transformers remembers."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            try:
                model = registry_models.build(architecture, folder)
            except Exception as error:  # of many kinds, all of them transformers' own
                return Outcome(NO_TRAINER, reason(error, folder))
            found: dict[Manifest | None, Outcome] = {}
            for published in (False, True):
                try:
                    manifest = registry_models.checkpoint_tensors(model, published)
                except UnsupportedError as error:
                    found.setdefault(None, Outcome(REFUSED, reason(error, folder)))
                    continue
                if manifest not in found:
                    found[manifest] = self._plan(manifest, folder, workers)
                if found[manifest].kind not in (PASSED_OVER, MISFIT, REFUSED):
                    break
        return min(found.values(), key=lambda outcome: KINDS.index(outcome.kind))

    def _plan(self, manifest: Manifest, folder: Path, workers: tuple[int, ...]) -> Outcome:
        from weightsync.vllm.plan_offline import plan_workers

        try:
            know_class(folder)
        except ImportError as error:
            return Outcome(NO_ENGINE, reason(error, folder))
        try:
            plans = [plan_workers(folder, manifest, tp, "auto") for tp in workers]
        except ConfigError as error:
            return Outcome(NO_ENGINE, reason(error, folder))
        except UnsupportedError as error:
            return Outcome(REFUSED, reason(error, folder))
        return next((found for plan in plans if (found := misfit(manifest, plan))), Outcome(PLANS))

    def close(self) -> None:
        pass


def misfit(manifest: Manifest, workers: list[WorkerPlan]) -> Outcome | None:
    """What a push would refuse of these plans, as `weightsync.strategies.plan_checks` would."""
    unknown, missing, doubled = (
        dict.fromkeys(name for worker in workers for name in names(worker))
        for names in (lambda w: w.trace.unknown, lambda w: w.missing, lambda w: w.doubled)
    )
    refused = {name: why for worker in workers for name, why in worker.trace.refused.items()}
    computed = {name for worker in workers for names in worker.trace.computed.values() for name in names}
    boxes: dict[str, dict[Box, None]] = defaultdict(dict)
    for copy in (copy for worker in workers for copy in worker.trace.copies):
        boxes[copy.name][copy.box] = None
    known = {*unknown, *refused, *computed}
    lost = [name for name in manifest.names if name not in boxes and name not in known]
    torn = [name for name, own in boxes.items() if name not in known and coverage(manifest[name].shape, list(own))[0]]
    faults = [
        f"no place for {some(unknown)}" if unknown else "",
        f"{next(iter(refused.values()))}: {some(refused)}" if refused else "",
        f"nothing fills {some(missing)}" if missing else "",
        f"filled twice: {some(doubled)}" if doubled else "",
        f"no worker reads all of {some(torn)}" if torn else "",
    ]
    if not any(faults):
        return Outcome(PASSED_OVER, some(lost)) if lost else None
    return Outcome(MISFIT, "; ".join(filter(None, [*faults, f"passes over {some(lost)}" if lost else ""])))


def some(names: Iterable[str]) -> str:
    """Names with stars for their numbers, of which one stands for the rest."""
    alike = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))
    return f"`{alike[0]}`" + (f" and {len(alike) - 1} more" if len(alike) > 1 else "")


def reason(error: Exception, folder: Path) -> str:
    """The words of an error, without what differs from run to run."""
    words = error.message if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
    words = re.sub(r"^vLLM (refuses it|cannot make a model of this config for \d tensor parallel workers): ", "", words)
    return shorten(words.replace(str(folder), "the folder").replace("|", "\\|"), LONGEST_REASON, placeholder=" ...")


class Asked:
    """A planner process that is replaced when it crashes or hangs, which is a fault of the architecture's."""

    def __init__(self, kind: type[Planner] = Planner) -> None:
        self._kind = kind
        self._planner = VllmRemote(kind)

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        return self._planner.call(fn, *args, timeout_s=PATIENCE_S)

    def outcome(self, architecture: str) -> Outcome:
        try:
            return self(self._kind.ask, architecture)
        except AssertionError as error:  # of `VllmRemote`, whose process is gone
            self.close()
            self._planner = VllmRemote(self._kind)
            return Outcome(FAULT, str(error))
        except Exception as error:
            return Outcome(FAULT, f"{type(error).__name__}: {error}" + "".join(getattr(error, "__notes__", ())))

    def close(self) -> None:
        self._planner.close()


@dataclass(frozen=True)
class Found:
    """The outcome of each architecture that transformers has, by section, and the size of each section.

    tested: the architectures that other tests find equal.
    """

    outcomes: dict[str, dict[str, Outcome]]
    sizes: dict[str, int]
    registered: int
    packages: str
    tested: set[str]


@pytest.fixture(scope="module")
def found() -> Iterator[Found]:
    asked = Asked()
    text, multimodal, registered = asked(Planner.registry)
    sections = dict(zip(SUFFIXES, (text, multimodal), strict=True))
    outcomes = {
        section: {name: asked.outcome(name) for name in names if asked(Planner.has_trainer, name)}
        for section, names in sections.items()
    }
    sizes = {section: len(names) for section, names in sections.items()}
    yield Found(outcomes, sizes, registered, asked(Planner.versions), asked(Planner.tested))
    asked.close()


class Failing(Planner):
    def __init__(self) -> None:
        pass

    def ask(self, architecture: str, workers: tuple[int, ...] = WORKERS) -> Outcome:
        if architecture == "crash":
            os._exit(3)
        return Outcome(PLANS if architecture == "good" else str(1 / 0))


def test_a_crash_and_an_error_are_found_and_the_next_is_asked():
    asked = Asked(Failing)
    found = {name: asked.outcome(name) for name in ("crash", "error", "good")}
    asked.close()
    assert [outcome.kind for outcome in found.values()] == [FAULT, FAULT, PLANS]
    assert "ended with 3" in found["crash"].why
    assert "ZeroDivisionError" in found["error"].why


def test_every_architecture_has_a_plan_or_a_reason(found: Found):
    faults = {
        name: outcome.why
        for section in found.outcomes.values()
        for name, outcome in section.items()
        if outcome.kind == FAULT or not (outcome.why or outcome.kind == PLANS)
    }
    assert not faults, "\n".join(f"{name}: {why}" for name, why in faults.items())


def test_the_document_says_what_was_found(found: Found):
    written = document(found)
    if WRITES:
        DOCUMENT.write_text(written, encoding="utf-8")
    said = DOCUMENT.read_text(encoding="utf-8")
    assert said == written, f"{DOCUMENT} is stale: WEIGHTSYNC_WRITE_DOCS=1 python -m pytest {Path(__file__).name}"


def document(found: Found) -> str:
    counts = [
        f"| {' | '.join(['section', 'registered', 'transformers has', *KINDS[:-1]])} |",
        f"| {' | '.join(['---'] * (3 + len(KINDS) - 1))} |",
    ]
    lists = []
    for section, outcomes in found.outcomes.items():
        by_kind = {kind: [name for name, o in outcomes.items() if o.kind == kind] for kind in KINDS[:-1]}
        cells = [section, found.sizes[section], len(outcomes), *map(len, by_kind.values())]
        counts.append(f"| {' | '.join(map(str, cells))} |")
        suffix = SUFFIXES[section]
        lists.append(f"## {section.capitalize()}\n\nThe names end in `{suffix}`, unless they end otherwise.")
        for kind, names in by_kind.items():
            if kind == PLANS:
                lists += (
                    answered(names, found.tested) if section == TEXT else [listed(PLANS.capitalize(), names, suffix)]
                )
            elif names:
                lists.append(with_reasons(kind, {name: outcomes[name].why for name in names}, suffix))
    return HEAD.format(packages=found.packages, counts="\n".join(counts), registered=found.registered) + "\n\n".join(
        [*lists, EQUAL]
    )


def answered(planned: list[str], tested: set[str]) -> list[str]:
    """What is known of the answers of architectures with a complete plan."""
    saved = {name: registry_models.SPELLED_OTHERWISE.get(name, name) for name in planned}
    asked = [name for name in planned if saved[name] == name or saved[name] not in planned]
    equal = equal_in(ON_CPU) | tested, equal_in(ON_GPU)
    on_cpu, on_gpu = ([name for name in asked if those & {name, saved[name]}] for those in equal)
    fails = {
        name: why + (" Equal on an H200." if name in on_gpu else "")
        for name, why in NO_ANSWERS.items()
        if name in asked and name not in on_cpu
    }
    parts = {
        "Equal on a CPU and on an H200": [name for name in on_cpu if name in on_gpu],
        "Equal on a CPU": [name for name in on_cpu if name not in on_gpu],
        "A plan alone": [name for name in asked if name not in on_cpu and name not in fails],
        "Other names of these": [name for name in planned if name not in asked],
    }
    runs = len(asked) - len(fails)
    suffix = SUFFIXES[TEXT]
    return [
        wrapped(
            f"{PLANS.capitalize()}: {len(asked)} architectures. Of these vLLM runs {runs} on a CPU, and pushed equals "
            f"cold for {len(on_cpu)} of the {runs}, see [below](#equal-answers)."
        ),
        *(listed(title, names, suffix) for title, names in parts.items() if names),
        with_reasons("a complete plan, and vLLM does not run it on a CPU", fails, suffix),
    ]


def equal_in(results: Path) -> set[str]:
    """The architectures of the families in `results` that answered as a cold start."""
    families = json.loads((ROOT / "benchmarks" / "families.json").read_text())
    rows = [row for row in json.loads(results.read_text()) if row.get("answers") == 0]
    return {families[name]["architectures"][0] for row in rows if (name := row["case"]["shape"]) in families}


def listed(title: str, names: list[str], suffix: str) -> str:
    return wrapped(f"{title}: {', '.join(name.removesuffix(suffix) for name in names)}.")


def with_reasons(kind: str, reasons: dict[str, str], suffix: str) -> str:
    rows = [f"| {name.removesuffix(suffix)} | {why} |" for name, why in reasons.items()]
    return "\n".join([f"| {kind} | why |", "| --- | --- |", *rows])


def wrapped(text: str) -> str:
    return fill(text, 120, break_long_words=False, break_on_hyphens=False)


HEAD = """# The registry

What becomes of every model that vLLM has a class for. `tests/engine/test_registry.py` writes this file and fails when
it finds something else. [Families](families.md) has those that the tests push to.

Found with {packages}, on a CPU.

For each architecture of vLLM's registry that transformers has too, a shallow model is made from the class's own
config. Load plans for one and for two tensor parallel workers are then traced from vLLM's loader. No engine runs.

- *a complete plan*: every parameter of every worker is filled once, and the workers together read every tensor whole.
- *a complete plan without what vLLM's loader passes over*: the checkpoint has tensors that vLLM's loader drops without
  a word. A push names them and stops. `TensorSelection(exclude=...)` leaves them out.
- *do not fit vLLM's model*: vLLM's loader does not take what `save_pretrained` writes. A cold start fails or leaves
  parameters unset. A push raises `ManifestError`.
- *refused by weightsync*: a push raises `UnsupportedError`.
- *vLLM makes no model*, *transformers makes no model*: here, from this config. The words are theirs.

{counts}

Nothing was asked of the others. vLLM registers {registered} architectures in all, also for embedding, classification
and speculative decoding. Of some transformers has no class.

"""
EQUAL = f"""## Equal answers

[Families](families.md) has what the tests push to. `benchmarks/families.json` has a small model of each
architecture for text with a complete plan, and real engines run it:

    weightsync bench --families benchmarks/families.json --gpus 0 --client extension --way weightsync --num-iters 1

An engine is started cold from A and gets A, B, what a training step made of B, and A again. It is *equal* where it then
gave the same tokens and log-probabilities as when it was cold, to the bit. vLLM *does not run* what fails in the same
way without weightsync. [More of GPUs](families.md#on-a-gpu). Raw results, without times:

- [on a CPU](https://github.com/weightsync/weightsync/blob/main/benchmarks/results/{ON_CPU.name}),
  where `engine_in_process` says that the engine was in the trainer's process
- [on an H200](https://github.com/weightsync/weightsync/blob/main/benchmarks/results/{ON_GPU.name}), with vLLM 0.26
"""
