"""How far measured tables of collectives carry: what they say about sizes, ranks and GPUs left out of them.

    python benchmarks/collectives_left_out.py nccl_single_node.parquet

The table has columns ``gpu, op, n, bytes, us``. For every operation some rows are taken away, predicted from
the rest as the simulator does, and compared: medians of ``|ln(predicted / measured)|``.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import accumulate
from statistics import median

import pyarrow.parquet as pq

from foretrace.simulator.network.collectives import measured_s
from foretrace.topologies.link import Table
from foretrace.traces.report.format import format_share

KIND = {"alltoall": "all_to_all"}
BYTES_PER_S = {"a100_sxm": 300e9, "h100_sxm": 450e9, "h200_sxm": 450e9, "b200_sxm": 900e9, "gb200": 900e9}

Times = dict[int, dict[int, float]]
"""Seconds by number of ranks and size."""


def read(path: str) -> dict[tuple[str, str], Times]:
    """Return the times of each ``(gpu, operation)``."""
    found: dict[tuple[str, str], Times] = defaultdict(lambda: defaultdict(dict))
    for row in pq.read_table(path).to_pylist():
        kind = KIND.get(row["op"], row["op"])
        found[row["gpu"], kind][row["n"]][row["bytes"]] = row["us"] * 1e-6
    return found


def table(times: Times, bytes_per_s: float) -> Table:
    """Return *times* as the catalogue holds them: never falling, at common sizes."""
    sizes = sorted(set.intersection(*(set(row) for row in times.values())))
    rising = {
        n: tuple(accumulate((row[size] for size in reversed(sizes)), min))[::-1] for n, row in times.items()
    }
    return Table(sizes_bytes=tuple(sizes), times_s=rising, bytes_per_s=bytes_per_s)


def errors(known: Table, kind: str, left_out: Times, width: float) -> Iterator[float]:
    """Yield the errors of *left_out*, measured at *width* bytes/s, predicted from *known*."""
    for n, row in left_out.items():
        for size, measured in row.items():
            latency_s, wire_s = measured_s(known, kind, size, n)
            yield abs(math.log((latency_s + wire_s * known.bytes_per_s / width) / measured))


def left_out(found: Mapping[tuple[str, str], Times]) -> Iterator[tuple[str, str, float]]:
    """Yield what was left out, the operation, and an error, for every row that was."""
    for (gpu, kind), times in found.items():
        width = BYTES_PER_S[gpu]
        for n in times:
            rest = {other: row for other, row in times.items() if other != n}
            for error in errors(table(rest, width), kind, {n: times[n]}, width) if rest else ():
                yield f"{n} of {sorted(times)} ranks", kind, error
        sizes = sorted(next(iter(times.values())))
        for what, gone in (
            ("every other size", sizes[1:-1:2]),
            ("8 MiB and more", [s for s in sizes if s >= 1 << 23]),
        ):
            rest = {n: {s: t for s, t in row.items() if s not in gone} for n, row in times.items()}
            hidden = {n: {s: t for s, t in row.items() if s in gone} for n, row in times.items()}
            for error in errors(table(rest, width), kind, hidden, width):
                yield what, kind, error
        for (other, same), others in found.items():
            if same == kind and other != gpu:
                shared = {n: row for n, row in times.items() if n in others}
                for error in errors(table(others, BYTES_PER_S[other]), kind, shared, width):
                    yield f"{gpu} from {other}", kind, error


def main(path: str) -> None:
    """Print the median error of everything that can be left out of the table at *path*."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for what, kind, error in left_out(read(path)):
        found[what][kind].append(error)
    kinds = sorted({kind for row in found.values() for kind in row})
    sys.stdout.write(f"{'left out':28}" + "".join(f"{kind:>17}" for kind in kinds) + "\n")
    for what, row in found.items():
        cells = (f"{format_share(median(row[kind])):>17}" if kind in row else f"{'-':>17}" for kind in kinds)
        sys.stdout.write(f"{what:28}" + "".join(cells) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
