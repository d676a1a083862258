"""Small runs whose every span is known: a 1F1B pipeline, folded, and recorded runs of four ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from foretrace.traces.info import RunInfo
from foretrace.traces.layout import Group, Layout
from foretrace.traces.run import Run
from foretrace.traces.store import open_run, write_run
from foretrace.traces.timeline import MEMORY, timeline

US = 1_000
"""Nanoseconds per microsecond."""

N_LAYERS = 4
TP_NS, P2P_NS, DP_NS = 40 * US, 60 * US, 500 * US


class Sheet:
    """Collects the rows of a timeline, and the groups that they refer to."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.groups = layout.process_groups()
        self.columns: dict[str, list[Any]] = defaultdict(list)
        self.sequence: dict[tuple[int, int], int] = defaultdict(int)

    def group(self, rank: int, axis: str) -> Group:
        return next(group for group in self.groups if group.axis == axis and rank in group.ranks)

    def add(self, rank: int, kind: str, start: int, end: int, **values: Any) -> None:
        row = {
            "stream": "compute",
            "category": "compute",
            "name": "",
            "axis": "",
            "microbatch": -1,
            "layer": -1,
        }
        row |= {"group": -1, "sequence": -1, "peer": -1, "size_bytes": 0, "flops": 0, "step": 0, "stage": -1}
        row |= {"rank": rank, "kind": kind, "start_ns": start, "duration_ns": end - start} | values
        for name, value in row.items():
            self.columns[name].append(value)

    def collective(self, rank: int, kind: str, axis: str, start: int, end: int, **values: Any) -> None:
        group = self.group(rank, axis).id
        number = self.sequence[rank, group]
        self.sequence[rank, group] += 1
        where = {"stream": axis, "category": "collective", "axis": axis, "group": group, "sequence": number}
        self.add(rank, kind, start, end, size_bytes=64_000_000, **where, **values)


def one_f_one_b(stage: int, n_stages: int, n_batches: int) -> list[tuple[str, int]]:
    """Return the actions of a stage: warm-up forwards, pairs, cool-down backwards."""
    warm = min(n_stages - stage - 1, n_batches)
    steady = [a for i in range(n_batches - warm) for a in (("forward", warm + i), ("backward", i))]
    cool = [("backward", i) for i in range(n_batches - warm, n_batches)]
    return [*(("forward", i) for i in range(warm)), *steady, *cool]


def pipeline_sheet(
    layout: Layout, ranks: dict[int, int], n_batches: int, slow: Callable[[int], float]
) -> Sheet:
    """Return a 1F1B step of one pipeline; *ranks* leads from stage to rank, *slow* stretches its work."""
    sheet = Sheet(layout)
    n_stages = layout.pp
    todo = {stage: one_f_one_b(stage, n_stages, n_batches) for stage in ranks}
    free = dict.fromkeys(ranks, 0)
    sent: dict[tuple[str, int, int], int] = {}
    while any(todo.values()):
        for stage, rank in ranks.items():
            while todo[stage]:
                kind, batch = todo[stage][0]
                before, after = (stage - 1, stage + 1) if kind == "forward" else (stage + 1, stage - 1)
                if 0 <= before < n_stages and (kind, batch, before) not in sent:
                    break
                todo[stage].pop(0)
                if 0 <= before < n_stages:
                    start = max(free[stage], sent[kind, batch, before])
                    p2p(
                        sheet,
                        ranks,
                        (before, stage),
                        "recv",
                        start=free[stage],
                        end=start + P2P_NS,
                        batch=batch,
                    )
                    free[stage] = start + P2P_NS
                free[stage] = one_pass(
                    sheet, rank, kind, free[stage], batch=batch, stage=stage, slow=slow(rank)
                )
                sent[kind, batch, stage] = free[stage]
                if 0 <= after < n_stages:
                    end = free[stage] + P2P_NS
                    p2p(sheet, ranks, (stage, after), "send", start=free[stage], end=end, batch=batch)
    finish(sheet, ranks, free)
    return sheet


