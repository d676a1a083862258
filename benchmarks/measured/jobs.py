"""Turns rows of published tables of training runs into jobs, and these into columns of settings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from foretrace.simulator.builder.stage_layers import split_layers
from foretrace.simulator.config import job_settings, with_expert_tp
from foretrace.simulator.errors import JobError, TableError
from foretrace.simulator.framework import framework_of, load_framework
from foretrace.simulator.job import Job, check_chunks, why_not_combined
from foretrace.simulator.memory.ranks import peak_bytes
from foretrace.simulator.models.model import Model
from foretrace.simulator.models.sources import load_model, names
from foretrace.simulator.network.cost import Network, network_of, placed
from foretrace.simulator.settings import CONVENTIONS
from foretrace.simulator.settings import SHAPE as SHAPE_SETTING
from foretrace.simulator.sharding import SHARDINGS
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.device import Device
from foretrace.traces.layout import Layout
from measured.machines import Machines, device_of, machine
from measured.spelling import (
    attention_kernel,
    capacity_of,
    conventions_of,
    conventions_then,
    counted_ends_of,
    expert_tp_of,
    fused_attention,
    fused_parts,
    has_dropout,
    is_hybrid,
    p2p_of,
    precision_of,
    recomputed,
    scaling_of,
    schedule_named,
    schedule_of,
    sharding_of,
    stated,
)
from measured.table import Row

GPT_LIKE: Final = re.compile(r"gpt|\bopt\b|bloom|mpt|bert|megatron")
"""Architectures with layer norms, biases, learned positions and no gate, unless a column says otherwise."""

OTHERS: Final = re.compile(
    r"\bt5|mamba|ssm|hybrid|\bvit\b|diffusion|\bdit\b|unet|encoder-decoder|rwkv|whisper"
)
"""Architectures that are not one stack of attention and MLP."""


PACKED: Final = re.compile(
    r"\bpacked\b|packed[ _]sequence|sequence packing|recipe v[\d.]+:\w*_(?:sft|lora|peft)_config"
)
"""Words for sequences that are filled with documents, each of which attends to itself alone; and recipes for
fine-tuning that do so, NVIDIA-NeMo/Megatron-Bridge ``scripts/performance/configs/llama``,
``packed_sequence_specs.packed_sequence_size``."""

DOCUMENT: Final = 512
"""Tokens of such a document where no more is said. Anything short gives the same step: at 512 of 4,096
tokens seven eighths of the scores are gone."""


def is_packed(row: Row) -> bool:
    """Return whether *row* says that its sequences are packed with documents shorter than they are."""
    words = f"{row.text('task')} {row.text('notes')}".lower()
    return bool(PACKED.search(words)) and row.integer("seq_len") > DOCUMENT


def model_of(row: Row) -> Model:
    """Return the columns of *row* over the preset that the name of its model begins with, if there is one."""
    name = row.text("model", "a model")
    base = _preset(name)
    if base is not None and not row.text("heads"):
        layers = row.integer("layers", base.n_layers)
        return replace(base, name=name, n_layers=layers, n_mtp=_mtp(base, layers))
    arch, hidden, heads = row.text("arch").lower(), row.count("hidden"), row.count("heads")
    layers = row.integer("layers", base.n_layers if base is not None else None)
    if OTHERS.search(arch):
        raise TableError(
            f"arch {row.text('arch')!r}: one stack of transformer layers, gpt, llama, moe or bert"
        )
    if "mla" in arch:
        return _with_latent_attention(base, row, name, layers)
    if base is not None and (base.hidden, base.n_heads) == (hidden, heads):
        return _over(base, row, name=name, n_layers=layers)
    gpt = bool(GPT_LIKE.search(arch))
    biases: dict[str, Any] = dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), gpt)
    return Model(
        name=name,
        n_layers=layers,
        hidden=hidden,
        n_heads=heads,
        n_kv_heads=row.integer("kv_heads", heads) or heads,
        head_dim=row.integer("head_dim", hidden // heads) or hidden // heads,
        ffn_hidden=row.integer("ffn_hidden"),
        vocab=row.integer("vocab"),
        gated=row.flag("gated", default=not gpt),
        tied_embeddings=row.flag("tied_emb", default=gpt),
        norm="layernorm" if gpt else "rmsnorm",
        **biases,
        max_positions=row.integer("seq_len") if gpt else 0,
        dropout=has_dropout(
            row.text("notes"), default=gpt and fused_attention(row.text("flash_attention")) is False
        ),
        causal="bert" not in arch,
        **_experts(row, layers),
    )


def _with_latent_attention(base: Model | None, row: Row, name: str, layers: int) -> Model:
    """Return the model of *row*, whose latent attention is that of *base* or of a preset of its width."""
    if base is None or not base.kv_lora_rank:
        base = _latent(row.count("hidden"), row.count("heads"))
    if base is None:
        raise TableError(f"model {name!r}: the widths of its latent attention are not given")
    dense = layers - row.integer("moe_layers", layers)
    vocab = row.integer("vocab", base.vocab)
    return replace(
        base, name=name, n_layers=layers, n_dense_layers=dense, n_mtp=_mtp(base, layers), vocab=vocab
    )


def _mtp(base: Model, layers: int) -> int:
    """Return the modules for multi-token prediction: a model cut to fewer layers is cut before them."""
    return base.n_mtp if layers == base.n_layers else 0


def _over(base: Model, row: Row, *, name: str, n_layers: int) -> Model:
    """Return the preset *base* with what *row* says of sizes: windows, norms and biases are in no column."""
    sizes: dict[str, Any] = {
        "n_kv_heads": row.integer("kv_heads", base.n_kv_heads),
        "head_dim": row.integer("head_dim", base.head_dim),
        "ffn_hidden": row.integer("ffn_hidden", base.ffn_hidden),
        "vocab": row.integer("vocab", base.vocab),
        "tied_embeddings": row.flag("tied_emb", default=base.tied_embeddings),
    }
    experts: dict[str, Any] = _experts(row, n_layers)
    sizes["dropout"] = has_dropout(row.text("notes"), default=base.dropout)
    return replace(base, name=name, n_layers=n_layers, n_mtp=_mtp(base, n_layers), **sizes, **experts)


def _experts(row: Row, layers: int) -> dict[str, Any]:
    """Return what a model with experts has beside its dense parts."""
    experts = row.integer("experts", 0)
    width = row.integer("moe_ffn_hidden", 0) or row.integer("ffn_hidden", 0)
    if experts < 2:
        return {}
    return {
        "n_experts": experts,
        "top_k": row.integer("top_k", 0),
        "moe_ffn_hidden": width,
        "n_shared_experts": row.integer("shared_expert_ffn", 0) // width if width else 0,
        "n_dense_layers": layers - row.integer("moe_layers", layers),
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


def _latent(hidden: int, heads: int) -> Model | None:
    """Return the preset with latent attention that is as wide; None if there is none.

    >>> _latent(7168, 128).name, _latent(4096, 32)
    ('deepseek-v3', None)
    """
    known = (load_model(name) for name in names())
    return next(
        (one for one in known if one.kv_lora_rank and (one.hidden, one.n_heads) == (hidden, heads)), None
    )


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
    notes, model, said = row.text("notes"), model_of(row), _said(row)
    precision = precision_of(row.text("precision"))
    sharding = sharding_of(row.text("sharding"))
    framework = framework_of(row.text("framework"), "torchtitan" if sharding == "fsdp" else "megatron")
    conventions = _conventions(row, framework)
    layout = _layout(row, model, {"framework": framework, CONVENTIONS: dict(conventions)})
    global_batch, micro_batch = _batch(row, layout.dp)
    fused = fused_attention(row.text("flash_attention"))
    return Job(
        model=model,
        cluster=_cluster(hardware_of(row), layout.world_size),
        layout=layout,
        global_batch=global_batch,
        micro_batch=micro_batch,
        seq_len=row.integer("seq_len"),
        document_len=DOCUMENT if is_packed(row) else 0,
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
        conventions=conventions,
        overlap_p2p=p2p_of(row.text("comm_overlap")),
        counted_ends=counted_ends_of(notes) if layout.pp > 1 else "none",
        capacity_factor=capacity_of(said) if model.n_experts else 0.0,
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


def _layout(row: Row, model: Model, given: dict[str, Any]) -> Layout:
    """Return the parallel degrees of *row*; data parallelism is what is left of its GPUs if not given.

    Over how many ranks experts are cut is decided as for any job with the settings *given*, if not stated.
    """
    degrees = {axis: row.count(axis, 1) for axis in ("pp", "cp", "tp", "ep")}
    rest = max(1, row.count("world_size", 1) // (degrees["pp"] * degrees["cp"] * degrees["tp"]))
    degrees["dp"] = row.count("dp", rest)
    noted = row.integer("expert_tp", expert_tp_of(row.text("notes")))
    if noted and model.n_experts:
        degrees["expert_tp"] = noted
    given = {**given, "sequence_parallel": row.flag("sp", default=True)}
    return Layout(**with_expert_tp(model, degrees, given)[0])


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


def _said(row: Row) -> str:
    """Return the notes of *row*, and what was run with what on what, as one text."""
    return " ".join(row.text(column) for column in ("notes", "framework", "model", "hardware"))


def _conventions(row: Row, framework: str) -> tuple[tuple[str, object], ...]:
    """Return what *row* says in any column about conventions of its *framework*."""
    said, kernel = _said(row), attention_kernel(row.text("flash_attention"))
    found: dict[str, Any] = dict(conventions_then(framework, row.text("date")))
    found.update(conventions_of(row.text("comm_overlap"), row.text("sharding"), said))
    if kernel:
        found["attention"] = (kernel, *load_framework(framework).attention)
    if fused := fused_parts(said):
        eager = found.get("eager", load_framework(framework).eager)
        found["eager"] = tuple(part for part in eager if part not in fused)
    return tuple(found.items())


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
    return _of(device_of(hardware), load_cluster("dgx-h100", n_gpus))


def _of(device: Device, cluster: Cluster) -> Cluster:
    """Return *cluster* with GPUs of that kind, in nodes of which neither price nor power is known.

    The catalogue makes the same of a file with a device over a base, see ``catalog._with_base``.
    """
    if device == cluster.device:
        return cluster
    return replace(cluster, device=device, price_usd_per_gpu_hour=None, node_power_w=None)


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
        return {"offload": "states" if SHARDINGS[sharding_of(sharding)].parameters else "optimizer"}
    return {}


ASSUMED: Final = {"recompute": "none", "virtual_pp": "1", "micro_batch": "1"}
"""What is taken for a setting that a row does not give, unless something below says better."""

RECOMPUTED_BY: Final = {"jax": "full"}
"""Frameworks that recompute unless they are told not to: MaxText ``configs/base.yml`` has ``remat_policy:
'full'``, Pax ``LmCloudSpmdAdam`` the policy ``SAVE_NOTHING``. The others recompute nothing by default."""

FILLED: Final = 0.95
"""Share of a device's memory that people fill at most: the allocator keeps some beside tensors."""


