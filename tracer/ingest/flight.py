"""Reads dumps of PyTorch's flight recorder: the last collectives of one rank, as JSON or pickle.

``torch._C._distributed_c10d._dump_fr_trace_json`` and the files ``TORCH_NCCL_DEBUG_INFO_TEMP_FILE`` names.
Completion times are there only if the recorder timed (``TORCH_NCCL_ENABLE_TIMING``) or its watchdog saw the
end.
"""

from __future__ import annotations

import io
import json
import pickle
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.events import number, text, whole
from foretrace.tracer.ingest.groups import TraceGroups
from foretrace.tracer.ingest.kernels import collective_kind, dtype
from foretrace.tracer.ingest.kineto import rank_in_name
from foretrace.tracer.ingest.recording import Recording, lanes
from foretrace.tracer.ingest.rows import rows
from foretrace.tracer.ingest.sources import Progress, Source, opened

MOST_BYTES: Final = 1 << 28
"""Largest dump that is read: the recorder is a ring of some thousand entries."""

_LATEST_NS: Final = 1 << 62


class _Plain(pickle.Unpickler):
    """An unpickler that builds numbers, text, lists and dictionaries, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a dump")


def read(source: Source, progress: Progress | None = None) -> Recording:
    """Read the dump of one rank.

    Raises:
        IngestError: it cannot be read, or holds no collective with a time.
    """
    with opened(source, progress) as stream:
        data = stream.read(MOST_BYTES)
    try:
        document = json.loads(data) if data.lstrip()[:1] == b"{" else _Plain(io.BytesIO(data)).load()
    except Exception as error:  # an unpickler raises whatever its input makes it raise
        raise IngestError(f"{source.name} is not a dump of the flight recorder, or is damaged") from error
    if not isinstance(document, dict) or not isinstance(document.get("entries"), list):
        raise IngestError(f"{source.name} is not a dump of the flight recorder: no entries in it")
    rank = whole(document.get("rank"))
    rank = rank if rank is not None and 0 <= rank < 1 << 20 else rank_in_name(source.name)
    result = Recording(name=source.name, spans=pa.table({}), rank=rank, numbered=True)
    groups = _groups(document.get("pg_config"), -1 if rank is None else rank)
    result.spans = _rows(document["entries"], groups, result)
    result.groups = tuple(groups.known.values())
    result.world_size = groups.world_size or None
    result.evidence |= {"group": "pg_config of the dump", "sequence": "collective_seq_id of the dump"}
    return result


def _groups(config: object, rank: int) -> TraceGroups:
    """Return the process groups that the dump lists: by name, with members in a list or in a string."""
    groups = TraceGroups(rank, 0)
    for name, said in config.items() if isinstance(config, dict) else ():
        members = said.get("ranks") if isinstance(said, dict) else None
        listed = json.loads(members) if isinstance(members, str) and members.startswith("[") else members
        if isinstance(listed, list):
            found = tuple(r for r in map(whole, listed) if r is not None and 0 <= r < 1 << 20)
            groups.configured[text(name)] = (text(said.get("desc", "")), found)
            groups.world_size = max(groups.world_size, *(r + 1 for r in found), 0)
    return groups


def _rows(entries: list[Any], groups: TraceGroups, result: Recording) -> pa.Table:
    """Return the timeline of the entries."""
    columns: defaultdict[str, list[Any]] = defaultdict(list)
    for entry in entries:
        row = _row(entry, groups, result) if isinstance(entry, dict) else None
        if row is None:
            result.lost["entry without a time"] += 1
            continue
        for key, value in row.items():
            columns[key].append(value)
    if not columns:
        raise IngestError(f"{result.name} holds no collective with a time")
    start, duration = (np.array(columns[name], np.int64) for name in ("start_ns", "duration_ns"))
    order = np.argsort(start, kind="stable")
    lane, begin = lanes(start[order], (start + duration)[order], 0, 1 << 10)
    kept = lane >= 0
    chosen = order[kept]
    columns["stream"] = [f"communication {n + 1}" if n else "communication" for n in lane[kept].tolist()]
    data = {key: [values[i] for i in chosen.tolist()] for key, values in columns.items() if key != "stream"}
    data["stream"] = columns["stream"]
    numbers = {"group": np.int32, "sequence": np.int64, "size_bytes": np.int64, "duration_ns": np.int64}
    table = {key: np.array(v, numbers[key]) if key in numbers else v for key, v in data.items()}
    return rows(table | {"rank": np.zeros(len(chosen), np.int32), "start_ns": begin[kept]})


def _row(entry: Mapping[str, Any], groups: TraceGroups, result: Recording) -> dict[str, Any] | None:
    """Return one entry in columns of the timeline, None without a time."""
    created = whole(entry.get("time_created_ns"))
    start = whole(entry.get("time_discovered_started_ns")) or created
    if start is None or not 0 < start < _LATEST_NS:
        return None
    ended, took_ms = whole(entry.get("time_discovered_completed_ns")), number(entry.get("duration_ms"))
    if took_ms is not None and 0 <= took_ms < 1e9:
        duration = round(took_ms * 1e6)
    elif ended is not None and start <= ended < _LATEST_NS:
        duration = ended - start
    else:
        duration = 0
        result.lost["collective without an end: only its arrival is known"] += 1
    told = entry.get("process_group")
    name = text(told[0]) if isinstance(told, list | tuple) and told else text(entry.get("pg_name", ""))
    group = groups.of({"Process Group Name": name})
    sizes, kinds = entry.get("input_sizes"), entry.get("input_dtypes")
    label, width = dtype(str(kinds[0])) if isinstance(kinds, list) and kinds else ("", 0)
    sequence = whole(entry.get("collective_seq_id"))
    what = text(entry.get("profiling_name", ""))
    return {
        "category": "collective",
        "kind": collective_kind(what),
        "name": what[:160],
        "start_ns": start,
        "duration_ns": duration,
        "axis": group.axis if group else "unknown",
        "group": group.id if group else -1,
        "sequence": sequence if sequence is not None and sequence >= 0 else -1,
        "size_bytes": _elements(sizes) * width,
        "dtype": label,
    }


def _elements(sizes: object) -> int:
    """Return the number of elements of the first shape in *sizes*."""
    first = sizes[0] if isinstance(sizes, list) and sizes else None
    if not isinstance(first, list):
        return 0
    total = 1
    for size in first:
        total *= max(whole(size) or 0, 0)
    return total if total < 1 << 56 else 0
