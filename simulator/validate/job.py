"""Turns a row of a table of training runs into a job."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any, Final

from foretrace.simulator.errors import TableError
from foretrace.simulator.job import FULLY_SHARDED, Job
from foretrace.simulator.profiles import framework_of, load_framework
from foretrace.simulator.validate.hardware import device_of
from foretrace.simulator.validate.model import model_of
from foretrace.simulator.validate.overlap import (
    capacity_of,
    conventions_of,
    counted_ends_of,
    expert_tp_of,
    p2p_of,
    scaling_of,
)
from foretrace.simulator.validate.recomputed import recomputed
from foretrace.simulator.validate.spelling import (
    attention_kernel,
    fused_attention,
    is_hybrid,
    precision_of,
    sharding_of,
    stated,
)
from foretrace.simulator.validate.table import Row
from foretrace.simulator.validate.versions import conventions_then
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.cluster import Cluster
from foretrace.traces.layout import Layout

LORA_RANK: Final = 16
"""Rank of adapters where none is given, as MLPerf has it; at any rank it is a small share of a step."""

SHAPE: Final = (
    *(
        "arch",
        "heads",
        "kv_heads",
        "head_dim",
        "ffn_hidden",
        "gated",
        "vocab",
        "tied_emb",
        "experts",
        "top_k",
    ),
    *("moe_ffn_hidden", "moe_layers", "shared_expert_ffn", "flash_attention", "framework"),
)
"""Columns that a table of memory leaves to the table of steps."""


def with_shapes(rows: Iterable[Row], steps: Iterable[Row]) -> list[Row]:
    """Return *rows* completed from the table of *steps*: by its id, or else from a run of the same model.

    A run of the same model (name, layers and width) gives shape and framework only, never a layout.
    """
    by_id: dict[str, Row] = {}
    by_model: dict[tuple[str, str, str], Row] = {}
    for step in steps:
        by_id[step.text("id")] = step
        by_model.setdefault(_model_key(step), step)
    found = []
    for row in rows:
        if (step_id := row.text("step_id")) in by_id:
            found.append(row.over(by_id[step_id]))
        elif (like := by_model.get(_model_key(row))) is not None:
            found.append(row.over(like.only(SHAPE)))
        else:
            found.append(row)
    return found


def _model_key(row: Row) -> tuple[str, str, str]:
    return row.text("model"), row.text("layers"), row.text("hidden")


def job_of(row: Row) -> Job:
    """Return the job of *row*, in the conventions of its framework.

    Raises:
        TableError: the row does not say enough, or something the simulator does not have.
        SimulationError, TopologyError, TraceError: its layout, batch or model is not possible.
    """
    notes, layout = row.text("notes"), _layout(row)
    precision = precision_of(row.text("precision"))
    sharding = sharding_of(row.text("sharding"))
    framework = framework_of(row.text("framework"), "torchtitan" if sharding == "fsdp" else "megatron")
    global_batch, micro_batch = _batch(row, layout.dp)
    fused = fused_attention(row.text("flash_attention"))
    model = model_of(row)
    return Job(
        model=model,
        cluster=_cluster(hardware_of(row), layout.world_size),
        layout=layout,
        global_batch=global_batch,
        micro_batch=micro_batch,
        seq_len=row.integer("seq_len"),
        sharding=sharding,
        shard_ranks=_shard_ranks(row, layout, sharding),
        sequence_parallel=row.flag("sp", default=True),
        **recomputed(row.text("recompute"), notes),
        precision=precision.kept,
        fp8=precision.few_bits,
        recipe=precision.recipe or (scaling_of(notes) if precision.few_bits else ""),
        fp32_gradients=precision.kept in load_framework(framework).fp32_gradients,
        flash_attention=fused is not False,
        kernels=_kernels(row.text("framework"), notes),
        framework=framework,
        conventions=_conventions(row, framework),
        overlap_p2p=p2p_of(row.text("comm_overlap")),
        counted_ends=counted_ends_of(notes) if layout.pp > 1 else "none",
        capacity_factor=capacity_of(notes) if model.n_experts else 0.0,
        **_adapters(row.text("task"), notes),
        **_offloaded(notes, row.text("sharding"), layout.pp),
    )


def hardware_of(row: Row) -> str:
    """Return the GPU of *row* in words, with its memory if that is in a column of its own.

    Raises:
        TableError: it is not given.
    """
    words, memory = row.text("hardware"), re.match(r"\d+", row.text("gpu_mem_gb"))
    if not stated(words):
        raise TableError("hardware is not given")
    return words if memory is None or re.search(r"\d ?gb\b", words.lower()) else f"{words} {memory[0]}GB"


def _layout(row: Row) -> Layout:
    """Return the parallel degrees of *row*; data parallelism is what is left of its GPUs if not given."""
    degrees = {axis: row.count(axis, 1) for axis in ("pp", "cp", "tp", "ep")}
    rest = max(1, row.count("world_size", 1) // (degrees["pp"] * degrees["cp"] * degrees["tp"]))
    noted = expert_tp_of(row.text("notes")) if row.integer("experts", 0) > 1 else 0
    return Layout(**degrees, dp=row.count("dp", rest), expert_tp=row.integer("expert_tp", noted))


def _batch(row: Row, dp: int) -> tuple[int, int]:
    """Return the sequences of a step and of a micro-batch: the nearest number of whole rounds.

    Ranks that have less than a micro-batch compute what they have.
    """
    micro_batch = row.count("micro_batch", 1)
    asked = row.count("global_batch", dp * micro_batch)
    if asked < dp * micro_batch and asked % dp == 0:
        micro_batch = max(1, asked // dp)
    if asked < dp:
        raise TableError(f"global_batch={asked}: fewer sequences than the {dp} data-parallel ranks")
    chunk = dp * micro_batch
    return max(1, round(asked / chunk)) * chunk, micro_batch


def _shard_ranks(row: Row, layout: Layout, sharding: str) -> int:
    """Return over how many ranks states are sharded, 0 for all: of a node where it is hybrid and not said."""
    group = row.integer(
        "shard_group", row.count("gpus_per_node", 8) if is_hybrid(row.text("sharding")) else 0
    )
    # of all data-parallel ranks, context parallel or not, if no fewer
    fits = sharding != "ddp" and group < layout.dp and layout.dp * layout.cp % max(group, 1) == 0
    return group if fits else 0


def _conventions(row: Row, framework: str) -> tuple[tuple[str, object], ...]:
    """Return what *row* says in any column about conventions of its *framework*."""
    said = f"{row.text('notes')} {row.text('framework')}"
    kernel = attention_kernel(row.text("flash_attention"))
    named = (("attention", (kernel, *load_framework(framework).attention)),) if kernel else ()
    return (
        *conventions_then(framework, row.text("date")),
        *conventions_of(row.text("comm_overlap"), row.text("sharding"), said),
        *named,
    )


def _adapters(task: str, notes: str) -> dict[str, Any]:
    """Return how a *task* trains adapters alone, of the rank that *notes* give or else of the usual one.

    >>> _adapters("QLoRA", "r=64"), _adapters("sft", "")
    ({'lora_rank': 64, 'quantized_base': True}, {})
    """
    if "lora" not in task.lower():
        return {}
    found = re.search(r"\b(?:lora )?(?:rank|r|dim) ?[=:]? ?(\d+)", notes.lower())
    rank = {"lora_rank": int(found[1]) if found else LORA_RANK}
    return {**rank, "quantized_base": True} if "qlora" in task.lower() else rank


@cache
def _cluster(hardware: str, n_gpus: int) -> Cluster:
    """Return GPUs of that kind; memory does not ask how they are wired."""
    return replace(load_cluster("dgx-h100", n_gpus), device=device_of(hardware), name=hardware)


def _kernels(framework: str, notes: str) -> str:
    """Return whether element-wise work is fused, as ``Job.kernels``: if the row says so and its notes agree.

    Frameworks compile nothing unless asked to (``training.compile`` of torchtitan is off by default).

    >>> _kernels("torchtitan +compile", ""), _kernels("torchtitan +compile", "torch.compile state not stated")
    ('fused', '')
    """
    is_said = "compile" in framework.lower() and "compile state not stated" not in notes
    return "fused" if is_said else ""


def _offloaded(notes: str, sharding: str, pp: int) -> dict[str, Any]:
    """Return what goes to the host: as many layers as *notes*, which quote a recipe, say; or sharded states.

    Megatron-Bridge offloads activations alone (scripts/performance/utils/overrides.py), and no pipelines.
    DeepSpeed and FSDP offload states: those of the optimizer, and with stage 3 gradients and parameters.

    >>> _offloaded('recipe {"cpu_offloading_num_layers": 20}', "", 1), _offloaded("", "zero3-offload", 1)
    ({'offload': 'activations', 'offload_layers': 20}, {'offload': 'states'})
    """
    if (found := re.search(r'"cpu_offloading_num_layers": ([1-9]\d*)', notes)) and pp == 1:
        return {"offload": "activations", "offload_layers": int(found[1])}
    if "offload" in sharding.lower():
        return {"offload": "states" if sharding_of(sharding) in FULLY_SHARDED else "optimizer"}
    return {}
