"""Makes one run out of the recordings of its ranks: numbers communication, finds a common clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.clocks import common_clock
from foretrace.tracer.ingest.kineto import rank_in_name
from foretrace.tracer.ingest.matching import numbered_in_order, unmatched_ranks
from foretrace.tracer.ingest.recording import Recording
from foretrace.tracer.ingest.rows import stacked
from foretrace.traces.columns import int64, is_one_of
from foretrace.traces.info import Clock, RunInfo, rank_list
from foretrace.traces.layout import Group

NS_PER_YEAR: Final = 365.25 * 24 * 3600 * 1e9
LONGEST_NS: Final = 1 << 62
"""Half of what 64 bits hold, so that durations can be added."""

TIMELESS: Final = (
    "no times in the files: operators are drawn 1 µs long in the order of their calls; counts, sizes, FLOPs "
    "and order are real, times are not"
)
"""What is said of a run whose files tell only what was called."""


@dataclass(slots=True)
class Joined:
    """A run that is ready to be written: its description, and its spans rank by rank."""

    info: RunInfo
    tables: dict[int, pa.Table]

    def written(self) -> Iterator[pa.Table]:
        """Yield the timeline of each rank, giving it up."""
        while self.tables:
            yield self.tables.pop(min(self.tables))


@dataclass(slots=True)
class _Parts:
    """What the recordings say together."""

    tables: dict[int, pa.Table] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)
    evidence: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1


def join(recordings: Sequence[Recording], name: str, kind: str) -> Joined:
    """Return one run made of *recordings*.

    Args:
        recordings: one per rank, or a single one of several ranks.
        name: what to call the run.
        kind: kind of the files that they come from.
    """
    parts = _Parts()
    _tell_ranks_by_folder(recordings)
    for recording in recordings:
        _add(parts, recording)
    if not all(recording.numbered for recording in recordings):
        parts.tables = {rank: numbered_in_order(table) for rank, table in parts.tables.items()}
    rounding_ns = max((recording.rounding_ns for recording in recordings), default=0)
    clock = {rank: Clock(uncertainty_ns=rounding_ns) for rank in parts.tables}
    if not all(recording.one_clock for recording in recordings):
        for rank, reason in unmatched_ranks(parts.tables).items():
            parts.warnings.append(f"rank {rank}: {reason}")
            parts.tables[rank] = _unnumbered(parts.tables[rank])
        clock = common_clock(parts.tables)
    if any(clock[rank].offset_ns for rank in clock):
        parts.evidence["clock"] = (
            "ends of collectives that ranks share: offset of each rank is the median difference"
        )
    first_ns = _first_ns(parts.tables, clock)
    tables = {rank: _moved(table, rank, clock, first_ns) for rank, table in parts.tables.items()}
    layouts = {recording.layout for recording in recordings} - {None}
    layout = layouts.pop() if len(layouts) == 1 else None
    info = RunInfo(
        origin="ingested",
        world_size=layout.world_size if layout is not None else parts.world_size,
        name=name,
        layout=layout,
        representatives=recordings[0].representatives if len(recordings) == 1 else None,
        groups=tuple(parts.groups[number] for number in sorted(parts.groups)),
        clock=clock,
        cluster={"device": parts.facts["device"]} if "device" in parts.facts else None,
        job={"ingested_from": kind, "evidence": parts.evidence, **_times(parts.facts)},
        warnings=(*parts.warnings, *([TIMELESS] if "times" in parts.facts else [])),
        dropped=dict(parts.lost),
        versions=parts.facts.get("versions", {}),
    )
    return Joined(info, tables)


def _times(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the note of a run without times."""
    return {"times": facts["times"]} if "times" in facts else {}


def _add(parts: _Parts, recording: Recording) -> None:
    """Add *recording* under its rank; a second file of the same rank only where it goes on in time."""
    several = {int(rank) for rank in recording.spans["rank"].unique().to_pylist()}
    if several - {0} or len(several) > 1:
        split = {
            rank: recording.spans.filter(pa.array(int64(recording.spans, "rank") == rank)) for rank in several
        }
    else:
        split = {_rank(parts, recording): recording.spans}
    again = [
        rank
        for rank, table in split.items()
        if rank in parts.tables and not _goes_on(parts.tables[rank], table)
    ]
    if again:
        parts.warnings.append(f"{recording.name} is of rank {rank_list(again)}, as another file is: left out")
        parts.lost["file of a rank that another file is of"] += len(again)
    for rank, table in split.items():
        if rank in again:
            continue
        parts.tables[rank] = stacked([parts.tables[rank], table]) if rank in parts.tables else table
    parts.groups |= {group.id: group for group in recording.groups}
    parts.lost.update(recording.lost)
    parts.warnings += [f"{recording.name}: {warning}" for warning in recording.warnings]
    parts.evidence |= recording.evidence
    parts.facts |= recording.facts
    members = (rank for group in recording.groups for rank in group.ranks)
    highest = max(max(members, default=0), *parts.tables) + 1
    parts.world_size = max(parts.world_size, recording.world_size or 1, highest)


