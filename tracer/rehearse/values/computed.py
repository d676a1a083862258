"""Operators whose results are computed on known numbers, by kind: they create, fill, compute or overwrite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

FACTORIES: Final = frozenset(
    {
        "aten.arange", "aten.eye", "aten.full", "aten.lift_fresh", "aten.linspace", "aten.logspace",
        "aten.ones", "aten.randint", "aten.randperm", "aten.scalar_tensor", "aten.zeros", "aten.tril_indices",
        "aten.triu_indices", "aten.bartlett_window", "aten.blackman_window", "aten.hamming_window",
        "aten.hann_window", "aten.kaiser_window",
    }
)  # fmt: skip
"""Operators that make numbers of no other tensor's."""

LIKE: Final = frozenset(
    {
        "aten.full_like", "aten.new_full", "aten.new_ones", "aten.new_zeros", "aten.ones_like",
        "aten.randint_like", "aten.zeros_like",
    }
)  # fmt: skip
"""Operators that ask a tensor for its shape and type only."""

FRESH: Final = FACTORIES | LIKE
"""Operators that ask no tensor for its numbers."""

FILLS: Final[Mapping[str, tuple[int, float | None]]] = {
    "aten.zeros": (0, 0), "aten.zeros_like": (0, 0), "aten.new_zeros": (0, 0), "aten.zero_": (0, 0),
    "aten.ones": (0, 1), "aten.ones_like": (0, 1), "aten.new_ones": (0, 1),
    "aten.full": (1, None), "aten.full_like": (1, None), "aten.fill_": (1, None), "aten.new_full": (2, None),
}  # fmt: skip
"""Operators that fill a tensor with one number: which of their arguments it is, or, if not None, what."""

COMPUTED: Final = frozenset(
    {
        "aten._to_copy", "aten.abs", "aten.add", "aten.all", "aten.amax", "aten.amin", "aten.any",
        "aten.argmax", "aten.argmin", "aten.argsort", "aten.bitwise_and", "aten.bitwise_not",
        "aten._is_all_true", "aten._is_any_true",
        "aten.bitwise_or", "aten.cat", "aten.ceil", "aten.clamp", "aten.clamp_max", "aten.clamp_min",
        "aten.clone", "aten.constant_pad_nd", "aten.copy_", "aten.count_nonzero", "aten.cumsum", "aten.div",
        "aten.eq", "aten.fill_", "aten.flip", "aten.floor", "aten.floor_divide", "aten.fmod", "aten.gather",
        "aten.ge", "aten.gt", "aten.index", "aten.index_put_", "aten.index_select", "aten.le",
        "aten.logical_and", "aten.logical_not", "aten.logical_or", "aten.lt", "aten.masked_fill",
        "aten.max", "aten.maximum", "aten.mean", "aten.min", "aten.minimum", "aten.mul", "aten.ne",
        "aten.neg", "aten.pow", "aten.prod", "aten.remainder", "aten.repeat", "aten.roll", "aten.round",
        "aten.rsub", "aten.reciprocal", "aten.logical_xor", "aten.bitwise_xor",
        "aten.scatter", "aten.scatter_", "aten.scatter_add", "aten.scatter_add_",
        "aten.searchsorted", "aten.sort", "aten.stack", "aten.sub", "aten.sum", "aten.topk", "aten.tril",
        "aten.triu", "aten.where", "aten.zero_", "aten.add_", "aten.sub_", "aten.mul_", "aten.clamp_",
        "aten.masked_fill_", "aten.bernoulli", "aten.bernoulli_", "aten.random_",
        "aten.bitwise_and_", "aten.bitwise_or_", "aten.logical_and_", "aten.logical_or_",
        "aten.logical_not_", "aten.bitwise_not_", "aten.floor_divide_", "aten.div_", "aten.remainder_",
        "aten._pin_memory", "aten.unfold_backward", "aten.upsample_nearest1d",
        "aten.upsample_nearest2d",
    }
)  # fmt: skip
"""Operators that are computed where all of their operands are known."""

BLANK: Final = frozenset(
    {"aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided"}
)
"""Operators that make memory in which nothing has been written. Whole numbers in it count as zeros: no script
reads them before it has written them, and what it writes to a part is known then."""

OVERWRITES: Final = frozenset({"aten.bernoulli_", "aten.copy_", "aten.fill_", "aten.random_", "aten.zero_"})
"""Operators in place that ask nothing of what was there before."""

ABSORBS: Final[Mapping[str, bool]] = {
    f"aten.{kind}_{word}{end}": word == "or"
    for kind in ("bitwise", "logical")
    for word in ("and", "or")
    for end in ("", "_")
}
"""Operators on truths of which one operand can decide alone, and by which value: true or anything is true. A
generation ends with its last token, whatever the tokens are."""

FILLED: Final = BLANK | FILLS.keys()
"""Operators whose results are all one number."""

FOLLOWED: Final = FACTORIES | LIKE | COMPUTED | BLANK
