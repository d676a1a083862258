"""A hang is named: the communication, who waits in it, and who has not come."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.cli import main
from foretrace.traces.analysis.diagnosis import Evidence, Wait, diagnose, judge
from foretrace.traces.analysis.mismatch import disagreements
from foretrace.traces.info import Process, RunInfo
from foretrace.traces.layout import Group
from foretrace.traces.pending import Ended, damaged_notes, read_pending
from foretrace.traces.store import open_run, write_info, write_run
from foretrace.traces.timeline import timeline

GROUP = 7


def told(rank: int, issued: int, *pending: dict[str, Any], stack: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what a rank that has issued so many collectives writes about itself."""
    return {
        "format_version": 1,
        "rank": rank,
        "t_ns": 9_000_000_000,
        "step": 3,
        "collectives": {str(GROUP): issued},
        "transfers": [],
        "pending": list(pending),
        "n_pending": len(pending),
        "stack": list(stack),
    }


def hang(path: Path) -> tuple[Wait, ...]:
    """Return what the run at *path* waits for."""
    return diagnose(path, open_run(path)).waits


def under_way(sequence: int, kind: str = "all_reduce", **more: Any) -> dict[str, Any]:
    """Return one communication under way for six seconds."""
    return {
        "category": "collective",
        "kind": kind,
        "name": kind,
        "axis": "dp",
        "group": GROUP,
        "peer": -1,
        "sequence": sequence,
        "size_bytes": 4000,
        "dtype": "fp32",
        "step": 3,
        "start_ns": 3_000_000_000,
    } | more


def run_with(path: Path, *files: dict[str, Any], world_size: int = 4, ended: int = 5) -> Path:
    """Return a run that was stopped, in which every rank has ended so many collectives."""
    info = RunInfo(
        origin="recorded",
        world_size=world_size,
        groups=(Group(id=GROUP, axis="dp", ranks=tuple(range(world_size))),),
        finished=False,
    )
    rows = [(rank, n) for rank in range(world_size) for n in range(ended)]
    spans = timeline(
        {
            "rank": [rank for rank, _ in rows],
            "category": ["collective"] * len(rows),
            "kind": ["all_reduce"] * len(rows),
            "name": [""] * len(rows),
            "start_ns": [n * 10 for _, n in rows],
            "duration_ns": [10] * len(rows),
            "axis": ["dp"] * len(rows),
            "group": [GROUP] * len(rows),
            "sequence": [n for _, n in rows],
        }
    )
    write_run(path, info, spans)
    write_info(path, info)
    (path / "ranks").mkdir(exist_ok=True)
    for one in files:
        (path / "ranks" / f"rank-{one['rank']:05d}.pending.json").write_text(json.dumps(one))
    return path


def test_who_has_not_come_is_named_with_the_line_it_is_in(tmp_path: Path) -> None:
    """Library code is no answer to the question where a rank is."""
    stack = ("/usr/lib/python3/site-packages/torch/x.py:1 wait", "/home/me/train.py:42 load")
    path = run_with(
        tmp_path / "run",
        *(told(rank, 6, under_way(5)) for rank in (0, 1, 2)),
        told(3, 5, stack=stack),
    )
    (wait,) = hang(path)
    assert (wait.waiting, wait.missing, wait.silent) == ((0, 1, 2), (3,), ())
    assert wait.age_s == pytest.approx(6.0)
    assert wait.text == (
        "rank 0-2 wait in all_reduce 5 of dp, 4 kB for 6.000 s, step 3; "
        "rank 3 has not come: /home/me/train.py:42 load"
    )


def test_a_rank_that_has_left_the_collective_behind_has_come(tmp_path: Path) -> None:
    """Its spans say so, whatever its file says."""
    path = run_with(tmp_path / "run", told(0, 6, under_way(5)), told(1, 0), world_size=2, ended=6)
    assert hang(path) == ()  # nor is a note believed that is older than the spans of its own rank
    path = run_with(tmp_path / "other", told(0, 6, under_way(5)), told(1, 6, under_way(5)), world_size=2)
    (wait,) = hang(path)
    assert (wait.waiting, wait.missing, wait.silent) == ((0, 1), (), ())
    assert "all have come" in wait.text


def test_what_was_under_way_when_a_rank_said_so_may_be_over_since(tmp_path: Path) -> None:
    """Rank 1 writes two seconds later, and has come to it: nobody says that rank 0 still waits."""
    first = told(0, 6, under_way(5, start_ns=8_900_000_000))
    path = run_with(tmp_path / "run", first, told(1, 6) | {"t_ns": 11_000_000_000}, world_size=2)
    assert hang(path) == ()


