"""What a recording that goes on, or was stopped, waits for: which communication, and who has not come to it.

Read from ``ranks/rank-*.pending.json`` (section 7 of docs/timeline-format.md), because a communication that
hangs never becomes a span.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.traces.columns import int64, is_one_of
from foretrace.traces.info import rank_list
from foretrace.traces.pending import UNEVEN, Pending, communication, read_pending
from foretrace.traces.report.format import format_si, format_time
from foretrace.traces.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One communication that some have come to, and others not.

    Attributes:
        kind, axis, group, size_bytes, dtype, step: as in the timeline.
        waiting: ranks that have come.
        missing: members that have not.
        silent: members of whom nothing is known.
        sequence: -1 for a receive from whichever rank sends first.
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
        number = f" {self.sequence}" if self.sequence >= 0 else ""
        what = f"{self.kind}{number} of {self.axis or f'group {self.group}'}{size}"
        plural = "" if len(self.waiting) > 1 else "s"
        said = f"rank {rank_list(self.waiting)} wait{plural} in {what} for {format_time(self.age_s)}"
        if self.step >= 0:
            said += f", step {self.step}"
        if self.mismatch:
            return f"{said}: the ranks do not agree, the likely cause: {self.mismatch}"
        if self.sequence < 0:  # a receive from anybody
            return f"{said}; no rank has sent to it"
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


def waits(pending: Sequence[Pending], run: Run | None) -> list[Wait]:
    """Return the communications that are waited for, what holds up others first.

    Args:
        pending: what the ranks have under way.
        run: the run, which knows the members of groups and what has come to an end; None if nothing has.
    """
    issued: dict[tuple[int, int, int, int], dict[int, tuple[Pending, Mapping[str, Any]]]] = defaultdict(dict)
    for one in pending:
        for row in one.under_way:
            issued[communication(one.rank, row)][one.rank] = (one, row)
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


def _wait(
    key: tuple[int, int, int, int],
    who: Mapping[int, tuple[Pending, Mapping[str, Any]]],
    pending: Sequence[Pending],
    run: Run | None,
) -> Wait:
    """Return what is known of one communication that *who* has under way."""
    group, sequence, sender, receiver = key
    known = {one.rank: one for one in pending}
    members: tuple[int, ...] = (sender, receiver)
    if sender < 0:  # of a receive from anybody nobody in particular is missing
        members = _members(group, run, known) if sequence >= 0 else ()
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
    """Say in what the ranks of one collective differ: in what they call, or else in its size and type."""
    said: list[str] = []
    for name in ("kind", "size_bytes", "dtype"):
        values: dict[Any, list[int]] = defaultdict(list)
        for rank, (_, row) in who.items():
            values[row[name]].append(rank)
        is_uneven = name == "size_bytes" and set(UNEVEN) & {row["kind"] for _, row in who.values()}
        if len(values) > 1 and not is_uneven:
            parts = (f"{value} on rank {rank_list(ranks)}" for value, ranks in values.items())
            said.append(f"{name}: {', '.join(parts)}")
        if name == "kind" and said:
            break
    return "; ".join(said)