def _tell_ranks_by_folder(recordings: Sequence[Recording]) -> None:
    """Fill in the ranks that neither files nor their names tell, if a folder of each tells another."""
    untold = [one for one in recordings if one.rank is None and rank_in_name(one.name) is None]
    if len(untold) < 2:
        return
    folders = [one.name.split("/")[-2::-1] for one in untold]
    for level in zip(*folders, strict=False):
        ranks = [rank_in_name(folder) for folder in level]
        if None not in ranks and len(set(ranks)) == len(ranks):
            for one, rank in zip(untold, ranks, strict=True):
                one.rank, one.evidence["rank"] = rank, "name of the folder"
            return


def _rank(parts: _Parts, recording: Recording) -> int:
    """Return the rank of *recording*: what the file says, else its name, else the first that is free."""
    if recording.rank is not None:
        return recording.rank
    named = rank_in_name(recording.name)
    if named is not None:
        recording.evidence["rank"] = "name of the file"
        return named
    recording.evidence["rank"] = "order of the files"
    return next(rank for rank in range(len(parts.tables) + 1) if rank not in parts.tables)


def _goes_on(known: pa.Table, table: pa.Table) -> bool:
    """Whether the spans of *table* lie behind, or before, all of *known*."""
    a, b = ((int64(t, "start_ns"), int64(t, "start_ns") + int64(t, "duration_ns")) for t in (known, table))
    return bool(b[0].min() >= a[1].max() or a[0].min() >= b[1].max())


def _unnumbered(table: pa.Table) -> pa.Table:
    """Return *table* with communication that cannot be joined with other ranks."""
    communication = is_one_of(table, "category", ("collective", "p2p"))
    sequence = np.where(communication, -1, int64(table, "sequence"))
    return table.set_column(table.column_names.index("sequence"), "sequence", pa.array(sequence))


def _first_ns(tables: dict[int, pa.Table], clock: dict[int, Clock]) -> int:
    """Return when the first span begins, on the common clock.

    Raises:
        IngestError: the last begins longer after it than a timeline can say.
    """
    starts = [(int64(table, "start_ns"), clock[rank].offset_ns) for rank, table in tables.items()]
    first = min(int(start.min()) + offset for start, offset in starts)
    last = max(int(start.max()) + offset for start, offset in starts)
    if max(last - first, abs(first)) > LONGEST_NS:
        raise IngestError(
            f"times lie {(last - first) / NS_PER_YEAR:,.0f} years apart: at most "
            f"{LONGEST_NS / NS_PER_YEAR:.0f} can be told in nanoseconds"
        )
    return first


def _moved(table: pa.Table, rank: int, clock: dict[int, Clock], first_ns: int) -> pa.Table:
    """Return *table* under its rank, its times counted from the start of the run on the common clock."""
    start = int64(table, "start_ns") + (clock[rank].offset_ns - first_ns)
    columns = {"rank": pa.array(np.full(len(start), rank, np.int32)), "start_ns": pa.array(start)}
    moved = pa.table(
        [columns.get(name, table[name]) for name in table.column_names], names=table.column_names
    )
    return moved.take(np.argsort(start, kind="stable"))


def said(info: RunInfo) -> list[str]:
    """Return, line by line, what was inferred and from what."""
    evidence = (info.job or {}).get("evidence", {})
    lines = [f"{what}: {source}" for what, source in sorted(evidence.items())]
    uncertain = {rank: clock.uncertainty_ns for rank, clock in info.clock.items() if clock.uncertainty_ns}
    if uncertain:
        worst = max(uncertain.values())
        lines.append(f"clocks of rank {rank_list(uncertain)} agree within {worst / 1000:.0f} µs")
    return lines