def p2p(
    sheet: Sheet, ranks: dict[int, int], ends: tuple[int, int], kind: str, *, start: int, end: int, batch: int
) -> None:
    """Add one end of a transfer from one stage to another."""
    own, other = ends if kind == "send" else ends[::-1]
    key = (ranks[ends[0]], -1 - ranks[ends[1]] - (kind == "send") * 1000)
    number = sheet.sequence[key]
    sheet.sequence[key] += 1
    rank = ranks[own]
    where = {"stream": f"pp.{kind}", "category": "p2p", "axis": "pp", "group": sheet.group(rank, "pp").id}
    said = {"sequence": number, "peer": ranks[other], "size_bytes": 32_000_000, "microbatch": batch}
    sheet.add(rank, kind, start, end, stage=own, **where, **said)


def one_pass(sheet: Sheet, rank: int, kind: str, start: int, *, batch: int, stage: int, slow: float) -> int:
    """Add the layers of one pass, each with its tensor-parallel collective; return when it ends."""
    work = round((100 if kind == "forward" else 200) * US * slow)
    for layer in range(N_LAYERS):
        for block in ("attention", "mlp"):
            number = stage * N_LAYERS + layer
            end = start + work
            said = {"microbatch": batch, "layer": number, "stage": stage, "name": f"layers.{number}.{block}"}
            sheet.add(rank, kind, start, end, flops=40_000_000_000, **said)
            if sheet.layout.tp > 1:
                sheet.collective(rank, "all_reduce", "tp", end, end + TP_NS, **said)
                end += TP_NS
            start = end
    return start


def finish(sheet: Sheet, ranks: dict[int, int], free: dict[int, int]) -> None:
    """Add gradient synchronisation, the optimizer, and the window of the step."""
    last = max(free.values()) + DP_NS + 300 * US
    for stage, rank in ranks.items():
        sheet.collective(
            rank, "reduce_scatter", "dp", free[stage] - 200 * US, free[stage] + DP_NS, name="gradients"
        )
        sheet.add(
            rank, "optimizer", free[stage] + DP_NS, free[stage] + DP_NS + 300 * US, name="adam", stage=stage
        )
    for rank in ranks.values():
        sheet.add(rank, "step", 0, last, stream="step", category="step", name="step 0")


def fsdp_sheet(n_ranks: int, n_layers: int, n_steps: int, seed: int) -> Sheet:
    """Return a recorded FSDP run: layers gathered ahead of their use, gradients scattered behind."""
    sheet = Sheet(Layout(dp=n_ranks))
    noise = np.random.default_rng(seed)
    now = np.zeros(n_ranks, np.int64)
    for step in range(n_steps):
        begin = now.copy()
        wire = now.copy()
        passes = [("forward", layer, 400) for layer in range(n_layers)]
        passes += [("backward", layer, 800) for layer in reversed(range(n_layers))]
        for kind, layer, work_us in passes:
            said = {"layer": layer, "step": step, "name": f"layers.{layer}"}
            done = int(wire.max()) + 450 * US
            for rank in range(n_ranks):
                sheet.collective(rank, "all_gather", "dp", int(wire[rank]), done, **said)
            start = np.maximum(now, done)
            now = start + (work_us * US * noise.uniform(0.9, 1.3, n_ranks)).astype(np.int64)
            for rank in range(n_ranks):
                sheet.add(rank, kind, int(start[rank]), int(now[rank]), flops=900_000_000, **said)
            wire = np.full(n_ranks, done)
            if kind == "backward":
                arrive = np.maximum(wire, now)
                done = int(arrive.max()) + 500 * US
                for rank in range(n_ranks):
                    sheet.collective(rank, "reduce_scatter", "dp", int(arrive[rank]), done, **said)
                wire = np.full(n_ranks, done)
        now = np.maximum(now, wire) + 30 * US
        for rank in range(n_ranks):
            sheet.add(rank, "optimizer", int(now[rank]), int(now[rank]) + 700 * US, step=step, name="adam")
            end = int(now[rank]) + 700 * US
            sheet.add(
                rank,
                "step",
                int(begin[rank]),
                end,
                stream="step",
                category="step",
                step=step,
                name=f"step {step}",
            )
            now[rank] = end
    return sheet


