"""Of decompositions and transforms the bytes alone are known, and that they tell no time."""

from typing import Any

import pytest

from foretrace.tracer.rehearse.tape.calls import Call
from foretrace.tracer.rehearse.tape.works import work_of

torch = pytest.importorskip("torch")

MATRIX = torch.empty(400, 400, device="meta")
CASES: dict[str, tuple[Any, ...]] = {
    "linalg_cholesky_ex": (MATRIX,),
    "linalg_lu_factor_ex": (MATRIX,),
    "_linalg_slogdet": (MATRIX,),
    "_linalg_solve_ex": (MATRIX, MATRIX),
    "linalg_inv_ex": (MATRIX,),
    "linalg_qr": (MATRIX, "reduced"),
    "_linalg_eigh": (MATRIX,),
    "linalg_eig": (MATRIX,),
    "_linalg_svd": (MATRIX,),
    "linalg_matrix_exp": (MATRIX,),
    "_fft_r2c": (MATRIX, [1], 0, True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_decomposition_has_its_bytes_and_is_not_known(name: str) -> None:
    out = getattr(torch.ops.aten, name).default(*CASES[name])
    work = work_of(Call(f"aten.{name}", CASES[name], {}, out))
    assert (work.kind, work.flops, work.is_known) == ("memory", 0, False)
    assert work.bytes_moved > 400 * 400 * 4


def test_a_norm_is_known() -> None:
    out = torch.linalg.vector_norm(MATRIX)
    assert work_of(Call("aten.linalg_vector_norm", (MATRIX,), {}, out)).is_known
