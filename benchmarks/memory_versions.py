"""Hold measured memory against both versions of a convention, where a table does not say which one ran.

The scan of nanotron mixes versions that keep inputs of column-parallel matrices as gathered with versions
that gather them again. Prints the median error of each version alone, and of the nearer one row by row: what
is left when the version is known. The last column reads the label, so it is no accuracy.

    python benchmarks/memory_versions.py memory.csv
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median

from measured.memory import completed, job_with_stages
from measured.table import Row, read_table

from foretrace.simulator.errors import SimulationError
from foretrace.simulator.memory.ranks import rank_memories
from foretrace.simulator.validate.runs import figure_bytes
from foretrace.topologies.errors import TopologyError
from foretrace.traces.errors import TraceError
from foretrace.traces.report.format import format_share

CONVENTION = "keeps_gathered_inputs"


def errors(row: Row) -> tuple[float, float] | None:
    """Return |ln(predicted / measured)| of *row* when inputs are gathered again, and when they are kept."""
    try:
        job = job_with_stages(row)
        measured = row.number_in("peak_unspecified_gb") * 1e9
        rank = job.layout.coord(int(row.text("rank", "0"))).pp
        found = []
        for kept in (False, True):
            other = replace(job, conventions=(*job.conventions, (CONVENTION, kept)))
            memory = rank_memories(other)[rank]
            found.append(abs(math.log(figure_bytes(other, memory, "unspecified") / measured)))
    except (SimulationError, TopologyError, TraceError, ValueError):
        return None
    return found[0], found[1]


def main() -> None:
    """Print the table."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("table", type=Path)
    table = parser.parse_args().table
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in completed(read_table(table, ("model", "tp", "pp", "dp")), table, None):
        if "nanotron" not in row.text("framework") or not row.text("peak_unspecified_gb"):
            continue
        if (both := errors(row)) is not None:
            layout = "no tensor parallelism" if row.integer("tp", 1) == 1 else "tensor parallel"
            groups["all"].append(both)
            groups[f"{layout}, {'with' if row.integer('pp', 1) > 1 else 'without'} pipeline"].append(both)
    print(f"{'rows of nanotron':44} {'n':>5} {'again':>7} {'kept':>7} {'nearer':>7}")
    for name, pairs in sorted(groups.items()):
        again, kept = (median(pair[i] for pair in pairs) for i in (0, 1))
        nearer = median(min(pair) for pair in pairs)
        print(
            f"{name:44} {len(pairs):5} {format_share(again):>8} {format_share(kept):>8} "
            f"{format_share(nearer):>8}"
        )


if __name__ == "__main__":
    main()
