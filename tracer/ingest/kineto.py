"""Makes a recording of one Kineto file: device events, steps, and what the host did meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.calls import host_calls
from foretrace.tracer.ingest.chrome import (
    EVENTS_KEY,
    Trace,
    has_kineto_layout,
    read_any_layout,
    read_kineto_layout,
)
from foretrace.tracer.ingest.device import device_rows
from foretrace.tracer.ingest.events import whole
from foretrace.tracer.ingest.groups import MOST_RANKS, TraceGroups
from foretrace.tracer.ingest.host import (
    Known,
    Steps,
    gap_rows,
    host_only_rows,
    launches_of,
    step_rows,
    steps_of,
)
from foretrace.tracer.ingest.notes import Notes
from foretrace.tracer.ingest.recording import Recording, stacked
from foretrace.tracer.ingest.sources import Progress, Source, head, opened
from foretrace.traces.errors import reason

LATEST_NS: Final = 4 * 10**18
"""Latest base time that is believed, in the year 2096. Times of events may be as large: sums of both fit."""


def read(source: Source, progress: Progress | None = None) -> Recording:
    """Read one Kineto or Chrome trace of a rank.

    Raises:
        IngestError: the file cannot be read, is no trace, or holds nothing that has a duration.
    """
    fast = has_kineto_layout(head(source, until=EVENTS_KEY))
    reader = read_kineto_layout if fast else read_any_layout
    with opened(source, progress) as stream:
        trace = reader(stream)
    if not any(table.num_rows for table in trace.device):
        with opened(source) as stream:
            trace.operators = reader(stream, operators=True).operators
    try:
        return translated(trace, source.name)
    except (OverflowError, pa.ArrowException) as error:
        raise IngestError(f"{source.name} holds numbers that no trace has: {reason(error)}") from error


def translated(trace: Trace, name: str) -> Recording:
    """Return the recording of one rank that *trace* holds.

    Raises:
        IngestError: nothing in it has a duration.
    """
    info = trace.header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank, world_size = _rank(info), _world_size(info)
    base_ns = whole(trace.header.get("baseTimeNanoseconds")) or 0
    if abs(base_ns) > LATEST_NS:
        base_ns = 0
        trace.lost["base time that is no time"] += 1
    groups = TraceGroups.from_header(-1 if rank is None else rank, world_size or 0, info)
    notes = Notes.of(trace.notes, base_ns)
    steps = steps_of(notes, trace.header)
    result = Recording(
        name=name,
        spans=pa.table({}),
        rank=rank,
        world_size=world_size,
        lost=trace.lost,
        facts=_facts(trace.header),
    )
    known = Known(
        base_ns=base_ns,
        notes=notes,
        calls=host_calls(notes, groups),
        launches=launches_of(trace.launch_table(), base_ns),
        steps=steps,
        groups=groups,
        result=result,
    )
    device = device_rows(trace.device_table(), known)
    if device is None:
        spans = host_only_rows(trace, known)
    else:
        timeline, launch = device
        spans = stacked([timeline, gap_rows(timeline, launch, known)])
    if not spans.num_rows:
        raise IngestError(f"{name} holds no event with a duration: no kernel, no operator, no annotation")
    result.spans = stacked([spans, step_rows(steps, spans)])
    result.groups = tuple(groups.known.values())
    _note(result, trace, steps, groups, rank)
    return result


def _note(result: Recording, trace: Trace, steps: Steps, groups: TraceGroups, rank: int | None) -> None:
    """Write down where things were taken from, and what is missing."""
    if rank is not None:
        result.evidence["rank"] = "distributedInfo in the file"
    if steps.number.size:
        result.evidence["step"] = "ProfilerStep annotations"
    if groups.sources:
        result.evidence["group"] = "; ".join(sorted(groups.sources))
    if trace.cut:
        result.warnings.append(f"{trace.cut}; what was complete is shown")


def _rank(info: Mapping[str, Any]) -> int | None:
    rank = whole(info.get("rank"))
    return rank if rank is not None and 0 <= rank < MOST_RANKS else None


def _world_size(info: Mapping[str, Any]) -> int | None:
    size = whole(info.get("world_size"))
    return size if size is not None and 1 <= size <= MOST_RANKS else None


def _facts(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the header says about the machine, for ``run.json``."""
    devices = header.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices and isinstance(devices[0], dict) else {}
    facts: dict[str, Any] = {}
    if isinstance(first.get("name"), str):
        facts["device"] = {"name": first["name"]}
        if memory := whole(first.get("totalGlobalMem")):
            facts["device"]["memory_bytes"] = memory
    info = header.get("distributedInfo")
    versions = {"nccl": info.get("nccl_version")} if isinstance(info, dict) else {}
    versions |= {name: header.get(f"{name}_version") for name in ("cupti", "cuda_runtime", "roctracer")}
    facts["versions"] = {
        name: str(value) for name, value in versions.items() if isinstance(value, str | int | float)
    }
    return facts
