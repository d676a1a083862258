"""Waiting leads back to whom it comes from, not to whoever came last because it waited itself."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.traces.hand_made import in_memory

from foretrace.simulator.config import job_from
from foretrace.simulator.simulate import simulate
from foretrace.traces.analysis.findings import findings
from foretrace.traces.analysis.roots import CAUSES, followed, held_up, roots
from foretrace.traces.info import RunInfo
from foretrace.traces.layout import Group
from foretrace.traces.run import Run
from foretrace.traces.timeline import timeline

MS = 1_000_000
PAIRS = ((0, 1), (1, 2), (2, 3))
AXES = ("tp", "dp", "world")


def made(works: dict[int, list[tuple[str, int, int]]], n_ranks: int) -> Run:
    """Return a run in which each rank does its list in order: compute for ms, or meet in a group for ms.

    A meeting begins when all members have come, as a collective does.
    """
    rows: list[dict[str, Any]] = []
    now = dict.fromkeys(range(n_ranks), 0)
    todo = {rank: list(works.get(rank, [])) for rank in range(n_ranks)}
    met = dict.fromkeys(range(len(PAIRS)), 0)
    while any(todo.values()):
        for rank, left in todo.items():
            while left and left[0][0] != "meet":
                kind, ms, _ = left.pop(0)
                rows.append(span(rank, now[rank], now[rank] + ms * MS, kind))
                now[rank] += ms * MS
        for number, members in enumerate(PAIRS):
            if all(todo[r] and todo[r][0][:2] == ("meet", number) for r in members):
                ms = max(todo[r].pop(0)[2] for r in members)
                end = max(now[r] for r in members) + ms * MS
                for r in members:
                    said = {"group": number, "axis": AXES[number], "sequence": met[number]}
                    rows.append(span(r, now[r], end, "all_reduce", category="collective", **said))
                    now[r] = end
                met[number] += 1
    groups = tuple(Group(id=i, axis=AXES[i], ranks=pair) for i, pair in enumerate(PAIRS))
    names = rows[0].keys()
    columns: dict[str, object] = {name: [row[name] for row in rows] for name in names}
    info = RunInfo(origin="ingested", world_size=n_ranks, groups=groups)
    return in_memory(info, timeline(columns))


def span(rank: int, start: int, end: int, kind: str, **more: Any) -> dict[str, Any]:
    row = {"rank": rank, "start_ns": start, "duration_ns": end - start, "kind": kind, "step": 0}
    row |= {"category": "host" if kind == "load" else "compute", "stream": "compute", "name": kind}
    return row | {"axis": "", "group": -1, "sequence": -1} | more


def chain(kind: str = "forward") -> Run:
    """Rank 3 works 50 ms, the others 10; then 2 meets 3, 1 meets 2, 0 meets 1: each is late for the next."""
    works: dict[int, list[tuple[str, int, int]]] = {rank: [("forward", 10, 0)] for rank in range(3)}
    works[3] = [("forward", 10, 0), (kind, 40, 0), ("meet", 2, 1)]
    works[2] += [("meet", 2, 1), ("meet", 1, 1)]
    works[1] += [("meet", 1, 1), ("meet", 0, 1)]
    works[0] += [("meet", 0, 1)]
    return made(works, 4)


@pytest.mark.parametrize(("kind", "cause"), [("forward", "compute"), ("load", "other")])
def test_a_chain_of_waits_leads_to_its_root(kind: str, cause: str) -> None:
    """Rank 2 waits 40 ms, rank 1 41 (the transfer of 1 ms is rank 2's), rank 0 42."""
    found = roots(chain(kind))
    assert found[0].rank == 3
    assert found[0].direct_ns == 40 * MS
    assert sum(one.caused_ns for one in found) == (40 + 41 + 42) * MS
    assert found[0].caused_ns == pytest.approx((40 + 40 + 40) * MS, rel=0.03)
    assert max(found[0].by_cause, key=found[0].by_cause.__getitem__) == cause
    assert set(found[0].waiting_ranks) == {0, 1, 2}
    assert set(found[0].by_axis) == {"tp", "dp", "world"}


def test_the_words_name_the_root_and_say_that_others_are_late_because_of_it() -> None:
    run = chain()
    (one,) = (found for found in findings(run) if found.what == "held up:3")
    assert one.text.startswith(
        "rank 3 computes 5.00 times as long as the other ranks: 3 others wait for it, most along"
    )
    assert ", 67 % of that behind ranks that it makes late" in one.text
    loads = held_up(chain("load"))[0]
    assert "comes late for reasons outside of its kernels" in loads.text


def test_being_late_after_a_fair_share_of_waiting_is_nobodys_new_fault() -> None:
    """Rank 1 is slow before both meetings: rank 2 waits for it, then 3 for 2 because of it."""
    works: dict[int, list[tuple[str, int, int]]] = {
        1: [("forward", 30, 0), ("meet", 1, 1)],
        2: [("forward", 10, 0), ("meet", 1, 1), ("meet", 2, 1)],
        3: [("forward", 10, 0), ("meet", 2, 1)],
    }
    found = roots(made(works, 4))
    assert found[0].rank == 1
    assert found[0].caused_ns == pytest.approx(40 * MS, rel=0.03)


ACTIONS = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 9), min_size=4, max_size=4)), max_size=12
)


@settings(max_examples=30, deadline=None)
@given(actions=ACTIONS)
def test_nothing_of_the_waiting_is_lost(actions: list[tuple[int, list[int]]]) -> None:
    """Roots add up to all waiting, by cause, by axis and by rank."""
    works: dict[int, list[tuple[str, int, int]]] = {rank: [("forward", 1, 0)] for rank in range(4)}
    for number, ms in actions:
        for rank in range(4):
            works[rank].append(("forward" if ms[rank] % 2 else "load", ms[rank], 0))
        for rank in PAIRS[number]:
            works[rank].append(("meet", number, 1))
    run = made(works, 4)
    _, waits = followed(run, AXES)
    found = roots(run)
    total = int(waits.waited_ns.sum())
    assert sum(one.caused_ns for one in found) == pytest.approx(total, abs=8)
    for one in found:
        assert one.direct_ns <= one.caused_ns + 1
        for parts in (one.by_cause, one.by_axis, one.by_rank):
            assert sum(parts.values()) == pytest.approx(one.caused_ns, abs=8)
        assert set(one.by_cause) <= set(CAUSES)


def test_a_rank_that_stands_for_its_stage_is_called_by_the_stage() -> None:
    """The last stage has the head besides as many layers: all of its ranks compute longer, not one."""
    job = {"model": "llama3-70b", "cluster": "dgx-h100", "gpus": 64, "tp": 4, "pp": 4, "global_batch": 64}
    run = simulate(job_from({**job, "seq_len": 4096, "framework": "megatron"})).run
    (one,) = (found for found in findings(run) if found.what.startswith("held up"))
    assert one.text.startswith("stage 3 computes")
    assert "the other stages: 48 others wait for it" in one.text
