"""Ranks that send to each other meet: who waits for whom, what idles, whose peer is not there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.simulator.rehearsal_tables import Event, machine, message, place, run, tables, work

from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.rehearsed.works import op_of
from foretrace.traces.layout import Group, Layout
from foretrace.traces.rehearsal import RankTables

PP = Group(id=1, axis="pp", ranks=(0, 1))


def test_sender_and_receiver_meet(tmp_path: Path) -> None:
    """The receiver waits while the sender computes: a bubble, and both end together.

    Their places in the pipeline count, not those in other groups.
    """
    send, recv = message("send", peer=1), message("recv", peer=0)
    sender = tables([*[("op", 0, 0, -1)] * 20, ("communication", 0, 0, 0)], messages=[send])
    receiver = tables([("communication", 0, 0, 0), ("wait", -1, 0, 0), ("op", 0, 0, -1)], messages=[recv])
    groups = [PP, Group(id=2, axis="dp", ranks=(1,))]
    simulation = run(tmp_path, {0: sender, 1: receiver}, groups, layout=Layout(pp=2), representatives=(0, 1))
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


def test_transfers_of_a_pipeline_are_a_bubble_in_whichever_group_they_are_sent(tmp_path: Path) -> None:
    """DeepSpeed, and many by hand, send in the group of all ranks; and nobody numbers micro-batches."""
    ops = [("op", 0, 0, -1)] * 400
    sender = tables([*ops, ("communication", 0, 0, 0)], messages=[message("send", peer=1, group=3)])
    receiver = tables(
        [("communication", 0, 0, 0), ("wait", -1, 0, 0), *ops], messages=[message("recv", peer=0, group=3)]
    )
    groups = [PP, Group(id=3, axis="world", ranks=(0, 1))]
    simulation = run(tmp_path, {0: sender, 1: receiver}, groups, layout=Layout(pp=2), representatives=(0, 1))
    assert simulation.summary["bubble_fraction"] == pytest.approx(0.5, abs=0.01)
    assert {row["axis"] for row in simulation.spans.to_pylist() if row["category"] == "p2p"} == {"pp"}
    assert not simulation.summary["stages"]  # nothing is told of memory


def _twice(
    events: Sequence[tuple[str, int, int, int]], messages: Sequence[dict[str, Any]], n_more: int
) -> RankTables:
    """Return two steps of *events*, in each of which a message of each kind is sent once.

    The second has *n_more* operations at its end.
    """
    numbered: list[Event] = [
        (what, item, stream, {"communication": at, "wait": at * len(events) + number}.get(what, -1), at)
        for at in range(2)
        for what, item, stream, number in events
    ]
    numbered += [("op", 0, 0, -1, 1)] * n_more
    return tables(numbered, messages=messages, places=[place(step=1), place(step=2)])


@pytest.mark.parametrize("n_more", [0, 30])
def test_of_several_steps_each_has_the_idle_time_before_its_work(tmp_path: Path, n_more: int) -> None:
    """There and back through two stages: the second is done first, and waits for the next step to reach it.

    As in a recording, a step ends with the stage's own work, and what it waits behind that is in the next
    one's window; in the first one's is what came behind a step that was not simulated. So all are as long,
    but for what the first stage does more at the end of the second.
    """
    ops = [("op", 0, 0, -1)] * 100
    n = len(ops)
    there_and_back = [("communication", 0, 0, 0), ("communication", 1, 0, 0), ("wait", -1, 0, n + 1)]
    first = _twice([*ops, *there_and_back, *ops], [message("send", peer=1), message("recv", peer=1)], n_more)
    through = [("communication", 0, 0, 0), ("wait", -1, 0, 0), *ops, ("communication", 1, 0, 0)]
    second = _twice(through, [message("recv", peer=0), message("send", peer=0)], 0)
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
    lengths = sorted(row["duration_ns"] for row in windows)
    assert len(set(lengths[:3])) == 1
    product_ns = 1e9 * ComputeModel(machine(8).device, "bf16").op_s(op_of(work(), machine(8).device))
    assert lengths[3] - lengths[0] == pytest.approx(n_more * product_ns, abs=n_more)
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


@pytest.mark.parametrize("layout", [Layout(dp=2), None])
def test_ranks_that_are_no_pipeline_end_their_step_each_with_its_own_work(
    tmp_path: Path, layout: Layout | None
) -> None:
    """Also where no layout says so."""
    ranks = {0: tables([("op", 0, 0, -1)]), 1: tables([("op", 0, 0, -1)] * 3)}
    group = Group(id=1, axis="dp", ranks=(0, 1))
    simulation = run(tmp_path, ranks, [group], layout=layout, representatives=(0, 1))
    rows = simulation.spans.to_pylist()
    found = {row["rank"]: row["duration_ns"] for row in rows if row["category"] == "step"}
    assert found == {row["rank"]: row["duration_ns"] for row in rows if row["category"] == "compute"}
    assert found[1] == pytest.approx(3 * found[0], abs=3)


def test_a_ring_of_ranks_of_which_one_stands_for_all_meets_itself(tmp_path: Path) -> None:
    ring = Group(id=1, axis="cp", ranks=(0, 1, 2, 3))
    both = [message("send", peer=1), message("recv", peer=3)]
    found = tables([("communication", 0, 0, 0), ("communication", 1, 0, 0)], messages=both)
    simulation = run(tmp_path, {0: found}, [ring], world_size=4, layout=Layout(cp=4))
    assert not [warning for warning in simulation.info.warnings if "not rehearsed" in warning]


@pytest.mark.parametrize(("n", "shown"), [(1, "1"), (5, "1, 2, 3, 4, 5"), (6, "1, 2, 3, 4, 5, ...")])
def test_peers_that_were_not_rehearsed_are_said(tmp_path: Path, n: int, shown: str) -> None:
    """Up to five of them; what somebody of another stage sends to whom is the same in no group."""
    events = [("communication", at, 0, 0) for at in range(n)]
    sender = tables(events, messages=[message("send", peer=at + 1) for at in range(n)])
    stages = Group(id=1, axis="pp", ranks=tuple(range(7)))
    asked: Any = {"world_size": 7, "layout": Layout(pp=7), "representatives": (0,) * 7}
    simulation = run(tmp_path, {0: sender}, [stages], **asked)
    (said,) = [warning for warning in simulation.info.warnings if "with --ranks auto" in warning]
    assert said.startswith(f"{n} transfers go to or come from ranks that were not rehearsed ({shown}), so")


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
