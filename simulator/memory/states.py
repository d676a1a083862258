"""Model states of a stage: parameters, gradients and optimizer, as data-parallel ranks share them out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from foretrace.simulator.job import Job
from foretrace.simulator.models.model import share
from foretrace.simulator.workload.linear import job_recipe
from foretrace.simulator.workload.lora import NF4_BITS, adapter_params
from foretrace.simulator.workload.micro_batch import copied_embedding_params, join_linear
from foretrace.simulator.workload.ops import DTYPE_BYTES, operand_bytes
from foretrace.simulator.workload.recipes import layouts


class StateBytes(NamedTuple):
    """Model states of one rank."""

    parameters: int
    gradients: int
    optimizer: int


class Unit(NamedTuple):
    """Parameters of a part of a stage that is sharded as one.

    Attributes:
        dense: held in common by all data-parallel ranks.
        experts: held in common by those of one expert-parallel rank.
        matrices: those of ``dense`` and ``experts`` that a layer multiplies by; they can be quantised.
    """

    dense: int
    experts: int
    matrices: int = 0
    adapters: int = 0

    @property
    def params(self) -> int:
        """Parameters of the part, without adapters."""
        return self.dense + self.experts


def state_bytes(job: Job, n_params: int, replicas: int, n_matrices: int = 0) -> StateBytes:
    """Return the model states of *n_params* parameters that *replicas* ranks hold in common.

    Adam in mixed precision keeps a parameter and a gradient to compute with, and in fp32 a master weight
    and two moments: 2 + 2 + 12 bytes per parameter, or 2 + 4 + 12 with ``job.fp32_gradients``. In fp32 there
    is no second copy: 4 + 4 + 8. Other optimizers keep less (``simulator.optimizers``). ``zero1`` shares the
    optimizer states out, ``zero2`` the gradients too, ``zero3`` the parameters too. ``fsdp`` is PyTorch's
    FSDP2 with a mixed-precision policy: its sharded
    parameters *are* the fp32 master, so that 4 + 4 + 8 bytes are shared out.

    References: Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1; Megatron-LM ``docs/dist_optimizer``;
    ``torch.distributed.fsdp.MixedPrecisionPolicy``.

    *n_params*: parameters on this rank before data-parallel sharding. *replicas*: data-parallel ranks among
    which they are shared out.
    """
    part = share(n_params, replicas)
    # Optimizers such as Muon treat matrices of layers in another way than all else.
    kept = (n_params - n_matrices) * job.updates.other_bytes + n_matrices * job.updates.state_bytes
    if job.precision == "fp32" or (job.shards.updates_shards and job.master_weights):
        weight, gradient = 4, 4
    else:
        weight, gradient = DTYPE_BYTES[job.precision], DTYPE_BYTES[job.gradient_dtype]
        kept += n_params * job.master_bytes
    return StateBytes(
        parameters=weight * (part if job.shards.parameters else n_params),
        gradients=gradient * (part if job.shards.gradients else n_params),
        # Bytes of a parameter may be a fraction: 8-bit moments have a scale for every 256.
        optimizer=math.ceil(-(-kept * part // max(n_params, 1)) if job.shards.optimizer else kept),
    )


def sharding_units(job: Job, layers: Sequence[int], *, first: bool, last: bool) -> list[Unit]:
    """Return the parts of a stage in order: embedding with the tower, layers, head with the final norm."""
    model, tp = job.model, job.layout.tp
    found = [Unit(model.embedding_params(tp) + model.tower_params(tp), 0)] if first else []
    alike: dict[tuple[str, ...], Unit] = {}
    for layer in layers:
        if (kinds := model.kinds(layer)) not in alike:
            alike[kinds] = _layer_unit(job, layer)
        found.append(alike[kinds])
    if last:
        own_head = not model.tied_embeddings or not first
        found.append(_head_unit(job, model.head_params(tp) if own_head else 0))
    return found


def _head_unit(job: Job, own_params: int) -> Unit:
    """Return the norm, the *own_params* of the head, and the modules for multi-token prediction."""
    model = job.model
    head = Unit(model.norm_params + own_params, 0)
    if not model.n_mtp:
        return head
    layer, join = _layer_unit(job, model.n_layers - 1), join_linear(job)
    each = 3 * model.norm_params + join.params + layer.dense
    return Unit(
        dense=head.dense + model.n_mtp * each + copied_embedding_params(job),
        experts=model.n_mtp * layer.experts,
        matrices=model.n_mtp * layer.matrices,
        adapters=model.n_mtp * layer.adapters,
    )


def _layer_unit(job: Job, layer: int) -> Unit:
    model, layout = job.model, job.layout
    experts, linears = model.expert_params(layer, layout.etp, layout.ep), model.linears(layer, layout.tp)
    matrices = experts + sum(linear.n_in * linear.n_out for linear in linears)
    adapters = sum(adapter_params(job, linear) for linear in linears)
    return Unit(model.dense_params(layer, layout.tp), experts, matrices, adapters)


def stage_states(job: Job, units: Sequence[Unit]) -> StateBytes:
    """Return the model states of a stage; experts have fewer replicas than the rest.

    With ``job.lora_rank`` only the adapters are trained, and the base is kept in ``job.precision`` or 4 bits.
    """
    replicas = job.shard_ranks or job.layout.dp * job.layout.cp
    if job.lora_rank:
        n_adapters = sum(unit.adapters for unit in units)
        trained = state_bytes(job, n_adapters, replicas, n_adapters)
        frozen = sum(_frozen_bytes(job, unit) for unit in units)
        ranks = replicas if job.shards.parameters else 1
        return trained._replace(parameters=trained.parameters + share(frozen, ranks))
    n_experts, n_matrices = (sum(unit.experts for unit in units), sum(unit.matrices for unit in units))
    dense = state_bytes(job, sum(unit.dense for unit in units), replicas, n_matrices - n_experts)
    # Tensor-parallel ranks are replicas of experts as far as these are not cut over them.
    expert_replicas = max(replicas * job.layout.tp // (job.layout.ep * job.layout.etp), 1)
    experts = state_bytes(job, n_experts, expert_replicas, n_experts)
    both = StateBytes(*(a + b for a, b in zip(dense, experts, strict=True)))
    return both._replace(parameters=both.parameters + _quantised_weight_bytes(job, units))


def outer_bytes(job: Job, units: Sequence[Unit]) -> int:
    """Return what sites that meet keep of a stage: what they last agreed on, and its momentum, in fp32.

    Replicas of a site share them out. In fragments, all but the one that is on its way are in the memory of
    the host. Reference: Douillard et al. 2025, arXiv:2501.18512, section 2.5.
    """
    if not job.outer_every:
        return 0
    replicas = job.layout.dp * job.layout.cp
    if job.lora_rank:
        part = share(sum(unit.adapters for unit in units), replicas)
    else:
        of_experts = max(replicas * job.layout.tp // (job.layout.ep * job.layout.etp), 1)
        part = share(sum(unit.dense for unit in units), replicas)
        part += share(sum(unit.experts for unit in units), of_experts)
    return -(-part // job.outer_fragments) * 2 * DTYPE_BYTES["fp32"]


def _quantised_weight_bytes(job: Job, units: Sequence[Unit]) -> int:
    """Return what the copies of matrices in few bits add, where they are made once per step.

    Weights in 16 bit stay beside them; with ``fp8_param_gather`` (Megatron-LM ``--fp8-param-gather``) what
    they took is given back.
    """
    recipe = job_recipe(job)
    if recipe is None or recipe.weights_each or job.shards.parameters:
        return 0
    copies = layouts(recipe, job.cluster.device)
    matrices = sum(unit.matrices for unit in units)
    in_16_bit = DTYPE_BYTES[job.precision] * matrices if job.profile.fp8_param_gather else 0
    return copies * operand_bytes(matrices, recipe.dtype) - in_16_bit


def _frozen_bytes(job: Job, unit: Unit) -> int:
    """Size of a part that is not trained."""
    width = DTYPE_BYTES[job.precision]
    if not job.quantized_base:
        return unit.params * width
    return (unit.params - unit.matrices) * width + round(unit.matrices * NF4_BITS / 8)


def gathered_parameters_bytes(job: Job, units: Sequence[Unit]) -> int:
    """Return parameters that are whole for a while although ranks share them out.

    Two neighbouring units are whole at once, the one in use and the one gathered ahead; all of a stage, if it
    is wrapped as one, stays whole after its forward, or is gathered without a limit. Weights in 4 bits are
    gathered as they are, and one unit at a time has a copy to compute with.
    """
    width = DTYPE_BYTES[job.precision]
    copy = width * max((unit.matrices for unit in units), default=0) if job.quantized_base else 0
    if not job.shards.parameters:
        return copy
    sizes = [_frozen_bytes(job, unit) if job.lora_rank else width * unit.params for unit in units]
    if _stays_whole(job):
        return copy + sum(sizes)
    # The last unit has none behind it.
    return copy + max((a + b for a, b in pairwise([*sizes, 0])), default=0)


def _stays_whole(job: Job) -> bool:
    """Return whether all parameters of a fully sharded stage are whole at some moment of a step."""
    profile = job.profile
    by_unit = profile.wrap == "block" and profile.reshard_after_forward and profile.limit_all_gathers
    return not by_unit or job.keeps_stages_whole


def whole_gradient_bytes(job: Job, units: Sequence[Unit]) -> int:
    """Return gradients that are whole although ranks share them out: computed, and reduced.

    One unit at a time, unless the model is wrapped as one, or a pipeline sums whole gradients up over the
    micro-batches of a step.
    """
    if not job.shards.gradients:
        return 0
    width, gradient = DTYPE_BYTES[job.precision], DTYPE_BYTES[job.gradient_dtype]
    trained = [unit.adapters if job.lora_rank else unit.params for unit in units]
    # Gradients alone are sharded (zero2): no copy of parameters, and one unit's gradients before they are
    # reduced.
    if not job.shards.parameters:
        return gradient * max(trained, default=0)
    if job.keeps_stages_whole:
        # Whole sums, and beside them the gradients of one unit as backward makes them.
        return gradient * sum(trained) + width * max(trained)
    as_one = job.profile.wrap == "model"
    return (width + gradient) * (sum(trained) if as_one else max(trained))


def bucket_bytes(job: Job, units: Sequence[Unit]) -> int:
    """Return what communication buckets of the framework hold beside gradients.

    Where gradients are summed in fp32 and not sharded, those of a backward are there in 16 bit beside the
    sums. A flat bucket is there under every stage of ZeRO (DeepSpeed ``stage_1_and_2.py``, ``stage3.py``).
    """
    framework = job.profile
    if job.shards.updates_shards or job.layout.dp * job.layout.cp < framework.bucket_ranks:
        return 0
    sums_apart = job.gradient_dtype == "fp32" and not job.shards.gradients
    beside = framework.bucket_bytes * _trained(job, units) if sums_apart else 0
    return beside + framework.flat_bucket_bytes


def step_copy_bytes(job: Job, units: Sequence[Unit]) -> int:
    """Return what the optimizer's step makes of the 16-bit gradients that this rank updates with."""
    if job.gradient_dtype == "fp32" or not job.profile.step_copy_bytes:
        return 0
    replicas = 1 if not job.shards.optimizer else job.shard_ranks or job.layout.dp * job.layout.cp
    return job.profile.step_copy_bytes * share(_trained(job, units), replicas)


