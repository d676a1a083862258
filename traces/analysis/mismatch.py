"""Communications on which ranks do not agree: what hangs, aborts or corrupts a training.

All ranks of a group must issue the same collectives in the same order, with the same size and type; a receive
must be as large as its send. Which is compared is what was called: out of spans, out of what is under way,
and out of the last calls of ranks that died (sections 7 and 8 of docs/timeline-format.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.traces.columns import factorized, int64, is_one_of, labels
from foretrace.traces.info import rank_list
from foretrace.traces.pending import P2P, UNEVEN, Key, Pending, communication, read_pending
from foretrace.traces.report.format import format_si
from foretrace.traces.run import Run

Call = tuple[str, int, str]
"""Kind, size in bytes (-1 where it need not agree) and type; the kind of a transfer is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One communication that ranks have called differently."""

    # as in the timeline
    axis: str
    group: int
    sequence: int
    # ranks of a transfer; -1 for a collective
    sender: int
    receiver: int
    step: int  # optimizer step of one of them
    calls: tuple[tuple[str, tuple[int, ...]], ...]  # what was called, and by which ranks
    places: Mapping[int, str]  # by rank, where its main thread was when it last said so

    @property
    def text(self) -> str:
        """What is known, in a sentence for a person."""
        calls = ", ".join(f"{what} on rank {rank_list(ranks)}" for what, ranks in self.calls)
        where = f" of {self.axis or f'group {self.group}'}"
        if self.sender >= 0:
            said = f"transfer {self.sequence} from rank {self.sender} to rank {self.receiver}{where}"
        else:
            said = f"collective {self.sequence}{where}"
        at = [f"rank {rank} at {place}" for rank, place in sorted(self.places.items()) if place]
        step = f", step {self.step}" if self.step >= 0 else ""
        known = f" ({'; '.join(at[:2])})" if at else ""
        return f"{said}{step}: {calls}: the likely cause of a crash, a hang or wrong numbers{known}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self) | {"text": self.text}


def mismatches(path: str | Path, run: Run | None) -> list[Mismatch]:
    """Return the first disagreement of each group of the recording at *path*; none for other runs.

    Args:
        path: the run directory.
        run: the run, None if nothing has come to an end.
    """
    if run is not None and run.info.origin != "recorded":
        return []
    pending = read_pending(path)
    suspects = _differing(run) if run is not None else set()
    calls = _told(pending)
    keys = suspects | set(calls)
    for key in keys:
        for rank, row in _ended(run, key):
            calls[key][rank] = row
    return disagreements(calls, {one.rank: one.place for one in pending})


def disagreements(
    calls: Mapping[Key, Mapping[int, Mapping[str, Any]]], places: Mapping[int, str]
) -> list[Mismatch]:
    """Return the first disagreement of each group.

    Args:
        calls: by communication and rank, what it has called.
        places: by rank, where its main thread was.
    """
    found: dict[int, Key] = {}
    # In the order of their numbers, so that of each group the first one stays.
    for key in sorted(calls):
        if len({_call(row) for row in calls[key].values()}) > 1:
            found.setdefault(key[0], key)
    return [_described(key, calls[key], places) for key in found.values()]


def _differing(run: Run) -> set[Key]:
    """Return group, sequence, sender and receiver of what ended with different sizes, types or kinds."""
    numbers: dict[str, int] = {}
    parts = [_columns(run, rank, numbers) for rank in run.stored_ranks]
    if not parts:
        return set()
    keys, codes = np.concatenate([p[0] for p in parts], axis=1), np.concatenate([p[1] for p in parts], axis=1)
    if not keys.shape[1]:
        return set()
    which, what = factorized(*keys), factorized(*codes)
    order = np.lexsort((what, which))
    # By communication, then by what was called: two neighbours of one communication that differ disagree.
    differs = (np.diff(which[order]) == 0) & (np.diff(what[order]) != 0)
    hits = keys[:, order[1:][differs]].T
    return {(int(g), int(s), int(a), int(b)) for g, s, a, b in hits}


def _columns(run: Run, rank: int, numbers: dict[str, int]) -> tuple[Any, Any]:
    """Return what tells the communications of a rank apart, and what must agree, a row for each."""
    table = run.spans([rank])
    own = is_one_of(table, "category", ("collective", "p2p")) & (int64(table, "sequence") >= 0)
    group, sequence, peer, size = (
        int64(table, name)[own] for name in ("group", "sequence", "peer", "size_bytes")
    )
    sends, is_p2p = is_one_of(table, "kind", ("send",))[own], is_one_of(table, "kind", P2P)[own]
    uneven = is_one_of(table, "kind", UNEVEN)[own]
    sender = np.where(is_p2p, np.where(sends, rank, peer), -1)
    receiver = np.where(is_p2p, np.where(sends, peer, rank), -1)
    kind, dtype = (_numbered(table, name, numbers)[own] for name in ("kind", "dtype"))
    codes = (np.where(is_p2p, -1, kind), np.where(uneven, -1, size), dtype)
    return np.stack([group, sequence, sender, receiver]), np.stack(codes)


def _numbered(table: Any, name: str, numbers: dict[str, int]) -> Any:
    """Return a label column as numbers that mean the same in all tables."""
    codes, names = labels(table, name)
    known = np.array([numbers.setdefault(label, len(numbers)) for label in names] or [0], np.int64)
    return known[codes]


def _told(pending: Sequence[Pending]) -> dict[Key, dict[int, Mapping[str, Any]]]:
    """Return what ranks say of themselves: by communication and rank, the row."""
    calls: dict[Key, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for one in pending:
        for row in (*one.issued, *one.under_way):
            calls[communication(one.rank, row)][one.rank] = row
    return calls


def _ended(run: Run | None, key: Key) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the ranks whose spans hold the communication *key*, and the row."""
    group, sequence, sender, receiver = key
    ends = {sender: ("send", receiver), receiver: ("recv", sender)} if sender >= 0 else {}
    if run is None:
        return
    for rank in run.stored_ranks:
        if ends and rank not in ends:
            continue
        table = run.spans([rank])
        rows = (int64(table, "group") == group) & (int64(table, "sequence") == sequence)
        rows &= is_one_of(table, "category", ("p2p",) if ends else ("collective",))
        if ends:
            kind, peer = ends[rank]
            rows &= is_one_of(table, "kind", (kind,)) & (int64(table, "peer") == peer)
        if len(at := np.flatnonzero(rows)):
            yield rank, table.slice(int(at[0]), 1).to_pylist()[0]


def _call(row: Mapping[str, Any]) -> Call:
    """Return what must agree between ranks."""
    size = -1 if row["kind"] in UNEVEN else int(row["size_bytes"])
    return ("" if row["kind"] in P2P else str(row["kind"])), size, str(row["dtype"])


def _described(key: Key, rows: Mapping[int, Mapping[str, Any]], places: Mapping[int, str]) -> Mismatch:
    group, sequence, sender, receiver = key
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, row in sorted(rows.items()):
        size = f" of {format_si(int(row['size_bytes']), 'B')} {row['dtype']}" if row["size_bytes"] else ""
        ranks[f"{row['kind']}{size}"].append(rank)
    first = next(iter(rows.values()))
    return Mismatch(
        axis=str(first["axis"]),
        group=group,
        sequence=sequence,
        sender=sender,
        receiver=receiver,
        step=int(first["step"]),
        calls=tuple((what, tuple(who)) for what, who in ranks.items()),
        places={rank: places[rank] for rank in rows if rank in places},
    )
