"""Reads dumps of PyTorch's flight recorder: the last communications of one rank, as JSON or pickle.

``torch._C._distributed_c10d._dump_fr_trace_json`` and the files ``TORCH_NCCL_DEBUG_INFO_TEMP_FILE`` names.
Completion times are there only if the recorder timed (``TORCH_NCCL_ENABLE_TIMING``) or its watchdog saw the
end. ``diagnose`` says of a job that nobody recorded which rank is behind.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from foretrace.door import check
from foretrace.tracer.errors import IngestError
from foretrace.tracer.groups import axis_of
from foretrace.tracer.ingest.events import array_bytes, elements, number, text, whole
from foretrace.tracer.ingest.groups import MOST_RANKS, TraceGroups, placed, whole_bytes
from foretrace.tracer.ingest.kernels import collective_kind, first_dtype
from foretrace.tracer.ingest.recording import Recording, Rows
from foretrace.tracer.ingest.sources import Progress, Source, kind_of, rank_in_name, read_whole
from foretrace.traces.analysis.diagnosis import Diagnosis, Evidence, judge
from foretrace.traces.analysis.mismatch import disagreements
from foretrace.traces.info import stable_group_id
from foretrace.traces.pending import P2P, Key

MOST_BYTES: Final = 1 << 28  # largest dump that is read: the recorder is a ring of some thousand entries
MOST_INSTRUCTIONS: Final = 10_000_000  # of a pickle: twenty thousand entries with stacks have half of it
MOST_DUMPS: Final = 1 << 16  # most files of a folder that are looked at

MOST_LIST: Final = 1 << 24  # characters of a list of the members of a group

_LATEST_NS: Final = 1 << 62
_NUMBERED: Final = re.compile(r"(\d{1,6})(?:\.(?:json|pickle|pkl))?$")
_PEERS: Final = re.compile(r"(\d{1,6})(?:->|<-)(\d{1,6})$")

_MEMO: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_PLAIN: Final = _MEMO | {
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "GET", "BINGET", "LONG_BINGET", "MEMOIZE"),
    *("NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1"),
    *("FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"),
}
"""Instructions of a pickle that build numbers, text, lists and dictionaries."""


class _Plain(pickle.Unpickler):
    """An unpickler that builds numbers, text, lists and dictionaries, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a dump")


def read(source: Source, progress: Progress | None = None) -> Recording:
    """Read the dump of one rank.

    Raises IngestError: it cannot be read, or holds no collective with a time.
    """
    document, rank = _document(source, progress)
    result = Recording(name=source.name, spans=pa.table({}), rank=rank, numbered=True)
    groups = _groups(document.get("pg_config"), -1 if rank is None else rank)
    result.spans = _rows(document["entries"], groups, result)
    result.groups = tuple(groups.known.values())
    result.world_size = groups.world_size or None
    result.evidence |= {"group": "pg_config of the dump", "sequence": "collective_seq_id of the dump"}
    return result


