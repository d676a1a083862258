"""A hang is named: the communication, who waits in it, and who has not come."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.cli import main
from foretrace.traces.analysis.diagnosis import Wait, diagnose
from foretrace.traces.info import RunInfo
from foretrace.traces.layout import Group
from foretrace.traces.pending import read_pending
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
@settings(max_examples=150, deadline=None)
def test_a_damaged_file_is_left_out(tmp_path_factory: pytest.TempPathFactory, document: Any) -> None:
    """Whatever is in it, it costs no more than a line."""
    path = tmp_path_factory.mktemp("run")
    (path / "ranks").mkdir()
    (path / "ranks" / "rank-00000.pending.json").write_text(json.dumps(document))
    found, damaged = read_pending(path)
    assert len(found) + len(damaged) == 1
    diagnose(path, None)