def test_ranks_that_are_a_moment_apart_hang_nowhere(tmp_path: Path) -> None:
    path = run_with(tmp_path / "run", told(0, 6, under_way(5, start_ns=8_500_000_000)), told(1, 5))
    assert not diagnose(path, open_run(path))


@pytest.mark.parametrize("sender", [0, 2])
def test_collectives_of_a_rank_are_no_transfers(tmp_path: Path, sender: int) -> None:
    """It has issued five collectives of the group and no transfer: the one that it should send is missing."""
    transfer = {"category": "p2p", "peer": sender, "axis": "pp", "start_ns": 8_000_000_000}
    path = run_with(
        tmp_path / "run", told(sender, 5), told(1, 5, under_way(0, "recv", **transfer)), world_size=3
    )
    (wait,) = hang(path)
    assert (wait.waiting, wait.missing) == ((1,), (sender,))


def test_ranks_that_do_not_agree_are_told(tmp_path: Path) -> None:
    """The same number of a group, but another operation."""
    path = run_with(
        tmp_path / "run",
        told(0, 6, under_way(5)),
        told(1, 6, under_way(5, "barrier", size_bytes=0)),
        world_size=2,
    )
    (differing,) = diagnose(path, open_run(path)).mismatches
    assert differing.calls == (("all_reduce of 4 kB fp32", (0,)), ("barrier", (1,)))


def test_what_holds_up_others_comes_first(tmp_path: Path) -> None:
    """Rank 1 is missing in one wait because it waits in another, for rank 2."""
    send = {"category": "p2p", "peer": 2, "group": 8, "axis": "pp", "start_ns": 8_000_000_000}
    path = run_with(
        tmp_path / "run",
        told(0, 6, under_way(5)),
        told(1, 5, under_way(0, "recv", **send)),
        told(2, 5),
        world_size=3,
    )
    first, second = hang(path)
    assert (first.kind, first.waiting, first.missing) == ("recv", (1,), (2,))
    assert (second.kind, second.missing) == ("all_reduce", (1, 2))


def test_a_rank_of_which_nothing_is_known_is_not_accused(tmp_path: Path) -> None:
    """Neither a file nor spans."""
    path = tmp_path / "run"
    (path / "ranks").mkdir(parents=True)
    info = RunInfo(
        origin="recorded",
        world_size=2,
        groups=(Group(id=GROUP, axis="dp", ranks=(0, 1)),),
        finished=False,
    )
    write_info(path, info)
    (path / "ranks" / "rank-00000.pending.json").write_text(json.dumps(told(0, 1, under_way(0))))
    result = CliRunner().invoke(main, ["analyze", str(path), "--json"])
    assert result.exit_code == 0, result.output
    (wait,) = json.loads(result.stdout)["hang"]
    assert wait["waiting"] == [0]
    assert (
        CliRunner()
        .invoke(main, ["analyze", str(path)])
        .output.startswith("hang rank 0 waits in all_reduce 0")
    )


def test_a_finished_run_hangs_nowhere(tmp_path: Path) -> None:
    """A file that was forgotten says nothing."""
    path = run_with(tmp_path / "run", told(0, 6, under_way(5)), world_size=1)
    run = open_run(path)
    assert diagnose(path, run)
    object.__setattr__(run.info, "finished", True)
    assert not diagnose(path, run)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["rank", "t_ns", "pending", "collectives", "transfers", "stack"]), inner
            )
        ),
        max_leaves=12,
    )
)
@settings(max_examples=60, deadline=None)
def test_a_damaged_file_is_left_out(tmp_path_factory: pytest.TempPathFactory, document: Any) -> None:
    """Whatever is in it, it costs no more than a line."""
    path = tmp_path_factory.mktemp("run")
    (path / "ranks").mkdir()
    (path / "ranks" / "rank-00000.pending.json").write_text(json.dumps(document))
    found, damaged = read_pending(path), damaged_notes(path)
    assert len(found) + len(damaged) == 1
    diagnose(path, None)


SECOND_NS = 1_000_000_000


def left(
    rank: int,
    calls: list[dict[str, Any]],
    error: str = "",
    at_s: int = 0,
    ended: Ended | None = None,
    *,
    failed: bool = False,
) -> Evidence:
    """Return what a rank has left that has issued *calls* and raised *error* after so many seconds.

    *failed*: one of its calls had failed by then.
    """
    process = Process(error=error, error_ns=at_s * SECOND_NS, call_failed=failed)
    found = Evidence(rank=rank, is_exact=True, process=process, ended_by=ended)
    for row in calls:
        found.add(row, row["start_ns"])
    return found


