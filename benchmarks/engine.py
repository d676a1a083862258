"""How fast programs are built and run: tasks per second from 8 to 16,384 GPUs.

    python benchmarks/engine.py [--repeat N] [--json]

Every figure is the median over the repeats of processor time, which others on the machine disturb less than
wall time. Cost should be linear in tasks, so that the last column stays level.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any, Final

from simulator.build import build
from simulator.compute import ComputeModel
from simulator.config import job_from
from simulator.engine import event
from simulator.job import Job
from simulator.network import Network
from simulator.simulate import simulate

COMMON: Final = {"cluster": "dgx-h100", "seq_len": 8192}
CASES: Final[dict[str, dict[str, Any]]] = {
    "llama3-8b, 8 GPUs, fsdp": {"model": "llama3-8b", "gpus": 8, "global_batch": 64, "sharding": "fsdp"},
    "llama3-70b, 64 GPUs": {"model": "llama3-70b", "gpus": 64, "tp": 8, "pp": 4, "global_batch": 128},
    "llama3-70b, 512 GPUs": {"model": "llama3-70b", "gpus": 512, "tp": 8, "pp": 4, "global_batch": 1024},
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
        "global_batch": 32,
        "folded": False,
    },
}


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
        print(json.dumps({"engine": event.NAME, "repeat": args.repeat, "cases": rows}))
        return
    print(f"{'case':30} {'tasks':>9} {'build s':>8} {'run s':>8} {'in all s':>9} {'run tasks/s':>12}")
    for row in rows:
        print(
            f"{row['case']:30} {row['n_tasks']:>9,} {row['build_s']:>8.3f} {row['run_s']:>8.3f} "
            f"{row['simulate_s']:>9.3f} {row['tasks_per_s']:>12,.0f}"
        )


def measure(name: str, case: dict[str, Any], repeat: int) -> dict[str, Any]:
    """Return the median times of one case.

    Args:
        name: what to call it.
        case: settings of the job, and ``folded``.
        repeat: how often each part is done.
    """
    folded = case.pop("folded", True)
    job = job_from({**COMMON, **case})
    program = _program(job, folded=folded)
    run_s = _median_s(lambda: event.times(program), repeat)
    return {
        "case": name,
        "world_size": job.layout.world_size,
        "n_tasks": program.n_tasks,
        "build_s": _median_s(lambda: _program(job, folded=folded), repeat),
        "run_s": run_s,
        "simulate_s": _median_s(lambda: simulate(job, folded=folded), repeat),
        "tasks_per_s": program.n_tasks / run_s,
    }


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
