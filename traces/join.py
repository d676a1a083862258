"""Joins the spans of a step in one run with those of a step in another.

Two spans are the same piece of work if they lie on the same rank and agree in category, kind and axis, in
micro-batch, layer and stage as far as *both* runs know them for such spans, and in their order in time among
the spans that agree in all of that. Where one run cuts the same compute into more spans than the other, as a
recording of single modules does, all spans of that piece are joined as one. Runs of different size are joined
stage by stage, on one rank each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from foretrace.traces.analysis.communications import arrivals
from foretrace.traces.analysis.windows import windows_of
from foretrace.traces.columns import Int64Array, factorized, int64, is_one_of, labels, occurrence
from foretrace.traces.communicated import Channels, Communicated, channels, compared
from foretrace.traces.run import Run
from foretrace.traces.timeline import MARKS

_LABEL: Final = pa.dictionary(pa.int32(), pa.string())

JOINED: Final = pa.schema(
    [
        pa.field("a_rank", pa.int32()),
        pa.field("b_rank", pa.int32()),
        pa.field("category", _LABEL),
        pa.field("kind", _LABEL),
        pa.field("axis", _LABEL),
        pa.field("stage", pa.int16()),
        pa.field("microbatch", pa.int32()),
        pa.field("layer", pa.int32()),
        pa.field("a_name", _LABEL),
        pa.field("b_name", _LABEL),
        pa.field("a_spans", pa.int32()),  # number of spans that make up the piece
        pa.field("b_spans", pa.int32()),
        pa.field("a_start_ns", pa.int64()),  # from the start of the step, as b_start_ns
        pa.field("b_start_ns", pa.int64()),
        pa.field("a_duration_ns", pa.int64()),
        pa.field("b_duration_ns", pa.int64()),
        pa.field("a_waiting_ns", pa.int64()),  # part of the duration before the last arrival
        pa.field("b_waiting_ns", pa.int64()),
    ]
)
"""Columns of joined spans; names and starts are those of the first span of a piece."""


N_BESIDE: Final = 4  # steps beside the one that is compared in which the same communication is looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedSpans:
    """The spans of two steps, joined, and how many were not."""

    table: pa.Table  # one row per piece of work, columns ``JOINED``
    rank_pairs: tuple[tuple[int, int], ...]  # the ranks that were joined, ``(rank in a, rank in b)``
    # spans of these ranks without a partner
    a_unjoined: int
    b_unjoined: int
    # what these ranks communicate, and where that differs; None between worlds of two sizes or other ranks
    communicated: Communicated | None

    def to_dict(self) -> dict[str, Any]:
        """Return counts, and by category, kind and axis the total times and the median ratio a / b."""
        return {
            "n_joined": self.table.num_rows,
            "a_unjoined": self.a_unjoined,
            "b_unjoined": self.b_unjoined,
            "rank_pairs": [list(pair) for pair in self.rank_pairs],
            "kinds": list(_by_kind(self.table)),
            "communicated": None if self.communicated is None else self.communicated.to_dict(),
        }


def join_spans(a: Run, a_step: int, b: Run, b_step: int) -> JoinedSpans:
    """Join the spans of *a_step* in *a* with those of *b_step* in *b*.

    Only the ranks that can be paired are looked at: those stored in both runs if the worlds are of one size,
    else the first rank of each pipeline stage.
    """
    pairs = rank_pairs(a, b)
    tables, a_left, b_left = [JOINED.empty_table()], 0, 0
    sides = {}
    for a_rank, b_rank in pairs:
        ours, theirs = _step_spans(a, a_rank, a_step), _step_spans(b, b_rank, b_step)
        joined = _joined(ours, theirs)
        sides[a_rank] = channels(a, ours), channels(b, theirs)
        tables.append(joined)
        a_left += ours.num_rows - int(int64(joined, "a_spans").sum())
        b_left += theirs.num_rows - int(int64(joined, "b_spans").sum())
    table = pa.concat_tables(tables).unify_dictionaries()
    return JoinedSpans(
        table=table,
        rank_pairs=tuple(pairs),
        a_unjoined=a_left,
        b_unjoined=b_left,
        communicated=_communicated((a, b), (a_step, b_step), sides),
    )


def _communicated(
    runs: tuple[Run, Run], steps: tuple[int, int], sides: Mapping[int, tuple[Channels, Channels]]
) -> Communicated | None:
    """Return what the *steps* of two *runs* communicate; None if these are not the same ranks of one world.

    Where that differs, it may be for one step only, as in the second step of DDP, which agrees on the order
    of gradients: so steps beside it are looked at, too.
    """
    if runs[0].info.world_size != runs[1].info.world_size or not all(
        r in runs[1].stored_ranks for r in sides
    ):
        return None
    found = compared(sides)
    for name, at in (("b", 1), ("a", 0)) if found.differences else ():
        for step in _beside(runs[at], steps[at], sides):
            other = {rank: channels(runs[at], _step_spans(runs[at], rank, step)) for rank in sides}
            pairs = {rank: (sides[rank][1 - at], other[rank]) for rank in sides}
            if not compared(pairs).differences:
                return replace(found, alike=(name, step))
    return found


def _beside(run: Run, step: int, ranks: Iterable[int]) -> list[int]:
    """Return the steps of *run* that all *ranks* have, without *step*: those beside it, the nearest first."""
    own = [{window.step for window in windows_of(run, rank)} for rank in ranks]
    both = set.intersection(*own) - {step} if own else set()
    return sorted(both, key=lambda other: (abs(other - step), other))[:N_BESIDE]


def rank_pairs(a: Run, b: Run) -> list[tuple[int, int]]:
    """Return which rank of *a* to lay beside which of *b*; stored ranks only."""
    if a.info.world_size == b.info.world_size and (both := set(a.stored_ranks) & set(b.stored_ranks)):
        return [(rank, rank) for rank in sorted(both)]
    ours, theirs = _stage_ranks(a), _stage_ranks(b)
    return [(ours[stage], theirs[stage]) for stage in sorted(ours.keys() & theirs.keys())]


def _stage_ranks(run: Run) -> dict[int, int]:
    """Return the first stored rank of each pipeline stage, by the layout or else by what its spans say."""
    found: dict[int, int] = {}
    for rank in run.stored_ranks:
        if run.info.layout is not None:
            stage = run.info.layout.coord(rank).pp
        else:
            stage = int(max(int64(run.spans([rank]), "stage").max(initial=0), 0))
        found.setdefault(stage, rank)
    return found


def _step_spans(run: Run, rank: int, step: int) -> pa.Table:
    """Return the work that starts in *step* on *rank*, by start; how long each waited, and its place."""
    window = next((w for w in windows_of(run, rank) if w.step == step), None)
    table = run.spans([rank])
    start = int64(table, "start_ns")
    low, high = (window.start_ns, window.end_ns) if window is not None else (0, 0)
    # Why a device idles is no work.
    is_work = ~is_one_of(table, "category", MARKS) & ~is_one_of(table, "stream", ("idle",))
    inside = (start >= low) & (start < high) & is_work
    rows = np.flatnonzero(inside)
    rows = rows[np.argsort(start[rows], kind="stable")]
    waiting = arrivals(run).last_ns[rank][rows] - start[rows]
    spans = table.take(rows).append_column("waiting_ns", pa.array(waiting))
    return spans.set_column(spans.column_names.index("start_ns"), "start_ns", pa.array(start[rows] - low))


def _joined(ours: pa.Table, theirs: pa.Table) -> pa.Table:
    """Return the pieces of work that are in both, in the order of *ours*."""
    piece = _pieces(ours, theirs)
    n_ours = ours.num_rows
    a_pieces, ours = _summed(ours, piece[:n_ours])
    b_pieces, theirs = _summed(theirs, piece[n_ours:])
    _, rows_a, rows_b = np.intersect1d(a_pieces, b_pieces, assume_unique=True, return_indices=True)
    order = np.argsort(ours["start_ns"].to_numpy()[rows_a], kind="stable")
    return _paired(ours.take(rows_a[order]), theirs.take(rows_b[order]))


def _pieces(ours: pa.Table, theirs: pa.Table) -> Int64Array:
    """Return a number for the piece of work of each row of *ours*, then of *theirs*."""
    names = ["category", "kind", "axis", "microbatch", "layer", "stage", "virtual_stage"]
    both = pa.concat_tables([ours.select(names), theirs.select(names)]).unify_dictionaries()
    n_ours = ours.num_rows
    sort_of_span = factorized(*(labels(both, name)[0] for name in names[:3]))
    places = [_known_to_both(int64(both, name), sort_of_span, n_ours) for name in names[3:]]
    key = factorized(sort_of_span, *places)
    a_count, b_count = (np.bincount(part, minlength=len(key)) for part in (key[:n_ours], key[n_ours:]))
    # Where only one run has spans of that piece, nothing can be joined, and they stay apart.
    is_cut_alike = (a_count == b_count) | (a_count == 0) | (b_count == 0)
    one_by_one = is_cut_alike[key] | ~is_one_of(both, "category", ("compute",))
    nth = np.concatenate([occurrence(key[:n_ours]), occurrence(key[n_ours:])])
    # All spans of a piece that is cut differently are one.
    return factorized(key, np.where(one_by_one, nth, 0))


def _summed(spans: pa.Table, piece: Int64Array) -> tuple[Int64Array, pa.Table]:
    """Return the pieces in *spans*, and one row for each: its first span, with times added up."""
    order = np.argsort(piece, kind="stable")
    first = np.flatnonzero(np.diff(piece[order], prepend=-1))
    pieces = spans.take(order[first])
    for name in ("duration_ns", "waiting_ns"):
        total = np.add.reduceat(int64(spans, name)[order], first) if len(first) else np.zeros(0, np.int64)
        pieces = pieces.set_column(pieces.column_names.index(name), name, pa.array(total))
    count = np.diff(first, append=len(order)).astype(np.int32)
    return piece[order][first], pieces.append_column("spans", pa.array(count))


def _known_to_both(value: Int64Array, sort_of_span: Int64Array, n_ours: int) -> Int64Array:
    """Return *value* where both runs know it for spans of that sort, else -1: unknown cannot tell apart."""
    if not len(value):
        return value
    n_sorts = int(sort_of_span.max()) + 1
    is_known = value >= 0
    ours = np.bincount(sort_of_span[:n_ours], is_known[:n_ours], n_sorts)
    theirs = np.bincount(sort_of_span[n_ours:], is_known[n_ours:], n_sorts)
    return np.where(((ours > 0) & (theirs > 0))[sort_of_span], value, -1)


def _paired(ours: pa.Table, theirs: pa.Table) -> pa.Table:
    """Return the columns ``JOINED`` of two tables whose rows belong together."""
    columns = {
        "a_rank": ours["rank"],
        "b_rank": theirs["rank"],
        "stage": pa.array(np.maximum(ours["stage"].to_numpy(), theirs["stage"].to_numpy())),
        "microbatch": pa.array(np.maximum(ours["microbatch"].to_numpy(), theirs["microbatch"].to_numpy())),
        "layer": pa.array(np.maximum(ours["layer"].to_numpy(), theirs["layer"].to_numpy())),
    }
    columns |= {name: ours[name] for name in ("category", "kind", "axis")}
    for name in ("name", "spans", "start_ns", "duration_ns", "waiting_ns"):
        columns |= {f"a_{name}": ours[name], f"b_{name}": theirs[name]}
    return pa.table([columns[name] for name in JOINED.names], schema=JOINED)


def _by_kind(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield count, total times and the median of a / b for each category, kind and axis of joined spans."""
    columns = [labels(table, name) for name in ("category", "kind", "axis")]
    key = factorized(*(codes for codes, _ in columns))
    order = np.argsort(key, kind="stable")
    a_ns, b_ns = int64(table, "a_duration_ns"), int64(table, "b_duration_ns")
    groups = {
        tuple(names[codes[rows[0]]] for codes, names in columns): rows
        for rows in (np.split(order, np.flatnonzero(np.diff(key[order])) + 1) if len(order) else ())
    }
    for (category, kind, axis), chosen in sorted(groups.items(), key=lambda group: group[0]):
        positive = chosen[b_ns[chosen] > 0]
        ratio = float(np.median(a_ns[positive] / b_ns[positive])) if len(positive) else None
        yield {
            "category": category,
            "kind": kind,
            "axis": axis,
            "n_joined": len(chosen),
            "a_total_s": int(a_ns[chosen].sum()) / 1e9,
            "b_total_s": int(b_ns[chosen].sum()) / 1e9,
            "median_ratio": ratio,
        }
