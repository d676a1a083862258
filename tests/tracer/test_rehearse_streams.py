"""Streams of a rehearsal wait for each other as CUDA streams do."""

from collections.abc import Callable

import pytest

from foretrace.tracer.records import Position
from foretrace.tracer.rehearse.events.lane import IssueLane
from foretrace.tracer.rehearse.events.tape import HOST_WAIT, MARK, WAIT_MARK, Tape
from foretrace.tracer.rehearse.gpu.streams import Streams

pytest.importorskip("torch")

WAITS: dict[str, tuple[Callable[[Streams], object], list[tuple[int, int]]]] = {
    "another": (lambda streams: streams.Stream().wait_stream(streams.default), [(MARK, 0), (WAIT_MARK, 1)]),
    "itself": (lambda streams: streams.default.wait_stream(streams.default), []),
    "no stream": (lambda streams: streams.default.wait_stream(None), []),
    "not recorded": (lambda streams: streams.Stream().wait_event(streams.Event()), []),
    "recorded": (
        lambda streams: streams.Event().record().wait(streams.Stream()),
        [(MARK, 0), (WAIT_MARK, 1)],
    ),
    "the host": (lambda streams: streams.Stream().synchronize(), [(HOST_WAIT, 1)]),
}
"""Calls, and what they write down: kind of event and stream."""


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_is_written_down_where_it_holds_something_up(what: str) -> None:
    """A stream waits for its own work anyway, and for an event that nobody has recorded it does not wait."""
    tape = Tape(IssueLane(), Position())
    call, expected = WAITS[what]
    call(Streams(tape))
    assert [(row[0], row[3]) for row in tape.rows_from(0).tolist()] == expected


def test_a_stream_is_current_in_its_context_alone() -> None:
    """Contexts of several streams are one inside the other."""
    tape = Tape(IssueLane(), Position())
    streams = Streams(tape)
    one, other = streams.Stream(), streams.Stream()
    with streams.stream(one):
        with other:
            assert streams.current is other
        assert streams.current is one
        with streams.stream(None):
            assert streams.current is one
    assert streams.current is streams.default
