"""Gradients of what is picked out of a tensor take its memory once, as they do where nobody watches."""

from pathlib import Path

import pytest

from tests.tracer import picking
from tracer.rehearse.acting import Loaded
from tracer.rehearse.rehearsing import Asked, rehearse

SCRIPT = Path(__file__).parent / "picking.py"
TABLE_BYTES = picking.WORDS * picking.WIDTH * 4


@pytest.mark.parametrize("way", picking.PICKS)
def test_a_gradient_of_what_is_picked_is_in_memory_once(tmp_path: Path, loaded: Loaded, way: str) -> None:
    """The table, its gradient, and what is picked with its places, which is a fraction of it."""
    asked = Asked(command=(str(SCRIPT), way), world_size=2, ranks=(0,))
    peak = rehearse(asked, tmp_path / "run", on=loaded).memory["0"]["peak_bytes"]
    assert 2 * TABLE_BYTES <= peak < 2.5 * TABLE_BYTES


@pytest.mark.parametrize("way", picking.ORDERS)
def test_a_gradient_of_what_is_put_in_order_is_in_memory_once(
    tmp_path: Path, loaded: Loaded, way: str
) -> None:
    """The table, its gradient, and the places, which are two tables of float32: so much as in the forward."""
    asked = Asked(command=(str(SCRIPT), way), world_size=2, ranks=(0,))
    peak = rehearse(asked, tmp_path / "run", on=loaded).memory["0"]["peak_bytes"]
    assert 4 * TABLE_BYTES <= peak < 4.5 * TABLE_BYTES
