"""Threads that a script starts issue what the first thread would."""

from collections import Counter
from pathlib import Path

import pytest

from tracer.rehearse.errors import RehearsalError
from tracer.rehearse.rehearsing import Asked, rehearse
from traces.rehearsal import RankTables, Rehearsal, read_rank, rehearsal_folder

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "threaded.py"

COMMUNICATION = 1


def _rehearsed(kind: str, folder: Path) -> tuple[Rehearsal, RankTables]:
    asked = Asked(command=(str(SCRIPT), kind), world_size=2, ranks=(0,))
    return rehearse(asked, folder / kind), read_rank(rehearsal_folder(folder / kind), 0)


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


@pytest.mark.parametrize("kind", ["pool", "trainer", "backward"])
def test_what_threads_issue_is_what_one_thread_issues(kind: str, tmp_path: Path) -> None:
    """Work, messages, streams, blocks and kinds of passes: for batches of a pool, a training in a thread, and
    a backward pass beside the forward pass of another model."""
    found, tables = _rehearsed(kind, tmp_path)
    alone, expected = _rehearsed("alone", tmp_path)
    assert _issued(tables) == _issued(expected)
    if kind != "backward":  # beside each other they need more
        assert found.memory == alone.memory
    assert not found.notes


def test_an_error_of_a_thread_is_said(tmp_path: Path) -> None:
    """The script does not hear of it, as in a real run."""
    found, tables = _rehearsed("broken", tmp_path)
    assert any("threaded.py:" in note and "ValueError: nothing to do" in note for note in found.notes)
    assert _issued(tables) == _issued(_rehearsed("alone", tmp_path)[1])


def test_what_a_thread_needs_and_a_rehearsal_has_not_ends_it(tmp_path: Path) -> None:
    """In the line that names it, though the first thread waits for the other."""
    with pytest.raises(RehearsalError, match=r"threaded.py:\d+: aten._unique2.default needs numbers"):
        _rehearsed("unknown", tmp_path)
