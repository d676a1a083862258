"""Jobs that tests of workload and memory look at: on DGX H100, from a preset cut to a few layers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from hypothesis.strategies import booleans, builds, sampled_from

from foretrace.simulator.job import RECOMPUTES, Job
from foretrace.simulator.memory.stage import FIXED, Peak, StageMemory, stage_memory
from foretrace.simulator.models.model import Model
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.sharding import SHARDINGS
from foretrace.topologies.catalog import load_cluster
from foretrace.traces.layout import Layout

cluster = cache(load_cluster)


def job(model: str | Model = "llama3-8b", layout: Layout | None = None, **settings: object) -> Job:
    layout = layout or Layout()
    return Job(
        model=load_model(model) if isinstance(model, str) else model,
        cluster=cluster("dgx-h100", layout.world_size),
        layout=layout,
        global_batch=layout.dp * int(str(settings.get("micro_batch", 1))),
        **{"seq_len": 4096, **settings},  # type: ignore[arg-type]
    )


short_job = partial(job, seq_len=2048)
"""The same over 2,048 tokens."""


def cut(name: str, n_layers: int) -> Model:
    return replace(load_model(name), n_layers=n_layers)


def two_layers(name: str) -> Model:
    """A model cut to two layers, the second with experts if there are any."""
    model = load_model(name)
    return replace(model, n_layers=2, n_dense_layers=1 if model.n_dense_layers else 0)


def memory_of(some: Job, in_flight: int = 1) -> StageMemory:
    return stage_memory(some, range(some.model.n_layers), 0, in_flight, first=True, last=True)


def fixed_bytes(memory: Peak) -> int:
    """Return the bytes that are held all the time: model states and reserved memory."""
    return sum(memory.items.get(name, 0) for name in FIXED)


short_jobs = builds(
    lambda name, dp, tp, cp, sp, sharding, recompute, flash, precision: short_job(
        cut(name, 4),
        Layout(tp=tp, cp=cp, dp=dp),
        sequence_parallel=sp,
        sharding=sharding,
        recompute=recompute,
        flash_attention=flash,
        precision=precision,
    ),
    sampled_from(["llama3-8b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3"]),
    sampled_from([1, 2, 3, 8]),
    sampled_from([1, 2, 4]),
    sampled_from([1, 2]),
    booleans(),
    sampled_from(sorted(SHARDINGS)),
    sampled_from(RECOMPUTES),
    booleans(),
    sampled_from(["bf16", "fp16", "fp32"]),
)
"""Every way to shard, four layers of four models."""
