"""What is known of each communication kernel of a trace, and the columns of the timeline that it fills."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.tracer.ingest.calls import Call, from_arguments, named
from foretrace.tracer.ingest.events import ARGUMENTS
from foretrace.tracer.ingest.groups import TraceGroups
from foretrace.tracer.ingest.host import Known
from foretrace.tracer.ingest.kernels import UNKNOWN, Kernel, kernel_dtype
from foretrace.tracer.ingest.recording import Recording
from foretrace.tracer.ingest.rows import coded, rows
from foretrace.traces.columns import BoolArray
from foretrace.traces.layout import Group


def communication_calls(
    table: pa.Table,
    communication: BoolArray,
    launch: NDArray[np.intp],
    known: Known,
    kernels: list[Kernel],
) -> list[Call]:
    """Return what is known about each communication kernel, in the order of the table.

    Args:
        table: device events, columns ``tracer.ingest.events.DEVICE``.
        communication: which of them communicate.
        launch: the runtime call of each event, -1 if unknown.
        known: what the file holds beside them.
        kernels: what the name of each communication kernel says.
    """
    host, launches = known.calls, known.launches
    picked = table.filter(pa.array(communication)).select(list(ARGUMENTS))
    told = picked.num_rows - picked["Collective name"].null_count
    said_by_kernel = picked.to_pylist() if told else [{}] * picked.num_rows
    at = launch[communication]
    if len(host.calls) and len(launches.tid):
        around = host.around(np.where(at >= 0, launches.tid[at], -1), launches.start_ns[at])
    else:
        around = [None] * picked.num_rows
    found = []
    for said, near, own in zip(said_by_kernel, around, kernels, strict=True):
        call = (
            from_arguments({k: v for k, v in said.items() if v is not None}, known.groups, "kernel")
            or near
            or Call()
        )
        kind = own.kind if call.kind == UNKNOWN else call.kind
        found.append(replace(call, kind=kind, dtype=call.dtype or kernel_dtype(own.name)))
    return found


def tell_sources(calls: list[Call], result: Recording) -> None:
    """Note where kind and size of the communication were taken from, with counts."""
    if not calls:
        return
    told = ", ".join(f"{source} {count}" for source, count in named(calls).most_common())
    untold = sum(not call.source for call in calls)
    parts = [told, f"name of the kernel only {untold}" if untold else ""]
    result.evidence["communication"] = "; ".join(part for part in parts if part)
    if unknown := sum(call.kind == UNKNOWN for call in calls):
        result.lost["communication kernel whose operation is unknown"] += unknown


def with_calls(
    columns: dict[str, Any], communication: BoolArray, calls: list[Call], known: Known
) -> pa.Table:
    """Return the timeline with kind, axis, group, sequence and size of each communication filled in."""
    everyone = _everyone(known.groups, known.result) if any(call.group is None for call in calls) else None
    calls = [_sized(replace(call, group=call.group or everyone)) for call in calls]
    where = np.flatnonzero(communication)
    n = len(communication)
    filled: dict[str, Any] = {
        "axis": _scattered(n, where, [call.group.axis if call.group else "unknown" for call in calls], ""),
        "group": _numbers(n, where, [call.group.id if call.group else -1 for call in calls], -1, np.int32),
        "sequence": _numbers(n, where, [call.sequence for call in calls], -1, np.int64),
        "peer": _numbers(n, where, [call.peer for call in calls], -1, np.int32),
        "size_bytes": _numbers(n, where, [call.size_bytes for call in calls], 0, np.int64),
        "dtype": _scattered(n, where, [call.dtype for call in calls], ""),
    }
    if calls:
        columns |= {
            "kind": _relabelled(columns["kind"], where, [call.kind for call in calls]),
            "category": _relabelled(columns["category"], where, [_category(call) for call in calls]),
        }
    known.result.numbered = bool(calls) and all(
        call.sequence >= 0 for call in calls if call.group is not None
    )
    return rows(columns | filled)


def _category(call: Call) -> str:
    return "p2p" if call.kind in {"send", "recv"} else "collective"


def _relabelled(column: pa.DictionaryArray, where: NDArray[np.intp], values: list[str]) -> pa.DictionaryArray:
    """Return *column* with other labels at the rows *where*."""
    names = column.dictionary.to_pylist()
    names += sorted(set(values) - set(names))
    number = {name: i for i, name in enumerate(names)}
    codes = column.indices.to_numpy(zero_copy_only=False).copy()
    codes[where] = [number[value] for value in values]
    return coded(codes, names)


def _everyone(groups: TraceGroups, result: Recording) -> Group | None:
    """Return the group of communication that tells none: the only one there is, or the whole world."""
    if len(groups.configured) == 1:
        ((name, (description, ranks)),) = groups.configured.items()
        if ranks:
            result.evidence["group of untold communication"] = "the only process group in the header"
            return groups.add(name, description, ranks)
    if groups.world_size > 1 and not groups.known:
        result.evidence["group"] = (
            "no process group in the file: all communication taken as of the whole world"
        )
        return groups.add("", "", tuple(range(groups.world_size)))
    return None


def _sized(call: Call) -> Call:
    """Return *call* with the size of the whole array; an annotation gives the input, which may be a shard."""
    if call.kind == "all_gather" and call.source.startswith("annotation") and call.group is not None:
        return replace(call, size_bytes=call.size_bytes * len(call.group.ranks))
    return call


def _numbers(n: int, where: NDArray[np.intp], values: list[int], default: int, kind: Any) -> NDArray[Any]:
    column = np.full(n, default, kind)
    column[where] = values
    return column


def _scattered(n: int, where: NDArray[np.intp], values: list[str], default: str) -> pa.DictionaryArray:
    distinct = [default, *sorted(set(values) - {default})]
    code = {name: i for i, name in enumerate(distinct)}
    column = np.zeros(n, np.int32)
    column[where] = [code[value] for value in values]
    return coded(column, distinct)
