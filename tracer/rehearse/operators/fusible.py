"""Which operators a compiler fuses, and what they read if that is not each operand once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from foretrace.tracer.rehearse.operators.calls import tensors_in
from foretrace.tracer.rehearse.operators.work import Work

APART: Final = (
    *("embedding_dense_backward", "embedding_bag", "index_put", "index_add", "index_copy", "scatter"),
    *("sort", "topk", "cumsum", "cumprod", "unique", "nonzero", "masked_select", "histc", "bincount"),
    *("pool", "upsample", "grid_sampl", "_foreach_", "_fused_adam", "_fused_sgd", "fft", "linalg", "svd"),
    *("multinomial", "ctc_loss", "searchsorted", "bucketize", "max_unpool", "roll", "repeat_interleave"),
)
"""Parts of the names of operators that stay kernels of their own."""

GATHERS: Final = frozenset({"aten.embedding", "aten.index", "aten.index_select", "aten.gather"})
"""Operators that read as much of their first operand as they make."""

RANDOM: Final = frozenset(
    {"aten.bernoulli_", "aten.rand_like", "aten.randn_like", "aten.normal_", "aten.uniform_"}
    | {"aten.zero_", "aten.fill_"}
)
"""Operators that read nothing: one number, or random numbers, which are drawn again where needed."""

OVERWRITES: Final = frozenset({"aten.copy_"})
"""Operators that write their first operand, and do not read it."""

MADE: Final = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_full", "new_ones", "empty_like")
"""Ends of the names of operators that use only the shape of their operand."""

COLUMNS: Final = frozenset({"aten.native_layer_norm_backward", "aten._fused_rms_norm_backward"})
"""Backwards that also reduce over the rows: they read gradient and input once more."""

SUMS: Final = ("aten.sum", "aten.mean", "aten.amax", "aten.var", "aten.norm")
"""Reductions, by the beginnings of their names."""

BATCHES: Final = frozenset(
    {"aten.native_batch_norm", "aten.cudnn_batch_norm", "aten._native_batch_norm_legit"}
)
"""Norms over all but one dimension: one kernel reduces, the next one applies the result."""

BATCHES_BACKWARD: Final = frozenset({"aten.native_batch_norm_backward", "aten.cudnn_batch_norm_backward"})
"""Their backwards, which reduce gradient and input."""


def is_fused(name: str, work: Work) -> bool:
    """Return whether an operator is element-wise, or a reduction, that a compiler fuses with others."""
    if work.kind != "memory" or not work.is_known or not name.startswith(("aten.", "prims.")):
        return False
    return not any(part in name for part in APART)


def gathers(name: str) -> bool:
    """Return whether an operator picks rows of its first operand."""
    return name in GATHERS


def is_random(name: str) -> bool:
    """Return whether the numbers of an operator do not depend on those of its operands."""
    return name in RANDOM or name.endswith(MADE)


def is_sum(name: str, over: Sequence[Any]) -> bool:
    """Return whether an operator does nothing but reduce *over* other dimensions than the last."""
    return bool(over) and name.startswith(SUMS)


def passes_over(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any]
) -> list[Any]:
    """Return the operands that a kernel of its own reads, to reduce over other dimensions than the last."""
    if name in COLUMNS or name in BATCHES_BACKWARD:
        return tensors_in(args[:2])
    if name in BATCHES:
        return tensors_in(args[:1])
    if not name.startswith(SUMS) or not results:
        return []
    operand = args[0]
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not isinstance(dims, list | tuple) or not dims or not operand.dim():
        return []
    return [] if operand.dim() - 1 in {one % operand.dim() for one in dims} else [operand]
