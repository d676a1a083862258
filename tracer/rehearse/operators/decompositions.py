"""FLOPs of matrix decompositions and similar operators of linear algebra.

Counts are those of the standard algorithms, highest powers of the sizes only, in real arithmetic; complex
arithmetic takes four times as many. LAWN 41 is LAPACK Working Note 41, "Installation Guide for LAPACK",
appendix C; G&VL is Golub and Van Loan, "Matrix Computations", 4th edition. Their time on a GPU was not
measured: it is far longer than that of a matrix product with as many FLOPs, because their steps depend on
each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log2, prod
from types import MappingProxyType
from typing import Final

from foretrace.tracer.rehearse.operators.calls import Call, tensors_in
from foretrace.tracer.rehearse.operators.traffic import traffic
from foretrace.tracer.rehearse.operators.work import Work, dtype_of, shapes_of

COMPLEX_FACTOR: Final = 4
"""FLOPs of a complex multiply-add, relative to a real one."""


def decomposition(call: Call) -> Work:
    """Return the work of *call*: a matrix product with as many FLOPs, which is faster than the real one."""
    matrix = next(tensor for tensor in tensors_in(call.args) if len(tensor.shape) > 1)
    count = _COUNTS[call.name]
    flops = 0 if count is None else round(count(call) * (COMPLEX_FACTOR if matrix.dtype.is_complex else 1))
    batch, rows, columns = prod(matrix.shape[:-2]), matrix.shape[-2], matrix.shape[-1]
    area = batch * rows * columns
    work = Work(
        name=call.name,
        kind="gemm" if flops and area else "memory",
        shapes=shapes_of(call),
        dtype=dtype_of(tensors_in(call.args)),
        flops=flops,
        bytes_moved=traffic(call),
        is_known=False,
    )
    if work.kind == "memory":
        return work
    return work._replace(m=rows, n=columns, k=max(round(flops / (2 * area)), 1), batch=batch)


def transform(call: Call) -> Work:
    """Return the work of a Fourier transform: it reads and writes its operands once per dimension.

    FLOPs are ``5 n log2(n)`` for *n* complex elements that are transformed together, half of that if one side
    is real: the convention by which FFTW and cuFFT state their rates (Frigo and Johnson, "The Design and
    Implementation of FFTW3", Proceedings of the IEEE 93(2), 2005).
    """
    data, dims = call.args[:2]
    out = next(iter(tensors_in(call.out)))
    whole = data if call.name == "aten._fft_r2c" else out
    n_together = prod(whole.shape[dim] for dim in dims)
    n_times = whole.numel() // max(n_together, 1)
    per_element = 5 if call.name == "aten._fft_c2c" else 2.5
    return Work(
        name=call.name,
        kind="memory",
        shapes=shapes_of(call),
        dtype=dtype_of([data]),
        flops=round(per_element * n_times * n_together * log2(max(n_together, 1))),
        bytes_moved=traffic(call) + 2 * out.nbytes * (len(dims) - 1),
        kernels=len(dims),
        is_known=False,
    )


def _sizes(call: Call) -> tuple[int, int, int]:
    """Return the number of matrices, their rows and their columns."""
    matrix = call.args[0]
    return prod(matrix.shape[:-2]), matrix.shape[-2], matrix.shape[-1]


def _cubes(share: float) -> Callable[[Call], float]:
    """Return a function that counts *share* times n³ FLOPs for each matrix of n rows."""

    def count(call: Call) -> float:
        n_matrices, n, _ = _sizes(call)
        return n_matrices * share * n**3

    return count


def _lu(call: Call) -> float:
    """``xGETRF`` (LAWN 41): m n² - n³ / 3, with n the shorter side."""
    n_matrices, rows, columns = _sizes(call)
    m, n = max(rows, columns), min(rows, columns)
    return n_matrices * (m * n**2 - n**3 / 3)


def _solved(share: float, *, at: int = 1, of: int = 0) -> Callable[[Call], float]:
    """Return a function that counts solving for the columns of operand *at* with the factored matrix *of*.

    A triangle takes n² FLOPs per column, two triangles 2 n² (LAWN 41: ``xTRTRS``, ``xPOTRS``, ``xGETRS``).
    """

    def count(call: Call) -> float:
        right, n = call.args[at], call.args[of].shape[-1]
        return share * float(n * right.numel())

    return count


def _solve(call: Call) -> float:
    """``xGESV`` (LAWN 41): a factorisation, and two triangles per right-hand side."""
    matrix, right = call.args[:2]
    return _lu(call) + 2 * float(matrix.shape[-1] * right.numel())


def _reflections(call: Call) -> float:
    """``xGEQRF`` (LAWN 41): 2 m n² - 2 n³ / 3, with n the shorter side."""
    return 2 * _lu(call)


def _qr(call: Call) -> float:
    """``xGEQRF``, and ``xORGQR`` if Q is requested: 4 m q k - 2 (m + q) k² + 4 k³ / 3 (LAWN 41)."""
    n_matrices, m, n = _sizes(call)
    mode = call.named.get("mode", "reduced")
    k = min(m, n)
    q = {"r": 0, "complete": m}.get(mode, k)
    return _reflections(call) + n_matrices * (_generated(m, q, k) if q else 0)


def _generated(m: int, n: int, k: int) -> float:
    return 4 * m * n * k - 2 * (m + n) * k**2 + 4 * k**3 / 3


def _householder(call: Call) -> float:
    """``xORGQR`` (LAWN 41)."""
    n_matrices, m, n = _sizes(call)
    return n_matrices * _generated(m, n, call.args[1].shape[-1])


def _applied(call: Call) -> float:
    """``xORMQR`` (LAWN 41): 4 m n k - 2 n k² with k reflections, applied to m rows and n columns."""
    tau, other = call.args[1:3]
    k, is_left = tau.shape[-1], call.named.get("left", True)
    m, n = other.shape[-2:] if is_left else other.shape[-2:][::-1]
    return float(prod(other.shape[:-2]) * (4 * m * n * k - 2 * n * k**2))


def _least_squares(call: Call) -> float:
    """``xGELS``: reflections, applied to right-hand sides, and a triangle for each (G&VL, section 5.3)."""
    n_matrices, m, n = _sizes(call)
    n_right = call.args[1].numel() // max(n_matrices * m, 1)
    k = min(m, n)
    return float(_reflections(call) + n_matrices * n_right * (4 * m * k - 2 * k**2 + k**2))


def _eigen_symmetric(call: Call) -> float:
    """4/3 n³ for the tridiagonal form; 9 n³ in all if vectors are requested (G&VL, section 8.3)."""
    n_matrices, n, _ = _sizes(call)
    return n_matrices * (9 if call.named.get("compute_v", True) else 4 / 3) * n**3


def _singular(call: Call) -> float:
    """With or without a QR first, whichever is less (G&VL, figure 8.6.1); n is the shorter side.

    Values alone take 2 m n² + 2 n³ or 4 m n² - 4/3 n³, with vectors 6 m n² + 20 n³ or 14 m n² + 8 n³.
    """
    n_matrices, rows, columns = _sizes(call)
    m, n = max(rows, columns), min(rows, columns)
    square, cube = m * n**2, n**3
    if not call.named.get("compute_uv", True):
        return n_matrices * min(2 * square + 2 * cube, 4 * square - 4 / 3 * cube)
    return n_matrices * min(6 * square + 20 * cube, 14 * square + 8 * cube)


_COUNTS: Final[Mapping[str, Callable[[Call], float] | None]] = MappingProxyType(
    {
        "aten.linalg_cholesky_ex": _cubes(1 / 3),  # xPOTRF
        "aten.cholesky_inverse": _cubes(2 / 3),  # xPOTRI
        "aten.cholesky_solve": _solved(2, at=0, of=1),
        "aten.linalg_ldl_factor_ex": _cubes(1 / 3),  # xSYTRF
        "aten.linalg_lu": _lu,
        "aten.linalg_lu_factor_ex": _lu,
        "aten._linalg_det": _lu,
        "aten._linalg_slogdet": _lu,
        "aten.linalg_inv_ex": _cubes(2),  # xGETRF and xGETRI
        "aten._linalg_solve_ex": _solve,
        "aten.linalg_lu_solve": _solved(2, at=2),
        "aten.linalg_solve_triangular": _solved(1),
        "aten.triangular_solve": _solved(1, at=0, of=1),
        "aten.geqrf": _reflections,
        "aten.linalg_qr": _qr,
        "aten.linalg_householder_product": _householder,
        "aten.ormqr": _applied,
        "aten.linalg_lstsq": _least_squares,
        "aten._linalg_eigh": _eigen_symmetric,
        "aten.linalg_eig": _cubes(25),  # G&VL, section 7.5, with vectors
        "aten._linalg_eigvals": _cubes(10),  # the same, values alone
        "aten._linalg_svd": _singular,
        "aten.linalg_matrix_exp": None,  # the number of squarings depends on values
    }
)
"""FLOPs by operator, None if they depend on values; comments name the routine of LAPACK."""

DECOMPOSED: Final[Mapping[str, Callable[[Call], Work]]] = MappingProxyType(
    {
        **dict.fromkeys(_COUNTS, decomposition),
        **dict.fromkeys(("aten._fft_c2c", "aten._fft_r2c", "aten._fft_c2r"), transform),
    }
)
"""Operators of this module, and the function that returns the work of each."""
