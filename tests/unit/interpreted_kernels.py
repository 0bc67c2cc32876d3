"""The kernels for GPUs, run on a CPU by Triton's interpreter: `TRITON_INTERPRET=1 python
tests/unit/interpreted_kernels.py`.

In a process of its own, because Triton asks for that variable as it is imported. Says what it has compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
from functools import cache, partial
from typing import Any

import test_changed_words
import test_copies
import test_digest
import test_rows
import torch
from triton.runtime import interpreter

from weightsync.kernels import changed_words_triton, copies_triton, digest_triton, rows_triton
from weightsync.kernels.digest import MASK, MIB, WHOLE, digest, share, signed
from weightsync.kernels.quantize import BlockForm, Form, fp8_per_block, fp8_per_tensor
from weightsync.kernels.rows import Job

_make_interpreted = cache(interpreter._patch_lang)


def call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of a kernel. Triton makes its language the interpreter's at each call, and no call undoes it."""
    _make_interpreted(function.fn)
    return function.rewrite()(*args, **kwargs)


def copies(of: torch.dtype, to: torch.dtype) -> int:
    """Copies between random views; gives how many there were."""
    # A matrix of many long rows takes the interpreter longer than all others; of a few it runs the same.
    sizes = [(9, 5000) if size == (128, 5000) else size for size in test_copies.SIZES if 0 not in size]
    pairs, wholes = test_copies.some_pairs(of, to, "cpu", sizes)
    assert all(copies_triton.can_launch(*pair) for pair in pairs)
    few = partial(copies_triton.CopyLaunches, programs=5 if of == to else None)
    test_copies.check(pairs, wholes, links=3, batched=few)
    test_copies.check_groups(pairs, wholes, few)
    return len(pairs)


def digests(start: int) -> int:
    sizes = [0, 5, 8, 4096, MIB, 2 * MIB + 70_007, 9]
    runs = [test_digest.noise(start + size, seed)[start:] for seed, size in enumerate(sizes)]
    for sample in test_digest.EVERY_KIND:
        first, nbytes = share(sample)
        launches = digest_triton.Launches(runs, nbytes)
        for some in (range(len(runs)), range(2), range(3, 6), range(1, 1)):
            out = torch.full((len(some),), 7, dtype=torch.int64)
            launches.run(some, first, out, start)
            assert out.tolist() == [signed(digest(runs[number], sample) + start & MASK) for number in some]
    return len(runs)


def quantised(form: Form | BlockForm, dtype: torch.dtype) -> int:
    """Experts in pieces; gives how many there were. The interpreter rounds to float8 otherwise, so torch does it."""
    weights, pieces = test_rows.experts_in_pieces(dtype, "cpu")
    values, scale = test_rows.empty(*weights.shape[1:], form, "cpu", 16, len(weights))
    values = torch.full(values.shape, torch.nan)
    job = Job(tuple(pieces), values, scale)
    launches = rows_triton.RowLaunches(form, [job], [0])
    if isinstance(form, BlockForm):
        launches.quantise(None)
    else:
        maxima = torch.zeros(scale.numel())
        launches.maxima(maxima)
        scale.copy_(form.scale(maxima).view(scale.shape))
        launches.quantise(scale.view(-1))
    test_rows.assert_is(form, (values.to(form.dtype), scale), weights)
    return len(weights)


def changes() -> int:
    launches = changed_words_triton.FindLaunches, changed_words_triton.WriteLaunch
    cases = [(0.01, WHOLE), (1.0, 0)]
    for part, sample in cases:
        assert test_changed_words.check_all(part, sample, *launches) == test_changed_words.check_all(part, sample)
    return len(cases) + test_changed_words.check_hostile(launches[1])


if __name__ == "__main__":
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment, misc]
    interpreter.InterpretedFunction.__call__ = call  # type: ignore[method-assign]
    # It computes whether each sum overflows, and asserts it only where it debugs.
    without = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter.interpreter_builder.options = without
    same = [torch.int64, torch.float32, torch.bfloat16, torch.float8_e4m3fn]  # of each size one
    print(sum(copies(dtype, dtype) for dtype in same), "copies")
    casts = [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)]  # to bfloat16 it does not round
    print(sum(copies(*dtypes) for dtypes in casts), "casts")
    print(sum(digests(start) for start in (0, 1, 2, 4)), "digests")
    print(changes(), "bodies of changes")
    # Forms that divide by the scale need a fused multiply-add, which the interpreter rounds twice.
    print(sum(quantised(form, torch.bfloat16) for form in (fp8_per_tensor, fp8_per_block)), "quantised experts")
