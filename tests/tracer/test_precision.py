"""In what type a model computes is read off the products that it has run, wherever autocast was entered."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import foretrace
from foretrace.tracer.shape import computed_in
from foretrace.traces.store import open_run

torch = pytest.importorskip("torch")
nn = torch.nn
Module: Any = nn.Module
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint

BF16 = torch.bfloat16


class Casting(Module):  # type: ignore[misc]  # torch is untyped here
    """Enters autocast inside of its call, as Accelerate arranges it; its head may be exact."""

    def __init__(self, keeps: Callable[..., Any] | None = None, dtype: Any = BF16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 64)
        self.keeps, self.dtype = keeps, dtype

    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", self.dtype):
            for layer in self.layers:
                x = layer(x) if self.keeps is None else self.keeps(layer, x)
        with torch.autocast("cpu", enabled=False):
            return {"ids": torch.ones(1, dtype=torch.long), "logits": self.head(x.float())}


def reentrant(layer: Any, x: Any) -> Any:
    """Call *layer* so that it leaves no nodes behind."""
    return checkpoint(layer, x, use_reentrant=True)


def non_reentrant(layer: Any, x: Any) -> Any:
    """Call *layer* so that what it keeps is computed again."""
    return checkpoint(layer, x, use_reentrant=False)


def described(path: Path, model: Any, steps: int = 2) -> str:
    """Return in what type a recording says that *model* computes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with foretrace.record(path):
        for _ in range(steps):
            model(torch.ones(2, 4, requires_grad=True))["logits"].sum().backward()
            optimizer.step()
    info = open_run(path).info
    assert info.model is not None
    assert info.warnings == ()
    return str(info.model["dtype"])


@pytest.mark.parametrize("keeps", [None, reentrant, non_reentrant])
def test_autocast_inside_of_a_call_is_seen(tmp_path: Path, keeps: Any) -> None:
    """Three layers of four: the head, with most of the numbers, is exact."""
    assert described(tmp_path / "run", Casting(keeps)) == "bf16"


def test_a_model_that_is_first_called_without_gradients_is_seen(tmp_path: Path) -> None:
    model = Casting(dtype=torch.float16)

    class Trained(Module):  # type: ignore[misc]  # torch is untyped here
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Any) -> Any:
            return self.inner(x)

    outer, n_calls = Trained(), 0
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.01)
    with foretrace.record(tmp_path / "run"):
        for n_calls in range(3):
            with torch.set_grad_enabled(n_calls > 0):
                loss = outer(torch.ones(2, 4))["logits"].sum()
            if n_calls:
                loss.backward()
                optimizer.step()
    assert (open_run(tmp_path / "run").info.model or {})["dtype"] == "fp16"


def test_most_products_decide() -> None:
    x = torch.ones(2, 4)
    w = torch.ones(4, 4, requires_grad=True)
    assert computed_in(x @ w) == torch.float32
    assert computed_in((None, (x @ w).bfloat16() @ w.bfloat16() @ w.bfloat16())) == BF16
    assert computed_in({"a": nn.Conv1d(2, 2, 1).double()(x[None, :, :2].double().mT)}) == torch.float64


def test_what_has_no_products_says_nothing() -> None:
    w = torch.ones(4, requires_grad=True)
    assert computed_in(w.bfloat16() + 1) is None
    assert computed_in(w.detach() @ w.detach()) is None
    assert computed_in(None) is None
