"""What ranks say of themselves while they run: what is under way, and the last calls of those that died.

Out of ``ranks/rank-*.pending.json`` and ``ranks/rank-*.issued.jsonl``, sections 7 and 8 of
docs/timeline-format.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from foretrace.door import is_as_sealed, parse, read_bytes, read_text, shaped
from foretrace.traces.errors import TraceError

_Made = TypeVar("_Made")

P2P: Final = ("send", "recv")
UNEVEN: Final = ("all_to_all",)
"""Collectives in which each rank may send as much as it likes, as to the experts of its tokens."""

_LIBRARY: Final = ("/site-packages/", "/dist-packages/", "/lib/python", "/torch/")
"""Parts of a path that no user's own code has."""


Key = tuple[int, int, int, int]
"""Group, sequence, sender and receiver of a communication; -1 for both of a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the process of a rank ended, as its parent saw it."""

    status: int  # its exit status; the negative number of the signal that ended it
    signals_sent: tuple[int, ...] = ()  # the signals that the parent had sent it


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """What one rank has said about itself."""

    rank: int  # whose file it is
    t_ns: int  # when it was written, on the clock of the run
    step: int  # optimizer step that it is in
    collectives: Mapping[int, int]  # by group, how many it has issued
    # by group, sender and receiver, how many it has issued its side of
    transfers: Mapping[tuple[int, int, int], int]
    # communications that have begun and not ended, in columns of a timeline
    under_way: tuple[Mapping[str, Any], ...]
    # where its main thread is, innermost first; () if it has issued something since it said so
    stack: tuple[str, ...]
    # the last communications that it has issued, ended or not, if its process died
    issued: tuple[Mapping[str, Any], ...] = ()
    has_ring: bool = False  # whether *issued* are known; there may be none

    @property
    def place(self) -> str:
        """Where it is in the user's own code, or in whatever code it is in; "" if nobody knows."""
        own = (frame for frame in self.stack if not any(part in frame for part in _LIBRARY))
        return next(own, self.stack[0] if self.stack else "")


def read_pending(path: str | Path) -> list[Pending]:
    """Return what the ranks of the run directory *path* have under way; what is damaged is left out."""
    found = {one.rank: one for one in _said(path, "pending", _pending).values() if one is not None}
    for rank, rows in read_issued(path).items():
        found[rank] = _with_issued(found.get(rank), rank, rows)
    return list(found.values())


def read_ended(path: str | Path) -> dict[int, Ended]:
    """Return how the processes of ranks have ended, as far as their parents noted it."""
    ends = _said(path, "ended", _ended)
    return {int(_rank(file)): one for file, one in ends.items() if one is not None}


def damaged_notes(path: str | Path) -> list[str]:
    """Return a warning for each of these files that is damaged."""
    said = {**_said(path, "pending", _pending), **_said(path, "ended", _ended)}
    again = _rings(path)  # a rank that is alive may write while its lines are read
    torn = {file: min(n, again[file][1]) for file, (_, n) in _rings(path).items() if file in again}
    return [f"{file} is damaged: left out" for file, one in said.items() if one is None] + [
        f"{file}: {n} {'line' if n == 1 else 'lines'} damaged: left out" for file, n in torn.items() if n
    ]


def _said(
    path: str | Path, what: str, made: Callable[[Mapping[str, Any]], _Made]
) -> dict[Path, _Made | None]:
    """Return what the files ``rank-*.<what>.json`` say, as *made* of it; None where one is damaged."""
    found: dict[Path, _Made | None] = {}
    for file in sorted((Path(path) / "ranks").glob(f"rank-*.{what}.json")):
        try:
            int(_rank(file))
            text = read_text(file, TraceError)
            document = parse(text, "JSON", str(file), TraceError)
            found[file] = made(document) if is_as_sealed(text, document) else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            found[file] = None
    return found


def read_issued(path: str | Path) -> dict[int, tuple[Mapping[str, Any], ...]]:
    """Return the last communications of ranks that have not ended well, oldest first; half a line is none."""
    found = {}
    for file, (rows, _) in _rings(path).items():
        with suppress(ValueError):
            found[int(_rank(file))] = rows
    return found


def _rings(path: str | Path) -> dict[Path, tuple[tuple[Mapping[str, Any], ...], int]]:
    """Return by file the last communications, and how many more stood there, but for one being written."""
    found = {}
    folder = Path(path) / "ranks"
    for file in sorted(folder.glob("rank-*.issued.jsonl")) if folder.is_dir() else ():
        rows, n_unread = [], 0
        for line in read_bytes(file, TraceError).splitlines():
            try:
                rows.append(_row(parse(line.decode(), "JSON", str(file), TraceError), _OF_ISSUED))
            except (ValueError, TypeError, KeyError, RecursionError, TraceError):
                n_unread += bool(line.strip(b"\0 "))
        rows.sort(key=lambda row: int(row["n"]))
        n_between = int(rows[-1]["n"]) - int(rows[0]["n"]) + 1 - len(rows) if rows else 0
        found[file] = tuple(rows), max(n_unread - 1, n_between, 0)  # they are counted without a gap
    return found


def _rank(file: Path) -> str:
    """Return what stands for a rank in the name of *file*."""
    return file.name.removeprefix("rank-").partition(".")[0]


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


_NUMBERS: Final = ("n", "issued_ns", "start_ns", "group", "sequence", "peer", "size_bytes", "step")
_ROW: Final[Mapping[str, type]] = {
    **dict.fromkeys(_NUMBERS, int),
    **dict.fromkeys(("kind", "axis", "dtype"), str),
}
_OF_ISSUED: Final = {*_ROW} - {"start_ns"}
_OF_PENDING: Final = {*_ROW} - {"n", "issued_ns", "peer"}
"""What a line of last calls, and one of what is under way, must tell; the rest of ``_ROW`` they may."""


def _row(given: Any, needed: Set[str]) -> Mapping[str, Any]:
    """Return one communication; raises what a wrong type raises."""
    return dict(given) | {
        name: shaped(kind, given[name], name)
        for name, kind in _ROW.items()
        if name in needed or name in given
    }


def _ended(document: Mapping[str, Any]) -> Ended:
    """Return what a file says; raises what a wrong type raises."""
    return Ended(
        status=int(document["status"]), signals_sent=tuple(map(int, document.get("signals_sent", [])))
    )


def _pending(document: Mapping[str, Any]) -> Pending:
    """Return what a file says; raises what a wrong type raises."""
    transfers = {(int(g), int(a), int(b)): int(n) for g, a, b, n in document.get("transfers", [])}
    under_way = tuple(_row(row, _OF_PENDING) for row in document["pending"])
    return Pending(
        rank=int(document["rank"]),
        t_ns=int(document["t_ns"]),
        step=int(document.get("step", -1)),
        collectives={int(group): int(n) for group, n in document.get("collectives", {}).items()},
        transfers=transfers,
        under_way=under_way,
        stack=tuple(map(str, document.get("stack", []))),
    )
