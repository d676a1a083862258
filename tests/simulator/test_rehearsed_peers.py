"""Ranks that send to each other meet: who waits for whom, what idles, whose peer is not there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.simulator.rehearsal_tables import message, place, run, tables
from traces.layout import Group, Layout
from traces.rehearsal import EVENTS, RankTables

PP = Group(id=1, axis="pp", ranks=(0, 1))


def test_sender_and_receiver_meet(tmp_path: Path) -> None:
    """The receiver waits while the sender computes: a bubble, and both end together."""
    send, recv = message("send", peer=1), message("recv", peer=0)
    sender = tables([*[("op", 0, 0, -1)] * 20, ("communication", 0, 0, 0)], messages=[send])
    receiver = tables([("communication", 0, 0, 0), ("wait", -1, 0, 0), ("op", 0, 0, -1)], messages=[recv])
    simulation = run(tmp_path, {0: sender, 1: receiver}, [PP], layout=Layout(pp=2), representatives=(0, 1))
    ends = {
        row["kind"]: row["start_ns"] + row["duration_ns"]
        for row in simulation.spans.to_pylist()
        if row["category"] == "p2p"
    }
    assert ends["send"] == ends["recv"]
    assert simulation.summary["bubble_fraction"] > 0.1
    assert not [warning for warning in simulation.info.warnings if "not rehearsed" in warning]


def test_a_stage_that_is_done_first_idles_until_the_last_one_is(tmp_path: Path) -> None:
    """Two stages of equal work, one after the other: each idles for half of the step."""
    ops = [("op", 0, 0, -1)] * 400
    sender = tables([*ops, ("communication", 0, 0, 0)], messages=[message("send", peer=1)])
    receiver = tables(
        [("communication", 0, 0, 0), ("wait", -1, 0, 0), *ops], messages=[message("recv", peer=0)]
    )
    simulation = run(tmp_path, {0: sender, 1: receiver}, [PP], layout=Layout(pp=2), representatives=(0, 1))
    windows = [row["duration_ns"] for row in simulation.spans.to_pylist() if row["category"] == "step"]
    assert len(windows) == 2
    assert windows[0] == windows[1]
    assert simulation.summary["bubble_fraction"] == pytest.approx(0.5, abs=0.01)


def _twice(events: Sequence[tuple[str, int, int, int]], messages: Sequence[dict[str, Any]]) -> RankTables:
    """Return two steps of *events*, in each of which a message of each kind is sent once."""
    numbered = [
        (what, item, stream, {"communication": at, "wait": at * len(events) + number}.get(what, -1))
        for at in range(2)
        for what, item, stream, number in events
    ]
    found = tables(numbered, messages=messages, places=[place(step=1), place(step=2)])
    column = found.events.schema.get_field_index("place")
    field = EVENTS.field(column)
    places = pa.array([at for at in range(2) for _ in events], field.type)
    return found._replace(events=found.events.set_column(column, field, places))


def test_of_several_steps_each_has_the_idle_time_before_its_work(tmp_path: Path) -> None:
    """There and back through two stages: the second is done first, and waits for the next step to reach it.

    As in a recording, a step ends with the stage's own work, and what it waits behind that is in the next
    one's window; in the first one's is what came behind a step that was not simulated. So all are as long.
    """
    ops = [("op", 0, 0, -1)] * 100
    n = len(ops)
    there_and_back = [("communication", 0, 0, 0), ("communication", 1, 0, 0), ("wait", -1, 0, n + 1)]
    first = _twice([*ops, *there_and_back, *ops], [message("send", peer=1), message("recv", peer=1)])
    through = [("communication", 0, 0, 0), ("wait", -1, 0, 0), *ops, ("communication", 1, 0, 0)]
    second = _twice(through, [message("recv", peer=0), message("send", peer=0)])
    job = {"first_step": 1, "steps": 2, "input_shape": [1, 4096], "forwards_per_step": 1}
    simulation = run(
        tmp_path,
        {0: first, 1: second},
        [PP],
        layout=Layout(pp=2),
        representatives=(0, 1),
        job=job,
    )
    rows = simulation.spans.to_pylist()
    windows = [row for row in rows if row["category"] == "step"]
    assert len({row["duration_ns"] for row in windows}) == 1
    assert min(row["start_ns"] for row in rows) == 0
    for rank in (0, 1):
        one, other = ((w["start_ns"], w["start_ns"] + w["duration_ns"]) for w in windows if w["rank"] == rank)
        ends = [
            max(
                row["start_ns"] + row["duration_ns"]
                for row in rows
                if row["rank"] == rank and row["category"] != "step" and row["step"] == step
            )
            for step in (windows[0]["step"], windows[1]["step"])
        ]
        assert ends == [one[1], other[1]]
        assert one[1] == other[0]


def test_a_ring_of_ranks_of_which_one_stands_for_all_meets_itself(tmp_path: Path) -> None:
    ring = Group(id=1, axis="cp", ranks=(0, 1, 2, 3))
    both = [message("send", peer=1), message("recv", peer=3)]
    found = tables([("communication", 0, 0, 0), ("communication", 1, 0, 0)], messages=both)
    simulation = run(tmp_path, {0: found}, [ring], world_size=4, layout=Layout(cp=4))
    assert not [warning for warning in simulation.info.warnings if "not rehearsed" in warning]


def test_a_peer_that_was_not_rehearsed_is_said(tmp_path: Path) -> None:
    sender = tables([("communication", 0, 0, 0)], messages=[message("send", peer=1)])
    simulation = run(tmp_path, {0: sender}, [PP], layout=Layout(pp=2), representatives=(0, 0))
    assert any("rehearse with --ranks auto" in warning for warning in simulation.info.warnings)


def test_a_pipeline_rank_alone_is_not_taken_for_its_neighbours(tmp_path: Path) -> None:
    """It sends to the next stage and receives from the last: nobody is there, and nothing waits for ever."""
    both = [message("send", peer=1), message("recv", peer=3)]
    found = tables(
        [("communication", 1, 0, 0), ("wait", -1, 0, 0), ("communication", 0, 0, 0)], messages=both
    )
    ring = Group(id=1, axis="pp", ranks=(0, 1, 2, 3))
    simulation = run(
        tmp_path, {0: found}, [ring], world_size=4, layout=Layout(pp=4), representatives=(0,) * 4
    )
    assert any("2 transfers go to" in warning for warning in simulation.info.warnings)
