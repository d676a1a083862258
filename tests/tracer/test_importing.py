"""A module that is waited for is told once, when it is loaded, whatever was asked about it before."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from foretrace.tracer.importing import Expectation


@pytest.mark.parametrize("n_asked", [0, 1, 3])
def test_a_module_is_told_when_it_is_loaded_not_when_somebody_asks_for_it(
    n_asked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks whether torch can be imported before it does."""
    (tmp_path / "waited_for.py").write_text("number = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    told: list[int] = []
    expectation = Expectation("waited_for", lambda module: told.append(module.number))
    for _ in range(n_asked):
        spec = importlib.util.find_spec("waited_for")
        assert spec is not None
    assert told == []
    module = importlib.import_module("waited_for")
    assert told == [1]
    assert expectation not in sys.meta_path
    importlib.reload(module)
    assert told == [1]
    assert importlib.util.find_spec("waited_for") is module.__spec__
    del sys.modules["waited_for"]


def test_a_module_that_is_not_there_is_not_found() -> None:
    expectation = Expectation("not_there_at_all", lambda module: None)
    assert importlib.util.find_spec("not_there_at_all") is None
    expectation.remove()
    assert expectation not in sys.meta_path


def test_a_name_is_found_in_a_package_that_is_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As stages of pipelines, when a hook comes with the import of their package."""
    inner = tmp_path / "an_outer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "an_outer" / "__init__.py").write_text("")
    (inner / "__init__.py").write_text("from an_outer.inner import leaf")
    (inner / "leaf.py").write_text(
        "from foretrace.tracer import internals\n"
        "class Stage: pass\n"
        "found = internals._follow('an_outer.inner.leaf.Stage')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    leaf = importlib.import_module("an_outer.inner.leaf")
    assert leaf.found is leaf.Stage