def _trained(job: Job, units: Sequence[Unit]) -> int:
    return sum(unit.adapters if job.lora_rank else unit.params for unit in units)


def placeholder_bytes(job: Job, layers: Sequence[int], *, head: bool = False) -> int:
    """Return the 16-bit tensors that stand for weight gradients which products have added to the sums.

    Autograd asks for a gradient although the product has already added it: Transformer Engine keeps one
    tensor per shape of matrix (``get_dummy_wgrad``), Megatron-LM makes one for the *head* each time.
    """
    framework, model, tp, etp = job.profile, job.model, job.layout.tp, job.layout.etp
    in_place = framework.fused_wgrad and framework.wgrad_placeholders
    if not in_place or job.lora_rank or job.shards.parameters:
        return 0
    shapes = {(linear.n_in, linear.n_out) for layer in layers for linear in model.linears(layer, tp)}
    if any(model.is_moe(layer) for layer in layers):
        shapes |= {(linear.n_in, linear.n_out) for linear in model.mlp_linears(model.moe_ffn_hidden, etp)}
    sizes = sum(n_in * n_out for n_in, n_out in shapes) + (model.head_params(tp) if head else 0)
    return sizes * DTYPE_BYTES[job.precision]


# What a process takes of a device beside tensors: driver, context, and a communicator for every group.

COMMUNICATOR_BYTES: Final = 410_000_000
"""Buffers of NCCL for one communicator of 8 ranks.

System files of ai-dynamo/aiconfigurator 095f58a (Apache-2.0); on A100 544 MB were seen for groups of two and
688 MB for larger ones (NVIDIA/nccl issue 964). More communicators take more (its issue 864).
"""


def reserved_bytes(job: Job) -> int:
    """Return what a rank of *job* holds beside tensors, from its first collective on.

    ``Device.reserved_bytes`` is driver, context and one communicator. Every axis with more than a rank has a
    communicator of its own, and where there are several, one over all ranks comes beside them. A processor
    talks through gloo, which keeps no such buffers.
    """
    device = job.cluster.device
    axes = sum(degree > 1 for degree in job.layout.degrees.values())
    return device.reserved_bytes + (axes * COMMUNICATOR_BYTES if device.kind == "gpu" and axes > 1 else 0)
