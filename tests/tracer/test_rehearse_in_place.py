"""Gradients of what is picked out of a tensor take its memory once, as they do where nobody watches."""

from pathlib import Path

import pytest
from tests.tracer import picking

from foretrace.tracer.rehearse.rehearsing import Asked, rehearse
from foretrace.tracer.rehearse.world.acting import Loaded

SCRIPT = Path(__file__).parent / "picking.py"
TABLE_BYTES = picking.WORDS * picking.WIDTH * 4


def _tables(folder: Path, loaded: Loaded, *how: str) -> float:
    """Return the peak of a rehearsal, in sizes of the table."""
    asked = Asked(command=(str(SCRIPT), *how), world_size=2, ranks=(0,))
    return float(rehearse(asked, folder / "run", on=loaded).memory["0"]["peak_bytes"] / TABLE_BYTES)


@pytest.mark.parametrize("way", picking.PICKS)
def test_a_gradient_of_what_is_picked_is_in_memory_once(tmp_path: Path, loaded: Loaded, way: str) -> None:
    """The table, its gradient, and what is picked with its places, which is a fraction of it."""
    assert 2 <= _tables(tmp_path, loaded, way) < 2.5


@pytest.mark.parametrize("way", picking.ORDERS)
def test_a_gradient_of_what_is_put_in_order_is_in_memory_once(
    tmp_path: Path, loaded: Loaded, way: str
) -> None:
    """The table, its gradient, and the places, which are two tables of float32: so much as in the forward."""
    assert 4 <= _tables(tmp_path, loaded, way) < 4.5


@pytest.mark.parametrize("way", ["index", "index_select", "gather", "take", "topk"])
def test_so_is_a_gradient_that_is_differentiated(tmp_path: Path, loaded: Loaded, way: str) -> None:
    """Torch writes in place there, too: the table, its gradient, and the gradient of that."""
    assert 3 <= _tables(tmp_path, loaded, way, "twice") < 3.5


def test_what_the_backward_of_a_script_adds_to_a_copy_is_one(tmp_path: Path, loaded: Loaded) -> None:
    """The table, zeros, and their copy with the gradient."""
    assert 3 <= _tables(tmp_path, loaded, "own") < 3.5