def call(number: int, kind: str = "all_reduce", step: int = 0, **more: Any) -> dict[str, Any]:
    return under_way(number, kind, step=step, start_ns=SECOND_NS + number, **more)


def judged(*ranks: Evidence) -> tuple[tuple[int, ...], list[tuple[str, str]]]:
    """Return who is said to have failed first, and all that is said."""
    known = {one.rank: one for one in ranks}
    calls: dict[Any, dict[int, Any]] = {}
    for one in ranks:
        for key, row in one.rows.items():
            calls.setdefault(key, {})[one.rank] = row
    found = judge(known, {GROUP: tuple(known)}, disagreements(calls, {}))
    return found.failed, found.lines


def test_who_was_stuck_when_its_launcher_killed_it_fell_silent() -> None:
    killed = Ended(status=-9, signals_sent=(9, 15))
    others = [left(rank, [call(0), call(1)], f"timeout of {rank}", 26 + rank) for rank in (0, 1)]
    failed, lines = judged(*others, left(2, [call(0)], ended=killed))
    assert failed == (2,)
    said = (
        "rank 2 fell silent after all_reduce 0 of dp, step 0, until ended by the launcher (signal 9); "
        "ranks 0-1 waited in all_reduce 1"
    )
    assert lines == [("failure", said)]


@pytest.mark.parametrize("behind", [0, 1])
def test_who_raises_in_a_call_that_does_not_agree_is_not_its_cause(behind: int) -> None:
    """Whatever each of them raises, whether or not more was issued before the first was waited for."""
    more = [call(number) for number in range(1, 1 + behind)]
    ranks = [left(rank, [call(0), *more], f"peer {rank} is gone", 26 + rank) for rank in (0, 1)]
    ranks.append(left(2, [call(0, "barrier"), *more], "timeout", 27))
    failed, lines = judged(*ranks)
    assert (failed, [label for label, _ in lines]) == ((), ["mismatch"])
    # A crash, and what is raised in a later step, is no consequence.
    crashed = replace(ranks[1], process=Process(), ended_by=Ended(status=-6))
    assert judged(ranks[0], crashed, ranks[2])[0] == (1,)
    later = [call(0), call(1), call(2, step=1)]
    sent_away = Ended(status=-15, signals_sent=(15,))
    others = [
        left(rank, [call(0, kind), *later[1:]], ended=sent_away)
        for rank, kind in ((1, "all_reduce"), (2, "barrier"))
    ]
    assert judged(left(0, later, "no such file", 26), *others)[0] == (0,)


def test_ranks_that_wait_for_each_other_name_nobody() -> None:
    """Each waits in a receive from the other, and what one raises first is no cause."""
    ranks = [
        left(rank, [call(0, "recv", category="p2p", peer=1 - rank)], f"timeout of {rank}", 26 + rank)
        for rank in (0, 1)
    ]
    failed, lines = judged(*ranks)
    assert (failed, [label for label, _ in lines]) == ((), ["hang", "hang"])


def test_who_comes_once_others_have_given_up_has_made_them_fail() -> None:
    """Each raises, the late one last; all have issued what follows as well."""
    others = [left(rank, [call(0), call(1)], f"timeout of {rank}", 6 + rank, failed=True) for rank in (0, 1)]
    behind = call(0) | {"start_ns": 9 * SECOND_NS}, call(1) | {"start_ns": 9 * SECOND_NS + 1}
    failed, lines = judged(*others, left(2, [*behind], "peer is gone", 10, failed=True))
    said = "rank 2 came to all_reduce 0 of dp 3.000 s after others had given up; ranks 0-1 waited in it"
    said = said.replace("in it", "in all_reduce 0")
    assert (failed, lines) == ((2,), [("failure", said)])


def test_who_comes_a_moment_after_a_death_is_not_late() -> None:
    """Its peer has raised at once, as the dead one's links broke."""
    first = left(0, [call(0)], "reset by peer", 1, failed=True)
    first.process = replace(first.process, error_ns=SECOND_NS + 5)
    late = left(1, [call(0) | {"start_ns": SECOND_NS + 10}], "broken pipe", 2, failed=True)
    failed, lines = judged(first, late, left(2, [], ended=Ended(status=-9)))
    assert failed == (2,)
    assert lines[0][1].startswith("rank 2 was killed (signal 9) before its first communication")


