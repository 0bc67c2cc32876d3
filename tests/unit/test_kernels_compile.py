"""The kernels of changed words compile for a Hopper GPU. That needs no GPU, and finds more than an interpreter."""

from __future__ import annotations

from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from weightsync.kernels import changed_words_triton as kernels  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")  # as in a process with a GPU

HOPPER = GPUTarget("cuda", 90, 32)
KINDS = {
    "body": "*u8", "jobs": "*i32", "room": "i64", "sums": "*i64", "table": "*i64", "words": "*i64",
}  # fmt: skip
"""Of the arguments. Others are 32-bit numbers."""


@pytest.mark.parametrize(
    ("name", "warps", "values"),
    [
        ("_find", kernels._FIND_WARPS, {"casts": None, "aligned": True}),
        ("_find", kernels._FIND_WARPS, {"casts": kernels.tl.bfloat16, "aligned": False}),
        ("_write", kernels._WRITE_WARPS, {"writes": False}),
        ("_write", kernels._WRITE_WARPS, {"writes": True}),
    ],
)
def test_kernel_compiles(name: str, warps: int, values: dict[str, Any]):
    kernel = getattr(kernels, name)
    kinds = {each: "constexpr" if each in values else KINDS.get(each, "i32") for each in kernel.arg_names}
    places = {(kernel.arg_names.index(each),): value for each, value in values.items()}
    compiled = triton.compile(ASTSource(kernel, kinds, places), target=HOPPER, options={"num_warps": warps})
    assert compiled.asm["cubin"]
