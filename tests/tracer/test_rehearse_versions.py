"""Parts of torch that a rehearsal takes the place of, and that differ between versions of it."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from foretrace.tracer.rehearse.data import checkpoints
from foretrace.tracer.rehearse.device import stand_ins
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.session import watch_functions

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("is_of_c", [False, True])
def test_what_applies_a_function_may_be_of_python_or_of_c(
    monkeypatch: pytest.MonkeyPatch, is_of_c: bool
) -> None:
    """Of C it is in torch 2.15; there, too, a function knows that it is differentiated."""
    function: Any = torch.autograd.Function
    base: Any = torch._C._FunctionBase
    own = vars(base if is_of_c else function)["apply"]
    monkeypatch.setattr(function, "apply", own)
    lane = SimpleNamespace(applies=None)
    session: Any = SimpleNamespace(lane=lane, has_gradients=torch.is_grad_enabled)
    watch_functions(session)
    seen = []

    class Square(function):  # type: ignore[misc]  # torch is untyped here
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            seen.append((lane.applies, torch.is_grad_enabled()))
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return 2 * gradient * ctx.saved_tensors[0]

    x = torch.tensor(3.0, requires_grad=True)
    Square.apply(x).backward()
    assert x.grad == 6.0
    assert seen == [(True, False)]
    assert lane.applies is None


def test_what_only_some_versions_have_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in groups have no rule before torch 2.8."""
    metas = pytest.importorskip("torch._meta_registrations")
    monkeypatch.delattr(metas, "_meta_grouped_mm_common", raising=False)
    stand_ins._grouped_products()
    assert not hasattr(metas, "_meta_grouped_mm_common")


def test_a_torch_that_cannot_place_what_it_loads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch 2.6 what is read under a fake mode is on no device."""
    monkeypatch.delattr(pytest.importorskip("torch._utils"), "_restore_device_fake_mode", raising=False)
    session: Any = SimpleNamespace(placement=SimpleNamespace(is_met=True))
    with (
        pytest.raises(RehearsalError, match=re.escape(f"with torch {torch.__version__}: use 2.7")),
        checkpoints.placing(session, None),
    ):
        pass
