"""Makes one run out of the recordings of its ranks: numbers communication, finds a common clock."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.recording import Recording, place_in_time, stacked
from foretrace.tracer.ingest.sources import rank_in_name
from foretrace.traces.columns import BoolArray, Int64Array, int64, is_one_of, labels
from foretrace.traces.info import Clock, RunInfo, rank_list
from foretrace.traces.layout import Group
from foretrace.traces.rehearsal import Issued
from foretrace.traces.report.format import format_share
from foretrace.traces.timeline import MEMORY

NS_PER_YEAR: Final = 365.25 * 24 * 3600 * 1e9
LONGEST_NS: Final = 1 << 62  # half of what 64 bits hold, so that durations can be added

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
    memory: pa.Table | None = None
    issued: dict[int, Issued] = field(default_factory=dict)  # by rank, where it was asked for

    def written(self) -> Iterator[pa.Table]:
        """Yield the timeline of each rank, giving it up."""
        while self.tables:
            yield self.tables.pop(min(self.tables))


@dataclass(slots=True)
class _Parts:
    """What the recordings say together."""

    tables: dict[int, pa.Table] = field(default_factory=dict)
    memory: dict[int, pa.Table] = field(default_factory=dict)
    issued: dict[int, Issued] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)
    evidence: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1


def join(recordings: Sequence[Recording], name: str, kind: str) -> Joined:
    """Return one run of *recordings* from files of a *kind*: one per rank, or a single one of several.

    Raises IngestError: they are of two jobs, or lie too far apart in time.
    """
    if kind == "kineto":
        _check_one_job(recordings)
    parts = _Parts()
    _tell_ranks_by_folder(recordings)
    for recording in recordings:
        _add(parts, recording)
    parts.warnings += _told_once([(one.name, text) for one in recordings for text in one.warnings])
    if not all(recording.numbered for recording in recordings):
        parts.tables = {rank: numbered_in_order(table) for rank, table in parts.tables.items()}
    rounding_ns = max((recording.rounding_ns for recording in recordings), default=0)
    clock = {rank: Clock(uncertainty_ns=rounding_ns) for rank in parts.tables}
    if not all(recording.one_clock for recording in recordings):
        unmatched = unmatched_ranks(parts.tables)
        for rank, reason in unmatched.items():
            parts.warnings.append(f"rank {rank}: {reason}")
            parts.tables[rank] = _unnumbered(parts.tables[rank])
        # That they ran at the same times on all ranks shows what had been assumed.
        if 1 < len(parts.tables) == parts.world_size and not unmatched and parts.facts.pop("assumed", None):
            parts.evidence["group"] = "no group in the files; collectives of all ranks ran at the same times"
        clock = common_clock(parts.tables)
        # A graph of work has no clock at all.
        if not unmatched and all("began_ns" in one.facts for one in parts.issued.values()):
            parts.issued = begun_apart(parts.issued, clock, parts.tables)
    if any(clock[rank].offset_ns for rank in clock):
        parts.evidence["clock"] = (
            "ends of collectives that ranks share: offset of each rank is the median difference"
        )
    first_ns = _first_ns(parts.tables, clock)
    tables = {rank: _moved(table, rank, clock, first_ns) for rank, table in parts.tables.items()}
    layouts = {recording.layout for recording in recordings} - {None}
    layout = layouts.pop() if len(layouts) == 1 else None
    noted = {name: value for name, value in parts.facts.items() if name in {"times", "assumed", "launches"}}
    info = RunInfo(
        origin="ingested",
        world_size=layout.world_size if layout is not None else parts.world_size,
        name=name,
        layout=layout,
        representatives=recordings[0].representatives if len(recordings) == 1 else None,
        groups=tuple(parts.groups[number] for number in sorted(parts.groups)),
        clock=clock,
        cluster={"device": parts.facts["device"]} if "device" in parts.facts else None,
        job={"ingested_from": kind, "evidence": parts.evidence, **noted},
        warnings=(*parts.warnings, *([TIMELESS] if "times" in noted else [])),
        dropped=dict(parts.lost),
        versions=parts.facts.get("versions", {}),
    )
    held = [_held(table, rank, clock[rank].offset_ns - first_ns) for rank, table in parts.memory.items()]
    return Joined(info, tables, pa.concat_tables(held) if held else None, parts.issued)


def begun_apart(
    issued: Mapping[int, Issued], clock: Mapping[int, Clock], tables: Mapping[int, pa.Table]
) -> dict[int, Issued]:
    """Return *issued* with what ranks began later than the first that they meet as a pause of their hosts.

    The first step of all ranks then begins with that of the first: ranks that begin early wait for late ones.
    """
    began = {rank: one.facts["began_ns"] + clock[rank].offset_ns for rank, one in issued.items()}
    together: list[tuple[set[int], set[int]]] = []  # ranks that meet, and in which groups
    for rank in issued:
        ranks, groups = {rank}, set(collectives(tables[rank]))
        for met in [one for one in together if one[1] & groups]:
            together.remove(met)
            ranks, groups = ranks | met[0], groups | met[1]
        together.append((ranks, groups))
    earliest = {rank: min(began[one] for one in ranks) for ranks, _ in together for rank in ranks}
    found = {}
    for rank, one in issued.items():
        late_ns = began[rank] - earliest[rank]
        pauses = int64(one.measured, "pause_ns").copy()
        pauses[0] += late_ns
        at = one.measured.schema.get_field_index("pause_ns")
        measured = one.measured.set_column(at, one.measured.schema.field(at), pa.array(pauses))
        facts = {**one.facts, "late_s": late_ns / 1e9}
        for name in ("step_s", "idle_s"):
            first, *others = one.facts[name]
            facts[name] = [first + late_ns / 1e9, *others]
        found[rank] = one._replace(measured=measured, facts=facts)
    return found


def _held(memory: pa.Table, rank: int, later_ns: int) -> pa.Table:
    t_ns = pa.array(int64(memory, "t_ns") + later_ns)
    ranks = pa.array(np.full(memory.num_rows, rank, np.int32))
    return memory.set_column(1, MEMORY.field("t_ns"), t_ns).set_column(0, MEMORY.field("rank"), ranks)


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
    if recording.memory is not None and not again:
        parts.memory.setdefault(min(split), recording.memory)
    if recording.issued is not None and not again:
        parts.issued.setdefault(min(split), recording.issued)
    parts.groups |= {group.id: group for group in recording.groups}
    parts.lost.update(recording.lost)
    parts.evidence |= recording.evidence
    launches = recording.facts.pop("launches", None)
    parts.facts |= recording.facts
    if launches:
        parts.facts.setdefault("launches", {})[str(min(split))] = launches
    members = (rank for group in recording.groups for rank in group.ranks)
    highest = max(max(members, default=0), *parts.tables) + 1
    parts.world_size = max(parts.world_size, recording.world_size or 1, highest)


def _check_one_job(recordings: Sequence[Recording]) -> None:
    """Raise IngestError if two files say themselves that their worlds have different sizes."""
    said = {one.world_size: one.name for one in recordings if one.rank is not None and one.world_size}
    if len(said) > 1:
        (size, name), (other, another) = sorted(said.items())[:2]
        raise IngestError(
            f"files of different jobs: {name} is of {'1 rank' if size == 1 else f'{size} ranks'}, {another} "
            f"of {other}: take them over one job at a time"
        )


def _told_once(warnings: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield *warnings* with their files; of those that differ only in numbers, the first, and how many."""
    alike: dict[str, list[tuple[str, str]]] = {}
    for name, text in warnings:
        alike.setdefault(re.sub(r"\d[\d.,]*( [nµm]?s\b)?", "0", text), []).append((name, text))
    for (name, text), *others in alike.values():
        more = f" (and {len(others)} alike)" if others else ""
        yield f"{name}{more}: {text}"


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

    Raises IngestError: the last begins longer after it than a timeline can say.
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