def filled(row: Row) -> tuple[Row, tuple[str, ...]]:
    """Return *row* with what it does not state, and that in words.

    Raises:
        TableError: the row does not say enough, or something the simulator does not have.
        SimulationError, TopologyError, TraceError: its layout, batch, model or machine is not possible.
    """
    unsaid = [name for name in ASSUMED if not stated(row.text(name))]
    taken = {name: ASSUMED[name] for name in unsaid}
    if "recompute" in taken:
        framework = framework_of(row.text("framework"))
        taken["recompute"] = RECOMPUTED_BY.get(framework, ASSUMED["recompute"])
    found = Row(taken, row.number).over(row)
    in_pipeline = row.integer("pp", 1) > 1
    if "micro_batch" in taken and not in_pipeline and stated(row.text("global_batch")):
        taken["micro_batch"] = str(largest_micro_batch(job_of(found)))
        found = Row(taken, row.number).over(row)
    matters = [name for name in unsaid if name != "virtual_pp" or in_pipeline]
    words = [f"{name} not stated: {taken[name]}" for name in matters]
    if is_packed(row):
        words.append(f"documents of a packed sequence not stated: {DOCUMENT} tokens each")
    return found, tuple(words)


def largest_micro_batch(job: Job) -> int:
    """Return the largest micro-batch that fits, a power of two times that of *job* which divides its batch.

    People who do not say theirs have usually taken it. Without a pipeline steps only get faster with it, and
    where recipes do state it, errors are a half to a fifth of those with one sequence
    (docs/accuracy-evidence.md).
    """
    room = FILLED * job.cluster.device.memory_bytes
    while job.n_microbatches % 2 == 0:
        larger = replace(job, micro_batch=2 * job.micro_batch)
        if peak_bytes(larger) > room:
            break
        job = larger
    return job.micro_batch


