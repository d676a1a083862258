"""How long a search takes: layouts considered, pipelines run, layouts simulated, processor time.

    python benchmarks/search.py [--json] [--processes 2] [CASE ...]

Cold. The wide cases widen every choice until more than 100,000 layouts are considered.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

from foretrace.simulator.models.sources import load_model
from foretrace.simulator.search.parts import search_parts
from foretrace.simulator.search.space import Space
from foretrace.topologies.catalog import load_cluster

WIDE = {
    "cp": (1, 2, 4, 8),
    "sharding": ("ddp", "zero1", "zero2", "zero3", "fsdp"),
    "schedule": ("1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2", "interleaved-zb", "zb-v"),
}
CASES: dict[str, dict[str, Any]] = {
    "llama3-8b on 8": {"model": "llama3-8b", "gpus": 8, "global_batch": 64},
    "llama3-70b on 64": {"model": "llama3-70b", "gpus": 64, "global_batch": 256},
    "llama3-70b on 512": {"model": "llama3-70b", "gpus": 512, "global_batch": 1024},
    "gpt3-175b on 512": {"model": "gpt3-175b", "gpus": 512, "global_batch": 1024, "seq_len": 2048},
    "qwen3-235b-a22b on 512": {
        "model": "qwen3-235b-a22b",
        "gpus": 512,
        "global_batch": 2048,
        "seq_len": 4096,
    },
    "llama3-70b on 512, wide": {"model": "llama3-70b", "gpus": 512, "global_batch": 1024, **WIDE},
    "gpt3-175b on 512, wide": {
        "model": "gpt3-175b",
        "gpus": 512,
        "global_batch": 1024,
        "seq_len": 2048,
        **WIDE,
    },
}


def main() -> None:
    """Search each case and print a table or one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("cases", nargs="*", help="all if left out")
    args = parser.parse_args()
    rows = {name: measured(processes=args.processes, **CASES[name]) for name in args.cases or CASES}
    if args.json:
        print(json.dumps(rows))
        return
    print(f"{'case':26} {'layouts':>9} {'pipelines':>9} {'simulated':>9} {'cpu s':>8} {'wall s':>8}")
    for name, row in rows.items():
        counts = f"{row['layouts']:>9,} {row['pipelines']:>9,} {row['simulated']:>9}"
        print(f"{name:26} {counts} {row['cpu_s']:>8.1f} {row['wall_s']:>8.1f}")


def measured(
    model: str, gpus: int, global_batch: int, processes: int, seq_len: int = 8192, **wide: Any
) -> dict[str, float]:
    """Return what one search considers and takes: seconds of all its processors, and on the clock."""
    space = Space(
        model=load_model(model),
        cluster=load_cluster("dgx-h100", gpus),
        global_batch=global_batch,
        seq_len=seq_len,
        **wide,
    )
    before_s, start_s = processor_s(), time.monotonic()
    found = search_parts([space], 10, processes=processes)
    return {
        "layouts": found.counts.n_candidates,
        "pipelines": found.counts.n_run,
        "simulated": found.counts.n_simulated,
        "cpu_s": processor_s() - before_s,
        "wall_s": time.monotonic() - start_s,
    }


def processor_s() -> float:
    """Return the seconds that this process and its finished children have computed."""
    each = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in each)


if __name__ == "__main__":
    main()
