"""Timelines that tests write down span by span."""

from typing import Any, NamedTuple

import pyarrow as pa

from foretrace.traces.info import RunInfo
from foretrace.traces.run import Part, Run
from foretrace.traces.timeline import MEMORY, timeline


class Span(NamedTuple):
    """A span of a hand-made timeline."""

    rank: int
    category: str
    kind: str
    start_ns: int
    duration_ns: int
    axis: str = ""
    group: int = -1
    sequence: int = -1
    peer: int = -1
    step: int = 0
    is_bound: bool = False


def opened(spans: list[Span], **values: Any) -> Run:
    given: dict[str, Any] = {"origin": "simulated", "world_size": 4} | values
    info = RunInfo(**given)
    columns: dict[str, object] = dict(zip(Span._fields, zip(*spans, strict=True), strict=True))
    return in_memory(info, timeline(columns))


def in_memory(info: RunInfo, spans: pa.Table, memory: pa.Table | None = None) -> Run:
    """Return the run of *spans*, as a simulation makes it: what files do to it, test_store.py tests."""
    held = MEMORY.empty_table() if memory is None else memory.cast(MEMORY)
    return Run("hand-made", info, [Part(None, lambda: spans)], held, ())


def compute(rank: int, kind: str, start: int, duration: int) -> Span:
    return Span(rank, "compute", kind, start, duration)


def collective(rank: int, start: int, duration: int, *, axis: str = "dp", group: int = 0, n: int = 0) -> Span:
    return Span(rank, "collective", "all_reduce", start, duration, axis, group, n)


def p2p(rank: int, kind: str, start: int, duration: int, peer: int) -> Span:
    return Span(rank, "p2p", kind, start, duration, "pp", 9, 0, peer)


def window(rank: int, start: int, duration: int, step: int = 0) -> Span:
    return Span(rank, "step", "step", start, duration, step=step)