BY_STAGES: Final = ("", "1f1b", "interleaved-1f1b")
"""Schedules of which the number of virtual stages tells which one is meant."""

SIZES: Final = ((8, "1-8 GPUs"), (128, "9-128 GPUs"), (1024, "129-1,024 GPUs"))
LARGEST: Final = "over 1,024 GPUs"


@dataclass(frozen=True, slots=True, eq=False)
class StepJob:
    """What to simulate for a row.

    Attributes:
        job: on as many GPUs as took part.
        share: measured batch over that of the job: not 1 where the last micro-batch is not full.
        assumed: settings that the row does not give, in words.
    """

    job: Job
    share: float
    assumed: tuple[str, ...]

    @property
    def network(self) -> Network:
        """Network of the machine, with ranks where they were; one per machine and number of ranks."""
        return _network(self.job.cluster, self.job.layout.world_size, tuple(placed(self.job).items()))


def step_job(row: Row) -> StepJob:
    """Return what to simulate for *row*.

    Raises:
        TableError: the row does not say enough, or something the simulator does not have.
        SimulationError, TopologyError, TraceError: its layout, batch, model or machine is not possible.
    """
    row, words = filled(row)
    hardware = hardware_of(row)
    job = job_of(row)
    world_size = job.layout.world_size
    if (n_gpus := row.integer("world_size", world_size)) != world_size:
        raise TableError(f"world_size={n_gpus}: tp*pp*dp*cp is {world_size}")
    cluster = _machine(hardware, row.text("interconnect"), world_size, _n_nodes(row, world_size))
    virtual_stages = max(1, row.integer("virtual_pp", 1)) if job.layout.pp > 1 else 1
    named = schedule_named(row.text("schedule")) if job.layout.pp > 1 else ""
    schedule = named if named not in BY_STAGES else schedule_of(row.text("notes"), virtual_stages)
    unpaired = schedule == "combined-1f1b" and why_not_combined(job, virtual_stages) != ""
    job = replace(
        job,
        cluster=_of(device_of(hardware), cluster.sized(world_size)),
        schedule=schedule_of("", virtual_stages) if unpaired else schedule,
        virtual_stages=virtual_stages if virtual_stages > 1 else None,
        counted_ends=_counted_ends(job, job.layout.pp * virtual_stages),
    )
    said = list(words)
    try:
        check_chunks(job)
    except JobError:
        sizes = split_layers(job.model.n_layers, job.layout.pp * virtual_stages, job.counted_ends)
        job = replace(job, layers_per_stage=tuple(map(len, sizes)))
        said.append("layers do not divide into virtual stages: as equally as they go")
    share = row.number_in("global_batch", job.global_batch) / job.global_batch
    if unpaired:
        said.append("exchanges of experts beside another micro-batch, which this layout cannot have: without")
    if share != 1:
        said.append("global batch not a multiple of dp*micro_batch: the nearest one, and time in proportion")
    return StepJob(job, share, tuple(said))


