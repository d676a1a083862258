"""Constants that a library computes while it builds a model are what torch computes, as are their sizes."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.data.numbers import Numbers, is_followed
from foretrace.tracer.rehearse.data.stated import Stated
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import rehearsal_folder

torch = pytest.importorskip("torch")
fakes = pytest.importorskip("torch._subclasses.fake_tensor")

SCRIPT = Path(__file__).parent / "bases.py"

aten: Any = torch.ops.aten
MATRIX = torch.arange(9.0).reshape(3, 3) * 0.1 + torch.eye(3)
SYMMETRIC = MATRIX + MATRIX.T
PLACES = torch.tensor([2, 0])

CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "aten.mm": (aten.mm.default, (MATRIX, SYMMETRIC)),
    "aten.bmm": (aten.bmm.default, (MATRIX[None], SYMMETRIC[None])),
    "aten.mv": (aten.mv.default, (MATRIX, MATRIX[0])),
    "aten.dot": (aten.dot.default, (MATRIX[1], MATRIX[0])),
    "aten.addmm": (aten.addmm.default, (MATRIX, MATRIX, SYMMETRIC)),
    "aten.sqrt": (aten.sqrt.default, (MATRIX,)),
    "aten.exp": (aten.exp.default, (MATRIX,)),
    "aten.sin": (aten.sin.default, (MATRIX,)),
    "aten.atan2": (aten.atan2.default, (MATRIX, SYMMETRIC)),
    "aten.isinf": (aten.isinf.default, (MATRIX / 0,)),
    "aten.cumprod": (aten.cumprod.default, (MATRIX, 0)),
    "aten.std": (aten.std.correction, (MATRIX, [1])),
    "aten.index_add": (aten.index_add.default, (MATRIX, 0, PLACES, SYMMETRIC[:2])),
    "aten.index": (aten.index.Tensor, (MATRIX, [PLACES])),
    "aten.diag_embed": (aten.diag_embed.default, (MATRIX,)),
    "aten.complex": (aten.complex.default, (MATRIX, SYMMETRIC)),
    "aten.linalg_vector_norm": (aten.linalg_vector_norm.default, (MATRIX,)),
    "aten._linalg_eigh": (aten._linalg_eigh.default, (SYMMETRIC,)),
    "aten._linalg_svd": (aten._linalg_svd.default, (MATRIX,)),
    "aten._linalg_det": (aten._linalg_det.default, (MATRIX,)),
    "aten._linalg_solve_ex": (aten._linalg_solve_ex.default, (MATRIX, SYMMETRIC)),
    "aten.linalg_inv_ex": (aten.linalg_inv_ex.default, (MATRIX,)),
    "aten.linalg_qr": (aten.linalg_qr.default, (MATRIX,)),
    "aten.linalg_matrix_exp": (aten.linalg_matrix_exp.default, (MATRIX,)),
    "aten._fft_r2c": (aten._fft_r2c.default, (MATRIX, [1], 0, True)),
}


def known(numbers: Numbers, real: Any) -> Any:
    """Return a fake tensor of which *numbers* know that its elements are those of *real*."""
    with fakes.FakeTensorMode():
        made = torch.empty(real.shape, dtype=real.dtype)
    numbers.keep(made, real)
    return made


def tensors(found: Any) -> list[Any]:
    """Return the tensors that an operator has returned."""
    return list(found) if isinstance(found, list | tuple) else [found]


@pytest.mark.parametrize("name", CALLS)
def test_what_is_made_of_known_fractions_is_what_torch_makes(name: str) -> None:
    """Element by element, products and decompositions; of unknown ones nothing is known."""
    func, args = CALLS[name]
    assert is_followed(name, func)
    expected = tensors(func(*args))
    for is_known in (True, False):
        numbers, mode = Numbers(), fakes.FakeTensorMode()
        called = [known(numbers, one) if hasattr(one, "shape") else one for one in args]
        if not is_known:
            numbers.forget(called[:1])
        with mode:
            made = [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype) for one in expected]
        numbers.follow(name, func, called, {}, tuple(made))
        for one, real in zip(made, expected, strict=True):
            found = numbers.of(one)
            assert torch.equal(found, real) if is_known else found is None


def test_an_operator_in_place_changes_the_numbers_once_and_through_a_view() -> None:
    """As a basis that is scaled row by row; what is written with unknown numbers is unknown."""
    numbers = Numbers()
    whole, unknown = known(numbers, MATRIX), known(Numbers(), MATRIX[0])
    numbers.follow("aten.sqrt_", aten.sqrt_.default, (whole[1],), {}, whole[1])
    expected = MATRIX.clone()
    expected[1].sqrt_()
    assert torch.equal(numbers.of(whole), expected)
    numbers.follow("aten.addcmul_", aten.addcmul_.default, (whole[0], unknown, unknown), {}, whole[0])
    assert numbers.of(whole) is None


def test_complex_numbers_are_seen_in_parts_and_conjugate() -> None:
    """A conjugate is the same memory, seen otherwise; other bits are not read."""
    numbers, real = Numbers(), torch.complex(MATRIX, SYMMETRIC)
    made = known(numbers, real)
    views: tuple[Callable[[Any], Any], ...] = (
        torch.view_as_real,
        torch.conj,
        lambda one: one.real,
        lambda one: one.conj().imag,
        lambda one: torch.view_as_complex(torch.view_as_real(one)),
    )
    for view in views:
        assert torch.equal(numbers.of(view(made)), view(real))
    parts = known(numbers, torch.view_as_real(real))
    assert torch.equal(numbers.of(torch.view_as_complex(parts)), real)
    stated = Stated()
    stated.numbers.keep(made, real)
    assert stated.scalar(made[1, 2]) == complex(real[1, 2])
    assert stated.of(made).mean is None


def test_what_draws_or_is_made_of_others_or_changes_more_than_it_returns_is_left_out() -> None:
    """What draws is another number each time; what is made of others in place would be computed twice."""
    drawn = (aten.dropout.default, aten.poisson.default, aten.native_dropout.default)
    composite = (aten.square_.default, aten.multiply_.Tensor)
    views, changing = (aten.t.default, aten.view.default), (aten._native_batch_norm_legit.default,)
    for func in (*drawn, *composite, *views, *changing, aten._foreach_add_.List):
        assert not is_followed(".".join(func._schema.name.split("::")), func)


def test_a_basis_that_a_library_computes_has_the_size_of_a_real_run(tmp_path: Path, ranks: Any) -> None:
    """Null spaces, masks of norms and checks of equality, asked before the training and in it."""
    real = ranks.run([sys.executable, str(SCRIPT), "cpu"], ranks.env(), 1)
    assert real.status == (0,), real.errors
    asked = Asked(command=(str(SCRIPT),), world_size=1, ranks=(0,), warmup=0, steps=2)
    found = rehearse(asked, tmp_path / "run")
    said = (rehearsal_folder(tmp_path / "run") / "rank-00000" / "output.log").read_text()
    assert said == real.output
    assert len(said.splitlines()) == 6
    assert not found.stated
