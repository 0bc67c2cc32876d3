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
COMPARISON = {"casts": None, "aligned": True, **kernels._SAMPLES}
CAST = {"casts": kernels.tl.bfloat16, "aligned": False, **kernels._SAMPLES}
WRITING = {"entries": kernels._ENTRIES, **kernels._SAMPLES}


@pytest.mark.parametrize(
    ("name", "warps", "constants"),
    [
        ("_find", kernels._FIND_WARPS, COMPARISON),
        ("_find", kernels._FIND_WARPS, CAST),
        ("_write", kernels._WRITE_WARPS, {"writes": False, **WRITING}),
        ("_write", kernels._WRITE_WARPS, {"writes": True, **WRITING}),
    ],
)
def test_kernel_compiles(name: str, warps: int, constants: dict[str, Any]):
    kernel = getattr(kernels, name)
    values = {**kernels._CONSTANTS, **constants}
    kinds = {each: "constexpr" if each in values else KINDS.get(each, "i32") for each in kernel.arg_names}
    places = {(kernel.arg_names.index(each),): value for each, value in values.items()}
    compiled = triton.compile(ASTSource(kernel, kinds, places), target=HOPPER, options={"num_warps": warps})
    assert compiled.asm["cubin"]