def size_names() -> tuple[str, ...]:
    """Return the classes of the number of GPUs, from small to large."""
    return (*(name for _, name in SIZES), LARGEST)


def size_class(row: Row) -> str:
    """Return how large the machine of *row* was, in words."""
    n_gpus = row.integer("world_size")
    return next((name for most, name in SIZES if n_gpus <= most), LARGEST)


def _n_nodes(row: Row, world_size: int) -> int:
    return -(-world_size // row.count("gpus_per_node", 8))


def _counted_ends(job: Job, n_stages: int) -> str:
    """Return which ends of the model count as a layer: those without which there are more stages than layers.

    Llama 3.1 405B has 126 layers on 128 stages of which the first and the last hold embedding and head alone.
    """
    lacking = n_stages - job.model.n_layers
    return {1: "head", 2: "both"}.get(lacking, job.counted_ends)


@cache
def _machine(hardware: str, interconnect: str, n_gpus: int, n_nodes: int) -> Cluster:
    """Return the machine that the words name."""
    return machine(f"{hardware}; {interconnect}", n_gpus, n_nodes)


@cache
def _network(cluster: Cluster, n_gpus: int, settings: tuple[tuple[str, Any], ...]) -> Network:
    """Return the network of *n_gpus* of *cluster*, with *settings* of ``network_of``."""
    return network_of(cluster, n_gpus, **dict(settings))


def step_columns(row: Row, machines: Machines) -> dict[str, object]:
    """Return *row* in the columns of ``foretrace validate steps``.

    Where the last micro-batch is not full, the measured time is that of as many sequences as the job has.

    Raises:
        TableError: the row does not say enough, or something the simulator does not have.
        SimulationError, TopologyError, TraceError: its layout, batch, model or machine is not possible.
    """
    measured_s = row.above_zero("step_time_s")
    step = step_job(row)
    return {
        **columns_of(step.job, machines),
        "step_time_s": measured_s if step.share == 1 else measured_s / step.share,
        "assumed": "; ".join(step.assumed),
    }


def columns_of(job: Job, machines: Machines) -> dict[str, object]:
    """Return *job* in the columns of ``foretrace validate``: its settings, by their names."""
    settings = {**job_settings(job), "cluster": machines.name(job.cluster)}
    inside = {"model": settings.pop(SHAPE_SETTING, {}), "framework": settings.pop(CONVENTIONS, {})}
    named = {f"{table}.{name}": value for table, names_ in inside.items() for name, value in names_.items()}
    return {
        name: ",".join(map(str, value)) if isinstance(value, list | tuple) else value
        for name, value in {**settings, **named}.items()
    }
