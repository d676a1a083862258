"""How fast programs are built and run: both engines, from 8 to 16,384 GPUs.

    python benchmarks/engine.py [--repeat N] [--json]

Every figure is the median over the repeats of processor time, which others on the machine disturb less than
wall time. Cost should be linear in tasks, so that tasks per second stay level. ``in all`` is what a caller
waits for: program, timeline, memory over time and figures. ``expanded`` gives every rank its own rows in
Arrow. ``contended`` shares links, ``GPUs`` the processors and memory of GPUs. Memory per task is what the
program and the times of its tasks hold.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import fields, replace
from statistics import median
from typing import Any, Final

from foretrace.simulator.builder.step import build
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.config import job_from
from foretrace.simulator.engine import choose
from foretrace.simulator.job import Job
from foretrace.simulator.network.cost import Network
from foretrace.simulator.program import Program
from foretrace.simulator.simulate import simulate

COMMON: Final = {"cluster": "dgx-h100", "seq_len": 8192}
CASES: Final[dict[str, dict[str, Any]]] = {
    "llama3-8b, 8 GPUs": {"model": "llama3-8b", "gpus": 8, "tp": 8, "global_batch": 64},
    "llama3-70b, 64 GPUs": {"model": "llama3-70b", "gpus": 64, "tp": 8, "pp": 4, "global_batch": 128},
    "llama3-70b, 512 GPUs": {"model": "llama3-70b", "gpus": 512, "tp": 8, "pp": 4, "global_batch": 1024},
    "the same, zb-v": {
        "model": "llama3-70b",
        "gpus": 512,
        "tp": 8,
        "pp": 4,
        "global_batch": 1024,
        "schedule": "zb-v",
    },
    "llama3-405b, 2,048 GPUs": {"model": "llama3-405b", "gpus": 2048, "tp": 8, "pp": 16, "global_batch": 512},
    "llama3-405b, 16,384 GPUs": {
        "model": "llama3-405b",
        "gpus": 16384,
        "tp": 8,
        "pp": 16,
        "global_batch": 4096,
    },
    "llama3-8b, 8 GPUs, all ranks": {
        "model": "llama3-8b",
        "gpus": 8,
        "tp": 8,
        "global_batch": 64,
        "folded": False,
    },
}
EXPANDED_RANKS: Final = 512
"""Most ranks whose rows are expanded in memory."""


def main() -> None:
    """Run every case and print a table or one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [measure(name, dict(case), args.repeat) for name, case in CASES.items()]
    if args.json:
        print(json.dumps({"repeat": args.repeat, "cases": rows}))
        return
    heads = (
        *("build s", "event s", "compiled", "contended", "GPUs", "in all s", "expanded"),
        *("event/s", "compiled/s", "B/task"),
    )
    widths = (8, 8, 8, 9, 8, 8, 8, 11, 11, 6)
    titles = (f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))
    print(f"{'case':29} {'tasks':>9}", *titles)
    for row in rows:
        expanded = "" if row["expand_s"] is None else f"{row['expand_s']:.3f}"
        print(
            f"{row['case']:29} {row['n_tasks']:>9,} {row['build_s']:>8.3f} {row['event_s']:>8.3f} "
            f"{row['compiled_s']:>8.4f} {row['contended_s']:>9.4f} {row['shared_gpus_s']:>8.4f} "
            f"{row['simulate_s']:>8.3f} {expanded:>8} "
            f"{row['n_tasks'] / row['event_s']:>11,.0f} {row['n_tasks'] / row['compiled_s']:>11,.0f} "
            f"{row['bytes_per_task']:>6.0f}"
        )


def measure(name: str, case: dict[str, Any], repeat: int) -> dict[str, Any]:
    """Return the median times of one case, in s.

    Args:
        name: what to call it.
        case: settings of the job, and ``folded``.
        repeat: how often each part is done.
    """
    folded = case.pop("folded", True)
    job = job_from({**COMMON, **case})
    program = _program(job, folded=folded)
    event, compiled, contended = (choose(name, 0) for name in ("event", "compiled", "contended-compiled"))
    taken = _program(replace(job, overlap_slowdown=1.0), folded=folded)
    compiled.times(program)  # loads the compiled code
    compiled.times(taken)
    contended.times(program)
    simulation = simulate(job, folded=folded)
    ranks = range(job.layout.world_size)
    return {
        "case": name,
        "world_size": job.layout.world_size,
        "n_tasks": program.n_tasks,
        "build_s": _median_s(lambda: _program(job, folded=folded), repeat),
        "event_s": _median_s(lambda: event.times(program), repeat),
        "compiled_s": _median_s(lambda: compiled.times(program), repeat),
        "contended_s": _median_s(lambda: contended.times(program), repeat),
        "shared_gpus_s": _median_s(lambda: compiled.times(taken), repeat),
        "simulate_s": _median_s(lambda: simulate(job, folded=folded, engine="compiled"), repeat),
        "expand_s": _median_s(lambda: simulation.run.spans(ranks), repeat)
        if len(ranks) <= EXPANDED_RANKS
        else None,
        "bytes_per_task": _bytes(program) / program.n_tasks,
    }


def _bytes(program: Program) -> int:
    """Return what the arrays of *program* hold, and start and end of its tasks."""
    arrays = (getattr(program, field.name) for field in fields(program))
    return sum(getattr(array, "nbytes", 0) for array in arrays) + 2 * 8 * program.n_tasks


def _program(job: Job, *, folded: bool) -> Any:
    """Return the program of *job* as ``simulate`` builds it, network and all."""
    return build(job, Network(job.cluster), ComputeModel(job.cluster.device, job.precision), folded=folded)


def _median_s(do: Callable[[], object], repeat: int) -> float:
    """Return the median processor time of *do*."""
    times = []
    for _ in range(repeat):
        start = time.process_time()
        do()
        times.append(time.process_time() - start)
    return median(times)


if __name__ == "__main__":
    main()
