"""One training job: everything that a prediction depends on, checked once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from foretrace.door import own_table
from foretrace.simulator.builder.stage_layers import ENDS, check_layers
from foretrace.simulator.errors import JobError
from foretrace.simulator.framework import Framework, framework_names, profile, profile_meant
from foretrace.simulator.models.kinds import KINDS
from foretrace.simulator.models.model import Model
from foretrace.simulator.nearest import near_divisors, near_multiples
from foretrace.simulator.optimizers import OPTIMIZERS, Optimizer
from foretrace.simulator.schedules import SCHEDULES
from foretrace.simulator.sharding import SHARDINGS, Sharding
from foretrace.simulator.variation import Variation
from foretrace.simulator.workload.recipes import RECIPES
from foretrace.topologies.cluster import Cluster
from foretrace.traces.layout import Layout

WAITS: Final = (
    ("prefetch_forward", False),
    ("prefetch_backward", False),
    ("overlap_tp_backward", False),
    ("overlap_grad_reduce", False),
)
"""What becomes of conventions on a processor. It has no streams: there FSDP2 and tensor parallelism wait for
every collective where it is called. DDP does not wait for a bucket, so the last is for shards alone."""

OFFLOAD_PLACES: Final = ("host", "nvme")
"""Memory of the host, or drives of the node."""

RECOMPUTES: Final = ("none", "selective", "full")
PRECISIONS: Final = ("bf16", "fp16", "fp32")
KERNELS: Final = ("", "fused", "eager")
"""How element-wise work runs; empty: as the framework does it."""

OFFLOADS: Final = ("none", "optimizer", "states", "activations", "all")
"""What lives in the memory of the host: optimizer states; and gradients and sharded parameters; and so on."""

RECOMPUTE_MODULES: Final = (
    *("core_attn", "layernorm", "mla_up_proj"),
    *("mlp", "moe", "moe_act", "shared_experts"),
)
"""Parts of a layer that selective recomputation may be asked for, as Megatron-LM calls them."""

EXPERT_TP_FROM: Final[Mapping[str, str]] = MappingProxyType(
    {
        "only": "nothing else is possible with these tp, ep and dp",
        "model": "as in the published recipe of {model}",
        "framework": "as {framework} has it unless it is given",
        "open": "assumed",
    }
)
"""Where the ranks that an expert is cut over are from if nobody gave them, in words."""

MOST_SLOWDOWN: Final = 4.0
"""Most that ``overlap_slowdown`` may be: 24 channels times 4 are most processors of any GPU."""


def _instead(name: str, value: str) -> str:
    """Return where to find what people mean who give a setting this *value*; empty if it is not known."""
    places = own_table("simulator/instead.toml").get(name, {})
    return next((f"; {where}" for where, values in places.items() if value in values), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model, a machine, and how the one is spread over the other.

    What each setting means is in ``settings.toml``, and at more length in docs/simulation.md.

    Attributes:
        cluster: the machine; has at least ``layout.world_size`` GPUs.
        layers_per_stage: layers of every stage, in order of the stages; empty: as equally as they go. The
            first and the last may have none: then they hold the embedding or the head alone.
        overlap_p2p: post a receive one action ahead, so that the message travels while the rank computes, as
            Megatron-LM does with virtual stages; None: on with several stages per rank or split backward.
        precision: dtype of parameters in compute, activations and their communication.
        conventions: conventions of that framework that are different here, as names and values.
        expert_tp_from: where ``layout.expert_tp`` is from if nobody gave it, a key of ``EXPERT_TP_FROM``.
        unsaid: settings that whose conventions hold decides, itself included, where nobody said it.
        published: where settings that nobody gave were read, if they are those of a published run.
    """

    model: Model
    cluster: Cluster
    layout: Layout
    global_batch: int
    micro_batch: int = 1
    seq_len: int = 2048
    document_len: int = 0
    images: int = 0
    image_tokens: int = 0
    schedule: str = "1f1b"
    virtual_stages: int | None = None
    layers_per_stage: tuple[int, ...] = ()
    counted_ends: str = "none"
    overlap_pairs: bool | None = None
    overlap_p2p: bool | None = None
    deallocate_outputs: bool = True
    sharding: str = "zero1"
    sequence_parallel: bool = True
    recompute: str = "none"
    recompute_modules: str = ""
    recompute_layers: int = 0
    recompute_every: int = 1
    precision: str = "bf16"
    fp8: bool = False
    recipe: str = ""
    optimizer: str = "adamw"
    master_weights: bool = True
    fp32_gradients: bool = True
    flash_attention: bool = True
    kernels: str = ""
    framework: str = "megatron"
    conventions: tuple[tuple[str, object], ...] = ()
    capacity_factor: float = 0.0
    expert_imbalance: float = 0.0
    offload: str = "none"
    offload_to: str = "host"
    offload_layers: int = 0
    shard_ranks: int = 0
    lora_rank: int = 0
    quantized_base: bool = False
    checkpoint_every: int = 0
    checkpoint_bytes_per_s: float = 0.0
    outer_every: int = 0
    outer_fragments: int = 1
    outer_overlap: int = 0
    outer_bits: int = 32
    ranks_per_node: int = 0
    placement: str = "packed"
    nccl_algo: str = ""
    nccl_proto: str = ""
    overlap_slowdown: float = 0.0
    n_steps: int = 1
    variation: Variation = field(default_factory=Variation)
    expert_tp_from: str = field(default="", compare=False)
    unsaid: tuple[str, ...] = field(default=(), compare=False)
    published: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        choices = {
            "sharding": SHARDINGS,
            "recompute": RECOMPUTES,
            "counted_ends": ENDS,
            "precision": PRECISIONS,
            "kernels": KERNELS,
            "recipe": ("", *RECIPES),
            "optimizer": tuple(OPTIMIZERS),
            "offload": OFFLOADS,
            "offload_to": OFFLOAD_PLACES,
            "framework": framework_names(),
        }
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                meant = profile_meant(value) if name == "framework" else _instead(name, value)
                raise JobError(f"{name}={value!r}: one of {', '.join(filter(None, allowed))}{meant}")
        profile(self.framework, self.conventions)
        check_numbers(self)
        if not 0 <= self.overlap_slowdown <= MOST_SLOWDOWN:
            raise JobError(
                f"overlap_slowdown={self.overlap_slowdown}: from 0, none, to {MOST_SLOWDOWN}; "
                "1 is what NCCL takes by default"
            )
        self._check_settings()
        check_layout(self)
        check_batch(self)
        check_images(self)
        check_shards(self)
        check_schedule(self)
        check_offload(self)
        check_outer(self)
        check_recipe(self)

    @property
    def updates(self) -> Optimizer:
        """What the optimizer keeps and does."""
        return OPTIMIZERS[self.optimizer]

    @property
    def master_bytes(self) -> int:
        """Bytes of the weight that the optimizer keeps beside a parameter, 0 if that is the one."""
        return 4 if self.master_weights and self.precision != "fp32" else 0

    def _check_settings(self) -> None:
        check_layers(self.layers_per_stage, self.model.n_layers, self.model.name)
        if self.virtual_stages is not None and self.virtual_stages < 1:
            raise JobError(f"virtual_stages={self.virtual_stages}: at least 1")
        if self.recompute_modules and self.recompute != "selective":
            raise JobError(
                f"recompute_modules={self.recompute_modules!r} needs recompute=selective: it says which parts"
            )
        if unknown := sorted(self.recomputed_modules - set(RECOMPUTE_MODULES)):
            raise JobError(f"recompute_modules={', '.join(unknown)}: any of {', '.join(RECOMPUTE_MODULES)}")
        if not self.model.n_experts and (self.capacity_factor or self.expert_imbalance):
            raise JobError(
                f"capacity_factor={self.capacity_factor}, expert_imbalance={self.expert_imbalance}: "
                f"{self.model.name} has no experts"
            )
        if self.document_len > self.seq_len or self.document_len == 1:
            raise JobError(
                f"document_len={self.document_len}: from 2 tokens to the {self.seq_len} of a sequence; "
                "0 is one document"
            )
        if self.ranks_per_node > self.cluster.gpus_per_node:
            raise JobError(
                f"ranks_per_node={self.ranks_per_node}: a node of {self.cluster.name} has "
                f"{self.cluster.gpus_per_node} GPUs, and a rank has one of its own"
            )
        if self.ranks_per_node and self.placement != "packed":
            raise JobError(
                f"ranks_per_node={self.ranks_per_node} fills nodes in turn, and placement {self.placement!r} "
                "does not: give one of them"
            )
        if self.quantized_base and not self.lora_rank:
            raise JobError("quantized_base=True needs lora_rank: 4-bit weights are not trained themselves")
        if self.recompute == "none" and (self.recompute_layers or self.recompute_every > 1):
            raise JobError("recompute_layers and recompute_every need recompute: nothing is computed again")
        if self.checkpoint_every and self.checkpoint_bytes_per_s < 1:
            raise JobError(
                f"checkpoint_every={self.checkpoint_every} needs checkpoint_bytes_per_s from 1 on, at which "
                "a rank saves its states, e.g. 1e9"
            )

    @property
    def profile(self) -> Framework:
        """Conventions of the framework as this job has them, where its device can keep them."""
        if self.cluster.device.kind != "cpu":
            return profile(self.framework, self.conventions)
        waits = WAITS if self.shards.parameters else WAITS[:-1]
        return profile(self.framework, (*waits, *self.conventions))

    @property
    def kinds(self) -> tuple[Job, ...]:
        """The job on machines of one kind of node each, in the order of ``Cluster.kinds``."""
        if not self.cluster.others:
            return (self,)
        return tuple(replace(self, cluster=cluster) for cluster in self.cluster.kinds)

    @property
    def shards(self) -> Sharding:
        """What data-parallel ranks share out."""
        return SHARDINGS[self.sharding]

    @property
    def most_ranks_per_node(self) -> int:
        """Ranks on a node that is full."""
        return self.ranks_per_node or self.filled_per_node or self.cluster.gpus_per_node

    @property
    def filled_per_node(self) -> int:
        """Ranks that launchers place on each node (NVLink domain) of several; 0: one on every GPU.

        No group that communicates in every layer straddles nodes if it fits into one, and nodes have as many
        ranks each if that leaves no more than a quarter of them idle. References: the greatest divisor of the
        trays up to 18 is the ``--segment`` of NVIDIA/NeMo scripts/performance/executors.py @ 8cfedd72, of
        NVIDIA-NeMo/Megatron-Bridge scripts/performance/utils/executors.py @ 067f987d and of
        NVIDIA/dgxc-benchmarking llmb_run/job_launcher.py @ 841f5466.
        """
        cluster, layout = self.cluster, self.layout
        full, is_given = cluster.gpus_per_node, self.ranks_per_node or self.placement != "packed"
        if is_given or layout.world_size <= full or cluster.others or cluster.fabric_spec.links:
            return 0
        blocks = [size for size in (layout.tp, layout.tp * layout.cp, layout.ep * layout.etp) if size <= full]
        if (unit := math.lcm(*blocks)) > full:
            unit = max(blocks)
        alike = [n for n in range(unit, full + 1, unit) if layout.world_size % n == 0 and 4 * n >= 3 * full]
        filled = max(alike, default=full // unit * unit)
        return 0 if filled == full else filled

    @property
    def n_sites(self) -> int:
        """Sites that train apart; 1 where none does."""
        spec = self.cluster.fabric_spec
        return -(-self.cluster.n_nodes // spec.group_nodes) if self.outer_every and spec.group_nodes else 1

    @property
    def of_one_site(self) -> Job:
        """The job as one of its sites does it, with its share of replicas and batch."""
        if (n := self.n_sites) == 1:
            return self
        return replace(
            self,
            cluster=self.cluster.sized(self.cluster.n_gpus // n),
            layout=replace(self.layout, dp=self.layout.dp // n),
            global_batch=self.global_batch // n,
        )

    def window_of(self, layer: int) -> int:
        """Return how many keys a query of *layer* sees at most, or the size of its chunks; 0 means all.

        A token of a packed document sees half of it on average: as many keys as in a window of that half.
        """
        window, mixer = self.model.window_of(layer), self.model.mixer(layer)
        if not self.document_len:
            return window
        halves = self.model.causal and not (mixer and KINDS[mixer].in_chunks)
        document = self.document_len // 2 if halves else self.document_len
        return min(window, document) if window else document

    @property
    def recomputed_modules(self) -> frozenset[str]:
        """What ``recompute_modules`` lists."""
        return frozenset(name.strip() for name in self.recompute_modules.split(",") if name.strip())

    @property
    def n_microbatches(self) -> int:
        """Micro-batches per optimizer step and data-parallel rank."""
        return self.global_batch // (self.layout.dp * self.micro_batch)

    @property
    def keeps_stages_whole(self) -> bool:
        """Whether fully sharded stages of a pipeline are whole from its first micro-batch to the last.

        Gradients then are too, and are reduced once. Where there is one replica nothing is in shards.
        """
        has_shards = self.shards.parameters and self.layout.dp * self.layout.cp > 1
        return has_shards and self.layout.pp > 1 and self.profile.pipeline_keeps_whole

    @property
    def autocasts(self) -> bool:
        """Whether parameters and hidden states are fp32, and products cast what they read."""
        cast = self.profile.autocast and self.precision in ("bf16", "fp16") and self.fp32_gradients
        return cast and not self.shards.optimizer and not self.fp8 and not self.lora_rank

    @property
    def gradient_dtype(self) -> str:
        """Dtype in which gradients are accumulated and reduced over data-parallel ranks."""
        return "fp32" if self.fp32_gradients else self.precision

    @property
    def flops_per_token(self) -> int:
        """Model FLOPs of a token, images with it."""
        length, frozen = self.document_len or self.seq_len, self.lora_rank > 0
        text = self.model.flops_per_token(length, frozen=frozen)
        if not self.images or self.model.tower is None:
            return text
        seen = self.model.tower.flops(self.image_tokens) * self.images / self.seq_len
        return text + round((1 if frozen else 3) * seen)

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, over all ranks."""
        return self.global_batch * self.seq_len


_FROM_ZERO: Final = (
    *("capacity_factor", "expert_imbalance", "checkpoint_every", "checkpoint_bytes_per_s"),
    *("shard_ranks", "lora_rank", "recompute_layers", "document_len", "ranks_per_node"),
    *("images", "image_tokens"),
    *("outer_every", "outer_overlap"),
)
_FROM_ONE: Final = ("global_batch", "micro_batch", "seq_len", "n_steps", "recompute_every", "outer_fragments")


def check_numbers(job: Job) -> None:
    """Raise JobError unless all numbers of *job* are ones to count with."""
    for least, names in ((0, _FROM_ZERO), (1, _FROM_ONE)):
        for name in names:
            if not least <= (value := getattr(job, name)) < math.inf:
                raise JobError(f"{name.removeprefix('n_')}={value}: give a number from {least} on")


def check_batch(job: Job) -> None:
    """Raise JobError unless whole micro-batches make up the batch."""
    chunk = job.layout.dp * job.micro_batch
    if job.global_batch % chunk:
        below = max(job.global_batch // chunk, 1) * chunk
        raise JobError(
            f"global_batch={job.global_batch} is not a multiple of dp*micro_batch = "
            f"{job.layout.dp}*{job.micro_batch} = {chunk}; {below} or {below + chunk} would work"
        )


def check_images(job: Job) -> None:
    """Raise JobError unless the model can see the images of a sequence, and they fit into it."""
    tower, layout, given = job.model.tower, job.layout, f"images={job.images}"
    if not job.images:
        return
    if tower is None:
        raise JobError(f"{given}: {job.model.name} has no tower for them; a config.json with one would work")
    if not (tokens := job.image_tokens or tower.image_tokens):
        raise JobError(f"{given}: images of {job.model.name} are of any size: image_tokens says of which")
    if job.images * tokens > job.seq_len:
        raise JobError(
            f"{given} of {tokens} tokens do not fit into seq_len={job.seq_len}; "
            f"{job.images * tokens} would work"
        )
    if layout.cp > 1:
        raise JobError(
            f"{given} with cp={layout.cp}: how ranks share the tower is not known; cp=1 would work"
        )
    check_heads(layout.tp, tower)


OUTER_BITS: Final = (4, 8, 16, 32)
"""Bits of a number that sites may send each other."""


def check_outer(job: Job) -> None:
    """Raise JobError unless the sites of the machine can train apart and meet."""
    if job.outer_bits not in OUTER_BITS:
        raise JobError(f"outer_bits={job.outer_bits}: one of {', '.join(map(str, OUTER_BITS))}")
    if not job.outer_every:
        return
    spec, every, sites = job.cluster.fabric_spec, f"outer_every={job.outer_every}", job.n_sites
    if spec.kind != "two-site":
        raise JobError(
            f"{every} needs a machine of sites: [fabric] kind = 'two-site' with group_nodes and "
            f"group_bandwidth in its file; that of {job.cluster.name} is {spec.kind!r}"
        )
    if job.cluster.others or job.ranks_per_node or job.filled_per_node:
        raise JobError(f"{every}: sites that train apart are alike, with a rank on each GPU of their nodes")
    full = spec.group_nodes * job.cluster.gpus_per_node
    if sites > 1 and job.cluster.n_gpus != sites * full:
        fewer, more = ((job.cluster.n_gpus // full + extra) * full for extra in (0, 1))
        would = f"{fewer} or {more}" if fewer > full else f"{more}"
        raise JobError(
            f"{every} needs full sites: {job.cluster.n_gpus} GPUs are no multiple of {full}; "
            f"{would} would work"
        )
    if job.layout.dp % sites:
        raise JobError(f"{every}: dp={job.layout.dp} replicas do not divide over {sites} sites")
    most = min(job.model.n_layers, job.outer_every)
    if job.outer_fragments > most:
        raise JobError(f"outer_fragments={job.outer_fragments}: at most {most}, each a layer and a step")
    if job.outer_overlap > job.outer_every:
        raise JobError(f"outer_overlap={job.outer_overlap}: at most outer_every = {job.outer_every} steps")


def check_shards(job: Job) -> None:
    """Raise JobError unless what is shared out goes round."""
    replicas = job.layout.dp * job.layout.cp
    if job.shard_ranks and not job.shards.optimizer:
        raise JobError(f"shard_ranks={job.shard_ranks} needs a sharding that shares something: zero1, fsdp")
    if job.shard_ranks and replicas % job.shard_ranks:
        raise JobError(
            f"shard_ranks={job.shard_ranks} does not divide dp*cp = {job.layout.dp}*{job.layout.cp} = "
            f"{replicas} ranks; {near_divisors(replicas, job.shard_ranks)} would work"
        )


def check_layout(job: Job) -> None:
    """Raise JobError unless ranks, heads, layers, experts and tokens can be dealt out."""
    layout, model = job.layout, job.model
    if layout.world_size != job.cluster.n_gpus:
        per_replica = layout.world_size // layout.dp
        fits = job.cluster.n_gpus // per_replica
        advice = f"dp={fits} fills {fits * per_replica}" if fits else f"one replica needs {per_replica}"
        raise JobError(
            f"pp*dp*cp*tp = {layout.pp}*{layout.dp}*{layout.cp}*{layout.tp} = {layout.world_size} ranks, "
            f"but the cluster has {job.cluster.n_gpus} GPUs; with this pp, cp and tp {advice}"
        )
    check_heads(layout.tp, model)
    check_mixers(layout.tp, layout.cp, model)
    if layout.cp > 1 and job.profile.context == "ulysses" and model.n_heads // layout.tp % layout.cp:
        raise JobError(
            f"cp={layout.cp} does not divide the {model.n_heads // layout.tp} heads that tp={layout.tp} "
            f"leaves of {model.name}, as Ulysses needs; context ring or all_gather would work"
        )
    if layout.pp > model.n_layers and not job.layers_per_stage:
        raise JobError(f"pp={layout.pp} stages for {model.n_layers} layers of {model.name}: at most one each")
    if layout.ep > 1 and not model.n_experts:
        raise JobError(
            f"ep={layout.ep}: {model.name} is dense, it has no experts to deal out; ep 1 would work"
        )
    if layout.ep > 1 and model.n_experts % layout.ep:
        raise JobError(
            f"ep={layout.ep} does not divide the {model.n_experts} experts of {model.name}; "
            f"{near_divisors(model.n_experts, layout.ep)} would work"
        )
    _check_expert_tp(job)
    shares = {"cp": layout.cp} | ({"tp": layout.tp} if job.sequence_parallel else {})
    if job.seq_len % (n_ranks := math.prod(shares.values())):
        raise JobError(
            f"seq_len={job.seq_len} does not divide over {'*'.join(shares)} = "
            f"{'*'.join(map(str, shares.values()))} ranks; {near_multiples(job.seq_len, n_ranks)} would work"
        )


def possible_expert_tp(model: Model, layout: Mapping[str, int], *, sequence_parallel: bool) -> list[int]:
    """Return the ranks that an expert of *model* can be cut over in a *layout* of degrees, at most ``tp``.

    >>> from foretrace.simulator.models.sources import load_model
    >>> mixtral = load_model("mixtral-8x7b")
    >>> possible_expert_tp(mixtral, {"tp": 4, "dp": 2, "ep": 8}, sequence_parallel=True)
    [1]
    """
    dp, cp, tp, ep = (layout.get(axis, 1) for axis in ("dp", "cp", "tp", "ep"))
    return [
        n
        for n in range(1, tp + 1)
        if tp % n == 0
        and dp * cp * tp % (ep * n) == 0
        and model.moe_ffn_hidden % n == 0
        and (sequence_parallel or n == tp)
    ]


def _check_expert_tp(job: Job) -> None:
    """Raise JobError unless experts can be cut as the layout says."""
    layout, model = job.layout, job.model
    if not layout.expert_tp:
        return
    if not model.n_experts:
        raise JobError(f"expert_tp={layout.expert_tp}: {model.name} has no experts")
    width = model.moe_ffn_hidden
    if width % layout.expert_tp:
        raise JobError(
            f"expert_tp={layout.expert_tp} does not divide the inner width {width} of an expert of "
            f"{model.name}; {near_divisors(width, layout.expert_tp)} would work"
        )
    if layout.tp > 1 and not job.sequence_parallel:
        raise JobError(
            f"expert_tp={layout.expert_tp} beside tp={layout.tp} needs sequence_parallel: otherwise every "
            f"tensor-parallel rank sends the same tokens; or expert_tp={layout.tp}"
        )


def check_schedule(job: Job) -> None:
    """Raise JobError if the pipeline schedule asks for something that the rest of the job does not have."""
    if reason := why_not_schedule(job, job.schedule, job.virtual_stages):
        raise JobError(f"schedule {job.schedule} {reason}")


def why_not_schedule(job: Job, schedule: str, virtual_stages: int | None) -> str:
    """Return why *job* cannot run by *schedule* with *virtual_stages*; empty if it can."""
    return why_not_combined(job, virtual_stages or 1) if schedule == "combined-1f1b" else ""


def why_not_combined(job: Job, virtual_stages: int) -> str:
    """Return why Megatron-LM would not run the micro-batches of *job* in pairs; empty if it would.

    A pair of a forward and a backward is of two virtual stages, or of a model that no pipeline cuts
    (megatron/core/transformer/transformer_config.py, ``overlap_moe_expert_parallel_comm``).
    """
    pp = job.layout.pp
    if job.layout.ep == 1:
        plain = "interleaved-1f1b" if pp > 1 else "1f1b"
        return f"hides what experts exchange, and with ep=1 they exchange nothing; {plain} would work"
    if pp > 1 and virtual_stages == 1:
        return (
            f"with pp={pp} needs virtual_stages of 2 or more: Megatron-LM pairs micro-batches of different "
            "virtual stages; or 1f1b, or dualpipe-v"
        )
    if job.recompute == "full" or "moe" in job.recomputed_modules:
        again = "recompute=full" if job.recompute == "full" else "recompute_modules moe"
        return f"does not run with {again}, which would exchange tokens again; other modules would work"
    return ""


def check_offload(job: Job) -> None:
    """Raise JobError unless what is to be offloaded is something, and layers by number are Megatron-LM's way.

    Reference: Megatron-LM ``transformer_config.py``, ``cpu_offloading_num_layers``.
    """
    if job.offload == "none" and job.offload_to != "host":
        raise JobError(f"offload_to={job.offload_to!r} needs offload: nothing is offloaded")
    if OPTIMIZERS[job.optimizer].iterations and job.offload not in ("none", "activations"):
        raise JobError(
            f"offload={job.offload} with optimizer={job.optimizer}: its products run on the device; offload "
            "none or activations, or another optimizer"
        )
    number, n_layers = job.offload_layers, job.model.n_layers
    if not number:
        return
    what = f"offload_layers={number}"
    if job.offload not in ("activations", "all"):
        raise JobError(f"{what} needs offload=activations (or all): it says whose activations travel")
    if not 0 < number < n_layers:
        most = f"at most {n_layers - 1} of the {n_layers} layers of {job.model.name}"
        raise JobError(f"{what}: {most}; 0 is all of them")
    if job.layout.pp > 1:
        raise JobError(
            f"{what} with pp={job.layout.pp}: in a pipeline all layers are offloaded or none (Megatron-LM)"
        )
    if job.recompute != "none":
        raise JobError(
            f"{what} with recompute={job.recompute}: layers whose activations travel are not computed again "
            "(Megatron-LM); recompute none, or offload_layers 0"
        )


def check_recipe(job: Job) -> None:
    """Raise JobError or CatalogError unless the device can multiply what the recipe quantises.

    Scales of 8 bits per 32 values came with the tensor cores that also take 4 bits (Transformer Engine
    ``quantization.py``, ``check_mxfp8_support``: compute capability 10.0).
    """
    if not job.fp8:
        if job.recipe:
            raise JobError(f"recipe={job.recipe!r} needs fp8: it says how products are quantised")
        return
    name = job.recipe or job.profile.fp8_recipe
    for device in (kind.device for kind in job.cluster.kinds):
        device.peak(RECIPES[name].dtype)
        if name == "mxfp8" and "fp4" not in device.peak_flops_per_s:
            raise JobError(
                f"recipe='mxfp8': tensor cores of {device.name} take no scales per 32 values, those of "
                "Blackwell do; delayed, current or blockwise would work"
            )


def check_heads(tp: int, model: Model) -> None:
    """Raise JobError unless *tp* ranks have the same number of attention heads each."""
    if model.n_heads % tp:
        raise JobError(
            f"tp={tp} does not divide the {model.n_heads} attention heads of {model.name}; "
            f"{near_divisors(model.n_heads, tp)} would work"
        )


def check_mixers(tp: int, cp: int, model: Model) -> None:
    """Raise JobError unless it is known how *tp* x *cp* ranks share each mixer of *model*.

    Heads of a recurrence are dealt out to both. Reference: Megatron-LM ``ssm/mamba_context_parallel.py``.
    """
    if tp * cp == 1:
        return
    for kind in _mixers(model):
        if not KINDS[kind].is_cut:
            raise JobError(
                f"tp={tp}, cp={cp}: how ranks would share {kind} layers of {model.name} is not known; "
                "tp=1 with cp=1 would work, with pp, ep and sharding"
            )
        scan_of = KINDS[kind].scan
        scan = scan_of(model, 1, 0) if scan_of else None
        if scan and (scan.groups % (tp * cp) or scan.heads % (tp * cp)):
            raise JobError(
                f"tp*cp = {tp}*{cp} = {tp * cp} does not divide the {scan.groups} heads of keys that {kind} "
                f"layers of {model.name} have; {near_divisors(scan.groups, tp * cp)} would work"
            )


@lru_cache(maxsize=16)
def _mixers(model: Model) -> tuple[str, ...]:
    """Return the mixers of *model*; whoever tries thousands of jobs asks for those of few models."""
    return tuple(filter(None, dict.fromkeys(map(model.mixer, range(model.n_layers)))))


def counted_layers(n_layers: int, counted_ends: str) -> int:
    """Return the layers that are shared out: those of the model, and ends that count as one.

    >>> counted_layers(126, "none"), counted_layers(126, "head"), counted_layers(126, "both")
    (126, 127, 128)
    """
    return n_layers + {"none": 0, "both": 2}.get(counted_ends, 1)


def check_chunks(job: Job) -> None:
    """Check that every virtual stage gets the same number of layers, where the framework cannot do otherwise.

    A list of layers per stage says outright what each gets, and is always possible. Raises JobError if they
    do not; the message has the nearest numbers that work.
    """
    schedule = SCHEDULES.get(job.schedule)
    if schedule is None or not schedule.is_flexible or not job.profile.even_chunks or job.layers_per_stage:
        return
    pp, virtual = job.layout.pp, job.virtual_stages or schedule.virtual_stages
    n_layers = counted_layers(job.model.n_layers, job.counted_ends)
    if pp == 1 or virtual == 1 or n_layers % (pp * virtual) == 0:
        return
    ends = "" if n_layers == job.model.n_layers else f" with counted_ends {job.counted_ends}"
    raise JobError(
        f"{n_layers} layers of {job.model.name}{ends} do not divide into pp*virtual_stages = "
        f"{pp}*{virtual} = {pp * virtual}; {_others(job, n_layers, pp, virtual)} would work, or "
        f"layers_per_stage with {pp * virtual} numbers"
    )


def _others(job: Job, n_layers: int, pp: int, virtual: int) -> str:
    """Return what else would do in words: other virtual stages, counted ends, or other pipeline ranks."""
    if n_layers % pp == 0:
        return f"virtual_stages {near_divisors(n_layers // pp, virtual)}"
    if counted_layers(job.model.n_layers, "both") % (pp * virtual) == 0:
        return "counted_ends both"
    if n_layers % virtual == 0 and n_layers > virtual:
        return f"pp {near_divisors(n_layers // virtual, pp)}"
    return "schedule 1f1b"
