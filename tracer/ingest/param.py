"""Reads communication traces of PARAM: a JSON list of collectives and, at times, compute, of one rank.

What was recorded says when each was called; what a replay wrote says how long each took (``latency_us``). An
asynchronous one without a duration is taken to last until somebody waits for it. What has no times at all is
laid end to end.
Format: https://github.com/facebookresearch/param, ``commsTraceReplay.py`` and ``commsTraceParser.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.events import array_bytes, number, text, whole
from foretrace.tracer.ingest.groups import MOST_RANKS, TraceGroups, placed
from foretrace.tracer.ingest.kernels import UNKNOWN, collective_kind, dtype
from foretrace.tracer.ingest.recording import Recording, Rows
from foretrace.tracer.ingest.sources import Progress, Source, rank_in_name, read_json, read_whole

_LATEST_NS: Final = 1 << 62
_LONGEST_US: Final = 1e12
_BOOKKEEPING: Final = ("wait", "init")
_TRANSFERS: Final = {"send": "send", "isend": "send", "recv": "recv", "irecv": "recv"}


def read(source: Source, progress: Progress | None = None) -> Recording:
    """Read the communication trace of one rank.

    Raises IngestError: it cannot be read, or holds nothing with a length.
    """
    listed = read_json(read_whole(source, progress), source.name)
    if not isinstance(listed, list):
        raise IngestError(f"{source.name} is not a list of collectives")
    rank = rank_in_name(source.name)
    result = Recording(name=source.name, spans=pa.table({}), rank=rank)
    entries = [entry for entry in listed if isinstance(entry, dict)]
    result.lost["entry that is no object"] += len(listed) - len(entries)
    groups = _groups(entries, -1 if rank is None else rank)
    result.spans = _laid_out(entries, groups, result)
    result.groups = tuple(groups.known.values())
    result.world_size = groups.world_size or None
    result.evidence["group"] = "pg_id and global_ranks of the trace"
    # Unary plus drops reasons without a count.
    result.lost = +result.lost
    return result


def _groups(entries: list[dict[str, Any]], rank: int) -> TraceGroups:
    groups = TraceGroups(rank, 0)
    for entry in entries:
        size = whole(entry.get("world_size")) or 0
        groups.configure(entry.get("pg_id", ""), "", entry.get("global_ranks"), size)
    return groups


def _laid_out(entries: list[dict[str, Any]], groups: TraceGroups, result: Recording) -> pa.Table:
    waits = {
        str(entry.get("req")): start
        # Backwards, so that of several waits for one request the first counts.
        for entry in reversed(entries)
        if entry.get("comms") == "wait" and (start := _start(entry)) is not None
    }
    rows = Rows()
    numbers: Counter[int] = Counter()
    now, guessed = 0, Counter[str]()
    for entry in entries:
        row = _row(entry, groups, result)
        if row is None:
            continue
        start, took = _start(entry), _duration_ns(entry, waits, guessed, result)
        begun = now if start is None else start
        guessed["end to end: the file has no start times"] += start is None
        now = begun + took if start is None else now
        row |= {"start_ns": begun, "duration_ns": took, "sequence": -1}
        if row["category"] == "collective" and row["group"] >= 0:
            row["sequence"] = numbers[row["group"]]
            numbers[row["group"]] += 1
        rows.add(row)
    if not any(rows.column("duration_ns")):
        raise IngestError(f"{result.name} holds no collective with a length; replay it to measure them")
    result.evidence |= {"start" if "start" in said else "duration": said for said, n in guessed.items() if n}
    return rows.beside("communication")


def _start(entry: Mapping[str, Any]) -> int | None:
    start = whole(entry.get("startTime_ns"))
    return start if start is not None and 0 <= start < _LATEST_NS else None


def _duration_ns(
    entry: Mapping[str, Any], waits: Mapping[str, int], guessed: Counter[str], result: Recording
) -> int:
    """Return how long *entry* took: measured, until it was waited for, or 0 with a count."""
    took_us = number(entry.get("latency_us"))
    if took_us is not None and 0 <= took_us < _LONGEST_US:
        return round(took_us * 1000)
    start, waited = _start(entry), waits.get(str(entry.get("req")))
    if start is not None and waited is not None and waited >= start and entry.get("req") is not None:
        guessed["from the call to the wait for it"] += 1
        return waited - start
    result.lost["collective without an end: only its call is known"] += 1
    return 0


def _row(entry: Mapping[str, Any], groups: TraceGroups, result: Recording) -> dict[str, Any] | None:
    name = text(entry.get("comms", entry.get("compute", "")))[:160].lower()
    if name in _BOOKKEEPING:
        return None
    if "compute" in entry:
        row = {"category": "compute", "kind": "kernel", "name": name, "axis": "", "group": -1, "peer": -1}
        return row | {"size_bytes": 0, "dtype": ""}
    transfer = _TRANSFERS.get(name)
    kind = transfer or collective_kind(name)
    if kind == UNKNOWN:
        result.lost["entry that is neither a known collective nor compute"] += 1
        return None
    label, width = dtype(text(entry.get("dtype", "")))
    counts = [max(whole(entry.get(key)) or 0, 0) for key in ("in_msg_size", "out_msg_size")]
    # The whole array: the output of an all-gather, the input of all else.
    n_elements = counts[1] if kind == "all_gather" else counts[0] or counts[1]
    group = groups.of(
        {"Process Group Name": str(entry.get("pg_id", "")), "Group size": entry.get("world_size")}
    )
    peer = whole(entry.get("dst_rank" if transfer == "send" else "src_rank")) if transfer else -1
    return {
        "category": "p2p" if transfer else "collective",
        "kind": kind,
        "name": name,
        **placed(group),
        "peer": peer if peer is not None and 0 <= peer < MOST_RANKS else -1,
        "size_bytes": array_bytes(n_elements, width),
        "dtype": label,
    }
