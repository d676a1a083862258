"""Operators of linear algebra in many dependent steps on a matrix: their bytes say little of their time."""

from __future__ import annotations

from typing import Final

DECOMPOSITIONS: Final = frozenset(
    {
        "aten._linalg_det", "aten._linalg_eigh", "aten._linalg_slogdet", "aten._linalg_solve_ex",
        "aten._linalg_svd", "aten.cholesky_inverse", "aten.cholesky_solve", "aten.geqrf",
        "aten.linalg_cholesky_ex", "aten.linalg_eig", "aten.linalg_householder_product", "aten.linalg_inv_ex",
        "aten.linalg_ldl_factor_ex", "aten.linalg_lstsq", "aten.linalg_lu", "aten.linalg_lu_factor_ex",
        "aten.linalg_lu_solve", "aten.linalg_matrix_exp", "aten.linalg_qr", "aten.linalg_solve_triangular",
        "aten.ormqr", "aten.triangular_solve",
    }
)  # fmt: skip
"""Those of which only the bytes of the operands are known, as of a custom kernel."""
