"""How late a recording notes the end of a gloo collective, against Kineto's events of gloo's own threads.

    torchrun --nproc-per-node 2 benchmarks/record_lateness.py ddp
    torchrun --nproc-per-node 2 benchmarks/record_lateness.py fsdp2

Trains the steps of ``record_paired.py`` under torch.profiler, recorded. The i-th collective of a kind that
was issued is the i-th ``gloo:*`` event of that kind that began; gloo does a reduce-scatter as an all-reduce.
Rank 0 prints. What is late on a machine that others use, too, is late by their turns.
"""

# ruff: noqa: SLF001 - the recorder tells what it has seen to nobody else

from __future__ import annotations

import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS, STEP_MS = 25, 60
FLUSH_S = 1.0
"""Seconds between two batches."""

GLOO = {"reduce_scatter": "all_reduce"}
"""What gloo calls a kind of collective, where it is not the kind itself."""


def main() -> None:
    """Train, and print on rank 0 how late each kind of collective is."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
    torch, distributed = import_module("torch"), import_module("torch.distributed")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    step = import_module("record_paired").sized(sys.argv[1], STEP_MS)
    folder = [tempfile.mkdtemp()]
    distributed.broadcast_object_list(folder)
    with import_module("foretrace").record(f"{folder[0]}/run", flush_s=FLUSH_S) as recording:
        issued, events = traced(step, recording.session.sink, distributed.barrier)
    if distributed.get_rank() == 0:
        for kind in sorted({one.kind for one in issued} - {"barrier"}):  # ours, after the last step
            report(f"{sys.argv[1]}, {kind}", [one for one in issued if one.kind == kind], events)
    distributed.barrier()
    distributed.destroy_process_group()


def traced(step: Any, sink: Any, barrier: Any) -> tuple[list[Any], list[Any]]:
    """Return the communications of some steps, and the events of Kineto beside them."""
    profiler = import_module("torch.profiler")
    issued: list[Any] = []
    seen = sink._seen

    def keep(one: Any) -> None:
        seen(one)
        issued.append(one)

    for _ in range(2):
        step()
    barrier()
    time.sleep(2 * FLUSH_S)
    sink._seen = keep
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(STEPS):
            step()
    barrier()
    time.sleep(2 * FLUSH_S)
    sink._seen = seen
    return issued, list(profile.profiler.kineto_results.events())


def report(title: str, issued: list[Any], events: list[Any]) -> None:
    """Print how much later than Kineto the recording saw the ends of the collectives of one kind."""
    name = "gloo:" + GLOO.get(issued[0].kind, issued[0].kind)
    found = sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == name)
    if len(found) != len(issued):
        raise SystemExit(f"{title}: {len(issued)} collectives, but {len(found)} events {name}")
    shift_ns = time.time_ns() - time.monotonic_ns()  # Kineto has the time of day
    ordered = sorted(issued, key=lambda one: one.start)
    late = [(one.end + shift_ns - end) / 1e3 for one, (_, end) in zip(ordered, found, strict=True)]
    took = median((end - start) / 1e3 for start, end in found)
    print(
        f"{title}: {len(late)} of {took:.0f} us; late by {median(late):.0f} us (median), "
        f"{quantiles(late, n=20)[17]:.0f} us (p90), {max(late):.0f} us at most"
    )


if __name__ == "__main__":
    main()
