"""What a block computes again before its backward, under each kind of recomputation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from foretrace.simulator.compute.fusion import is_separate
from foretrace.simulator.job import Job
from foretrace.simulator.workload.ops import Comm, Op, Phase

SECOND: Final = 2
"""Of the products that are computed apart, the one that is not saved: key, and up."""

REDUCTIONS = ("reduce_scatter", "all_reduce")
"""Communications whose results are saved where operations are selected one by one."""

SENT: Final = tuple(f".{kind}.copy" for kind in REDUCTIONS)
"""Ends of the names of copies that they alone need."""


def recomputes(job: Job, layer: int, layers: Sequence[int]) -> bool:
    """Return whether *layer* is computed again, of the *layers* of its stage; ends count as such."""
    if layer < 0:
        return True
    within = not job.recompute_layers or layers.index(layer) < job.recompute_layers
    return within and layer % job.recompute_every == 0


def as_kept(job: Job, layer: int, layers: Sequence[int]) -> Job:
    """Return the job as *layer* sees it: without recomputation, if other layers alone are computed again."""
    if job.recompute == "none" or recomputes(job, layer, layers):
        return job
    # Other settings of recomputation would be refused without it.
    return replace(job, recompute="none", recompute_modules="", recompute_layers=0, recompute_every=1)


def recompute_phase(job: Job, forward: Phase, core: Phase) -> Phase:
    """Return what is computed again of a block.

    *job*: for ``recompute`` and the framework. *core*: the attention core of it; empty for an MLP.
    """
    if job.recompute == "full":
        return forward
    if job.recompute == "none":
        return ()
    if job.recompute_modules:
        return tuple(item for item in forward if module_of(item, forward, core) & job.recomputed_modules)
    if job.profile.selective == "core":
        return core
    return tuple(_unsaved(job, forward, core))


def module_of(item: Op | Comm, forward: Phase, core: Phase) -> frozenset[str]:
    """Return which of ``simulator.job.RECOMPUTE_MODULES`` *item* of *forward* belongs to.

    Whole blocks are taken without their norm and their sum with the residual. Communication belongs to the
    core and to whole blocks. Reference: Megatron-LM ``transformer_config.py``, ``recompute_modules``.
    """
    if item in core:
        return frozenset({"core_attn"})
    block = next((one.name.partition(".")[0] for one in forward if isinstance(one, Op)), "")
    if isinstance(item, Comm):
        return frozenset({block} & {"mlp", "moe"})
    part = item.name.partition(".")[2]
    if part == "norm":
        return frozenset({"layernorm"})
    found = {block} & {"mlp", "moe"} if part not in ("residual", "post_norm") else set()
    if block == "moe" and part in ("activation", "clamp"):
        found.add("moe_act")
    if block == "moe" and part.startswith("shared."):
        found.add("shared_experts")
    if part.startswith(("q_up", "kv_up", "assemble")):
        found.add("mla_up_proj")
    return frozenset(found)


def _unsaved(job: Job, forward: Phase, core: Phase) -> Iterable[Op | Comm]:
    """Yield what is left when attention, reductions and every other product of a layer are saved.

    The products of a Llama layer in order are query, key, value, output, gate, up, down: the first, third,
    fifth and seventh are saved. Reference: torchtitan ``parallelize_llama.py``, selective activation
    checkpointing of operations.
    """
    kv_heads = job.model.kv_heads_per_rank(job.layout.tp)
    heads = job.model.n_heads // job.layout.tp
    # Of query, key and value the key; of gate and up the up; down is the seventh, and saved.
    again = {"qkv": kv_heads / (heads + 2 * kv_heads), "up": 0.5 if job.model.gated else 0.0, "down": 0.0}
    apart = is_separate(job, "projections")
    seen: Counter[str] = Counter()
    for op in forward:
        if isinstance(op, Comm):
            if op.kind not in REDUCTIONS:
                yield op
        elif op.kind != "gemm":
            if op not in core and not op.name.endswith(SENT):
                yield op
        elif share := again.get(op.name.rpartition(".")[2], 1.0):
            seen[op.name] += 1
            if not apart or share == 1.0:
                yield _part(op, share)
            elif seen[op.name] == SECOND:  # key, or up
                yield op


def _part(op: Op, share: float) -> Op:
    """Return the product that computes *share* of the columns of *op*."""
    return replace(
        op, flops=round(op.flops * share), bytes_moved=round(op.bytes_moved * share), n=round(op.n * share)
    )
