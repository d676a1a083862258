"""A run that has been opened: its description, and the spans of each rank, loaded on demand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.traces.columns import Int64Array, int64, labels
from foretrace.traces.errors import RunError
from foretrace.traces.info import UNNAMED, Clock, RunInfo, rank_list
from foretrace.traces.layout import Group
from foretrace.traces.report.format import format_time
from foretrace.traces.timeline import TIMELINE, empty

_Derived = TypeVar("_Derived")

PLACES: Final = ("rank", "group", "peer")  # columns in which ranks differ that do the same at the same times
_RECENT: Final = 16  # different columns of a name that a new one is held against: neighbouring ranks do alike


@dataclass(frozen=True, slots=True)
class Part:
    """The spans of one file, decoded on first use."""

    rank: int | None  # whose spans these are; None for a file of several ranks
    load: Callable[[], pa.Table]  # returns the checked timeline; raises RunError if the file is damaged


class Inside(NamedTuple):
    """Communications inside of compute spans that stand for several in a row; nothing else runs meanwhile."""

    # when they run, in the order of their starts; shape ``(n,)``
    start_ns: Int64Array
    end_ns: Int64Array
    state: Int64Array  # of each, index into ``states``
    # an axis, and behind what it communicates: "compute", another axis, or "" if it is exposed
    states: tuple[tuple[str, str], ...]
    n_more: int  # how many spans more there would be one by one


class Run:
    """A run that has been opened; spans are decoded on first use, and cached.

    Attributes:
        stored_ranks: ranks whose spans are stored, in order.
        warnings: caveats about the run, from the writer and from reading it.
        links: utilisation of links in the columns of ``traces.timeline.LINKS``; None if unknown.
        inside: by stored rank, what compute spans consist of where some stand for several.

    Args:
        kept: cache of values derived from the spans; runs with the same spans may share one.
        shown: returns the run as a notebook shows it, which takes modules that need this one.
    """

    def __init__(
        self,
        path: str,
        info: RunInfo,
        parts: Sequence[Part],
        memory: pa.Table,
        notes: Sequence[str],
        *,
        kept: dict[Any, Any] | None = None,
        links: pa.Table | None = None,
        shown: Callable[[Run], str] | None = None,
        inside: Mapping[int, Inside] | None = None,
    ) -> None:
        self.path = path  # where it was opened
        # What ``run.json`` and the sidecars of the ranks say. Of another run, it is not of the same files.
        self.info, self.files = replace(info, files={}), info.files
        self._parts = {part.rank: part for part in parts if part.rank is not None}
        self._tables: dict[int, pa.Table] = {}
        self._seen: dict[str, list[tuple[int, pa.ChunkedArray]]] = {name: [] for name in TIMELINE.names}
        self._alike: dict[int, int] = {}
        self._first: dict[tuple[int, ...], int] = {}
        for part in parts:
            if part.rank is None:
                self._tables.update(_by_rank(part.load()))
        self._memory = memory
        self.links = links
        self.inside = inside or {}
        self._shown = shown
        self._expander = Expander(info.groups)
        self._derived: dict[Any, Any] = {} if kept is None else kept
        self.stored_ranks = tuple(sorted({*self._parts, *self._tables}))
        self.warnings = (*info.warnings, *notes, *self._missing())

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that ``spans`` can return: those stored, and those represented by a stored one."""
        if self.info.representatives is None:
            return self.stored_ranks
        stored = set(self.stored_ranks)
        return tuple(rank for rank, stands in enumerate(self.info.representatives) if {rank, stands} & stored)

    def spans(self, ranks: Iterable[int] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the timeline of *ranks*, rank after rank, in the order in which each was written.

        Args:
            ranks: global ranks; folded ones are expanded. None: every stored rank, nothing expanded.
            columns: names of columns; None: all.

        Raises:
            RunError: a rank is not in the run, or its file is damaged.
        """
        wanted = self.stored_ranks if ranks is None else tuple(ranks)
        tables = [self._rank_spans(rank) for rank in wanted]
        if columns is not None:
            tables = [table.select(list(columns)) for table in tables]
        if not tables:
            return empty() if columns is None else empty().select(list(columns))
        return pa.concat_tables(tables).unify_dictionaries() if len(tables) > 1 else tables[0]

    @property
    def n_stored(self) -> int:
        """How many spans are stored."""
        return sum(self._rank_spans(rank).num_rows for rank in self.stored_ranks)

    def source(self, rank: int) -> int:
        """Return the stored rank whose spans *rank* has: itself, or its representative."""
        return rank if rank in self._parts or rank in self._tables else self.info.representative(rank)

    def memory(self) -> pa.Table:
        """Return memory over time of the stored ranks, without rows if it was not stored."""
        return self._memory

    def derived(self, build: Callable[[Run], _Derived]) -> _Derived:
        """Return ``build(self)``, computed once and cached with the run."""
        if build not in self._derived:
            self._derived[build] = build(self)
        return cast("_Derived", self._derived[build])

    def like(self, rank: int) -> int:
        """Return the first stored rank whose spans are those of the stored *rank* in all but ``PLACES``.

        What does not depend on these columns has to be found only once for all such ranks.
        """
        self._rank_spans(rank)
        return self._alike.setdefault(rank, rank)

    def once(self, build: Callable[[pa.Table], _Derived], rank: int) -> _Derived:
        """Return ``build`` of the spans of the stored *rank*, which does not look at ``PLACES``; kept."""
        first = self.like(rank)
        if (build, first) not in self._derived:
            self._derived[build, first] = build(self._rank_spans(first))
        return cast("_Derived", self._derived[build, first])

    def __repr__(self) -> str:
        """Return what the description says, in one line; no spans are loaded."""
        info, step_s = self.info, self.info.summary.get("step_time_s")
        ranks = f"{info.world_size} rank{'s' if info.world_size > 1 else ''}"
        said = [info.origin, ranks, *([f"step {format_time(step_s)}"] if step_s else [])]
        return f"<Run {info.name or self.path!r}: {', '.join(said)}>"

    def _repr_html_(self) -> str | None:
        """Return the run as a notebook shows it; None if it was made without."""
        return None if self._shown is None else self._shown(self)

    def _rank_spans(self, rank: int) -> pa.Table:
        if rank in self._parts or rank in self._tables:
            if rank not in self._tables:
                self._tables[rank] = self._loaded(rank)
            return self._tables[rank]
        if rank not in self.ranks:
            raise RunError(f"no spans of rank {rank} in {self.path}; it has ranks {rank_list(self.ranks)}")
        source = self.source(rank)
        return self._expander.expand(self._rank_spans(source), source, rank)

    def _loaded(self, rank: int) -> pa.Table:
        table = self._parts[rank].load()
        if table.num_rows and (other := set(table["rank"].unique().to_pylist()) - {rank}):
            raise RunError(f"{self.path}: the file of rank {rank} holds spans of rank {min(other)}")
        clock = self.info.clock.get(rank)
        table = table if clock is None or clock.applied else _on_common_clock(table, clock)
        return self._shared(rank, _named_since(table, self.info) if self.info.origin == "recorded" else table)

    def _shared(self, rank: int, table: pa.Table) -> pa.Table:
        """Return *table* with columns that another rank has, too, held once; note if all of them are."""
        columns, numbers = [], []
        for name, column in zip(table.column_names, table.columns, strict=True):
            seen = self._seen[name]
            at = next((at for at, (_, one) in enumerate(seen) if one.equals(column)), None)
            found = (rank, column) if at is None or name in PLACES else seen.pop(at)
            if name not in PLACES:
                seen.insert(0, found)
                del seen[_RECENT:]
                numbers.append(found[0])
            columns.append(found[1])
        self._alike[rank] = self._first.setdefault(tuple(numbers), rank)
        return pa.table(columns, schema=table.schema)

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that should have spans of their own but have none, in order."""
        expected = set(self.info.representatives or range(self.info.world_size))
        return tuple(sorted(expected - set(self.stored_ranks)))

    @property
    def elsewhere(self) -> tuple[int, ...]:
        """Ranks that other machines have recorded: of whom nothing is here, if there are other machines."""
        per_node = (self.info.cluster or {}).get("gpus_per_node")
        if (
            self.info.origin != "recorded"
            or not isinstance(per_node, int)
            or per_node >= self.info.world_size
        ):
            return ()
        known = {*self.stored_ranks, *self.info.processes}
        return tuple(rank for rank in self.info.recorded_ranks if rank not in known)

    @property
    def is_timeless(self) -> bool:
        """Whether the run only contains the order of calls: its times are meaningless."""
        return (self.info.job or {}).get("times") == "none"

    def _missing(self) -> list[str]:
        """Say which ranks are missing, and what that does to the figures."""
        if not self.missing_ranks:
            return []
        who = f"rank {rank_list(self.missing_ranks)} of {self.info.world_size}"
        what = "waiting for a missing rank cannot be told from transfer"
        notes = [f"no spans of {who}; figures are of the others, and {what}"]
        if elsewhere := self.elsewhere:
            here = rank_list(set(range(self.info.world_size)) - set(elsewhere))
            join = "foretrace record --merge joins them"
            notes.append(f"a part of the run: rank {here}; the others are on other machines, {join}")
        return notes


def _by_rank(table: pa.Table) -> dict[int, pa.Table]:
    """Split *table* into one table per rank, rows in their order."""
    rank = table["rank"].to_numpy()
    order = np.argsort(rank, kind="stable")
    ranks, starts = np.unique(rank[order], return_index=True)
    ends = np.append(starts[1:], len(rank))
    if (np.diff(rank) < 0).any():
        table = table.take(order).combine_chunks()
    return {int(r): table.slice(a, b - a) for r, a, b in zip(ranks, starts, ends, strict=True)}


def _named_since(table: pa.Table, info: RunInfo) -> pa.Table:
    """Return *table* with one axis for each group: rows may be older than what its group is known by."""
    named = {group.id: group.axis for group in info.groups if group.axis != UNNAMED}
    codes, names = labels(table, "axis")
    if UNNAMED not in names or not named:
        return table
    group = int64(table, "group")
    rows = np.flatnonzero((codes == names.index(UNNAMED)) & np.isin(group, list(named)))
    if not len(rows):
        return table
    known = list(dict.fromkeys([*names, *named.values()]))
    codes = codes.copy()
    codes[rows] = [known.index(named[one]) for one in group[rows].tolist()]
    field = table.schema.field("axis")
    column = pa.DictionaryArray.from_arrays(pa.array(codes, field.type.index_type), pa.array(known))
    return table.set_column(table.schema.get_field_index("axis"), field, column.cast(field.type))


def _on_common_clock(table: pa.Table, clock: Clock) -> pa.Table:
    """Return *table* with its times moved from the rank's own clock to the common one."""
    start = table["start_ns"].to_numpy()
    ends = start + table["duration_ns"].to_numpy()
    moved, moved_ends = (
        t + clock.offset_ns + np.rint((t - clock.reference_ns) * (clock.drift_ppb * 1e-9)).astype(np.int64)
        for t in (start, ends)
    )
    columns = {"start_ns": pa.array(moved), "duration_ns": pa.array(moved_ends - moved)}
    return pa.table([columns.get(name, table[name]) for name in table.column_names], schema=table.schema)


# Expands folded runs: gives every rank the spans of the rank that stands for it.
#
# Only three columns differ between a rank and its representative: ``rank``, ``group`` and ``peer``. All
# others are shared, so that expanding 512 ranks costs three columns per rank.

_Meetings = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]
"""Distinct pairs of a group and a peer, and for each span which of them it names."""


