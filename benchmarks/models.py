"""Every preset: parameters and FLOPs of a token against what is published, and a step on 64 H100 if it fits.

    python benchmarks/models.py [WORDS...]

Published are the counts that presets name, in billions where only a rounded one is known; ``digits equal``
says whether ours has all digits that are published. FLOPs are forward and backward at 4,096 tokens, with the
causal half of attention; ``over 6 N`` is over 6 for each parameter that a token meets (Kaplan et al. 2020,
arXiv:2001.08361, section 2.1), which leaves attention and recurrences out and has embeddings in. That they
are those of transformers' own modules is tested, where it is installed
(tests/simulator/test_models_of_transformers.py). The step: of the layouts tried, the first that fits; where
none does, the fastest that a search finds with as little as possible in the memory of the host.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from foretrace.simulator.config import job_from
from foretrace.simulator.errors import SimulationError
from foretrace.simulator.memory.ranks import host_bytes, rank_memories
from foretrace.simulator.models.model import Model
from foretrace.simulator.models.sources import EXACT, load_model, names, published_params
from foretrace.simulator.search.parts import search_parts
from foretrace.simulator.search.space import Space
from foretrace.simulator.simulate import simulate
from foretrace.topologies.catalog import load_cluster
from foretrace.traces.report.format import format_share

GFLOPS = {"deepseek-v2": 155, "deepseek-v3": 250, "qwen2.5-72b": 394, "llama3-405b": 2448}
"""Training GFLOPs of a token as published, at 4,096 tokens: Zhao et al. 2025, arXiv:2505.09343, table 2.

That of the Qwen model is below 6 for each of its parameters.
"""

GPUS = 64
SEQ_LEN = 4096


def layouts(model: Model) -> Iterator[dict[str, Any]]:
    """Yield layouts in the order in which they are tried: the less is cut and computed again, the earlier."""
    eps = [n for n in (8, 16, 32, 64) if model.n_experts and model.n_experts % n == 0] or [1]
    for recompute in ("selective", "full"):
        for ep in eps:
            yield {"ep": ep, "sharding": "fsdp", "recompute": recompute}
    yield {"ep": eps[-1], "sharding": "fsdp", "recompute": "full", "optimizer": "adamw-bf16"}


def step(model: Model) -> str:
    """Return a step on the GPUs in words: layout, time and MFU of the first layout that fits."""
    seq_len = min(SEQ_LEN, model.max_positions or SEQ_LEN)
    for layout in layouts(model):
        asked = {"model": model.name, "cluster": "dgx-h100", "gpus": GPUS, "seq_len": seq_len, **layout}
        try:
            job = job_from({**asked, "global_batch": 4 * GPUS})
            summary = simulate(job, only_figures=True, covers_unsaid=False).summary
        except SimulationError as error:
            return f"refused: {error}"
        if summary["fits"]:
            words = " ".join(f"{key}={value}" for key, value in layout.items() if value != 1)
            return f"{summary['step_time_s']:.2f} s, MFU {format_share(summary['mfu'])} ({words})"
    return searched_step(model, seq_len)


def searched_step(model: Model, seq_len: int) -> str:
    """Return a step of the fastest layout that fits with the least offloaded, and what hosts then hold."""
    cluster = load_cluster("dgx-h100", GPUS)
    for offload in ("none", "optimizer", "states", "all"):
        space = Space(
            model=model,
            cluster=cluster,
            global_batch=4 * GPUS,
            seq_len=seq_len,
            tp=(1, 2, 4, 8),
            cp=(1,),
            micro_batch=(1,),
            schedule=("1f1b",),
            sharding=("fsdp",),
            recompute=("full",),
            offload=(offload,),
        )
        if best := search_parts([space], 1).best:
            job, summary = best[0].job, best[0].summary
            degrees = " ".join(f"{axis}={n}" for axis, n in job.layout.degrees.items() if n > 1)
            host = host_bytes(job, rank_memories(job)) / 1e12
            said = f"{summary['step_time_s']:.2f} s, MFU {format_share(summary['mfu'])}"
            return f"{said} ({degrees} fsdp, offload={offload}: {host:.2f} TB in the host of each node)"
    return f"does not fit on {GPUS} H100"


def row(name: str) -> list[str]:
    """Return the cells of a preset."""
    model, found = load_model(name), published_params(name)
    theirs, off, digits = "unknown", "", ""
    if found:
        rounded = found.decimals < EXACT
        theirs = f"{found.params / 1e9:.{found.decimals}f} billion" if rounded else f"{found.params:,}"
        theirs += f", less {found.beside:,} ({found.what})" if found.beside else ""
        digits = "all" if found.is_every_digit(model.n_params) else "not all"
        off = format_share((model.n_params + found.beside) / found.params - 1, "+.3f")
    flops = model.flops_per_token(min(SEQ_LEN, model.max_positions or SEQ_LEN), causal=model.causal)
    known = (
        f"{GFLOPS[name]:,} ({format_share(flops / 1e9 / GFLOPS[name] - 1, '+.1f')})" if name in GFLOPS else ""
    )
    ratio = flops / (6 * model.n_active_params)
    ours = f"{model.n_params:,}"
    return [name, ours, theirs, digits, off, f"{flops / 1e9:,.2f}", known, f"{ratio:.2f}", step(model)]


def main(words: list[str]) -> None:
    """Print the table of all presets whose names have all *words*."""
    head = [
        "model",
        "parameters",
        "published",
        "digits equal",
        "off",
        "GFLOPs/token",
        "published",
        "over 6 N",
        f"step on {GPUS} H100",
    ]
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for name in names():
        if all(word in name for word in words):
            print("| " + " | ".join(row(name)) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
