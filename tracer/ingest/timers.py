"""Reads begin/end timers of pipelines, as MegatronApp writes them, all ranks in one file.

Events are ``B`` and ``E`` of a name, on a process per rank; arguments tell iteration, micro-batch, model
chunk and pipeline rank. Marks (``i``) named ``iteration begin``, ``reduce`` and ``iteration end`` bound a
step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.chrome import Decoder, Trace
from foretrace.tracer.ingest.events import LONGEST_US, arguments, number, text, to_ns, whole
from foretrace.tracer.ingest.kernels import UNKNOWN, collective_kind
from foretrace.tracer.ingest.recording import Recording, Rows, innermost
from foretrace.tracer.ingest.sources import Progress, Source, opened
from foretrace.traces.layout import Group, Layout

GAP: Final = "pass of another stage"
"""Name of the time between two passes, in which a stage has nothing to do but wait for its neighbour."""

_MOST_DEPTH: Final = 1000


class _Timed(NamedTuple):
    """One timer that has begun and ended; times in ns."""

    start_ns: int
    end_ns: int
    name: str
    said: Mapping[str, Any]


class _Process:
    """What one process has recorded."""

    def __init__(self) -> None:
        self.timers: list[_Timed] = []
        self.marks: dict[str, dict[int, int]] = defaultdict(dict)
        self.open: dict[object, list[tuple[int, str, Mapping[str, Any]]]] = defaultdict(list)


def read(source: Source, progress: Progress | None = None) -> Recording:
    """Read a file of begin/end timers.

    Raises IngestError: it cannot be read, or no timer in it begins and ends.
    """
    trace = Trace()
    processes: dict[int, _Process] = defaultdict(_Process)
    try:
        with opened(source, progress) as stream:
            for event in Decoder(stream, trace).events():
                _add(processes, event, trace.lost)
    except RecursionError as error:
        raise IngestError(f"{source.name}: values are nested too deeply to be a trace") from error
    for process in processes.values():
        if unclosed := sum(map(len, process.open.values())):
            trace.lost["timer that never ends"] += unclosed
    used = {pid: process for pid, process in sorted(processes.items()) if process.timers}
    if not used:
        raise IngestError(f"{source.name}: no timer begins and ends in it")
    return _recording(source.name, trace, used)


def _add(processes: dict[int, _Process], event: object, lost: Counter[str]) -> None:
    """Note one event; what cannot be understood is counted."""
    if not isinstance(event, dict):
        lost["malformed event"] += 1
        return
    ph, ts, pid = event.get("ph"), number(event.get("ts")), whole(event.get("pid"))
    if not isinstance(ph, str) or ph not in {"B", "E", "i", "I"}:
        return
    if ts is None or abs(ts) >= LONGEST_US:
        lost["event without a usable time"] += 1
        return
    process = processes[pid if pid is not None else 0]
    t_ns, name, said = to_ns(ts), text(event.get("name", "")), arguments(event)
    stack = process.open[str(event.get("tid"))]
    if ph == "B":
        if len(stack) >= _MOST_DEPTH:
            lost["timer nested too deeply"] += 1
        else:
            stack.append((t_ns, name, said))
    elif ph == "E":
        _end(process, stack, t_ns, said, lost)
    elif (iteration := whole(said.get("iteration"))) is not None:
        process.marks[name].setdefault(iteration, t_ns)


def _end(
    process: _Process,
    stack: list[tuple[int, str, Mapping[str, Any]]],
    t_ns: int,
    said: Mapping[str, Any],
    lost: Counter[str],
) -> None:
    if not stack:
        lost["end of a timer that never began"] += 1
        return
    start_ns, name, begun = stack.pop()
    if t_ns < start_ns:
        lost["timer that ends before it begins"] += 1
        return
    process.timers.append(_Timed(start_ns, t_ns, name, {**begun, **said}))


def _recording(name: str, trace: Trace, processes: dict[int, _Process]) -> Recording:
    stages = _stages(processes)
    result = Recording(
        name=name, spans=pa.table({}), world_size=len(processes), one_clock=True, lost=trace.lost
    )
    if stages is not None and len(stages) > 1:
        result.layout = Layout(pp=len(stages))
        result.groups = (Group(id=0, axis="pp", ranks=tuple(range(len(stages)))),)
        result.evidence["layout"] = "pp_rank of the timers: one process per stage"
        result.evidence["bubble"] = f"time between passes; the file has no transfers, it is named {GAP!r}"
    result.evidence["rank"] = "pp_rank of the timers" if stages is not None else "order of the processes"
    if trace.cut:
        result.warnings.append(f"{trace.cut}; what was complete is shown")
    rows = Rows()
    for place, (pid, process) in enumerate(processes.items()):
        rank = place if stages is None else stages[pid]
        stage = rank if stages is not None else -1
        for row in _rows(process, gaps=stages is not None and len(stages) > 1):
            rows.add({"rank": rank, "stage": stage, **row})
    result.spans = rows.table()
    return result


def _stages(processes: dict[int, _Process]) -> dict[int, int] | None:
    found = {}
    for pid, process in processes.items():
        told = {whole(timer.said.get("pp_rank")) for timer in process.timers}
        if len(told) != 1 or (stage := told.pop()) is None:
            return None
        found[pid] = stage
    return found if sorted(found.values()) == list(range(len(found))) else None


def _rows(process: _Process, *, gaps: bool) -> Iterator[dict[str, Any]]:
    steps = _steps(process)
    bounds = np.array([start for start, _, _ in steps], np.int64)

    def step_at(t_ns: int) -> int:
        at = int(np.searchsorted(bounds, t_ns, side="right")) - 1
        return steps[at][2] if at >= 0 and t_ns <= steps[at][1] else -1

    for start_ns, end_ns, step in steps:
        yield _row(("step", "step", "step", f"step {step}"), start_ns, end_ns, step)
    timers = sorted(process.timers, key=lambda timer: (timer.start_ns, -timer.end_ns))
    start = np.array([timer.start_ns for timer in timers], np.int64)
    end = np.array([timer.end_ns for timer in timers], np.int64)
    passes: list[tuple[int, int]] = []
    for index, a, b in innermost(start, end):
        timer = timers[index]
        category, kind = _what(timer.name)
        if kind in {"forward", "backward"}:
            passes.append((a, b))
        yield _row(("compute", category, kind, timer.name[:160]), a, b, step_at(a)) | {
            "microbatch": _small(timer.said.get("microbatch")),
            "virtual_stage": _small(timer.said.get("model_chunk"), 1 << 15),
        }
    yield from _reductions(process, passes, steps)
    if gaps:
        yield from _gaps(passes, steps)


def _reductions(
    process: _Process, passes: list[tuple[int, int]], steps: list[tuple[int, int, int]]
) -> Iterator[dict[str, Any]]:
    """Yield the time from the ``reduce`` mark to the end of each iteration: neither a pass nor a bubble."""
    marks = process.marks.get("reduce", {})
    for start_ns, end_ns, step in steps:
        # Passes may go on behind the mark: then it begins with the end of the last of them.
        begin = max(
            [marks.get(step, end_ns), start_ns, *(end for _, end in passes if start_ns < end <= end_ns)]
        )
        if begin < end_ns:
            yield _row(("host", "host", "reduce", "from the reduce mark to the end"), begin, end_ns, step)


def _gaps(passes: list[tuple[int, int]], steps: list[tuple[int, int, int]]) -> Iterator[dict[str, Any]]:
    """Yield the time between two passes of one step: a wait for another stage."""
    for start_ns, end_ns, step in steps:
        own = [(a, b) for a, b in passes if start_ns <= a < end_ns]
        for (_, before), (after, _) in pairwise(own):
            if after > before:
                yield _row(("pp.recv", "wait", "recv", GAP), before, after, step) | {"axis": "pp", "group": 0}


def _steps(process: _Process) -> list[tuple[int, int, int]]:
    begin, end = process.marks.get("iteration begin", {}), process.marks.get("iteration end", {})
    found = sorted(
        (begin[n], end[n], n) for n in begin if n in end and begin[n] < end[n] and 0 <= n < 1 << 31
    )
    # An iteration that reaches into the next is left out; behind the last one stands a moment without end.
    return [one for one, after in pairwise([*found, (1 << 62, 0, 0)]) if one[1] <= after[0]]


def _row(place: tuple[str, str, str, str], start_ns: int, end_ns: int, step: int) -> dict[str, Any]:
    row: dict[str, Any] = dict(zip(("stream", "category", "kind", "name"), place, strict=True)) | {
        "step": step
    }
    return row | {
        "start_ns": start_ns, "duration_ns": end_ns - start_ns, "microbatch": -1, "virtual_stage": -1,
        "axis": "", "group": -1,
    }  # fmt: skip


def _what(name: str) -> tuple[str, str]:
    word = name.lower()
    for kind in ("forward", "backward", "optimizer"):
        # A transfer bears the name of its pass, as `forward-send`.
        if kind in word and not any(part in word for part in ("send", "recv")):
            return "compute", kind
    return ("compute" if collective_kind(name) == UNKNOWN else "host"), name[:60] or "timer"


def _small(value: object, limit: int = 1 << 31) -> int:
    found = whole(value)
    return found if found is not None and 0 <= found < limit else -1
