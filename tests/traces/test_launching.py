"""How long devices do nothing because their host has yet to launch what comes next."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.traces.hand_made import in_memory

from foretrace.traces.analysis.device_time import launching_share
from foretrace.traces.analysis.findings import findings
from foretrace.traces.info import RunInfo
from foretrace.traces.timeline import timeline

STEP_NS = 100

Pieces = list[tuple[int, int]]


def pieces(of: st.DataObject, most: int) -> Pieces:
    """Draw spans of one stream: starts and ends within a step, which do not overlap."""
    edges = sorted(of.draw(st.sets(st.integers(0, STEP_NS), max_size=2 * most)))
    return list(zip(edges[::2], edges[1::2], strict=False))


def row(category: str, kind: str, start: int, end: int, stream: str) -> dict[str, Any]:
    return {
        "rank": 0,
        "step": 0,
        "category": category,
        "kind": kind,
        "stream": stream,
        "axis": "dp" if category == "collective" else "",
        "start_ns": start,
        "duration_ns": end - start,
    }


def share(launched: Pieces, computed: Pieces, communicated: Pieces, stream: str = "host") -> Any:
    rows = [row("step", "step", 0, STEP_NS, "step")]
    rows += [row("host", "launch", *piece, stream) for piece in launched]
    rows += [row("compute", "forward", *piece, "compute") for piece in computed]
    rows += [row("collective", "all_reduce", *piece, "dp") for piece in communicated]
    columns: dict[str, object] = {name: [one[name] for one in rows] for name in rows[0]}
    run = in_memory(RunInfo(origin="simulated", world_size=1), timeline(columns))
    return launching_share(run), findings(run)


@given(st.data())
def test_it_is_the_time_in_which_only_the_host_launches(data: st.DataObject) -> None:
    launched, computed, communicated = (pieces(data, 5) for _ in range(3))
    at = [
        {time for start, end in some for time in range(start, end)}
        for some in (launched, computed, communicated)
    ]
    found, said = share(launched, computed, communicated)
    assert round(found * STEP_NS) == len(at[0] - at[1] - at[2])
    told = [(one.share, one.advice) for one in said if one.what == "launch"]
    assert told == [(found, "")] * (found > 0)  # the advice of the idle cause of that name is another's


def test_why_a_recorded_device_was_idle_is_said_elsewhere() -> None:
    assert share([(0, 50)], [(50, 100)], [], stream="idle")[0] == 0


@given(st.data())
def test_each_rank_counts_as_often_as_it_stands(data: st.DataObject) -> None:
    """Of its own steps only, in whatever order its spans were written."""
    stands = data.draw(st.sampled_from([(0, 1), (0, 0, 2), (0, 1, 1, 1)]))
    rows, length_ns, launched_ns = [], {}, {}
    for rank in sorted({*stands}):
        launched, computed, length_ns[rank] = pieces(data, 5), pieces(data, 5), (1 + rank) * STEP_NS
        at = [{time for start, end in some for time in range(start, end)} for some in (launched, computed)]
        launched_ns[rank] = len(at[0] - at[1])
        spans = [row("step", "step", 0, length_ns[rank], "step")]
        spans += [row("host", "launch", *piece, "host") for piece in launched]
        spans += [row("compute", "forward", *piece, "compute") for piece in computed]
        spans += [row("host", "data", *piece, "host") for piece in pieces(data, 5)]
        rows += [span | {"rank": rank} for span in data.draw(st.permutations(spans))]
    columns: dict[str, object] = {name: [one[name] for one in rows] for name in rows[0]}
    info = RunInfo(origin="simulated", world_size=len(stands), representatives=stands)
    run = in_memory(info, timeline(columns))
    whole_ns = sum(length_ns[rank] for rank in stands)
    assert round(launching_share(run) * whole_ns, 6) == sum(launched_ns[rank] for rank in stands)
