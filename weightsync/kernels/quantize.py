"""Weights in 8 bits, as vLLM makes them: float8 (e4m3) and int8, each with its scales. MXFP4 too.

`values * scale` is roughly the weight again. All arithmetic is in float32, for weights in bfloat16, float16 or float32.
A row or a block does not depend on its neighbours. A weight is taken in strips, so no copy of the whole weight is made.
Pure, with equal results on CPUs and GPUs.

Mind the last bit. Division by a scale and multiplication by its reciprocal round some values differently, and vLLM does
both. On a GPU, torch also multiplies by the reciprocal when a tensor is divided by a Python number. Divisors are
therefore tensors here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

FP8_MAX = 448.0
"""The largest number of `torch.float8_e4m3fn`."""
BLOCK = 128
"""Rows and columns of a block that has one scale."""
LEAST_OF_BLOCK = 1e-4
"""The least magnitude of a block, for its scale."""
MX_BLOCK = 32
"""Columns that share a scale in MXFP4."""
_FP4_MAX = 6.0
_BETWEEN_FP4 = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""The midpoints between the magnitudes of 4-bit floats (e2m1): 0, 0.5, 1, 1.5, 2, 3, 4 and 6."""
_STRIP_ELEMENTS = 1 << 24
"""Elements of a strip. A strip bounds the scratch memory to 64 MiB of float32, or one row, or one row of blocks."""


