"""Whoever calls ``forward`` of a wrapper by himself: hooks saw the model without it, and knew no layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretrace.traces.layout import Layout
from foretrace.traces.rehearsal import RankTables, Rehearsal

SCRIPT, RANKS = Path(__file__).parent / "forwarding.py", 8


def _issued(tables: RankTables) -> list[Any]:
    """Return the operations and communications of the step that is kept."""
    steps = tables.places["step"].to_pylist()
    events = [event for event in tables.events.to_pylist() if steps[event["place"]] == 1]
    names = {0: tables.works["name"].to_pylist(), 1: tables.messages["kind"].to_pylist()}
    return [
        (names[event["what"]][event["item"]], event["stream"]) for event in events if event["what"] in names
    ]


@pytest.mark.parametrize(("way", "sharding"), [("ddp", "ddp"), ("fsdp", "fsdp")])
def test_a_wrapper_whose_forward_is_called_is_as_one_that_is_called(
    rehearsed: Callable[[str], tuple[Rehearsal, RankTables]], way: str, sharding: str
) -> None:
    """Layout, sharding, rows, memory and what the step issues are the same."""
    (called, own), (forwarded, other) = rehearsed(way), rehearsed(f"{way} forward")
    assert called.layout == forwarded.layout == Layout(dp=RANKS)
    assert called.job["sharding"] == forwarded.job["sharding"] == sharding
    assert called.job["input_shape"] == forwarded.job["input_shape"]
    assert called.memory == forwarded.memory
    assert _issued(own) == _issued(other)
