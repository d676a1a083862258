"""Micro-batches that are written down again: the same to the event as all of them run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.records import Block, Position
from foretrace.tracer.rehearse.device.memory import ROUND_BYTES, Change, Memory
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.tape.repeating import Result, Segment, changes_of, relative_rows
from foretrace.tracer.rehearse.tape.tape import IssueLane, Tape
from foretrace.traces.rehearsal import MARK, OP, WAIT, read_rank, rehearsal_folder

LAST_TO_THE_BYTE = 5
"""Step of the script up to which memory is the same, too, that of GPipe and 1F1B, interleaved or not.
Under the others what eight micro-batches of two stages send may be counted as free some actions earlier or
later."""

SCRIPT = Path(__file__).parent / "many_microbatches.py"
REPEATED = ("gpipe", "1f1b", "interleaved-1f1b", "interleaved-zb", "zb-v")
RUN_IN_FULL = ("looped-bfs", "dualpipe-v")
"""Schedules whose backwards do not come in the order of their forwards, or are not all of one kind."""


def _told(folder: Path, rank: int) -> list[Any]:
    """Return the events of a rank with the rows that they refer to."""
    tables = read_rank(rehearsal_folder(folder), rank)
    works, messages, places = (table.to_pylist() for table in tables[1:])
    found = []
    for event in tables.events.to_pylist():
        of = {0: works, 1: messages}.get(event["what"])
        item = of[event["item"]] if of is not None else event["item"]
        found.append({**event, "item": item, "place": places[event["place"]]})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("names", [REPEATED, RUN_IN_FULL])
def test_repeated_micro_batches_are_those_that_are_run(names: tuple[str, ...], tmp_path: Path) -> None:
    """Every event of every schedule of torch, with FSDP2 and without, on both ranks; memory nearly."""
    pytest.importorskip("torch")
    both = []
    for every in (True, False):
        asked = Asked(
            command=(str(SCRIPT), *names),
            world_size=4,
            ranks=(0, 2),
            warmup=0,
            steps=2 * len(names),
            every_microbatch=every,
        )
        both.append(rehearse(asked, tmp_path / str(every)))
    assert [note for note in both[0].notes if "micro-batches" in note] == []
    said = [note for note in both[1].notes if "of 8 micro-batches" in note]
    assert bool(said) == (names == REPEATED)
    for rank in (0, 2):
        run, repeated = (_told(tmp_path / str(every), rank) for every in (True, False))
        assert len(run) > 500
        for one, other in zip(run, repeated, strict=True):
            early = one.pop("allocated_bytes") - other.pop("allocated_bytes")
            assert one == other
            assert early == 0 or (one["place"]["step"] > LAST_TO_THE_BYTE and abs(early) <= 16 * ROUND_BYTES)


def _tape() -> tuple[Tape, Position]:
    position = Position(0, 0, 0, 1)
    lane = IssueLane()
    lane.push("forward", Block("layer"))
    return Tape(lane, position), position


def _segment(tape: Tape, write: Callable[[], None]) -> Segment:
    """Return what *write* writes on *tape* as a part of a micro-batch."""
    first, marks = tape.next_number, tape.n_marks
    write()
    rows, is_closed = relative_rows(tape.rows_from(first), first, marks, 0)
    return Segment(
        rows=rows,
        n_marks=tape.n_marks - marks,
        changes=(),
        results=(),
        forwards=0,
        told={},
        is_closed=is_closed,
    )


def test_a_part_that_waits_for_what_was_before_it_is_not_closed() -> None:
    """A wait for an event, or for a mark, of another part cannot be repeated."""
    tape, _ = _tape()
    mark = tape.mark()

    def own() -> None:
        tape.note(WAIT, number=tape.next_number - 1 if tape.n_events > 1 else 0)

    tape.note(MARK, tape.n_marks)
    tape.n_marks += 1
    assert not _segment(tape, lambda: tape.note(4, mark)).is_closed
    assert not _segment(tape, own).is_closed
    assert _segment(tape, lambda: tape.note(4, tape.mark())).is_closed


def test_equal_parts_differ_in_micro_batch_and_numbers_only() -> None:
    """Another place of the same block does the same, another operation does not."""
    tape, position = _tape()

    def write(item: int) -> Callable[[], None]:
        def inner() -> None:
            tape.note(OP, item)
            tape.note(4, tape.mark())

        return inner

    one = _segment(tape, write(0))
    position.microbatch = 2
    again, other = _segment(tape, write(0)), _segment(tape, write(1))
    assert one.does_the_same(again, tape)
    assert not one.does_the_same(other, tape)
    assert tape.moved(again.rows[:, 2], 1).tolist() == one.rows[:, 2].tolist()


def test_repeated_events_have_the_places_that_they_are_moved_to() -> None:
    """Rows that are repeated are what they were, elsewhere."""
    tape, _ = _tape()
    segment = _segment(tape, lambda: tape.note(OP, 3))
    rows = segment.rows.copy()
    rows[:, 2] = tape.moved(rows[:, 2], 7)
    tape.repeat(rows)
    tables = tape.tables()
    places = tables.places.to_pylist()
    assert [places[at]["microbatch"] for at in tables.events["place"].to_pylist()] == [1, 7]
    assert tables.events["item"].to_pylist() == [3, 3]
    assert tape.n_repeated == 1


def test_storages_are_known_by_the_part_that_made_them() -> None:
    """A backward that frees what its forward made says so; what neither made is nobody's."""
    totals: list[int] = []
    memory = Memory(totals.append)
    before = memory.hold(64, "activations")
    owned: dict[int, tuple[str, int]] = {}
    log: list[Change] = []
    memory.log = log
    kept, gone = memory.hold(512, "activations"), memory.hold(1024, "activations")
    memory.free(gone)
    forward, is_own = changes_of(log, "F", owned)
    assert is_own
    assert [(what, name) for what, name, *_ in forward] == [
        ("add", ("F", 0)),
        ("add", ("F", 1)),
        ("free", ("F", 1)),
    ]
    memory.log = log = []
    memory.free(kept)
    backward, is_own = changes_of(log, "B", owned)
    assert is_own
    assert backward[0][:2] == ("free", ("F", 0))
    memory.log = log = []
    memory.change(before, "resize", 0, "activations")
    assert not changes_of(log, "B", owned)[1]
    assert totals[-1] == memory.total == 0
    assert Result((1,), (1,), None, None, requires_grad=False, owned=None).owned is None
    assert np.array(totals).max() == 64 + 512 + 1024
