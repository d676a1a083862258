"""Operators on fractions whose results are computed: those on each element, and linear algebra.

Libraries compute constants while they build a model: bases of irreducible representations, tables of angles,
filters. Shapes may depend on these numbers: on how many eigenvalues are 0, for example.
"""
# ruff: noqa: SLF001 - this module asks torch about its operators

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

from foretrace.tracer.rehearse.values.computed import FOLLOWED

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