class Expander:
    """Gives ranks the spans of their representatives.

    Args:
        groups: the process groups of the run.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._distinct: tuple[pa.Table, _Meetings] | None = None

    def expand(self, spans: pa.Table, source: int, rank: int) -> pa.Table:
        """Return *spans* of rank *source* as those of *rank*.

        A group becomes the group of the same axis that *rank* belongs to (the n-th of that axis, where there
        are several); a peer becomes the rank as many places further in that group, which is a ring. Where
        the groups are unknown, a group becomes -1 and a peer keeps its distance.
        """
        group, peer, row_of = self._meetings(spans)
        new_group = np.full(len(group), -1, np.int32)
        new_peer = np.where(peer >= 0, peer + (rank - source), -1).astype(np.int32)
        for ours, theirs in self._pairs(source, rank):
            rows = group == ours.id
            new_group[rows] = theirs.id
            moved = rows & np.isin(peer, ours.ranks)
            turn = theirs.ranks.index(rank) - ours.ranks.index(source)
            new_peer[moved] = _turned(ours.ranks, theirs.ranks, turn)[peer[moved]]
        changed = {
            "rank": pa.array(np.full(spans.num_rows, rank, np.int32)),
            "group": pa.array(new_group[row_of]),
            "peer": pa.array(new_peer[row_of]),
        }
        return pa.table([changed.get(name, spans[name]) for name in spans.column_names], schema=spans.schema)

    def _meetings(self, spans: pa.Table) -> _Meetings:
        """Return which groups and peers are named together; remembered for the table that was asked last."""
        known = self._distinct
        if known is None or known[0] is not spans:
            pairs = np.stack([spans["group"].to_numpy(), spans["peer"].to_numpy()]).astype(np.int64)
            codes, row_of = np.unique((pairs[0] << 32) + pairs[1], return_inverse=True)
            low = (codes & 0xFFFFFFFF).astype(np.uint32).astype(np.int32)
            meetings = ((codes - low) >> 32).astype(np.int32), low, row_of
            known = self._distinct = spans, meetings
        return known[1]

    @cached_property
    def _of_rank(self) -> dict[int, dict[str, list[Group]]]:
        """The groups of every rank, by axis; only who expands needs them."""
        found: dict[int, dict[str, list[Group]]] = defaultdict(lambda: defaultdict(list))
        for group in self._groups:
            for rank in group.ranks:
                found[rank][group.axis].append(group)
        return found

    def _pairs(self, source: int, rank: int) -> list[tuple[Group, Group]]:
        """Return the groups of *source*, each with the corresponding group of *rank*."""
        found = self._of_rank[rank]
        return [
            (ours, theirs)
            for axis, groups in self._of_rank[source].items()
            for ours, theirs in zip(groups, found.get(axis, ()), strict=False)
            if len(ours.ranks) == len(theirs.ranks)
        ]


def _turned(ours: Sequence[int], theirs: Sequence[int], turn: int) -> NDArray[np.int32]:
    """Return an array that leads from a rank of *ours* to the one *turn* places further in *theirs*."""
    table = np.full(max(ours) + 1, -1, np.int32)
    table[list(ours)] = np.roll(theirs, -turn)
    return table