SYMMETRIC: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that end at the same moment on all ranks: nobody is done before everybody has contributed."""

FIT: Final = 0.9  # share of the collectives of two ranks that must have been running at the same time


@dataclass(frozen=True, slots=True)
class Ends:
    """Collectives of one rank in one group, in the order of their numbers."""

    sequence: Int64Array
    kind: tuple[str, ...]
    start_ns: Int64Array
    end_ns: Int64Array


def numbered_in_order(table: pa.Table) -> pa.Table:
    """Return *table* with communication numbered in order of time: by group; p2p by pair and direction."""
    sequence = int64(table, "sequence").copy()
    start, group = int64(table, "start_ns"), int64(table, "group")
    peer, rank = int64(table, "peer"), int64(table, "rank")
    collective = is_one_of(table, "category", ("collective",)) & (group >= 0)
    p2p = is_one_of(table, "category", ("p2p",)) & (peer >= 0)
    sending = is_one_of(table, "kind", ("send",)).astype(np.int64)
    pair = np.minimum(rank, peer), np.maximum(rank, peer), sending
    for chosen, keys in ((collective, [group]), (p2p, [group, *pair])):
        sequence[chosen] = place_in_time(start[chosen], *(key[chosen] for key in keys))
    return table.set_column(table.column_names.index("sequence"), "sequence", pa.array(sequence))


def collectives(table: pa.Table) -> dict[int, Ends]:
    """Return the numbered collectives in *table* that end everywhere at once, by group."""
    chosen: BoolArray = is_one_of(table, "category", ("collective",)) & is_one_of(table, "kind", SYMMETRIC)
    rows = np.flatnonzero(chosen & (int64(table, "sequence") >= 0) & (int64(table, "group") >= 0))
    picked = table.take(rows)
    group, sequence, start = (int64(picked, name) for name in ("group", "sequence", "start_ns"))
    end = start + int64(picked, "duration_ns")
    codes, names = labels(picked, "kind")
    found = {}
    for number in np.unique(group):
        of = np.flatnonzero(group == number)
        of = of[np.argsort(sequence[of], kind="stable")]
        found[int(number)] = Ends(sequence[of], tuple(names[code] for code in codes[of]), start[of], end[of])
    return found


def unmatched_ranks(tables: dict[int, pa.Table]) -> dict[int, str]:
    """Return the ranks whose collectives do not fit those of the lowest rank of their groups, and why.

    Two ranks fit if the collectives of equal number are of equal kind and, after the typical difference of
    the clocks, were running at the same time.
    """
    found: dict[int, str] = {}
    first: dict[int, tuple[int, Ends]] = {}
    for rank in sorted(tables):
        for group, ends in collectives(tables[rank]).items():
            if group not in first:
                first[group] = (rank, ends)
            elif reason := _misfit(first[group][1], ends):
                found[rank] = (
                    f"its collectives cannot be joined with those of rank {first[group][0]}: {reason}"
                )
    return found


def shared(a: Ends, b: Ends) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the rows of *a* and of *b* that have the same number."""
    _, left, right = np.intersect1d(a.sequence, b.sequence, assume_unique=False, return_indices=True)
    return left, right


