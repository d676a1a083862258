"""What ranks say of themselves while they run: what is under way, and the last calls of those that died.

Out of ``ranks/rank-*.pending.json`` and ``ranks/rank-*.issued.jsonl``, sections 7 and 8 of
docs/timeline-format.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from foretrace.traces.errors import TraceError

P2P: Final = ("send", "recv")
UNEVEN: Final = ("all_to_all",)
"""Collectives in which each rank may send as much as it likes, as to the experts of its tokens."""

_LIBRARY: Final = ("/site-packages/", "/dist-packages/", "/lib/python", "/torch/")
"""Parts of a path that no user's own code has."""


Key = tuple[int, int, int, int]
"""Group, sequence, sender and receiver of a communication; -1 for both of a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the process of a rank ended, as its parent saw it.

    Attributes:
        status: its exit status; the negative number of the signal that ended it.
        signals_sent: the signals that the parent had sent it.
    """

    status: int
    signals_sent: tuple[int, ...] = ()


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
        stack: where its main thread is, innermost first; () if it has issued something since it said so.
        issued: the last communications that it has issued, ended or not, if its process died.
        has_ring: whether *issued* are known; there may be none.
    """

    rank: int
    t_ns: int
    step: int
    collectives: Mapping[int, int]
    transfers: Mapping[tuple[int, int, int], int]
    under_way: tuple[Mapping[str, Any], ...]
    stack: tuple[str, ...]
    issued: tuple[Mapping[str, Any], ...] = ()
    has_ring: bool = False

    @property
    def place(self) -> str:
        """Where it is in the user's own code, or in whatever code it is in; "" if nobody knows."""
        own = (frame for frame in self.stack if not any(part in frame for part in _LIBRARY))
        return next(own, self.stack[0] if self.stack else "")


def read_pending(path: str | Path) -> tuple[list[Pending], list[str]]:
    """Return what the ranks of the run directory *path* have under way, and which files cannot be read."""
    found: dict[int, Pending] = {}
    damaged = []
    folder = Path(path) / "ranks"
    for file in sorted(folder.glob("rank-*.pending.json")) if folder.is_dir() else ():
        try:
            one = _pending(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            damaged.append(f"{file} cannot be read: left out")
        else:
            found[one.rank] = one
    for rank, rows in read_issued(path).items():
        found[rank] = _with_issued(found.get(rank), rank, rows)
    return list(found.values()), damaged


def read_issued(path: str | Path) -> dict[int, tuple[Mapping[str, Any], ...]]:
    """Return the last communications of ranks that have not ended well, oldest first; half a line is none."""
    found = {}
    folder = Path(path) / "ranks"
    for file in sorted(folder.glob("rank-*.issued.jsonl")) if folder.is_dir() else ():
        rows = []
        for line in file.read_bytes().splitlines():
            with suppress(ValueError, TypeError, KeyError, RecursionError, TraceError):
                rows.append(_row(json.loads(line)))
        with suppress(ValueError):
            found[int(file.name[5:].partition(".")[0])] = tuple(sorted(rows, key=lambda row: int(row["n"])))
    return found


def read_ended(path: str | Path) -> dict[int, Ended]:
    """Return how the processes of ranks have ended, as far as their parents noted it."""
    found = {}
    folder = Path(path) / "ranks"
    for file in sorted(folder.glob("rank-*.ended.json")) if folder.is_dir() else ():
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            said = json.loads(file.read_text(encoding="utf-8"))
            found[int(file.name[5:].partition(".")[0])] = Ended(
                status=int(said["status"]), signals_sent=tuple(map(int, said.get("signals_sent", [])))
            )
    return found


def communication(rank: int, row: Mapping[str, Any]) -> Key:
    """Return group, sequence, sender and receiver; -1 for both of a collective."""
    peer = int(row.get("peer", -1))
    if row["kind"] not in P2P:
        return int(row["group"]), int(row["sequence"]), -1, -1
    pair = (rank, peer) if row["kind"] == "send" else (peer, rank)
    return int(row["group"]), int(row["sequence"]), *pair


def _with_issued(one: Pending | None, rank: int, rows: tuple[Mapping[str, Any], ...]) -> Pending:
    """Return what a rank has said, and what its last calls add to it."""
    collectives = dict(one.collectives) if one is not None else {}
    transfers = dict(one.transfers) if one is not None else {}
    last_ns = int(rows[-1]["issued_ns"]) if rows else -1
    for row in rows:
        group, sequence, sender, receiver = communication(rank, row)
        if sender < 0:
            collectives[group] = max(collectives.get(group, 0), sequence + 1)
        else:
            pair = (group, sender, receiver)
            transfers[pair] = max(transfers.get(pair, 0), sequence + 1)
    if one is None:
        one = Pending(
            rank=rank,
            t_ns=last_ns,
            step=int(rows[-1]["step"]) if rows else -1,
            collectives={},
            transfers={},
            under_way=(),
            stack=(),
        )
    # A process that dies at once leaves where it was some calls ago, as in an import: that explains nothing.
    stack = one.stack if one.t_ns >= last_ns else ()
    return replace(one, collectives=collectives, transfers=transfers, issued=rows, stack=stack, has_ring=True)


def _row(given: Any) -> Mapping[str, Any]:
    """Return one line of last calls; raises what a wrong type raises."""
    row = dict(given)
    for name in ("n", "issued_ns", "group", "sequence", "peer", "size_bytes", "step"):
        row[name] = int(row[name])
    for name in ("kind", "axis", "dtype"):
        if not isinstance(row[name], str):
            raise TraceError(f"{name} is not text")
    return row


def _pending(document: Mapping[str, Any]) -> Pending:
    """Return what a file says; raises what a wrong type raises."""
    transfers = {(int(g), int(a), int(b)): int(n) for g, a, b, n in document.get("transfers", [])}
    under_way = tuple(dict(row) for row in document["pending"])
    for row in under_way:
        for name in ("group", "sequence", "size_bytes", "step", "start_ns"):
            int(row[name])
        for name in ("kind", "axis", "dtype"):
            if not isinstance(row[name], str):
                raise TraceError(f"{name} is not text")
    return Pending(
        rank=int(document["rank"]),
        t_ns=int(document["t_ns"]),
        step=int(document.get("step", -1)),
        collectives={int(group): int(n) for group, n in document.get("collectives", {}).items()},
        transfers=transfers,
        under_way=under_way,
        stack=tuple(map(str, document.get("stack", []))),
    )
