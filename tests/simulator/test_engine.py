"""Laws of the engines on random programs, and what they say when a program cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulator.made_programs import program_of

from foretrace.simulator.engine import WORTH_LOADING, choose, compiled, contended, contended_compiled, event
from foretrace.simulator.engine.jit import _is_ours, jit, words
from foretrace.simulator.errors import EngineError, ProgramError
from foretrace.simulator.program import Label, Program, Transfer
from foretrace.simulator.schedules import Action, plan

STREAMS = ("compute", "tp", "dp")
ENGINES = [event, compiled]


@dataclass
class Task:
    rank: int
    stream: int
    duration_ns: int = 0
    deps: list[int] = field(default_factory=list)
    instance: int = -1
    step: int = 0


def make(tasks: list[Task], costs: list[int], participants: list[int] | None = None) -> Program:
    """Return the program of *tasks*; communication *i* takes ``costs[i]`` ns."""
    fields = {} if participants is None else {"instance_participants": np.array(participants, np.int32)}
    return program_of(
        rank=[task.rank for task in tasks],
        stream=[task.stream for task in tasks],
        label=[int(task.instance >= 0) for task in tasks],
        duration_ns=[task.duration_ns for task in tasks],
        instance=[task.instance for task in tasks],
        deps=[task.deps for task in tasks],
        streams=STREAMS,
        labels=(Label("compute", "forward", "mlp"), Label("collective", "all_reduce", "mlp", "tp", "bf16")),
        transfers=[Transfer(cost // 2, cost - cost // 2) for cost in costs],
        step=np.array([task.step for task in tasks], np.int32),
        **fields,
    )


@st.composite
def runnable(draw: st.DrawFn, *, communicate: bool = True) -> tuple[list[Task], list[int]]:
    """Return tasks that can run: everything waits only for what was drawn before it."""
    n_ranks = draw(st.integers(1, 3))
    tasks: list[Task] = []
    costs: list[int] = []
    for _ in range(draw(st.integers(1, 25))):
        stream = draw(st.integers(0, len(STREAMS) - 1))
        members = [draw(st.integers(0, n_ranks - 1))]
        meeting = communicate and draw(st.booleans())
        if meeting:
            members = sorted(draw(st.sets(st.integers(0, n_ranks - 1), min_size=1)))
            costs.append(draw(st.integers(0, 50)))
        before = list(range(len(tasks)))
        for rank in members:
            deps = draw(st.lists(st.sampled_from(before), max_size=3, unique=True)) if before else []
            duration = 0 if meeting else draw(st.integers(0, 50))
            tasks.append(Task(rank, stream, duration, deps, len(costs) - 1 if meeting else -1))
    return tasks, costs


def longest_path(tasks: list[Task], costs: list[int]) -> tuple[list[int], list[int]]:
    """Return start and end of every task as longest paths in a graph: no events, no streams."""
    graph: nx.DiGraph[Any] = nx.DiGraph()
    lanes: dict[tuple[int, int], int] = {}
    for at, task in enumerate(tasks):
        end = ("met", task.instance) if task.instance >= 0 else ("end", at)
        cost = costs[task.instance] if task.instance >= 0 else task.duration_ns
        graph.add_edge(("start", at), end, ns=cost)
        lane = (task.rank, task.stream)
        for other in [*task.deps, *([lanes[lane]] if lane in lanes else [])]:
            ended = ("met", tasks[other].instance) if tasks[other].instance >= 0 else ("end", other)
            graph.add_edge(ended, ("start", at), ns=0)
        lanes[lane] = at
    when: dict[Any, int] = {}
    for node in nx.topological_sort(graph):
        when[node] = max((when[a] + edge["ns"] for a, _, edge in graph.in_edges(node, data=True)), default=0)
    ends = [when["met", t.instance] if t.instance >= 0 else when["end", at] for at, t in enumerate(tasks)]
    return [when["start", at] for at in range(len(tasks))], ends


@settings(max_examples=60, deadline=None)
@given(drawn=runnable(), damaged=st.booleans())
def test_both_engines_agree_to_the_nanosecond(drawn: tuple[list[Task], list[int]], *, damaged: bool) -> None:
    """Also where a program cannot run to its end: the same error, word for word."""
    tasks, costs = drawn
    if damaged:
        tasks = [replace(task, deps=[*task.deps, len(tasks) - 1]) for task in tasks]
    results: list[object] = []
    for engine in ENGINES:
        try:
            results.append([column.tolist() for column in engine.times(make(tasks, costs))])
        except ProgramError as error:
            results.append(str(error))
    assert results[0] == results[1]


@settings(max_examples=40, deadline=None)
@given(drawn=runnable(), data=st.data())
def test_running_again_with_other_durations_is_running_another_program(
    drawn: tuple[list[Task], list[int]], data: st.DataObject
) -> None:
    tasks, costs = drawn
    other = [replace(t, duration_ns=data.draw(st.integers(0, 50)) if t.instance < 0 else 0) for t in tasks]
    other_costs = [data.draw(st.integers(0, 50)) for _ in costs]
    clock = compiled.Clock(make(tasks, costs))
    found = clock.times(np.array([t.duration_ns for t in other], np.int64), np.array(other_costs, np.int64))
    assert [x.tolist() for x in found] == [x.tolist() for x in event.times(make(other, other_costs))]
    assert [x.tolist() for x in clock.times()] == [x.tolist() for x in event.times(make(tasks, costs))]
    last_ns = compiled.Makespan(make(tasks, costs)).last_ns(
        np.array([t.duration_ns for t in other], np.int64), np.array(other_costs, np.int64)
    )
    assert last_ns == found[1].max()


@settings(max_examples=60, deadline=None)
@given(drawn=runnable(), data=st.data())
def test_both_contended_engines_agree_to_the_nanosecond(
    drawn: tuple[list[Task], list[int]], data: st.DataObject
) -> None:
    """Whatever share of which links the transfers fill; and where the program cannot run."""
    tasks, costs = drawn
    if data.draw(st.integers(0, 9)) == 0:
        tasks = [replace(task, deps=[*task.deps, len(tasks) - 1]) for task in tasks]
    program = make(tasks, costs)
    share = st.sampled_from([0.0, 0.25, 0.3, 0.7, 1.0])
    transfers = tuple(t._replace(near=data.draw(share), far=data.draw(share)) for t in program.transfers)
    program = replace(program, transfers=transfers)
    results: list[object] = []
    for engine in (contended, contended_compiled):
        try:
            results.append([column.tolist() for column in engine.times(program)])
        except ProgramError as error:
            results.append(str(error))
    assert results[0] == results[1]


@settings(deadline=None)
@given(runnable())
def test_every_task_is_where_the_longest_path_puts_it(drawn: tuple[list[Task], list[int]]) -> None:
    start_ns, end_ns = event.times(make(*drawn))
    assert (start_ns.tolist(), end_ns.tolist()) == longest_path(*drawn)


@settings(deadline=None)
@given(runnable(communicate=False))
def test_makespan_without_communication_is_the_longest_path(drawn: tuple[list[Task], list[int]]) -> None:
    tasks, costs = drawn
    graph: nx.DiGraph[Any] = nx.DiGraph()
    graph.add_weighted_edges_from((("s", i), ("e", i), t.duration_ns) for i, t in enumerate(tasks))
    graph.add_weighted_edges_from((("e", d), ("s", i), 0) for i, t in enumerate(tasks) for d in t.deps)
    lanes: dict[tuple[int, int], list[int]] = {}
    for at, task in enumerate(tasks):
        lanes.setdefault((task.rank, task.stream), []).append(at)
    graph.add_weighted_edges_from(
        (("e", a), ("s", b), 0) for lane in lanes.values() for a, b in pairwise(lane)
    )
    _, end_ns = event.times(make(tasks, costs))
    assert end_ns.max() == nx.dag_longest_path_length(graph)


@settings(deadline=None)
@given(runnable())
def test_nothing_overlaps_on_one_stream_and_inputs_come_first(drawn: tuple[list[Task], list[int]]) -> None:
    tasks, _ = drawn
    start_ns, end_ns = event.times(make(*drawn))
    last: dict[tuple[int, int], int] = {}
    for at, task in enumerate(tasks):
        lane = (task.rank, task.stream)
        assert start_ns[at] >= last.get(lane, 0)
        assert all(start_ns[at] >= end_ns[dep] for dep in task.deps)
        last[lane] = end_ns[at]


@settings(deadline=None)
@given(runnable())
def test_a_communication_ends_for_all_together_after_the_last_arrival(
    drawn: tuple[list[Task], list[int]],
) -> None:
    tasks, costs = drawn
    start_ns, end_ns = event.times(make(*drawn))
    for instance, cost in enumerate(costs):
        members = [at for at, task in enumerate(tasks) if task.instance == instance]
        assert {int(end_ns[at]) for at in members} == {max(int(start_ns[at]) for at in members) + cost}


@settings(deadline=None)
@given(runnable(), st.data())
def test_a_shorter_task_or_a_faster_link_never_makes_the_step_longer(
    drawn: tuple[list[Task], list[int]], data: st.DataObject
) -> None:
    """A theorem for in-order streams: a path can only become shorter. Holds for every single task."""
    tasks, costs = drawn
    shorter = [replace(t, duration_ns=data.draw(st.integers(0, t.duration_ns))) for t in tasks]
    faster = [data.draw(st.integers(0, cost)) for cost in costs]
    slow_start, slow_end = event.times(make(tasks, costs))
    fast_start, fast_end = event.times(make(shorter, faster))
    assert (fast_start <= slow_start).all()
    assert (fast_end <= slow_end).all()


@settings(deadline=None)
@given(runnable())
def test_the_same_program_gives_the_same_table(drawn: tuple[list[Task], list[int]]) -> None:
    program = make(*drawn)
    assert event.run(program).equals(event.run(program))


def pipeline(name: str, p: int, m: int, f_ns: int, b_ns: int) -> list[Task]:
    """Return the tasks of a schedule with free communication: one stream per stage."""
    actions = [action for rank in plan(name, p, m) for action in rank]
    position = {action: at for at, action in enumerate(actions)}
    tasks = []
    for action in actions:
        forward = action.kind == "F"
        beside = Action(action.kind, action.stage + (-1 if forward else 1), action.microbatch)
        deps = [position[beside]] if beside in position else []
        if not forward:
            deps.append(position[action._replace(kind="F")])
        tasks.append(Task(action.stage, 0, f_ns if forward else b_ns, deps))
    return tasks


@settings(deadline=None)
@given(
    p=st.integers(1, 6),
    m=st.integers(1, 16),
    f_ns=st.integers(1, 9),
    b_ns=st.integers(1, 9),
    name=st.sampled_from(["gpipe", "1f1b"]),
)
def test_makespan_of_gpipe_and_1f1b_is_the_closed_form(
    p: int, m: int, f_ns: int, b_ns: int, name: str
) -> None:
    """(m + p - 1)(f + b), with free communication: Narayanan et al. 2021, section 2.2."""
    _, end_ns = event.times(make(pipeline(name, p, m, f_ns, b_ns), []))
    assert end_ns.max() == (m + p - 1) * (f_ns + b_ns)


@settings(deadline=None)
@given(p=st.integers(1, 6), m=st.integers(1, 8), f_ns=st.integers(1, 9), b_ns=st.integers(1, 9))
def test_makespan_of_naive_is_the_closed_form(p: int, m: int, f_ns: int, b_ns: int) -> None:
    _, end_ns = event.times(make(pipeline("naive", p, m, f_ns, b_ns), []))
    assert end_ns.max() == m * p * (f_ns + b_ns)


def test_the_timeline_carries_communications_and_steps() -> None:
    tasks = [
        Task(0, 0, 10),
        Task(0, 1, 0, [0], instance=0),
        Task(1, 1, 0, instance=0),
        Task(1, 0, 5, [2], step=1),
    ]
    rows = event.run(make(tasks, [30])).to_pylist()
    assert [(r["category"], r["start_ns"], r["duration_ns"]) for r in rows[:4]] == [
        ("compute", 0, 10),
        ("collective", 10, 30),
        ("collective", 0, 40),
        ("compute", 40, 5),
    ]
    assert [(r["group"], r["sequence"], r["size_bytes"], r["axis"]) for r in rows[:3]] == [
        (-1, -1, 0, ""),
        (7, 0, 1024, "tp"),
        (7, 0, 1024, "tp"),
    ]
    windows = [(r["rank"], r["step"], r["start_ns"], r["duration_ns"]) for r in rows if r["stream"] == "step"]
    assert windows == [(0, 0, 0, 40), (1, 0, 0, 40), (1, 1, 40, 5)]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_empty_program_has_an_empty_timeline(engine: Any) -> None:
    assert engine.run(make([], [])).num_rows == 0


def test_the_engine_is_chosen_by_name_or_by_size() -> None:
    assert choose("event", 10**9) is event
    assert choose("compiled", 1) is compiled
    assert choose("contended-compiled", 1) is contended_compiled
    assert choose("auto", WORTH_LOADING) is compiled
    assert choose("auto", WORTH_LOADING - 1) is event
    with pytest.raises(EngineError, match=r"engine 'fast': one of auto, event, compiled, contended"):
        choose("fast", 1)


def test_without_numba_everything_runs_on_the_event_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretrace.simulator.engine.find_spec", lambda _: None)
    assert choose("auto", 10**9) is event
    with pytest.raises(EngineError, match="needs numba: pip install numba, or --engine event"):
        choose("compiled", 1)


def test_a_folder_gives_numba_no_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file in the current folder could name compiled code to load, which may do anything."""
    (tmp_path / ".numba_config.yaml").write_text("cache_dir: taken")
    monkeypatch.chdir(tmp_path)
    assert choose("auto", 10**9) is event
    with pytest.raises(EngineError, match=r"numba_config\.yaml, .*: start elsewhere, or --engine event"):
        choose("compiled", 1)


