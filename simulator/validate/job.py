"""Turns a row of a table of training runs into a job."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any, Final

from simulator.errors import TableError
from simulator.framework import framework_of, load_framework
from simulator.job import RECOMPUTE_MODULES, Job
from simulator.models.model import Model
from simulator.models.sources import load_model, names
from simulator.validate.hardware import device_of
from simulator.validate.overlap import conventions_of, expert_tp_of, p2p_of, scaling_of
from simulator.validate.table import Row
from simulator.validate.versions import conventions_then
from simulator.workload.recipes import recipe_of
from topologies.catalog import load_cluster
from topologies.cluster import Cluster
from traces.layout import Layout

SHARDINGS: Final = (
    (("fsdp", "zero3"), "fsdp"),
    (("zero2",), "zero2"),
    (("zero1",), "zero1"),
    (("none", "ddp", ""), "ddp"),
)
"""What tables call a sharding, by a part of the text, and ours; the first that is found counts."""

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
    degrees = {axis: row.integer(axis, 1) for axis in ("pp", "dp", "cp", "tp", "ep")}
    layout = Layout(**degrees, expert_tp=row.integer("expert_tp", expert_tp_of(row.text("notes"))))
    framework = framework_of(row.text("framework"))
    precision = _precision(row.text("precision", "bf16"))
    micro_batch = row.integer("micro_batch", 1)
    chunk = layout.dp * micro_batch
    sharding, replicas = _sharding(row.text("sharding")), layout.dp * layout.cp
    group = row.integer("shard_group", 0)  # of all data-parallel ranks, context parallel or not, if no fewer
    rounds = max(1, round(row.integer("global_batch", chunk) / chunk))
    return Job(
        model=model_of(row),
        cluster=_cluster(row.text("hardware"), layout.world_size),
        layout=layout,
        global_batch=rounds * chunk,
        micro_batch=micro_batch,
        seq_len=row.integer("seq_len"),
        sharding=sharding,
        shard_ranks=group if sharding != "ddp" and group < layout.dp and replicas % max(group, 1) == 0 else 0,
        sequence_parallel=row.flag("sp", default=True),
        **_recomputed(row.text("recompute", "none"), row.text("notes")),
        precision=precision,
        fp8="fp8" in row.text("precision") or "fp4" in row.text("precision"),
        recipe=_recipe(row.text("precision"), row.text("notes")),
        fp32_gradients=precision in load_framework(framework).fp32_gradients,
        flash_attention=row.flag("flash_attention", default=True),
        kernels=_kernels(row.text("framework"), row.text("notes")),
        framework=framework,
        conventions=conventions_then(framework, row.text("date"))
        + conventions_of(
            row.text("comm_overlap"), row.text("sharding"), f"{row.text('notes')} {row.text('framework')}"
        ),
        overlap_p2p=p2p_of(row.text("comm_overlap")),
    )


def model_of(row: Row) -> Model:
    """Return the model of *row*: its columns, over the preset that its name begins with if there is one."""
    name = row.text("model", "a model")
    base = _preset(name)
    if base is not None and not row.text("heads"):
        layers = row.integer("layers", base.n_layers)
        return replace(base, name=name, n_layers=layers, n_mtp=_mtp(base, layers))
    arch, hidden, heads = row.text("arch"), row.integer("hidden"), row.integer("heads")
    layers = row.integer("layers")
    if arch == "moe-mla":
        if base is None or not base.kv_lora_rank:
            raise TableError(f"model {name!r}: the widths of its latent attention are not given")
        dense = layers - row.integer("moe_layers", layers)
        return replace(base, name=name, n_layers=layers, n_dense_layers=dense, n_mtp=_mtp(base, layers))
    if base is not None and (base.hidden, base.n_heads) == (hidden, heads):
        return _over(base, row, name=name, n_layers=layers)
    gpt = arch == "gpt"
    biases: dict[str, Any] = dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), gpt)
    return Model(
        name=name,
        n_layers=layers,
        hidden=hidden,
        n_heads=heads,
        n_kv_heads=row.integer("kv_heads", heads),
        head_dim=row.integer("head_dim", hidden // heads),
        ffn_hidden=row.integer("ffn_hidden"),
        vocab=row.integer("vocab"),
        gated=row.flag("gated", default=not gpt),
        tied_embeddings=row.flag("tied_emb", default=gpt),
        norm="layernorm" if gpt else "rmsnorm",
        **biases,
        max_positions=row.integer("seq_len") if gpt else 0,
        dropout=gpt and not row.flag("flash_attention", default=True),
        **_experts(row, layers),
    )


def _mtp(base: Model, layers: int) -> int:
    """Return the modules for multi-token prediction: a model cut to fewer layers is cut before them."""
    return base.n_mtp if layers == base.n_layers else 0


def _over(base: Model, row: Row, *, name: str, n_layers: int) -> Model:
    """Return the preset *base* with what *row* says of sizes: windows, norms and biases are in no column."""
    sizes: dict[str, Any] = {
        "n_kv_heads": row.integer("kv_heads", base.n_kv_heads),
        "head_dim": row.integer("head_dim", base.head_dim),
        "ffn_hidden": row.integer("ffn_hidden"),
        "vocab": row.integer("vocab"),
        "tied_embeddings": row.flag("tied_emb", default=base.tied_embeddings),
    }
    experts: dict[str, Any] = _experts(row, n_layers) if row.integer("experts", 0) else {}
    return replace(base, name=name, n_layers=n_layers, n_mtp=_mtp(base, n_layers), **sizes, **experts)


def _experts(row: Row, layers: int) -> dict[str, Any]:
    """Return what a model with experts has beside its dense parts."""
    experts, width = row.integer("experts", 0), row.integer("moe_ffn_hidden", 0)
    return {
        "n_experts": experts,
        "top_k": row.integer("top_k", 0),
        "moe_ffn_hidden": width,
        "n_shared_experts": row.integer("shared_expert_ffn", 0) // width if width else 0,
        "n_dense_layers": layers - row.integer("moe_layers", layers) if experts else 0,
    }


def _preset(name: str) -> Model | None:
    """Return the preset that *name* begins with, unless it goes on to state another size.

    >>> _preset("llama3-70b cut to 12 layers").n_layers, _preset("gpt2 52B")
    (80, None)
    """
    plain = re.sub(r"[_ ]", "-", name.lower().strip())
    found = [preset for preset in names() if plain.startswith(preset)]
    longest = max(found, key=len, default="")
    if not longest or re.search(r"\d+(\.\d+)?b\b", plain.removeprefix(longest)):
        return None
    return load_model(longest)


@cache
def _cluster(hardware: str, n_gpus: int) -> Cluster:
    """Return GPUs of that kind; memory does not ask how they are wired."""
    return replace(load_cluster("dgx-h100", n_gpus), device=device_of(hardware), name=hardware)


def _sharding(text: str) -> str:
    for parts, name in SHARDINGS:
        if any(part == text or (part and part in text) for part in parts):
            return name
    raise TableError(f"sharding {text!r}: one of none, ddp, zero1, zero2, zero3, fsdp")


def _recipe(precision: str, notes: str) -> str:
    """Return how products are quantised: as *precision* says, or for plain fp8 the recipe in *notes*.

    >>> _recipe("fp8", "recipe v0.5.0:A_CONFIG_H100_FP8_CS_V1 {}"), _recipe("bf16", ""), _recipe("mxfp8", "")
    ('current', '', 'mxfp8')
    """
    return recipe_of(precision) or (scaling_of(notes) if precision == "fp8" else "")


def _kernels(framework: str, notes: str) -> str:
    """Return whether element-wise work is fused, as ``Job.kernels``: if the row says so and its notes agree.

    Frameworks compile nothing unless asked to (``training.compile`` of torchtitan is off by default).

    >>> _kernels("torchtitan +compile", ""), _kernels("torchtitan +compile", "torch.compile state not stated")
    ('fused', '')
    """
    is_said = "compile" in framework.lower() and "compile state not stated" not in notes
    return "fused" if is_said else ""


def _recomputed(text: str, notes: str = "") -> dict[str, Any]:
    """Return what *text* says about recomputation: how, and of which layers; *notes* may list modules.

    >>> _recomputed("partial-full (5 layers/stage)"), _recomputed("selective (every 2nd layer)")
    ({'recompute': 'full', 'recompute_layers': 5}, {'recompute': 'full', 'recompute_every': 2})
    """
    if found := re.search(r"(\d+) layers? ?(?:/|per|a) ?stage", text):
        return {"recompute": "full", "recompute_layers": int(found[1])}
    if found := re.search(r"every (\d+)(?:nd|rd|th) layer", text):
        return {"recompute": "full", "recompute_every": int(found[1])}
    how = _recompute(text)
    if how == "selective" and (found := re.search(r'"recompute_modules": \[([^\]]*)\]', notes)):
        listed = [name for name in RECOMPUTE_MODULES if f'"{name}"' in found[1]]
        return {"recompute": how, "recompute_modules": ",".join(listed)}
    return {"recompute": how}


def _recompute(text: str) -> str:
    for name in ("none", "full", "selective"):
        if text == name or (name == "selective" and text.startswith("selective")):
            return name
    raise TableError(f"recompute {text!r}: one of none, selective, full")


def _precision(text: str) -> str:
    """Return the precision of what is kept: with fp8 recipes, weights and activations are in bf16."""
    if text.startswith(("fp8", "mxfp8", "nvfp4")):
        return "bf16"
    if text in ("bf16", "fp16", "fp32"):
        return text
    raise TableError(f"precision {text!r}: one of bf16, fp16, fp32, fp8")
