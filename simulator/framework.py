"""What training frameworks keep in memory, leave unfused and overlap: conventions of one, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from foretrace.simulator.errors import JobError

SELECTIVE: Final = ("core", "operations")
SPLITS: Final = ("even", "cost")
WRAPS: Final = ("block", "model")
CONTEXTS: Final = ("all_gather", "ring", "ulysses")
DISPATCHES: Final = ("copies", "once")
EXPERT_TPS: Final = ("tp", "one", "open")
AMAX_RANKS: Final = ("stage", "tp")
ROTARIES: Final = ("complex", "halves")

EAGER_PARTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "norm": "norms run as casts, square, mean and products",
        "rotary": "rotary embedding, written as the convention of the same name says",
        "scaled_rotary": "rotary embedding that also scales (YaRN), in the precision of the job",
        "activation": "activation, then its product with the gate",
        "clamp": "clamps of the inputs of an activation, and the copy that joins them again",
        "residual": "dropout, then the residual sum",
        "loss": "log-softmax, then negative log-likelihood",
        "projections": "query, key and value, and gate and up, are matrices of their own",
        "heads": "keys and values are copied for every query head that shares them",
        "optimizer": "Adam as a row of multi-tensor kernels",
    }
)
"""What a framework may leave unfused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Conventions of one training framework.

    Attributes:
        name: name of the profile.
        matches: what a table or a person calls it; lower case, a part of the text is enough.
        library: names of libraries that run on an engine, which count where no engine is named.
        technique: words that any framework may be described with, which count where none is named.
        fp32_gradients: precisions in which gradients are accumulated in fp32.
        bucket_bytes: per parameter, what communication buckets hold beside gradients in fp32.
        flat_bucket_bytes: size of a communication bucket that is allocated whatever the model.
        step_copy_bytes: per parameter that a rank updates, what the step makes of 16-bit gradients first.
        wgrad_placeholders: a product that has added to the sums hands autograd a 16-bit tensor of the shape
            of its weight; there is one per shape.
        bucket_ranks: least number of data-parallel ranks that have buckets.
        logits_kept_bytes: per logit, for every micro-batch in flight on the last stage.
        logits_working_bytes: per logit, for one micro-batch at a time.
        compiles_loss: where kernels are fused the loss is compiled as well: logits and their gradient in the
            precision of the job, nothing in fp32.
        pads_vocabulary: embeddings have rows beside the vocabulary, so that rows of logits begin where tensor
            cores can be fed from, on every tensor-parallel rank.
        keeps_gathered_inputs: inputs of column-parallel matrices are kept as gathered over tensor-parallel
            ranks, rather than gathered again.
        keeps_gate_output: the activated gate is kept beside gate, up and their product: no fused kernel.
        keeps_norm_in_fp32: inputs of norms are kept in fp32 too: no fused kernel.
        selective: what ``recompute="selective"`` keeps: all but the attention ``"core"``, or only the results
            of every other matrix product and of attention (``"operations"``).
        split: stages have an ``"even"`` number of layers, or an equal share of the ``"cost"``, head included.
        even_chunks: virtual stages have the same number of layers each, or a list says how many.
        eager: what runs as separate kernels, of ``EAGER_PARTS``.
        rotary: a separate rotary embedding is a ``"complex"`` product in fp32, or turns ``"halves"`` of a
            head in the precision of the job.
        autocast: under ``ddp`` parameters and what runs between blocks are in fp32, and every product casts
            its operands (``torch.autocast``).
        stops_early: recomputation of whole layers ends before what no backward needs: the last product.
        grouped: how products of experts run, of ``simulator.compute.gemm.GROUPED``.
        fp8_recipe: how products in 8 bits are quantised unless a job says, of
            ``simulator.workload.recipes.RECIPES``.
        amax_ranks: who agrees on delayed 8-bit scales after every forward and backward: all ranks of a
            ``"stage"``, or ``"tp"``.
        allocator_slack: share of the allocated peak that the caching allocator reserves beside it.
        attention: fused attention kernels, of which the first one that the device lists is called; empty
            for the device's own.
        host_work: time of the host per operation, over that of Megatron-DeepSpeed, on which the ``launch`` of
            devices was measured.
        host_per_tensor_rank: share of that time that each further tensor-parallel rank adds in a pipeline
            that leaves the node.
        fused_wgrad: products of weight gradients add to the sums in place; otherwise a kernel of its own adds
            each 16-bit gradient to them.
        overlap_grad_reduce: buckets of gradients are reduced while backward goes on; otherwise after it.
        overlap_param_gather: parameters that others have updated are gathered while the next forward goes on;
            otherwise before it.
        fp8_param_gather: weights that recipes quantise once per step are there in few bits only, without the
            copy in 16 bits, where a replica has all of them.
        reduces_in_16_bit: gradients travel in the precision of the job although their sums are in fp32.
        no_sync: gradients are reduced once per step; otherwise in every backward (stages that share out
            gradients always do).
        bucket_mib: size of a bucket of gradients; 0: 25 MiB under ``ddp``, otherwise as Megatron-LM.
        buckets_first_chunk_only: only the layers that come first in a model have buckets; gradients of any
            other stage, or chunk of a stage, leave in one message.
        async_tp: tensor-parallel gathers and scatters run in slices beside the products that use them.
        overlap_tp_backward: in backward, column-parallel matrices communicate beside their products.
        p2p_scattered: without sequence parallelism, a tensor-parallel rank sends its share of what goes to
            the next stage, which gathers it.
        context: how context-parallel ranks see all keys: keys and values are gathered (``"all_gather"``),
            passed around beside the products (``"ring"``), or heads are dealt out (``"ulysses"``).
        expert_dispatch: what the exchange before and after experts sends: every one of the ``"copies"`` of a
            token, or a token ``"once"`` to each GPU, and to each node, that has any of its experts (DeepEP).
        expert_tp: over how many ranks an expert is cut where a run does not say: as many as layers
            (``"tp"``), ``"one"`` where experts are dealt out, or that is ``"open"``.
        fused_experts: with MXFP8, activation, biases and quantisation between the products of experts are
            inside of them (Transformer Engine's kernels in CuTe DSL).
        overlap_shared_experts: shared experts run beside the exchange before the routed ones, and backward
            beside that of their results' gradients; without tensor parallelism.
        wrap: what is gathered at once under full sharding, a ``"block"`` or the whole ``"model"``.
        prefetch_forward, prefetch_backward: the next unit is gathered while this one computes.
        reshard_after_forward: gathered parameters are freed after forward, and gathered again for backward.
        limit_all_gathers: at most two units are whole at once.
        pipeline_keeps_whole: under full sharding a pipeline stage is gathered in its first forward of a step,
            and reduces and frees after its last backward; otherwise in every micro-batch.
        copies_gathered: gathered parameters are copied out of the buffer they arrive in, and gradients into
            the one they leave from.
        joins_gradients: gradients of a unit are joined into one tensor, which is divided by the number of
            ranks before it is reduced (FSDP1).
        grad_norm: the norm of all gradients is summed over all ranks before the optimizer (clipping).
        norm_reductions: times that the optimizer sums the gradient of each norm over tensor-parallel ranks,
            one by one: DTensor leaves them partial, and AdamW without fusion asks for each three times.
        loss_all_reduce: the loss is averaged over data-parallel ranks each step.
        step_host_s: time of the host per step in which the device is idle: data, logging, learning rates.
        sources: where each convention was read.
    """

    name: str
    matches: tuple[str, ...]
    library: tuple[str, ...] = ()
    technique: tuple[str, ...] = ()
    fp32_gradients: tuple[str, ...] = ("bf16", "fp16")
    bucket_bytes: int = 0
    flat_bucket_bytes: int = 0
    step_copy_bytes: int = 0
    wgrad_placeholders: bool = False
    bucket_ranks: int = 2
    logits_kept_bytes: int = 4
    logits_working_bytes: int = 2
    compiles_loss: bool = False
    pads_vocabulary: bool = False
    keeps_gathered_inputs: bool = False
    keeps_gate_output: bool = False
    keeps_norm_in_fp32: bool = False
    selective: str = "core"
    split: str = "even"
    even_chunks: bool = False
    eager: tuple[str, ...] = ()
    rotary: str = "complex"
    autocast: bool = False
    stops_early: bool = False
    grouped: str = "streams"
    fp8_recipe: str = "delayed"
    amax_ranks: str = "stage"
    allocator_slack: float = 0.03
    attention: tuple[str, ...] = ()
    host_work: float = 1.0
    host_per_tensor_rank: float = 0.0
    fused_wgrad: bool = True
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = False
    fp8_param_gather: bool = False
    reduces_in_16_bit: bool = False
    no_sync: bool = True
    bucket_mib: float = 0.0
    buckets_first_chunk_only: bool = False
    async_tp: bool = False
    overlap_tp_backward: bool = True
    p2p_scattered: bool = False
    context: str = "all_gather"
    expert_dispatch: str = "copies"
    expert_tp: str = "open"
    fused_experts: bool = False
    overlap_shared_experts: bool = False
    wrap: str = "block"
    prefetch_forward: bool = True
    prefetch_backward: bool = True
    reshard_after_forward: bool = True
    limit_all_gathers: bool = True
    pipeline_keeps_whole: bool = False
    copies_gathered: bool = False
    joins_gradients: bool = False
    grad_norm: bool = True
    norm_reductions: int = 0
    loss_all_reduce: bool = False
    step_host_s: float = 0.0
    sources: dict[str, str] = field(default_factory=dict, hash=False, compare=False)

    def __post_init__(self) -> None:
        choices = {
            "selective": SELECTIVE,
            "split": SPLITS,
            "wrap": WRAPS,
            "context": CONTEXTS,
            "expert_dispatch": DISPATCHES,
            "expert_tp": EXPERT_TPS,
            "amax_ranks": AMAX_RANKS,
            "rotary": ROTARIES,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise JobError(
                    f"framework {self.name}: {name}={getattr(self, name)!r}: one of {', '.join(allowed)}"
                )
        for name in ("host_work", "host_per_tensor_rank", "bucket_mib", "step_host_s", "allocator_slack"):
            if (value := getattr(self, name)) < 0:
                raise JobError(f"framework {self.name}: {name}={value}: not negative")
        if unknown := set(self.eager) - set(EAGER_PARTS):
            raise JobError(
                f"framework {self.name}: eager={sorted(unknown)}: of {', '.join(sorted(EAGER_PARTS))}"
            )