@dataclass(frozen=True)
class Form:
    """A symmetric 8-bit format, with one float32 scale for each row (output channel) of a weight or one for all of it.

    The scales have the shape (rows, 1), as in checkpoints (`weight_scale`), or (1,).

    multiplies: whether a value is multiplied by the reciprocal of its scale instead of divided by the scale.
    """

    dtype: torch.dtype
    largest: float
    smallest_scale: float
    per_row: bool = True
    multiplies: bool = False

    @property
    def height(self) -> int | None:
        """The number of rows with scales of their own. None: all rows share a scale."""
        return 1 if self.per_row else None

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of a weight's scales, as a matrix."""
        return (rows if self.per_row else 1), 1

    def scale(self, maxima: torch.Tensor) -> torch.Tensor:
        """Return the float32 scales of rows, or of weights, from their largest magnitudes. Shapes are equal."""
        return (maxima / torch.full_like(maxima, self.largest)).clamp_min_(self.smallest_scale)

    def values(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the 8-bit values of a 2-D `weight` with the scales of all its rows.

        `weight` may be a part of the columns. With one scale it may be any part of the weight.
        """
        found = torch.empty(weight.shape, dtype=self.dtype, device=weight.device)
        for rows in _strips(weight, 1):
            own = scale[rows] if self.per_row else scale
            scaled = weight[rows] * own.reciprocal() if self.multiplies else weight[rows] / own
            if self.multiplies:
                scaled.nan_to_num_(self.largest)
            elif not self.dtype.is_floating_point:
                scaled.round_().nan_to_num_(0.0)  # a row of zeros has scale 0
            found[rows] = scaled.clamp_(-self.largest, self.largest).to(self.dtype)
        return found

    def __call__(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the 8-bit values of a whole 2-D weight, and its scales."""
        maxima = row_maxima(weight)
        scale = self.scale(maxima if self.per_row else maxima.amax().reshape(1))
        return self.values(weight, scale), scale


fp8_per_channel = Form(torch.float8_e4m3fn, FP8_MAX, 1.0 / (FP8_MAX * 512.0))
"""The format of vLLM's `quantization="fp8_per_channel"`, and of its `scaled_fp8_quant` with a scale for each token."""

int8_per_channel = Form(torch.int8, 127.0, 0.0)
"""Values rounded to the nearest, to even half-way, and never -128. vLLM's own int8 for experts rounds in the weight's
dtype, so its values are equal for float32 alone. vLLM's `scaled_int8_quant`, made for activations, has the same scales.
It multiplies: by the scale's reciprocal on CPUs, by 127 over the maximum on GPUs."""

fp8_per_tensor = Form(torch.float8_e4m3fn, FP8_MAX, 0.0, per_row=False, multiplies=True)
"""The format of vLLM's `quantization="fp8"`: `scaled_fp8_quant` with one scale for the tensor, multiplied by its
reciprocal. A weight of zeros has scale 0 and values 448, as in vLLM: 0 times infinity is NaN, and the kernel stores
NaN as 448."""


def row_maxima(weight: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude in each row of a 2-D weight: float32, of shape (rows, 1)."""
    low, high = weight.aminmax(dim=1, keepdim=True)
    return torch.maximum(low.abs(), high.abs()).float()


@dataclass(frozen=True)
class BlockForm:
    """The symmetric float8 format with a float32 scale for each block of 128 by 128.

    Blocks at the end may be smaller. Scales have the shape (blocks down, blocks across), as in checkpoints
    (`weight_scale_inv`). On a GPU, torch's compiler chooses how vLLM divides, and the last bit may differ. The fields
    name its choices.

    multiplies: whether the largest magnitude is multiplied by the reciprocal of 448 instead of divided by 448.
    approximates: whether the reciprocal of a scale is a GPU's faster one, off by up to two units in the last place.
        `RowQuantiser` computes it on GPUs. All other code divides exactly.
    """

    multiplies: bool = False
    approximates: bool = False
    dtype: torch.dtype = torch.float8_e4m3fn
    per_row: bool = False
    height: int = BLOCK

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of a weight's scales."""
        return -(-rows // BLOCK), -(-columns // BLOCK)

    def __call__(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the 8-bit values of a whole 2-D weight, and its scales."""
        rows, columns = weight.shape
        found = torch.empty(weight.shape, dtype=self.dtype, device=weight.device)
        scale = torch.empty(self.scale_shape(rows, columns), dtype=torch.float32, device=weight.device)
        across = scale.shape[1]
        for strip in _strips(weight, BLOCK):
            part = weight[strip]
            high = -(-part.shape[0] // BLOCK)
            padded = part.new_zeros((high * BLOCK, across * BLOCK))
            padded[: part.shape[0], :columns] = part
            blocks = padded.view(high, BLOCK, across, BLOCK)
            maxima = blocks.abs().amax(dim=(1, 3), keepdim=True).float().clamp_min_(LEAST_OF_BLOCK)
            scales = maxima * (1 / FP8_MAX) if self.multiplies else maxima / torch.full_like(maxima, FP8_MAX)
            scaled = (blocks * scales.reciprocal()).to(self.dtype).view(padded.shape)
            found[strip] = scaled[: part.shape[0], :columns]
            scale[strip.start // BLOCK : strip.start // BLOCK + high] = scales.view(high, across)
        return found, scale


fp8_per_block = BlockForm()
"""The format of vLLM's `quantization="fp8_per_block"` on a CPU, and of checkpoints."""

block_forms = (BlockForm(True, True), BlockForm(True, False), BlockForm(False, True), fp8_per_block)
"""The formats of vLLM's `quantization="fp8_per_block"` on GPUs, the likeliest one first."""


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 4-bit floats of a weight, and a power of two for each 32 columns of a row (OCP Microscaling, MXFP4).

    Both are uint8, laid out as in GPT-OSS's checkpoints. For a weight of shape (..., columns), values have the shape
    (..., columns / 32, 16). A byte holds two values, the first in its lower half. Scales have the shape (..., columns /
    32) and are exponents with a bias of 127.

    The bits equal those of transformers for a bfloat16 weight. A scale is the least power of two that keeps the largest
    value in range. Half-way values are rounded away from zero. Takes 16 bytes of scratch memory for each element.
    """
    groups = weight.float().contiguous().unflatten(-1, (-1, MX_BLOCK))
    maxima = groups.abs().amax(-1)
    mantissa = 0x7FFFFF  # adding it rounds any mantissa other than 0 up into the exponent
    exponents = (maxima / torch.full_like(maxima, _FP4_MAX)).view(torch.int32).add_(mantissa) >> 23
    scaled = groups * ((254 - exponents) << 23).view(torch.float32).unsqueeze(-1)
    between = torch.tensor(_BETWEEN_FP4, dtype=torch.float32, device=weight.device)
    values = torch.bucketize(scaled.abs(), between, out_int32=True, right=True).to(torch.uint8)
    values |= scaled.signbit().to(torch.uint8) << 3
    return values[..., 0::2] | values[..., 1::2] << 4, exponents.to(torch.uint8)


def _strips(weight: torch.Tensor, multiple: int) -> Iterator[slice]:
    """Yield the rows in strips of a bounded size, each but the last one a `multiple` of rows high."""
    rows, columns = weight.shape
    high = max(1, _STRIP_ELEMENTS // (max(1, columns) * multiple)) * multiple
    for start in range(0, rows, high):
        yield slice(start, min(start + high, rows))