SAYS = (
    "from numpy import int64, zeros; from foretrace.simulator.engine import choose; said = []; "
    "engine = choose('compiled', 1, said.append); "
    "engine._waits_of(zeros(1, int64), zeros(2, int64), zeros(0, int64)); print(said)"
)
"""Compiles the shortest function of the engine."""

ROOT = Path(__file__).parents[2]


def say(environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a process that compiles a part of the engine and prints what it was told."""
    return subprocess.Popen(
        [sys.executable, "-c", SAYS],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_compiling_is_announced_and_only_once_also_by_processes_at_the_same_time(tmp_path: Path) -> None:
    """Two with an empty cache say so and do not disturb each other; the next one finds their work."""
    environment = {"NUMBA_CACHE_DIR": str(tmp_path)}
    first = [say(environment) for _ in range(2)]
    answers = [process.communicate() for process in first]
    assert [process.returncode for process in first] == [0, 0], answers
    assert {out for out, _ in answers} == {"['compiling the engine, once (some seconds)']\n"}
    assert say(environment).communicate() == ("[]\n", "")


def test_what_is_kept_is_used_unless_others_can_change_it(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o700)
    (kept / "compiled.nbi").touch(mode=0o600)
    (kept / "compiled.py").touch()
    assert _is_ours.__wrapped__(kept)
    (kept / "compiled.nbi").chmod(0o666)
    assert not _is_ours.__wrapped__(kept)


def test_what_can_be_kept_nowhere_is_compiled_all_the_same() -> None:
    """As on a read-only installation: numba finds no place, here because the function is in no file."""
    made: dict[str, Any] = {}
    exec("def twice(x):\n    return 2 * x", made)
    twice = jit(made["twice"])
    assert "NUMBA_CACHE_DIR can name a directory" in words(twice, __file__)
    assert twice(3) == 6


def test_a_participant_without_a_task_is_named() -> None:
    program = make([Task(3, 1, instance=0)], [10], participants=[2])
    with pytest.raises(
        ProgramError,
        match=r"all_reduce 0 of group 7 \(tp\) waits for ever: rank 3 arrived first at 0 ns, "
        r"but 1 of 2 participants came; the others have no task in the program",
    ):
        event.run(program)


def test_collectives_in_opposite_order_are_a_deadlock_that_names_both_ranks() -> None:
    tasks = [
        Task(0, 1, instance=0),
        Task(0, 1, instance=1),
        Task(1, 1, instance=1),
        Task(1, 1, instance=0),
    ]
    with pytest.raises(
        ProgramError, match=r"all_reduce 0 of group 7 \(tp\).* rank 0 .*; rank 1 stands at task 2"
    ):
        event.run(make(tasks, [10, 10]))


def test_a_cycle_of_dependencies_is_named() -> None:
    tasks = [Task(0, 0, 5, [1]), Task(1, 0, 5, [0]), Task(1, 1, 5)]
    with pytest.raises(ProgramError, match=r"task 0 .*rank 0.* waits for task 1 .*rank 1.* waits for task 0"):
        event.run(make(tasks, []))


def test_waiting_for_a_later_task_of_the_same_stream_is_a_cycle() -> None:
    with pytest.raises(ProgramError, match=r"task 0 .* waits for task 1 .* waits for task 0"):
        event.run(make([Task(0, 0, 5, [1]), Task(0, 0, 5)], []))
