"""How many layouts a second: the schedule of each is run, not estimated.

    python benchmarks/layouts.py [--repeat N] [--json]

Every layout of Llama 3 70B on 512 GPUs with at most 16 pipeline ranks, at most 64 micro-batches and every
schedule that allows it. ``cold`` includes the layers and schedules that are remembered from then on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from simulator.config import job_from
from simulator.errors import SimulationError
from simulator.job import Job
from simulator.layouts import PipelineTimes
from simulator.schedule_program import schedule_program
from simulator.schedules import SCHEDULES
from traces.layout import Layout


def main() -> None:
    """Time all layouts, cold and warm, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    sized = list(layouts())
    jobs, n_tasks = [job for job, _ in sized], sum(n for _, n in sized)
    times = PipelineTimes(jobs[0].cluster)
    cold_s = measure(times, jobs)
    warm_s = median(measure(times, jobs) for _ in range(args.repeat))
    by_pp = {str(pp): rate(times, jobs, pp, args.repeat) for pp in (1, 2, 4, 8, 16)}
    found = {
        "layouts": len(jobs),
        "tasks": n_tasks,
        "cold_s": cold_s,
        "warm_s": warm_s,
        "layouts_per_cpu_s": len(jobs) / warm_s,
        "tasks_per_cpu_s": n_tasks / warm_s,
        "by_pp": by_pp,
    }
    if args.json:
        print(json.dumps(found))
        return
    print(
        f"{len(jobs):,} layouts, {n_tasks:,} tasks; processor time: cold {cold_s:.2f} s, warm {warm_s:.3f} s"
    )
    print(f"per CPU-second: {len(jobs) / warm_s:,.0f} layouts, {n_tasks / warm_s:,.0f} tasks")
    for pp, per_s in by_pp.items():
        print(f"  pp {pp:>2}: {per_s:>8,.0f} layouts")


def layouts() -> Iterator[tuple[Job, int]]:
    """Yield every layout that is possible, and the tasks of its schedule."""
    base = job_from(
        {"model": "llama3-70b", "cluster": "dgx-h100", "gpus": 512, "global_batch": 1024, "seq_len": 8192}
    )
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8, 16):
            layout = Layout(pp=pp, tp=tp, dp=512 // (pp * tp))
            for micro_batch in (1, 2, 4, 8, 16):
                for schedule in SCHEDULES:
                    try:
                        job = replace(base, layout=layout, micro_batch=micro_batch, schedule=schedule)
                        if job.n_microbatches <= 64:
                            yield job, schedule_program(schedule, pp, job.n_microbatches).program.n_tasks
                    except SimulationError:  # the schedule does not allow it
                        continue


def measure(times: PipelineTimes, jobs: list[Job]) -> float:
    """Return the processor time of answering for all *jobs*, in s."""
    start = time.process_time()
    for job in jobs:
        times.pipeline_ns(job)
    return time.process_time() - start


def rate(times: PipelineTimes, jobs: list[Job], pp: int, repeat: int) -> float:
    """Return layouts per second of processor time among those with *pp* pipeline ranks."""
    own = [job for job in jobs if job.layout.pp == pp]
    return len(own) / median(measure(times, own) for _ in range(repeat))


if __name__ == "__main__":
    main()
