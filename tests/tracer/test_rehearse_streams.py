"""Streams of a rehearsal wait for each other as the driver of its GPU says."""

from types import SimpleNamespace
from typing import Any

import pytest

from foretrace.tracer.records import Position
from foretrace.tracer.rehearse.device.driver import Entry
from foretrace.tracer.rehearse.tape.tape import IssueLane, Streams, Tape
from foretrace.traces.rehearsal import HOST_WAIT, MARK, WAIT_MARK

WAITS = {
    "another": ([("record", 0, 7), ("wait", 1, 7)], [(MARK, 0), (WAIT_MARK, 1)]),
    "not recorded": ([("wait", 1, 7)], []),
    "recorded again": (
        [("record", 0, 7), ("record", 1, 7), ("wait", 2, 7)],
        [(MARK, 0), (MARK, 1), (WAIT_MARK, 2)],
    ),
    "the host": ([("synchronize_stream", 3, 0)], [(HOST_WAIT, 3)]),
}
"""What happens: kind, stream, number; and what is written down of it: kind of event and stream."""


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_is_written_down_where_it_holds_something_up(what: str) -> None:
    """For an event that nobody has recorded, nobody waits; who waits does so for the last record."""
    happens, expected = WAITS[what]
    lane, coming = IssueLane(), list[Entry]()
    tape = Tape(lane, Position())
    driver: Any = SimpleNamespace(take=lambda: [coming.pop(0) for _ in coming[:]], stream=lambda device: 3)
    streams = Streams(tape, lane, driver)
    coming += [Entry(kind, stream, number) for kind, stream, number in happens]
    streams.follow()
    rows = tape.rows_from(0).tolist()
    assert [(row[0], row[3]) for row in rows] == expected
    if what == "recorded again":
        assert rows[2][1] == rows[1][1]