def diagnose(paths: Sequence[str]) -> Diagnosis | None:
    """Return which rank of a job is behind by the dumps at *paths*; None if there is none.

    Raises IngestError: a dump is damaged, or does not tell of which rank it is.
    """
    known: dict[int, Evidence] = {}
    members: dict[int, tuple[int, ...]] = {}
    calls: defaultdict[Key, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    cut: set[int] = set()
    for source in _dumps(paths):
        document, rank = _document(source)
        if rank is None:
            raise IngestError(f"{source.name} does not tell of which rank it is: name it ..._rank_0")
        if rank in known:
            raise IngestError(f"{source.name} is a second dump of rank {rank}: give those of one moment")
        known[rank] = _evidence(document, rank, members)
        first = next((entry for entry in document["entries"] if isinstance(entry, dict)), {})
        if whole(first.get("record_id")):  # it keeps the last entries: those of a group may all be gone
            cut.add(rank)
        for key, row in known[rank].rows.items():
            calls[key][rank] = row
    if not known:
        return None
    unlisted = {group for group, ranks in members.items() if not ranks}
    for key, callers in calls.items():
        if not members.get(key[0]):
            # No dump lists the members: all ranks for the group of all, else those that have used it.
            is_world = next(iter(callers.values()))["axis"] == "world"
            users = (rank for rank, one in known.items() if (key[0], -1, -1) in one.counts)
            members[key[0]] = tuple(range(max(known) + 1) if is_world else users)
    for group, ranks in members.items():
        track = (group, -1, -1)
        for one in (known[rank] for rank in ranks if rank in known and track not in known[rank].counts):
            one.counts[track] = 1  # the recorder counts from 1
            if one.rank in cut:
                one.unseen |= {track}
    return judge(known, members, disagreements(calls, {}), is_stuck=True, unlisted=unlisted)


def _dumps(paths: Sequence[str]) -> Iterator[Source]:
    """Yield the dumps at *paths*; looks at no file in a folder whose name has no rank at its end."""
    for path in map(Path, paths):
        if path.is_dir():
            files = [one for one in islice(path.iterdir(), MOST_DUMPS) if _NUMBERED.search(one.name)]
        else:
            files = [path]
        for file in sorted(files):
            if (
                file.is_file()
                and kind_of(source := Source(file, str(file), file.stat().st_size)) == "flight recorder"
            ):
                yield source


def _document(source: Source, progress: Progress | None = None) -> tuple[dict[str, Any], int | None]:
    """Return what a dump holds, and the rank that it is of. Raises IngestError."""
    data = read_whole(source, progress, MOST_BYTES)
    try:
        document = json.loads(data) if data.lstrip()[:1] == b"{" else _unpickled(data)
        check(document, is_ours=False)
    except Exception as error:  # an unpickler raises whatever its input makes it raise
        raise IngestError(f"{source.name} is not a dump of the flight recorder, or is damaged") from error
    if not isinstance(document, dict) or not isinstance(document.get("entries"), list):
        raise IngestError(f"{source.name} is not a dump of the flight recorder: no entries in it")
    rank = whole(document.get("rank"))
    if rank is None or not 0 <= rank < MOST_RANKS:
        rank = rank_in_name(source.name)
    if rank is None and (found := _NUMBERED.search(source.name)):
        rank = int(found[1])
    return document, rank


def _unpickled(data: bytes) -> Any:
    """Return what a pickle of plain values holds.

    Its instructions are looked at first: one of 5 bytes would have the unpickler make a memo of gigabytes.
    """
    for place, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if opcode.name not in _PLAIN or (opcode.name in _MEMO and int(argument or 0) > len(data)):
            raise pickle.UnpicklingError(f"{opcode.name} has no place in a dump")
        if place > MOST_INSTRUCTIONS:
            raise pickle.UnpicklingError(f"more than {MOST_INSTRUCTIONS:,} instructions")
    return _Plain(io.BytesIO(data)).load()


def _evidence(document: Mapping[str, Any], rank: int, members: dict[int, tuple[int, ...]]) -> Evidence:
    """Return what the dump of *rank* tells; note the members of groups in it, () if it does not list them."""
    found = Evidence(rank=rank, is_exact=True)
    configured = _groups(document.get("pg_config"), rank).configured
    status = document.get("pg_status")
    open_rows: list[Key] = []
    n_open: defaultdict[tuple[int, int, int], int] = defaultdict(int)
    for entry in document["entries"]:
        if not isinstance(entry, dict) or (row := _call(entry, rank, configured)) is None:
            continue
        members.setdefault(row["group"], row["members"])
        if row["state"] == "scheduled" and (entry.get("retired") is True or _is_past(entry, status)):
            row["state"] = "completed"
        is_over = row["state"] == "completed"
        if row["kind"] in P2P:
            # Transfers of a pair have no number of their own: those that are open are counted.
            if is_over or row["peer"] < 0:
                continue
            ends = (rank, row["peer"]) if row["kind"] == "send" else (row["peer"], rank)
            row["sequence"] = n_open[row["group"], *ends]
            n_open[row["group"], *ends] += 1
            found.add(row, row["issued_ns"])
            continue
        found.add(row, row["issued_ns"])
        key = (row["group"], row["sequence"], -1, -1)
        if is_over:
            found.ended[row["group"], -1, -1] = row["sequence"] + 1
        else:
            open_rows.append(key)
    found.under_way = tuple(open_rows[:1])
    if found.last is not None:
        frames = found.last["frames"]
        at = f" at {frames[0]}" if frames else ""
        found.place = f"its last call is {found.last['kind']} {found.last['sequence']}"
        found.place += f" of {found.last['axis']}, {found.last['state']}{at}"
    return found


def _is_past(entry: Mapping[str, Any], status: object) -> bool:
    """Whether the status of its group says that *entry* is over; for libraries that tell no other state."""
    said = status.get(_group_of(entry)[0]) if isinstance(status, dict) else None
    if not isinstance(said, dict) or whole(said.get("last_started_collective")) != -1:
        return False
    number, last = whole(entry.get("op_id")), whole(said.get("last_completed_collective"))
    return number is not None and last is not None and number <= last


def _call(
    entry: Mapping[str, Any], rank: int, configured: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, Any] | None:
    """Return one entry in columns of a timeline; None for what is no communication, as a coalesced batch."""
    kind = collective_kind(what := text(entry.get("profiling_name", "")))
    sequence = whole(entry.get("collective_seq_id"))
    if kind == "unknown" or sequence is None:
        return None
    name, described = _group_of(entry)
    desc, ranks = configured.get(name, (described, ()))
    peer = -1
    if kind in P2P and (found := _PEERS.search(what)):
        place = int(found[2])
        peer = place if not ranks else ranks[place] if place < len(ranks) else -1
    return {
        **_array(entry),
        **({"size_bytes": 0} if kind == "scatter" else {}),
        "kind": kind,
        "axis": axis_of(desc, fallback="world" if desc == "default_pg" else f"group {name}"),
        "group": stable_group_id(name, ranks),
        "members": ranks,
        "sequence": sequence,
        "peer": peer,
        "step": -1,
        "issued_ns": whole(entry.get("time_created_ns")) or 0,
        "state": text(entry.get("state", "")),
        "frames": tuple(_frames(entry.get("frames"))),
    }


def _frames(frames: object) -> Iterator[str]:
    """Yield where the call was made, in code that is not torch's own."""
    for frame in frames if isinstance(frames, list) else ():
        with suppress(TypeError, KeyError, AttributeError):
            where = f"{frame['filename']}:{frame['line']} {frame['name']}"
            if "/site-packages/" not in where and "/torch/" not in where:
                yield text(where)


def _groups(config: object, rank: int) -> TraceGroups:
    """Return the process groups that the dump lists: by name, with members in a list or in a string."""
    groups = TraceGroups(rank, 0)
    for name, said in config.items() if isinstance(config, dict) else ():
        members = said.get("ranks") if isinstance(said, dict) else None
        listed = members
        if isinstance(members, str):
            with suppress(ValueError, RecursionError):
                listed = json.loads(members[:MOST_LIST])
        if isinstance(said, dict) and isinstance(listed, list):
            groups.configure(name, said.get("desc", ""), listed)
    return groups


def _rows(entries: list[Any], groups: TraceGroups, result: Recording) -> pa.Table:
    rows = Rows()
    for entry in entries:
        row = _row(entry, groups, result) if isinstance(entry, dict) else None
        if row is None:
            result.lost["entry without a time"] += 1
        else:
            rows.add(row)
    if not len(rows):
        raise IngestError(f"{result.name} holds no collective with a time")
    return rows.beside("communication")


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
    sequence, what = whole(entry.get("collective_seq_id")), text(entry.get("profiling_name", ""))
    group, kind = groups.of({"Process Group Name": _group_of(entry)[0]}), collective_kind(what)
    array = _array(entry)
    return {
        "category": "collective",
        "kind": kind,
        "name": what[:160],
        "start_ns": start,
        "duration_ns": duration,
        **placed(group),
        "sequence": sequence if sequence is not None and sequence >= 0 else -1,
        **array,
        "size_bytes": whole_bytes(kind, array["size_bytes"], group),
    }


def _group_of(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name of the group of *entry* and its description, empty where it has none."""
    told = entry.get("process_group")
    if not isinstance(told, list | tuple) or not told:
        return text(entry.get("pg_name", "")), ""
    return text(told[0]), text(told[1]) if len(told) > 1 else ""


def _array(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the size and the type of the first array that *entry* is given, in columns of a timeline."""
    sizes, (label, width) = entry.get("input_sizes"), first_dtype(entry.get("input_dtypes"))
    size = array_bytes(elements(sizes[0]), width) if isinstance(sizes, list) and sizes else 0
    return {"size_bytes": size, "dtype": label}