def _misfit(a: Ends, b: Ends) -> str:
    left, right = shared(a, b)
    if not len(left):
        return "no number in common"
    kinds = [a.kind[i] == b.kind[j] for i, j in zip(left.tolist(), right.tolist(), strict=True)]
    if not all(kinds):
        return f"{kinds.count(False)} of {len(kinds)} are of different kinds"
    offset = int(np.median(a.end_ns[left] - b.end_ns[right]))
    together = (b.start_ns[right] + offset <= a.end_ns[left]) & (a.start_ns[left] <= b.end_ns[right] + offset)
    if together.mean() < FIT:
        return f"only {format_share(together.mean(), '.0f')} were running at the same time"
    return ""


# A collective that everybody contributes to ends everywhere at the same moment: the typical difference of
# the ends of shared ones is that of two clocks, and what is left over says how well it is known. Ranks of
# one host agree already, to some microseconds (8 GPUs: 1 to 7 µs).

LEAST_NS: Final = 50_000  # differences below this are left alone: ranks of one host have one clock


def common_clock(tables: dict[int, pa.Table]) -> dict[int, Clock]:
    """Return the clock of each rank; ranks that share no collective with others keep their own time."""
    ends = {rank: collectives(table) for rank, table in tables.items()}
    unknown: defaultdict[int, set[int]] = defaultdict(
        set
    )  # ranks of each group whose clocks are not known yet
    for rank, groups in ends.items():
        for group in groups:
            unknown[group].add(rank)
    clock: dict[int, Clock] = {}

    def know(rank: int, time: Clock) -> None:
        clock[rank] = time
        waiting.append(rank)
        for group in ends[rank]:
            unknown[group].discard(rank)

    waiting: deque[int] = deque()
    for root in sorted(tables):
        if root not in clock:
            know(root, Clock())
        while waiting:
            # Breadth first: each difference on the way adds its doubt, so the way is as short as can be.
            known = waiting.popleft()
            for rank in sorted(set().union(*(unknown[group] for group in ends[known]))):
                difference = _difference(ends[known], ends[rank])
                if difference is not None:
                    know(rank, _chained(clock[known], *difference))
    return clock


def _difference(a: dict[int, Ends], b: dict[int, Ends]) -> tuple[int, int] | None:
    """Return what must be added to the times of *b*, and half its spread; None without shared ends."""
    gaps = [
        a[group].end_ns[left] - b[group].end_ns[right]
        for group in a.keys() & b.keys()
        for left, right in [shared(a[group], b[group])]
        if len(left)
    ]
    if not gaps:
        return None
    gap = np.concatenate(gaps)
    offset = int(np.median(gap))
    return offset, int(np.quantile(np.abs(gap - offset), 0.95))


def _chained(known: Clock, offset_ns: int, spread_ns: int) -> Clock:
    # A difference within what is known of it is none: one clock, and all of it is doubt.
    if abs(offset_ns) <= max(LEAST_NS, 3 * spread_ns):
        spread_ns, offset_ns = spread_ns + abs(offset_ns), 0
    return Clock(offset_ns=known.offset_ns + offset_ns, uncertainty_ns=known.uncertainty_ns + spread_ns)
