"""Threads that a script starts issue what the first thread would."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tracer.rehearse.errors import RehearsalError
from traces.rehearsal import RankTables

pytest.importorskip("torch")

SCRIPT, RANKS = Path(__file__).parent / "threaded.py", 2

COMMUNICATION = 1


def _issued(tables: RankTables) -> Counter[tuple[object, ...]]:
    """Return what was issued, how often: kind of pass, block, stream, and the work or the message."""
    places, works, messages = (table.to_pylist() for table in (tables.places, tables.works, tables.messages))
    found: Counter[tuple[object, ...]] = Counter()
    for event in tables.events.to_pylist():
        if event["what"] <= COMMUNICATION:
            rows = messages if event["what"] == COMMUNICATION else works
            at, row = places[event["place"]], rows[event["item"]]
            found[at["kind"], at["name"], at["step"], event["stream"], *map(str, row.values())] += 1
    return found


@pytest.mark.parametrize("kind", ["pool", "trainer", "worker", "backward"])
def test_what_threads_issue_is_what_one_thread_issues(kind: str, rehearsed: Any) -> None:
    """Work, messages, streams, blocks and kinds of passes: for batches of a pool, a training in a thread, for
    which the first one waits in Python or in C, and a backward pass beside the forward of another model."""
    found, tables = rehearsed(kind)
    alone, expected = rehearsed("alone")
    assert _issued(tables) == _issued(expected)
    if kind != "backward":  # beside each other they need more
        assert found.memory == alone.memory
    assert not found.notes


def test_an_error_of_a_thread_is_said(rehearsed: Any) -> None:
    """The script does not hear of it, as in a real run."""
    found, tables = rehearsed("broken")
    assert any("threaded.py:" in note and "ValueError: nothing to do" in note for note in found.notes)
    assert _issued(tables) == _issued(rehearsed("alone")[1])


def test_what_a_thread_needs_and_a_rehearsal_has_not_ends_it(rehearsed: Any) -> None:
    """In the line that names it, though the first thread waits for the other."""
    with pytest.raises(RehearsalError, match=r"threaded.py:\d+: aten._unique2.default needs numbers"):
        rehearsed("unknown")
