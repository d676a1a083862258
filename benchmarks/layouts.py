"""How many layouts a second: the schedule of each is run, not estimated.

    python benchmarks/layouts.py [--repeat N] [--json]

Every layout of Llama 3 70B on 512 GPUs with at most 16 pipeline ranks, at most 64 micro-batches and every
schedule that allows it. ``cold`` includes the layers and schedules that are remembered from then on. By
schedule: with 16 ranks and 64 micro-batches. By size: one schedule with more and more micro-batches, the cost
of which should be linear in tasks. ``summaries``: those of a hundred layouts of a dense model and of one with
experts, drawn as whoever writes a search of their own would pass them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from random import Random
from statistics import median
from typing import Final

from foretrace.simulator.config import job_from
from foretrace.simulator.errors import SimulationError
from foretrace.simulator.job import Job
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.schedules import SCHEDULES
from foretrace.simulator.search.layouts import PipelineTimes
from foretrace.simulator.search.schedule_program import schedule_program
from foretrace.simulator.simulate import simulate_many
from foretrace.traces.errors import LayoutError
from foretrace.traces.layout import Layout

AGAIN: Final = 20
"""Times that the few layouts of one kind are answered for, for the clock to see them."""

SUMMARIES: Final = 100
"""Layouts that are simulated with all their figures."""

MICROBATCHES: Final = (16, 64, 256, 1024, 4096)


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
    largest = {name: rate_of(times, jobs, name, args.repeat) for name in SCHEDULES}
    sizes = [by_size(times, jobs[0], m, args.repeat) for m in MICROBATCHES]
    simulated = {model: summaries(model) for model in ("llama3-70b", "qwen3-235b-a22b")}
    found = {
        "layouts": len(jobs),
        "tasks": n_tasks,
        "cold_s": cold_s,
        "warm_s": warm_s,
        "layouts_per_cpu_s": len(jobs) / warm_s,
        "tasks_per_cpu_s": n_tasks / warm_s,
        "by_pp": by_pp,
        "by_schedule_pp16_m64": largest,
        "by_microbatches": sizes,
        "summaries_per_cpu_s": simulated,
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
    print("16 ranks, 64 micro-batches, layouts per CPU-second:")
    for name, per_s in largest.items():
        print(f"  {name:18} {per_s:>8,.0f}")
    for model, per_s in simulated.items():
        print(f"simulate_many, {model}: {per_s:.1f} layouts per CPU-second")
    print("1f1b on 16 ranks, by micro-batches:")
    for one in sizes:
        print(f"  {one['microbatches']:>5} {one['tasks']:>8,} tasks {one['ns_per_task']:>6.1f} ns per task")


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


def summaries(model: str) -> float:
    """Return layouts per second of processor time by ``simulate_many``, of a sweep drawn with one seed."""
    draw, jobs = Random(1), list[Job]()
    base = {"model": model, "cluster": "dgx-h100", "gpus": 512, "framework": "megatron"}
    settings = {
        "global_batch": (1024,),
        "seq_len": (8192,),
        "tp": (1, 2, 4, 8),
        "pp": (1, 2, 4, 8, 16),
        "cp": (1, 2, 4),
        "ep": (1, 8, 32) if load_model(model).n_experts else (1,),
        "micro_batch": (1, 2, 4),
        "sharding": ("zero1", "zero1", "ddp", "zero3"),
        "recompute": ("none", "selective", "full"),
    }
    while len(jobs) < SUMMARIES:
        drawn = {name: draw.choice(values) for name, values in settings.items()}
        with suppress(SimulationError, LayoutError):  # not every product is possible
            jobs.append(job_from({**base, **drawn}))
    simulate_many(jobs[:1])  # which loads compiled code
    start = time.process_time()
    simulate_many(jobs)
    return len(jobs) / (time.process_time() - start)


def measure(times: PipelineTimes, jobs: list[Job]) -> float:
    """Return the processor time of answering for all *jobs*, in s."""
    start = time.process_time()
    for job in jobs:
        times.pipeline_ns(job)
    return time.process_time() - start


def rate_of(times: PipelineTimes, jobs: list[Job], schedule: str, repeat: int) -> float:
    """Return layouts per second of processor time of *schedule* on 16 ranks with 64 micro-batches."""
    own = [job for job in jobs if (job.schedule, job.layout.pp, job.n_microbatches) == (schedule, 16, 64)]
    measure(times, own)
    return AGAIN * len(own) / median(measure(times, own * AGAIN) for _ in range(repeat))


def by_size(times: PipelineTimes, job: Job, n_microbatches: int, repeat: int) -> dict[str, float]:
    """Return what a layout of 16 ranks costs per task with *n_microbatches*."""
    layout = Layout(pp=16, tp=8, dp=4)
    job = replace(job, layout=layout, micro_batch=1, global_batch=4 * n_microbatches, schedule="1f1b")
    n_tasks = schedule_program("1f1b", 16, n_microbatches).program.n_tasks
    measure(times, [job])
    seconds = median(measure(times, [job] * AGAIN) for _ in range(repeat)) / AGAIN
    return {"microbatches": n_microbatches, "tasks": n_tasks, "ns_per_task": seconds / n_tasks * 1e9}


def rate(times: PipelineTimes, jobs: list[Job], pp: int, repeat: int) -> float:
    """Return layouts per second of processor time among those with *pp* pipeline ranks."""
    own = [job for job in jobs if job.layout.pp == pp]
    return len(own) / median(measure(times, own) for _ in range(repeat))


if __name__ == "__main__":
    main()
