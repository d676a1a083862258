"""Operators whose results are computed on known numbers, by kind: they create, fill, compute or overwrite.

Libraries compute constants while they build a model: bases of irreducible representations, tables of angles,
filters. Shapes may depend on these numbers: on how many eigenvalues are 0, for example.
"""
# ruff: noqa: SLF001 - this module asks torch about its operators

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

FACTORIES: Final = frozenset(
    {
        "aten.arange", "aten.eye", "aten.full", "aten.lift_fresh", "aten.linspace", "aten.logspace",
        "aten.ones", "aten.randint", "aten.randperm", "aten.scalar_tensor", "aten.zeros", "aten.tril_indices",
        "aten.triu_indices", "aten.bartlett_window", "aten.blackman_window", "aten.hamming_window",
        "aten.hann_window", "aten.kaiser_window", "aten.rand", "aten.randn",
    }
)  # fmt: skip
"""Operators that make numbers of no other tensor's."""

LIKE: Final = frozenset(
    {
        "aten.full_like", "aten.new_full", "aten.new_ones", "aten.new_zeros", "aten.ones_like",
        "aten.randint_like", "aten.zeros_like", "aten.rand_like", "aten.randn_like",
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
        "aten.masked_fill_", "aten.bernoulli", "aten.bernoulli_", "aten.multinomial", "aten.random_",
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

DRAWS: Final = frozenset(
    {
        "aten.rand", "aten.rand_like", "aten.randn", "aten.randn_like", "aten.uniform_", "aten.normal_",
        "aten.exponential_",
    }
)  # fmt: skip
"""Operators that draw fractions, also the first values of parameters, of which nothing depends."""

OVERWRITES: Final = frozenset(
    {
        "aten.bernoulli_", "aten.copy_", "aten.exponential_", "aten.fill_", "aten.normal_", "aten.random_",
        "aten.uniform_", "aten.zero_",
    }
)  # fmt: skip
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

FOLLOWED: Final = FACTORIES | LIKE | COMPUTED | BLANK | OVERWRITES

PRODUCTS: Final[Mapping[str, int]] = {
    "aten.mm": 0, "aten.bmm": 0, "aten.mv": 0, "aten.dot": 0, "aten.vdot": 0,
    "aten.addmm": 1, "aten.addmv": 1, "aten.baddbmm": 1, "aten.addbmm": 1,
}  # fmt: skip
"""Products, by which of their operands is the first factor: over its last dimension it is summed."""

DECOMPOSES: Final = frozenset(
    {
        "aten._linalg_det", "aten._linalg_eigh", "aten._linalg_slogdet", "aten._linalg_solve_ex",
        "aten._linalg_svd", "aten.cholesky_inverse", "aten.linalg_cholesky_ex", "aten.linalg_eig",
        "aten.linalg_householder_product", "aten.linalg_inv_ex", "aten.linalg_lu_factor_ex",
        "aten.linalg_matrix_exp", "aten.linalg_qr", "aten.linalg_solve_triangular",
    }
)  # fmt: skip
"""Operators on matrices that take a third power of their sides."""

ROWS: Final = frozenset(
    {
        "aten._fft_c2c", "aten._fft_c2r", "aten._fft_r2c", "aten._log_softmax", "aten._softmax",
        "aten.complex", "aten.cummax", "aten.cummin", "aten.cumprod", "aten.cumprod_", "aten.cumsum_",
        "aten.diag_embed", "aten.index_add", "aten.index_add_", "aten.index_copy", "aten.index_copy_",
        "aten.index_fill", "aten.index_fill_", "aten.linalg_cross", "aten.linalg_vector_norm",
        "aten.logcumsumexp", "aten.logsumexp", "aten.nansum", "aten.polar", "aten.std", "aten.std_mean",
        "aten.trace", "aten.tril_", "aten.triu_", "aten.var", "aten.var_mean",
    }
)  # fmt: skip
"""Operators along dimensions, and those that put elements in places."""

MOST_OPERATIONS: Final = 1 << 26
"""Multiplications above which a product or a decomposition is left out: they take tens of milliseconds."""

MOST_FRACTIONS: Final = 1 << 17
"""Elements above which a result is left out: a table of angles as long as a text is copied once per layer."""


def is_followed(name: str, func: Any) -> bool:
    """Whether the operator *func*, called *name*, is computed on known numbers although no list names it.

    This holds for operators on each element that draw no random numbers. An operator that is composed of
    others is followed through these instead: in place it would be computed twice.
    """
    import torch

    if name in PRODUCTS or name in DECOMPOSES or name in ROWS:
        return True
    if func.namespace != "aten" or name.endswith("_backward") or torch.Tag.pointwise not in func.tags:
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    is_composite = has_kernel(func.name(), "CompositeImplicitAutograd")
    return torch.Tag.nondeterministic_seeded not in func.tags and not is_composite


def is_laborious(name: str, args: Sequence[Any], result: Any) -> bool:
    """Whether the operator *name* of *args* takes long for its first *result*; never if a list names it."""
    if name not in FOLLOWED and result.numel() > MOST_FRACTIONS:
        return True
    if name in PRODUCTS:
        return bool(result.numel() * args[PRODUCTS[name]].shape[-1] > MOST_OPERATIONS)
    if name in DECOMPOSES:
        shape = tuple(args[0].shape)
        return bool(prod(shape) * max(shape[-2:]) > MOST_OPERATIONS)
    return False