@pytest.mark.parametrize("failed", [False, True])
def test_a_call_behind_which_a_rank_has_gone_on_is_no_wait(*, failed: bool) -> None:
    """Rank 0 had caught that rank 1 did not come to the first call of another group."""
    side = call(0) | {"group": GROUP + 1, "axis": "side", "duration_ns": 2 * SECOND_NS}
    later = [call(number) | {"start_ns": (4 + number) * SECOND_NS} for number in range(3)]
    known = {
        0: left(0, [side, *later[:2]], "no such file", 7),
        1: left(1, later, "closed by peer", 9, failed=failed),
    }
    found = judge(known, {GROUP: (0, 1), GROUP + 1: (0, 1)})
    said = "rank 0 ended with no such file after all_reduce 1 of dp, step 0; rank 1 waited in all_reduce 2"
    assert found.lines == [("failure", said)]
    # As long as no call that it made since has met those of others, it may be held by the first.
    known[0] = left(0, [side], "timeout", 7, failed=True)
    waits = judge(known, {GROUP: (0, 1), GROUP + 1: (0, 1)}).waits
    assert ("side", (0,), (1,)) in {(wait.axis, wait.waiting, wait.missing) for wait in waits}


@pytest.mark.parametrize("early", [0, 1])
def test_a_group_has_one_name_in_all_that_is_said(early: int) -> None:
    """One rank has died before it knew what the group is for, which the other has learnt."""
    calls = [call(0), call(1)], [call(0)]
    for row in calls[early]:
        row["axis"] = "world"
    failed, lines = judged(
        left(0, calls[0], "closed by peer", 2, failed=True), left(1, calls[1], ended=KILLED)
    )
    assert failed == (1,)
    assert lines == [
        (
            "failure",
            "rank 1 was killed (signal 9) after all_reduce 0 of dp, step 0; rank 0 waited in all_reduce 1",
        )
    ]


KILLED = Ended(status=-9)
"""Of a rank that neither it nor its launcher has ended."""


@pytest.mark.parametrize("seen_s", [3, 8])
def test_who_is_killed_comes_before_who_is_late_unless_others_had_given_up(seen_s: int) -> None:
    killed = left(1, [call(0)], ended=KILLED)
    killed.seen_ns = seen_s * SECOND_NS
    behind = call(0) | {"start_ns": 9 * SECOND_NS}
    others = left(0, [behind], "peer is gone", 10, failed=True), left(2, [call(0)], "timeout", 6, failed=True)
    failed, lines = judged(*others, killed)
    assert failed == ((1,) if seen_s < 6 else (0,))
    killed_in = "rank 1 was killed (signal 9) in all_reduce 0 of dp, step 0, for which rank 0 had not come"
    late = "rank 0 came to all_reduce 0 of dp 3.000 s after others had given up"
    assert lines[0][1].startswith(killed_in if seen_s < 6 else late)


def test_who_is_killed_while_it_waits_is_named_with_whom_it_waited_for() -> None:
    """The launcher ends all others, and the one that had not come was alive."""
    sent_away = Ended(status=-15, signals_sent=(15,))
    ranks = [left(0, [call(0), call(1)], ended=KILLED), left(1, [call(0), call(1)], ended=sent_away)]
    ranks.append(left(2, [call(0)], ended=sent_away))
    for one in ranks:
        one.seen_ns = 4 * SECOND_NS
    said = "rank 0 was killed (signal 9) in all_reduce 1 of dp, step 0, for which rank 2 had not come; "
    assert judged(*ranks) == ((0,), [("failure", said + "rank 1 waited in all_reduce 1")])
    # A crash may be how a rank gives up, as NCCL's watchdog does: that is a hang.
    ranks[0].ended_by = Ended(status=-6)
    failed, lines = judged(*ranks)
    assert (failed, [label for label, _ in lines]) == ((), ["hang"])


@pytest.mark.parametrize("same", [False, True])
def test_ranks_whose_links_broke_name_nobody(*, same: bool) -> None:
    texts = ["reset by peer"] * 3 if same else ["reset by peer", "closed by peer", "broken pipe"]
    ranks = [left(rank, [call(0)], text, 2 + rank, failed=True) for rank, text in enumerate(texts)]
    failed, lines = judged(*ranks)
    assert failed == ()
    assert [label for label, _ in lines] == ["failure"]
    assert lines[0][1].endswith(": no rank is known to have gone first")
    # Of whom no call had failed is another matter.
    assert judged(left(0, [call(0)], "no such file", 4), *ranks[1:])[0] == (0,)
