"""Low-precision recipes: what runs in how many bits, and what quantising on the way costs.

A product takes both operands in few bits along the dimension that it sums over. So an input is written
twice, by rows for the forward product and by columns for the weight gradient; gradients of outputs likewise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, NamedTuple

from foretrace.simulator.workload.ops import DTYPE_BYTES, Op, memory
from foretrace.topologies.device import Device


class Recipe(NamedTuple):
    """How operands get into few bits.

    Attributes:
        moved: bytes read and written per element of 16 bit, both directions together.
        kernels: over which that is spread.
        weights_each: weights are quantised for every micro-batch; otherwise once per step, which is left out.
        rate: of products over that of products with one scale per tensor.
        splits: products that make gradients add to a second accumulator now and then, where that is needed.
        source: where this was read.
        in_blocks: a scale holds for a block along the sum, so that rows and columns are quantised apart.
        rescales: products that make gradients are those with one scale per tensor, at their rate, and their
            results are scaled in a pass of their own.
        is_delayed: scales come from the steps before, and ranks agree on them.
    """

    dtype: str
    moved: float
    kernels: int
    weights_each: bool
    rate: float
    splits: bool
    source: str
    rescales: bool = False
    in_blocks: bool = False
    is_delayed: bool = False


RECIPES: Final[Mapping[str, Recipe]] = MappingProxyType(
    {
        "delayed": Recipe(
            *("fp8", 4.0, 1, False, 1.0, True),
            "Transformer Engine, DelayedScaling: one kernel casts, transposes and takes the maximum",
            is_delayed=True,
        ),
        "current": Recipe(
            *("fp8", 6.0, 2, False, 1.0, True),
            "Transformer Engine, Float8CurrentScaling: the maximum is a pass of its own before the cast",
        ),
        "blockwise": Recipe(
            *("fp8", 4.0625, 1, False, 0.82, False),
            "Transformer Engine, Float8BlockScaling: one kernel, an fp32 scale per 128 values each way; "
            "rate from 22.9 ms of a layer on H200 in its GEMM Profiling Tutorial",
            in_blocks=True,
        ),
        "mxfp8": Recipe(
            *("fp8", 4.5, 1, False, 0.95, False),
            "OCP Microscaling 1.0 in Transformer Engine: one kernel, an 8-bit scale per 32 values each way: "
            "4.06 bytes, that take 1.11 times as long on B300 (GEMM Profiling Tutorial); rate from "
            "6.81 against 7.16 ms",
            in_blocks=True,
        ),
        "nvfp4": Recipe(
            *("fp4", 6.35, 2, False, 1.0, False),
            "Transformer Engine, NVFP4BlockScaling: maximum of the tensor, then 4 bits, and 8 of scale per "
            "16 values each way: 5.125 bytes, that take 1.24 times as long on B300 (GEMM Profiling Tutorial)",
            in_blocks=True,
        ),
        "tensorwise": Recipe(
            *("fp8", 6.0, 2, True, 1.0, True),
            "torchao float8, tensorwise: dynamic scales, maximum and cast; weights again in every forward",
        ),
        "rowwise": Recipe(
            *("fp8", 8.0, 3, True, 0.95, True),
            "torchao float8, rowwise: scales by rows in one kernel (2 + 1), by columns in two (2 + 2 + 1); "
            "forward a kernel of CUTLASS at 0.90 to 1 of the rate of cuBLAS (pytorch issue 147971), backward "
            "cuBLAS, and rows and columns of the result scaled after it (pytorch/ao issue 2184)",
            rescales=True,
        ),
    }
)
"""Recipes by name."""

MEMBER_LAUNCH: Final = 0.5
"""Time of the host for each member of a group, over that of an operation.

Four bare calls of 8 us beside 60 (``simulator/rehearsed/run.py``): its part of the input, two allocations,
and a product of cuBLAS (Transformer Engine, ``nvte_multi_stream_cublas_gemm``; its issue 1499:
"``torch.split()``, and ``torch.empty()`` (2x ``num_gemms`` calls)").
"""


def recipe_of(text: str) -> str:
    """Return the recipe that *text* names, ``""`` if it names none.

    >>> recipe_of("fp8-rowwise"), recipe_of("mxfp8"), recipe_of("bf16")
    ('rowwise', 'mxfp8', '')
    """
    return next((name for name in RECIPES if name in text.lower()), "")


def layouts(recipe: Recipe, device: Device) -> int:
    """Return in how many layouts *recipe* keeps what it quantises: by rows and by columns, or one for both.

    One is enough where a scale holds for the whole tensor and products take either: that is Blackwell, not
    Hopper or Ada, whose 8-bit products also have to be split. Reference: Transformer Engine,
    ``is_non_tn_fp8_gemm_supported``, issues 1261 and 1880.
    """
    return 2 if recipe.in_blocks or device.gemm_split_share < 1 else 1


def quantised(
    name: str, n_elements: int, recipe: Recipe | None, device: Device, members: int = 1, *, each: bool = False
) -> tuple[Op, ...]:
    """Return the quantisation of *n_elements* as *recipe* does it on *device*; nothing without one.

    Members of a group are quantised one by one, but for delayed scaling. If the host sees to *each*, it makes
    the tensors of every member on its own, but for block scales, whose tensors are cut out of one. Reference:
    Transformer Engine ``csrc/extensions/cast.cpp``, ``multi_tensor_quantize_impl`` and ``split_quantize``.
    """
    if recipe is None:
        return ()
    both = 2 if recipe.weights_each else layouts(recipe, device)
    # One layout fewer is written: a byte less for each element.
    moved = recipe.moved - (2 - both) * DTYPE_BYTES["fp8"]
    count = recipe.kernels * (1 if recipe.is_delayed else members)
    op = memory(name, round(n_elements * moved), recipe.dtype, count=count)
    launches = recipe.kernels + (MEMBER_LAUNCH * members if each and not recipe.in_blocks else 0)
    return (op if count == launches else replace(op, launches=launches),)


def rescaled(name: str, n_elements: int, dtype: str, recipe: Recipe | None) -> tuple[Op, ...]:
    """Return the pass over *n_elements* of *dtype* that scales the result of a product, if there is one."""
    if recipe is None or not recipe.rescales:
        return ()
    return (memory(name, 2 * DTYPE_BYTES[dtype] * n_elements, dtype),)
