"""The tables that people look for in a trace of a device: kernels, copies, collectives, and its launches."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from foretrace.traces.analysis.collectives import bandwidths, lacks_ranks
from foretrace.traces.analysis.device_time import held_memory, launches
from foretrace.traces.analysis.gaps import has_idle
from foretrace.traces.analysis.kernels import kernels
from foretrace.traces.analysis.metrics import assumptions
from foretrace.traces.report.format import called, cut, format_share, format_si, format_time
from foretrace.traces.run import Run

SHOWN_LETTERS: Final = 60  # letters of a kernel's name that a person reads; the JSON has all

NAMESPACES: Final = re.compile(r"(?:\(anonymous namespace\)|\b\w+)::")
OUTER: Final = re.compile(rf"{NAMESPACES.pattern}(?={NAMESPACES.pattern})")
"""Namespaces, and those that hold another."""

REFUSED: Final = "refused: above what the links allow, so that size or group are not what they seem"


class Shown(NamedTuple):
    """One table: names of its columns, of which the first is text, its rows, and what to know of it."""

    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""


def tables(run: Run, n_rows: int, limit_bytes_per_s: float | None = None) -> list[Shown]:
    """Return the tables of a run of which kernels of devices are known, *n_rows* of each; else none."""
    told = launches(run)
    if not n_rows or run.is_timeless or not (told or has_idle(run)):
        return []
    moved = bandwidths(run, averaged=True, limit_bytes_per_s=limit_bytes_per_s)
    return [
        _work("kernel", kernels(run, copies=False), n_rows),
        _work("copy", kernels(run, copies=True), n_rows),
        Shown(
            ("collective", "size", "calls", "transfer", "waiting", "bus bandwidth", "of link"),
            [_collective(row, is_whole=not lacks_ranks(run, row["axis"])) for row in moved[:n_rows]],
            "; ".join(_doubts(run, moved)),
        ),
        Shown(
            ("launches", "calls", "started", "a call takes", "until a start", "queue", "longest", "empty"),
            [_launching(rank, one) for rank, one in list(told.items())[:n_rows]],
        ),
        Shown(
            ("memory", "peak", "after", "of device", "reserved"),
            [_held(row) for row in held_memory(run)[:n_rows]],
        ),
    ]


def _doubts(run: Run, moved: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what to know of the bandwidths of a run, *moved*."""
    if any(row["refused_bytes_per_s"] for row in moved):
        yield REFUSED
    if moved and (said := assumptions(run).get("group")):
        yield f"groups are {said}"


def _work(title: str, rows: list[dict[str, Any]], n_rows: int) -> Shown:
    """Return the table of kernels or copies."""
    head = (f"{title}, {len(rows)} kinds", "of step", "calls", "total", "mean", "reaches", "of peak")
    shown = rows[:n_rows]
    return Shown(head, [_one(row, name) for row, name in zip(shown, _names(shown), strict=True)])


def _names(rows: list[dict[str, Any]]) -> list[str]:
    """Return names that a person reads, without namespaces as far as that leaves them different."""
    said = [(str(row["name"]), f"{row['kind']} {row['dtype']}".strip()) for row in rows]
    ways = [
        [cut(NAMESPACES.sub("", name), SHOWN_LETTERS) for name, _ in said],
        [cut(OUTER.sub("", name), SHOWN_LETTERS) for name, _ in said],
        [f"{cut(OUTER.sub('', name), SHOWN_LETTERS - len(kind) - 2)}, {kind}" for name, kind in said],
    ]
    counts = [Counter(way) for way in ways]
    return [
        next((way[at] for way, n in zip(ways, counts, strict=True) if n[way[at]] == 1), ways[-1][at])
        for at in range(len(rows))
    ]


def _one(row: dict[str, Any], name: str) -> tuple[str, ...]:
    of_peak = row["of_peak"]
    of = row["nearest"]
    reached = format_si(row[of], {"flops_per_s": "FLOP/s", "bytes_per_s": "B/s"}[of]) if of else ""
    return (
        name,
        format_share(row["share"]),
        f"{row['count']:,}",
        format_time(row["total_s"]),
        format_time(row["mean_s"]),
        reached,
        "" if of_peak is None else format_share(of_peak, ".0f"),
    )


def _held(row: dict[str, Any]) -> tuple[str, ...]:
    peak, limit, reserved = (row[name] for name in ("peak_bytes", "limit_bytes", "reserved_bytes"))
    return (
        f"rank {row['rank']}",
        "" if peak is None else format_si(peak, "B"),
        format_time(row["at_s"]) if "at_s" in row else "",
        format_share(peak / limit) if peak is not None and limit else "",
        "" if reserved is None else format_si(reserved, "B"),
    )


def _collective(row: dict[str, Any], *, is_whole: bool) -> tuple[str, ...]:
    rate, refused, share = (
        row[name] for name in ("median_busbw_bytes_per_s", "refused_bytes_per_s", "share_of_limit")
    )
    # What a rank that is missing was waited for counts as transfer.
    bounds = ("", "") if is_whole else ("≤ ", "≥ ")
    reached = [bounds[1] + format_si(rate, "B/s")] if rate else []
    reached += [f"refused: {format_si(refused, 'B/s')}"] if refused else []
    return (
        called(row["kind"], row["axis"]),
        format_si(row["size_bytes"], "B") if row["size_bytes"] else "unknown",
        f"{row['count']:,}",
        bounds[0] + format_time(row["transfer_s"]),
        format_time(row["waiting_s"]) if is_whole else "unknown",
        ", ".join(reached),
        "" if share is None else bounds[1] + format_share(share, ".0f"),
    )


def _launching(rank: str, one: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"rank {rank}",
        f"{one['n_launches']:,}",
        f"{one['n_kernels']:,}",
        format_time(one["mean_call_s"]),
        format_time(one["median_delay_s"]),
        f"{one['mean_queue']:.1f}",
        f"{one['longest_queue']:,}",
        format_share(one["empty_share"], ".0f"),
    )
