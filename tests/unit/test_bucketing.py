"""What a bucketer may and may not do with a manifest."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import ConfigError
from weightsync.planning.bucketing import (
    DEFAULT_MAX_BYTES,
    Bucket,
    Bucketer,
    ModuleBucketer,
    ParameterBucketer,
    ThresholdBucketer,
    never_resent,
    open_bucketer,
    split,
)
from weightsync.planning.layout import Manifest, TensorMeta


def manifest_of(*names: str, shape: tuple[int, ...] = (4,)) -> Manifest:
    return Manifest(tuple(TensorMeta(name, shape, "bfloat16") for name in names))


def names_of(buckets: list[Bucket]) -> list[tuple[str, ...]]:
    return [bucket.names for bucket in buckets]


LAYER = manifest_of(
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.v_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.post_attention_layernorm.weight",
    "lm_head.weight",
)
PLAN = [
    [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"],
    ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"],
]


def test_a_module_is_a_bucket() -> None:
    for groups in (None, PLAN):
        assert names_of(ModuleBucketer().bucket(LAYER, groups)) == [
            LAYER.names[:1],
            LAYER.names[1:5],
            LAYER.names[5:8],
            LAYER.names[8:10],
            LAYER.names[10:],
        ]


def test_whole_modules_share_a_bucket_up_to_the_limit() -> None:
    buckets = ModuleBucketer(max_bytes=40).bucket(LAYER, PLAN)
    assert names_of(buckets) == [LAYER.names[:5], LAYER.names[5:10], LAYER.names[10:]]
    assert [bucket.nbytes for bucket in buckets] == [40, 40, 8]


def test_the_plan_joins_what_the_names_do_not() -> None:
    tied = ["model.embed_tokens.weight", "lm_head.weight"]
    buckets = names_of(ModuleBucketer().bucket(LAYER, [*PLAN, tied]))
    assert buckets[0] == ("model.embed_tokens.weight", "lm_head.weight")
    assert len(buckets) == 4


def test_a_threshold_cuts_between_projections_but_not_inside_of_qkv() -> None:
    assert (
        names_of(ThresholdBucketer(max_bytes=16).bucket(LAYER, PLAN))
        == [
            LAYER.names[:1],
            LAYER.names[1:4],  # larger than the limit, and still whole
            ("model.layers.0.self_attn.o_proj.weight",),
            LAYER.names[5:7],
            ("model.layers.0.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"),
            LAYER.names[9:],
        ]
    )


def test_without_a_plan_a_threshold_keeps_modules_whole() -> None:
    attention, mlp = LAYER.names[1:5], LAYER.names[5:8]
    buckets = names_of(ThresholdBucketer(max_bytes=16).bucket(LAYER, None))
    assert attention in buckets
    assert mlp in buckets


def test_one_parameter_at_a_time() -> None:
    assert names_of(ParameterBucketer().bucket(LAYER, PLAN)) == [(name,) for name in LAYER.names]


@pytest.mark.parametrize("layer", ["model.layers.3.mlp", "model.layers.3.block_sparse_moe"])
def test_all_experts_of_a_layer_are_together_and_the_router_is_not_torn_off(layer: str) -> None:
    experts = [f"{layer}.experts.{e}.{part}.weight" for e in range(3) for part in ("gate_proj", "up_proj", "down_proj")]
    manifest = manifest_of(f"{layer}.gate.weight", *experts, "model.norm.weight")
    buckets = names_of(ModuleBucketer().bucket(manifest, None))
    assert buckets == [(f"{layer}.gate.weight",), tuple(experts), ("model.norm.weight",)]


def test_experts_that_are_one_tensor_already_are_a_module_too() -> None:
    fused = ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj")
    manifest = manifest_of("model.layers.0.mlp.gate.weight", *fused)
    assert fused in names_of(ModuleBucketer().bucket(manifest, None))


def test_layers_are_not_mixed_up() -> None:
    names = [f"model.layers.{layer}.mlp.experts.{e}.up_proj.weight" for e in range(2) for layer in (1, 11)]
    buckets = names_of(ModuleBucketer().bucket(manifest_of(*names), None))
    assert buckets == [(names[0], names[2]), (names[1], names[3])]


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv", "input_scale"])
@pytest.mark.parametrize("groups", [None, [], [["a.q_proj.weight", "a.k_proj.weight"]]])
def test_a_weight_has_its_scales_beside_it(scale: str, groups: list[list[str]] | None) -> None:
    manifest = manifest_of("a.q_proj.weight", "a.k_proj.weight", f"a.q_proj.{scale}", f"a.k_proj.{scale}")
    bucketers: list[Bucketer] = [ModuleBucketer(), ThresholdBucketer(max_bytes=1)]
    for bucketer in bucketers:
        for names in names_of(bucketer.bucket(manifest, groups)):
            assert all(f"{name.rpartition('.')[0]}.{scale}" in names for name in names)


def test_bytes_are_counted_in_the_dtypes_of_the_manifest() -> None:
    manifest = Manifest((TensorMeta("a.b.weight", (8, 2), "float8_e4m3fn"), TensorMeta("a.b.scale", (), "float32")))
    assert ModuleBucketer().bucket(manifest, None) == [Bucket(("a.b.weight", "a.b.scale"), 20)]


def test_groups_of_another_push_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"first 'model\.stranger'"):
        ThresholdBucketer(100).bucket(LAYER, [["model.stranger", "lm_head.weight"]])


@pytest.mark.parametrize("max_bytes", [0, -1])
def test_a_limit_must_leave_room(max_bytes: int) -> None:
    for kind in ("module", "threshold"):
        with pytest.raises(ConfigError, match="max_bytes"):
            open_bucketer(kind, max_bytes)


def test_bucketers_are_made_by_name() -> None:
    assert open_bucketer("module", None) == ModuleBucketer(DEFAULT_MAX_BYTES)
    assert open_bucketer("module", 10) == ModuleBucketer(10)
    assert open_bucketer("threshold", 10) == ThresholdBucketer(10)
    assert open_bucketer("threshold", None) == ThresholdBucketer(DEFAULT_MAX_BYTES)
    assert open_bucketer("parameter", None) == ParameterBucketer()
    with pytest.raises(ConfigError, match="leave max_bytes=10 out"):
        open_bucketer("parameter", 10)


PARTS = [
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.q_proj.weight_scale",
    "self_attn.k_proj.weight",
    "self_attn.k_proj.bias",
    "mlp.gate.weight",
    "mlp.experts.0.up_proj.weight",
    "mlp.experts.1.up_proj.weight",
    "mlp.experts.1.up_proj.weight_scale_inv",
]


@st.composite
def pushes(draw: st.DrawFn) -> tuple[Manifest, list[list[str]] | None]:
    """A manifest of a small model in any order, and groups over it or none."""
    every = [f"model.layers.{layer}.{part}" for layer in range(3) for part in PARTS] + ["lm_head.weight", "scalar"]
    names = draw(st.permutations(every))[: draw(st.integers(1, len(every)))]
    shapes = st.lists(st.integers(0, 9), max_size=2).map(tuple)
    dtypes = st.sampled_from(["bfloat16", "float32", "float8_e4m3fn"])
    manifest = Manifest(tuple(TensorMeta(name, draw(shapes), draw(dtypes)) for name in names))
    groups = st.lists(st.lists(st.sampled_from(names), min_size=1, max_size=4), max_size=4)
    return manifest, draw(st.none() | groups)


@settings(max_examples=150, deadline=None)
@given(pushes(), st.none() | st.integers(1, 500))
def test_buckets_hold_everything_once_and_tear_nothing_apart(
    push: tuple[Manifest, list[list[str]] | None], max_bytes: int | None
) -> None:
    manifest, groups = push
    at = {name: number for number, name in enumerate(manifest.names)}
    smallest: list[Bucketer] = [ModuleBucketer(), ThresholdBucketer(1)]
    filled = [ModuleBucketer(max_bytes), ThresholdBucketer(max_bytes or 100)]
    for finest, bucketer in zip(smallest, filled, strict=True):
        buckets = bucketer.bucket(manifest, groups)
        names = [name for bucket in buckets for name in bucket.names]
        assert sorted(names) == sorted(manifest.names)
        home = {name: number for number, bucket in enumerate(buckets) for name in bucket.names}

        for group in groups or []:
            assert len({home[name] for name in group}) == 1
        for name in names:
            weight = f"{name.rpartition('.')[0]}.weight"
            assert home.get(weight, home[name]) == home[name]

        for bucket in buckets:
            assert bucket.nbytes == sum(manifest[name].nbytes for name in bucket.names)

        # The limit holds, but for what cannot be cut; and a bucket is not closed before it is full.
        limit = bucketer.max_bytes
        units = [set(bucket.names) for bucket in finest.bucket(manifest, groups) if bucket.nbytes > 0]
        for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
            if limit is None:
                continue
            inside = [unit for unit in units if unit <= set(bucket.names)]
            assert bucket.nbytes <= limit or len(inside) == 1
            if following is not None:
                first = next((unit for unit in units if following.names[0] in unit), set())
                assert bucket.nbytes + sum(manifest[name].nbytes for name in first) > limit

        # Export order: of buckets by their first tensor, and of the tensors of a group.
        firsts = [min(at[name] for name in bucket.names) for bucket in buckets]
        assert firsts == sorted(firsts)
        assert firsts == [at[bucket.names[0]] for bucket in buckets]
        for group in groups or []:
            assert sorted(set(group), key=at.__getitem__) == sorted(set(group), key=names.index)


def test_what_lasts_shares_nothing_with_what_does_not() -> None:
    attention = set(LAYER.names[1:4])
    assert never_resent(LAYER, set(LAYER.names), PLAN) == set(LAYER.names)
    assert never_resent(LAYER, attention, PLAN) == attention
    assert never_resent(LAYER, attention - {LAYER.names[1]}, PLAN) == set()
    # o fuses with nothing, until a module that is loaded as a whole has it together with q.
    assert never_resent(LAYER, set(LAYER.names[3:5]), PLAN) == {LAYER.names[4]}
    assert never_resent(LAYER, set(LAYER.names[3:5]), [*PLAN, [LAYER.names[1], LAYER.names[4]]]) == set()


@given(pushes(), st.sampled_from([ModuleBucketer(), ModuleBucketer(30), ThresholdBucketer(30), ParameterBucketer()]))
def test_what_lasts_has_the_last_buckets_to_itself(
    push: tuple[Manifest, list[list[str]] | None], bucketer: Bucketer
) -> None:
    manifest, groups = push
    last = never_resent(manifest, {name for name in manifest.names if "0" in name}, groups or [])
    buckets = split(bucketer, manifest, groups or [], last)
    assert sorted(name for bucket in buckets for name in bucket.names) == sorted(manifest.names)
    kinds = [{name in last for name in bucket.names} for bucket in buckets]
    assert all(len(kind) == 1 for kind in kinds)
    assert [True in kind for kind in kinds] == sorted(True in kind for kind in kinds)