def opened(path: Path, sheet: Sheet, memory: dict[str, list[Any]] | None = None, **values: Any) -> Run:
    held = None if memory is None else pa.table(memory).cast(MEMORY)
    info = RunInfo(
        world_size=sheet.layout.world_size, layout=sheet.layout, groups=tuple(sheet.groups), **values
    )
    return open_run(write_run(path, info, timeline(dict(sheet.columns)), held))


MACHINE = {"name": "dgx-h100", "device": {"name": "h100-sxm", "memory_bytes": 80_000_000_000}}
JOB = {"schedule": "1f1b", "sharding": "zero1", "n_microbatches": 8, "micro_batch": 1, "seq_len": 4096}


def pipeline_memory(ranks: dict[int, int]) -> dict[str, list[Any]]:
    """Return parameters that stay and activations that rise and fall, for the rank of each stage."""
    rows: dict[str, list[Any]] = {"rank": [], "t_ns": [], "category": [], "bytes": []}
    for stage, rank in ranks.items():
        points = [(0, "parameters", 30_000_000_000)]
        points += [(i * 1_000 * US, "activations", min(i, 4 - stage) * 6_000_000_000) for i in range(16)]
        points += [(30_000 * US, "activations", 0)]
        for t, category, size in points:
            for name, value in zip(rows, (rank, t, category, size), strict=True):
                rows[name].append(value)
    return rows


@pytest.fixture(scope="session")
def pipeline_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A simulated 1F1B step: 4 stages, 8 micro-batches, TP 2, DP 2; one rank per stage is stored."""
    layout = Layout(pp=4, dp=2, tp=2)
    ranks = {stage: stage * 4 for stage in range(4)}
    sheet = pipeline_sheet(layout, ranks, 8, lambda _: 1.0)
    summary = {"peak_memory_bytes": 54_000_000_000, "tokens_per_s_per_gpu": 812.5, "mfu": 0.41, "fits": True}
    return opened(
        tmp_path_factory.mktemp("runs") / "pipeline", sheet, pipeline_memory(ranks), origin="simulated",
        name="pipeline", representatives=tuple(rank // 4 * 4 for rank in range(16)), cluster=MACHINE, job=JOB,
        model={"name": "toy-llama", "n_layers": 16, "hidden": 4096}, summary=summary,
    )  # fmt: skip


@pytest.fixture(scope="session")
def many_ranks_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A simulated step of 64 ranks, PP 4, DP 8, TP 2; one rank per stage is stored."""
    layout = Layout(pp=4, dp=8, tp=2)
    ranks = {stage: stage * 16 for stage in range(4)}
    sheet = pipeline_sheet(layout, ranks, 8, lambda _: 1.0)
    stands = tuple(rank // 16 * 16 for rank in range(64))
    return opened(
        tmp_path_factory.mktemp("runs") / "many",
        sheet,
        origin="simulated",
        name="many",
        representatives=stands,
    )


@pytest.fixture(scope="session")
def recorded_pipeline_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A recorded 1F1B step of the same 16 ranks, on which one rank per stage was recorded and is slower."""
    layout = Layout(pp=4, dp=2, tp=2)
    sheet = pipeline_sheet(
        layout, {stage: stage * 4 for stage in range(4)}, 8, lambda rank: 1.0 + 0.01 * rank
    )
    return opened(tmp_path_factory.mktemp("runs") / "recorded", sheet, origin="recorded", name="pipeline")


@pytest.fixture(scope="session")
def fsdp_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A recorded FSDP run: 4 ranks, 6 layers, 4 steps, every duration different."""
    sheet = fsdp_sheet(4, 6, 4, seed=1)
    return opened(tmp_path_factory.mktemp("runs") / "fsdp", sheet, origin="recorded", name="fsdp")
