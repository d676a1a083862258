"""FLOPs of decompositions are those of their algorithms, step by step, of transforms by convention."""

from collections.abc import Callable
from math import log2
from typing import Any

import pytest

from foretrace.tracer.rehearse.tape.calls import Call
from foretrace.tracer.rehearse.tape.works import Work, work_of

torch = pytest.importorskip("torch")

N, TALL, RIGHT, BATCH = 400, 700, 30, 3
CLOSE = 0.02
"""What the lower powers of the sizes are of the highest one, about."""


def _steps(m: int, n: int, k: int, each: float) -> float:
    """Return *each* for all elements of what is left of an m x n matrix after 0, 1, ..., k - 1 steps."""
    return sum(each * (m - j) * (n - j) for j in range(k))


def _matrix(*shape: int, dtype: Any = None) -> Any:
    return torch.empty(shape, dtype=dtype, device="meta")


def _work(name: str, *args: Any, **kwargs: Any) -> Work:
    operator = getattr(torch.ops.aten, name).default
    out = operator(*args, **kwargs)
    names = [argument.name for argument in operator._schema.arguments]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    return work_of(Call(f"aten.{name}", (*args, *kwargs.values()), named, out))


SQUARE, TALL_ONE, RIGHTS = (N, N), (TALL, N), (N, RIGHT)
TRIANGLE = sum(2 * j * RIGHT for j in range(N))

CASES: dict[str, tuple[Callable[[], Work], float]] = {
    "cholesky": (
        lambda: _work("linalg_cholesky_ex", _matrix(*SQUARE)),
        sum(2 * j * (N - j) for j in range(N)),
    ),
    "lu": (lambda: _work("linalg_lu_factor_ex", _matrix(*TALL_ONE)), _steps(TALL, N, N, 2)),
    "wide lu": (lambda: _work("linalg_lu_factor_ex", _matrix(N, TALL)), _steps(N, TALL, N, 2)),
    "determinant": (lambda: _work("_linalg_slogdet", _matrix(*SQUARE)), _steps(N, N, N, 2)),
    "solve": (
        lambda: _work("_linalg_solve_ex", _matrix(*SQUARE), _matrix(*RIGHTS)),
        _steps(N, N, N, 2) + 2 * TRIANGLE,
    ),
    "inverse": (lambda: _work("linalg_inv_ex", _matrix(*SQUARE)), 3 * _steps(N, N, N, 2)),
    "triangle": (
        lambda: _work("linalg_solve_triangular", _matrix(*SQUARE), _matrix(*RIGHTS), upper=True),
        TRIANGLE,
    ),
    "two triangles": (lambda: _work("cholesky_solve", _matrix(*RIGHTS), _matrix(*SQUARE)), 2 * TRIANGLE),
    "qr": (lambda: _work("linalg_qr", _matrix(*TALL_ONE), "reduced"), 2 * _steps(TALL, N, N, 4)),
    "qr without q": (lambda: _work("linalg_qr", _matrix(*TALL_ONE), "r"), _steps(TALL, N, N, 4)),
    "whole q": (
        lambda: _work("linalg_qr", _matrix(*TALL_ONE), "complete"),
        _steps(TALL, N, N, 4) + _steps(TALL, TALL, N, 4),
    ),
    "applied": (
        lambda: _work("ormqr", _matrix(*TALL_ONE), _matrix(N), _matrix(TALL, RIGHT)),
        sum(4 * (TALL - j) * RIGHT for j in range(N)),
    ),
    "values of a symmetric matrix": (
        lambda: _work("_linalg_eigh", _matrix(*SQUARE), "L", False),
        sum(4 * (N - j) ** 2 for j in range(N)),  # a reflection from both sides: symv and syr2
    ),
    "singular values of a tall one": (
        lambda: _work("_linalg_svd", _matrix(10 * N, N), False, False),
        _steps(10 * N, N, N, 4) + _steps(N, N, N, 8),  # a QR, then two diagonals of the triangle
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_flops_are_those_of_the_steps(name: str) -> None:
    """Each step treats what is left of the matrix: a multiply-add an element, or two for a reflection."""
    call, expected = CASES[name]
    work = call()
    assert work.flops == pytest.approx(expected, rel=CLOSE)
    assert not work.is_known
    assert work.kind == "gemm"
    assert 2 * work.m * work.n * work.k * work.batch == pytest.approx(work.flops, rel=CLOSE)


@pytest.mark.parametrize(
    "name", ["linalg_cholesky_ex", "linalg_inv_ex", "_linalg_eigh", "linalg_eig", "_linalg_svd"]
)
def test_matrices_of_a_batch_are_decomposed_one_by_one(name: str) -> None:
    """As many FLOPs each; complex ones take four times as many, vectors more than values alone."""
    one, many = _work(name, _matrix(*SQUARE)), _work(name, _matrix(BATCH, *SQUARE))
    assert many.flops == pytest.approx(BATCH * one.flops)
    assert many.batch == BATCH
    assert _work(name, _matrix(*SQUARE, dtype=torch.complex64)).flops == pytest.approx(4 * one.flops)
    if name == "_linalg_eigh":
        assert one.flops > _work(name, _matrix(*SQUARE), "L", False).flops
    if name == "_linalg_svd":
        assert one.flops > _work(name, _matrix(*SQUARE), False, False).flops


def test_transforms_count_by_the_convention() -> None:
    """5 n log n for complex ones, together along all their dimensions; half where one side is real."""
    whole = _work("_fft_c2c", _matrix(BATCH, 64, 128, dtype=torch.complex64), [1, 2], 0, True)
    n = 64 * 128
    assert whole.flops == BATCH * 5 * n * log2(n)
    assert whole.kernels == 2
    assert whole.bytes_moved == 2 * 2 * BATCH * n * 8
    there = _work("_fft_r2c", _matrix(BATCH, 64, 128), [1, 2], 0, True)
    back = _work("_fft_c2r", _matrix(BATCH, 64, 65, dtype=torch.complex64), [1, 2], 0, 128)
    assert there.flops == back.flops == whole.flops / 2
    assert not any(work.is_known for work in (whole, there, back))


def test_what_depends_on_numbers_has_no_flops() -> None:
    """How often an exponential squares depends on the norm: its bytes alone are known."""
    work = _work("linalg_matrix_exp", _matrix(*SQUARE))
    assert (work.kind, work.flops, work.is_known) == ("memory", 0, False)
