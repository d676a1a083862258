"""What a recording that goes on, or was stopped, waits for: which communication, and who has not come to it.

Out of ``ranks/rank-*.pending.json``, section 7 of docs/timeline-format.md: a hang never comes to a span.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from traces.columns import int64, is_one_of
from traces.errors import TraceError
from traces.info import rank_list
from traces.report.format import format_si, format_time
from traces.run import Run

P2P: Final = ("send", "recv")
_LIBRARY: Final = ("/site-packages/", "/dist-packages/", "/lib/python", "/torch/")
"""Parts of a path that no user's own code has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """What one rank has said about itself.

    Attributes:
        rank: whose file it is.
        t_ns: when it was written, on the clock of the run.
        step: optimizer step that it is in.
        collectives: by group, how many it has issued.
        transfers: by group, sender and receiver, how many it has issued its side of.
        under_way: communications that have begun and not ended, in columns of a timeline.
        stack: where its main thread is, innermost first.
    """

    rank: int
    t_ns: int
    step: int
    collectives: Mapping[int, int]
    transfers: Mapping[tuple[int, int, int], int]
    under_way: tuple[Mapping[str, Any], ...]
    stack: tuple[str, ...]

    @property
    def place(self) -> str:
        """Where it is in the user's own code, or in whatever code it is in; "" if nobody knows."""
        own = (frame for frame in self.stack if not any(part in frame for part in _LIBRARY))
        return next(own, self.stack[0] if self.stack else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One communication that some have come to, and others not.

    Attributes:
        kind, axis, group, sequence, size_bytes, dtype, step: as in the timeline.
        waiting: ranks that have come.
        missing: members that have not.
        silent: members of whom nothing is known.
        age_s: how long the first of them has waited when it last wrote.
        mismatch: what the ranks do not agree on, "" if they do.
        places: by missing rank, where it is.
    """

    kind: str
    axis: str
    group: int
    sequence: int
    size_bytes: int
    dtype: str
    step: int
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    silent: tuple[int, ...]
    age_s: float
    mismatch: str
    places: Mapping[int, str]

    @property
    def text(self) -> str:
        """What is known, in a sentence for a person."""
        size = f", {format_si(self.size_bytes, 'B')}" if self.size_bytes else ""
        what = f"{self.kind} {self.sequence} of {self.axis or f'group {self.group}'}{size}"
        plural = "" if len(self.waiting) > 1 else "s"
        said = f"rank {rank_list(self.waiting)} wait{plural} in {what} for {format_time(self.age_s)}"
        if self.step >= 0:
            said += f", step {self.step}"
        if self.mismatch:
            return f"{said}: the ranks do not agree, {self.mismatch}"
        if self.missing:
            said += f"; rank {rank_list(self.missing)} {'has' if len(self.missing) == 1 else 'have'} not come"
            at = sorted({place for place in self.places.values() if place})
            said += f": {'; '.join(at[:2])}" if at else ""
        if self.silent:
            said += f"; nothing is known of rank {rank_list(self.silent)}"
        if not self.missing and not self.silent:
            said += "; all have come, so that data moves or a link is stuck"
        return said

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self) | {"text": self.text}


def read_pending(path: str | Path) -> tuple[list[Pending], list[str]]:
    """Return what the ranks of the run directory *path* have under way, and which files cannot be read."""
    found, damaged = [], []
    folder = Path(path) / "ranks"
    for file in sorted(folder.glob("rank-*.pending.json")) if folder.is_dir() else ():
        try:
            found.append(_pending(json.loads(file.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            damaged.append(f"{file} cannot be read: left out")
    return found, damaged


def waits(pending: Sequence[Pending], run: Run | None) -> list[Wait]:
    """Return the communications that are waited for, what holds up others first.

    Args:
        pending: what the ranks have under way.
        run: the run, which knows the members of groups and what has come to an end; None if nothing has.
    """
    issued: dict[tuple[int, int, int, int], dict[int, tuple[Pending, Mapping[str, Any]]]] = defaultdict(dict)
    for one in pending:
        for row in one.under_way:
            issued[_key(one.rank, row)][one.rank] = (one, row)
    found = [_wait(key, who, pending, run) for key, who in issued.items()]
    stuck = {rank for wait in found for rank in wait.waiting}
    held_up = {id(wait): bool(set(wait.missing) & stuck) for wait in found}
    relevant = [w for w in found if w.missing or w.silent or w.mismatch] or found
    return sorted(relevant, key=lambda wait: (not wait.mismatch, held_up[id(wait)], -wait.age_s))


def hang(path: str | Path, run: Run | None) -> list[Wait]:
    """Return what the run at *path* waits for; nothing for one that has come to its end."""
    if run is not None and run.info.finished and not run.missing_ranks:
        return []
    return waits(read_pending(path)[0], run)


def _key(rank: int, row: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return group, sequence, sender and receiver; -1 for both of a collective."""
    peer = int(row.get("peer", -1))
    if row["kind"] not in P2P:
        return int(row["group"]), int(row["sequence"]), -1, -1
    pair = (rank, peer) if row["kind"] == "send" else (peer, rank)
    return int(row["group"]), int(row["sequence"]), *pair


def _wait(
    key: tuple[int, int, int, int],
    who: Mapping[int, tuple[Pending, Mapping[str, Any]]],
    pending: Sequence[Pending],
    run: Run | None,
) -> Wait:
    """Return what is known of one communication that *who* has under way."""
    group, sequence, sender, receiver = key
    known = {one.rank: one for one in pending}
    members = (sender, receiver) if sender >= 0 else _members(group, run, known)
    missing, silent = [], []
    for rank in members:
        if rank in who:
            continue
        arrived = _has_come(rank, key, known.get(rank), run)
        if arrived is None:
            silent.append(rank)
        elif not arrived:
            missing.append(rank)
    rows = [row for _, row in who.values()]
    ages = [one.t_ns - int(row["start_ns"]) for one, row in who.values() if int(row["start_ns"]) >= 0]
    first = rows[0]
    return Wait(
        kind=str(first["kind"]),
        axis=str(first["axis"]),
        group=group,
        sequence=sequence,
        size_bytes=int(first["size_bytes"]),
        dtype=str(first["dtype"]),
        step=int(first["step"]),
        waiting=tuple(sorted(who)),
        missing=tuple(missing),
        silent=tuple(silent),
        age_s=max(ages, default=0) / 1e9,
        mismatch=_mismatch(who) if sender < 0 else "",
        places={rank: known[rank].place for rank in missing if rank in known},
    )


def _members(group: int, run: Run | None, known: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks of *group*, everybody who is known if nobody says."""
    listed = () if run is None else run.info.groups
    found = next((one.ranks for one in listed if one.id == group), ())
    return tuple(found) or tuple(sorted(known))


def _has_come(rank: int, key: tuple[int, int, int, int], one: Pending | None, run: Run | None) -> bool | None:
    """Return whether *rank* has issued a communication; None if nothing is known of it."""
    group, sequence, sender, receiver = key
    if one is not None:
        count = (
            one.collectives.get(group, 0) if sender < 0 else one.transfers.get((group, sender, receiver), 0)
        )
        if count > sequence:
            return True
    if run is not None and rank in run.stored_ranks:
        table = run.spans([rank])
        rows = (int64(table, "group") == group) & (int64(table, "sequence") >= sequence)
        rows &= is_one_of(table, "category", ("collective",) if sender < 0 else ("p2p",))
        if sender >= 0:
            rows &= int64(table, "peer") == (receiver if rank == sender else sender)
        return bool(np.any(rows))
    return None if one is None else False


def _mismatch(who: Mapping[int, tuple[Pending, Mapping[str, Any]]]) -> str:
    """Say in what the ranks of one collective differ."""
    said = []
    for name in ("kind", "size_bytes", "dtype"):
        values: dict[Any, list[int]] = defaultdict(list)
        for rank, (_, row) in who.items():
            values[row[name]].append(rank)
        if len(values) > 1:
            parts = (f"{value} on rank {rank_list(ranks)}" for value, ranks in values.items())
            said.append(f"{name}: {', '.join(parts)}")
    return "; ".join(said)


def _pending(document: Mapping[str, Any]) -> Pending:
    """Return what a file says; raises what a wrong type raises."""
    transfers = {(int(g), int(a), int(b)): int(n) for g, a, b, n in document.get("transfers", [])}
    under_way = tuple(dict(row) for row in document["pending"])
    for row in under_way:
        for name in ("group", "sequence", "size_bytes", "step", "start_ns"):
            int(row[name])
        for name in ("kind", "axis", "dtype"):
            if not isinstance(row[name], str):
                raise TraceError(f"{name} is no text")
    return Pending(
        rank=int(document["rank"]),
        t_ns=int(document["t_ns"]),
        step=int(document.get("step", -1)),
        collectives={int(group): int(n) for group, n in document.get("collectives", {}).items()},
        transfers=transfers,
        under_way=under_way,
        stack=tuple(map(str, document.get("stack", []))),
    )
