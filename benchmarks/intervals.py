"""Writes ``simulator/intervals.toml``, how far off predictions are, and says how often its ranges hold.

    python benchmarks/validate.py steps steps.csv --json > steps.json
    python benchmarks/validate.py memory memory.csv --json > memory.json
    python benchmarks/intervals.py steps.json memory.json

Prints the coverage of the ranges: each source in turn is left out, ranges are made of the others, and its
runs counted that lie within; and each GPU in turn, whose runs are then predicted with the clocks of others
and get the range of a GPU that was never measured. ``--on`` counts the runs of another table in the ranges
that are committed.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from measured.judge import quantile

from foretrace.simulator.intervals import half_width
from foretrace.traces.report.format import format_share

FILE: Final = Path(__file__).parents[1] / "simulator" / "intervals.toml"

LEVEL: Final = 0.8
"""Share of runs that a range is to contain. A convention."""

Row = Mapping[str, Any]


def main() -> None:
    """Write the file, and print how often ranges hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", type=Path)
    parser.add_argument("memory", type=Path, nargs="?")
    parser.add_argument("--on", action="store_true", help="Count the runs of STEPS in what is committed.")
    parser.add_argument("--output", type=Path, default=FILE)
    args = parser.parse_args()
    given = {"step_time": args.steps, "memory": args.memory}
    tables = {
        kind: json.loads(path.read_text(encoding="utf-8"))["errors"] for kind, path in given.items() if path
    }
    if not args.on:
        args.output.write_text("\n".join(lines(tables)), encoding="utf-8")
    print("| ranges of | left out in turn | sources or GPUs | runs within, mean over them | over families |")
    print("|---|---|---|---|---|")
    for kind, rows in tables.items():
        if args.on:
            table = tomllib.loads(args.output.read_text(encoding="utf-8"))[kind]
            _print(kind, "nothing", [(rows, shares(rows, table))])
            continue
        for by in ("source", "device"):
            parts = [
                (own, shares(own, made([row for row in rows if row[by] != name]), elsewhere=by == "device"))
                for name, own in _by(rows, by)
            ]
            _print(kind, f"{by}s", parts)


def lines(tables: Mapping[str, Sequence[Row]]) -> Iterable[str]:
    """Yield the lines of the file."""
    yield "# Written by benchmarks/intervals.py. |ln(measured / predicted)| that 8 in 10 runs stay below,"
    yield "# those of each source on each GPU counting once, and the factors of what makes it larger."
    yield f"level = {LEVEL}"
    for kind, rows in tables.items():
        table = made(rows)
        wider = table.pop("wider")
        for name, values in ((kind, table), (f"{kind}.wider", wider)):
            yield ""
            yield f"[{name}]"
            yield from (f"{key} = {json.dumps(_rounded(value))}" for key, value in values.items())
    yield ""


def _rounded(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


def made(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the table of *rows* that ``simulator.intervals.half_width`` takes.

    The spread is a quantile of errors over factors, by groups, half a group higher because few of them are
    known (Hazen 1914: the k-th of n lies at (k - 1/2) / n). A factor is the quantile of the rows that it is
    of over that of others, each as much higher as their own groups are few.
    """
    weight = _weights(rows)
    plain = [row for row in rows if not row["wider"]]
    wider = {}
    for name in sorted({name for row in rows for name in row["wider"]}):
        own = [row for row in rows if name in row["wider"]]
        far, near = (
            quantile([(abs(row["off"]), weight[row["family"]]) for row in some], _level(some))
            for some in (own, plain or own)
        )
        wider[name] = max(1.0, far / near)
    known = {"spread": 1.0, "wider": wider}
    scaled = [(abs(row["off"]) / half_width(known, row["wider"]), weight[row["family"]]) for row in rows]
    inherited = [
        (abs(off) / half_width(known, row["wider"]), weight[row["family"]] / len(row["elsewhere"]))
        for row in rows
        for off in row["elsewhere"]
    ]
    if inherited:
        wider["device"] = max(1.0, quantile(inherited, LEVEL) / quantile(scaled, LEVEL))
    return {
        "spread": quantile(scaled, _level(rows)),
        "rows": len(rows),
        "sources": len({row["source"] for row in rows}),
        "devices": sorted({row["device"] for row in rows}),
        "wider": wider,
    }


def _level(rows: Sequence[Row]) -> float:
    """Return of what share of *rows* the error is looked for that ``LEVEL`` of all runs stay below."""
    return min(LEVEL + 0.5 / len({(row["source"], row["device"]) for row in rows}), 1.0)


def shares(rows: Sequence[Row], table: Mapping[str, Any], *, elsewhere: bool = False) -> list[float]:
    """Return the share of each family of *rows* that lies within the ranges of *table*.

    Args:
        rows: runs.
        table: as ``made``.
        elsewhere: predicted as though their GPU had never been measured.
    """
    found = []
    for _, own in _by(rows, "family"):
        within = []
        for row in own:
            unknown = row["device"] not in table["devices"]
            width = half_width(table, [*row["wider"], *(["device"] if unknown else [])])
            offs = row["elsewhere"] if elsewhere and row["elsewhere"] else [row["off"]]
            within.append(fmean(abs(off) <= width for off in offs))
        found.append(fmean(within))
    return found


def _weights(rows: Sequence[Row]) -> dict[str, float]:
    """Return the weight of a row of each family: sources on GPUs count once, and their families the same."""
    groups: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        groups[row["source"], row["device"]][row["family"]] += 1
    return {family: 1 / len(families) / n for families in groups.values() for family, n in families.items()}


def _by(rows: Sequence[Row], key: str) -> Iterator[tuple[str, list[Row]]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row[key]].append(row)
    yield from sorted(found.items())


def _print(kind: str, what: str, parts: Sequence[tuple[Sequence[Row], Sequence[float]]]) -> None:
    means = (fmean(fmean(own) for _, own in parts), fmean(one for _, own in parts for one in own))
    print(
        f"| {kind.replace('_', ' ')} | {what} | {len(parts)} | " + " | ".join(map(format_share, means)) + " |"
    )


if __name__ == "__main__":
    main()
