"""What training frameworks keep in memory, leave unfused and overlap: conventions of one, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Final

from foretrace.door import own_table
from foretrace.simulator.errors import JobError
from foretrace.simulator.nearest import near_name

SELECTIVE: Final = ("core", "operations")
SPLITS: Final = ("even", "cost")
WRAPS: Final = ("block", "model")
CONTEXTS: Final = ("all_gather", "ring", "ulysses")
DISPATCHES: Final = ("copies", "once")
EXPERT_TPS: Final = ("tp", "one", "open")
AMAX_RANKS: Final = ("stage", "tp")
ROTARIES: Final = ("complex", "halves")
GRAPHED: Final = ("attention", "mlp", "router", "dispatch", "step")
COUNTS: Final = (
    *("host_work", "host_per_tensor_rank", "bucket_mib", "step_host_s", "allocator_slack", "update_launches"),
    *("router_launches", "dispatch_launches", "latent_launches", "dispatch_processors"),
    *("unit_calls", "tensor_calls", "update_calls"),
)

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

    docs/frameworks.md says what each means; those of memory, and units, are below.

    Attributes:
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
        keeps_gate_output: the activated gate is kept beside gate, up and their product: no fused kernel.
        keeps_norm_in_fp32: inputs of norms are kept in fp32 too: no fused kernel.
        allocator_slack: share of the allocated peak that the caching allocator reserves beside it.
        host_work: time of the host per operation, over that of Megatron-DeepSpeed, on which the ``launch`` of
            devices was measured.
        graphed: what is captured in CUDA graphs, whose kernels the host launches at once, of ``GRAPHED``: the
            ``"attention"`` block, the ``"mlp"`` block that is dense or has experts of a fixed capacity, of
            other experts the ``"router"`` or what prepares ``"dispatch"``, or all of a ``"step"``, in which
            the host waits for nothing.
        router_launches, dispatch_launches: operations that the host launches, each way, to choose experts for
            tokens; and to find out how many go where, beside what sorts them.
        latent_launches: operations that the host launches, each way, to join latent queries and keys with
            what is rotated of them; 2 where fused kernels rotate.
        update_launches: operations that the host launches for each tensor of parameters that a rank updates:
            its gradient is cast, or its new value copied to where it is used.
        unit_calls, tensor_calls: operators that the host calls, each way, to gather and free a unit and to
            reduce its gradients under full sharding, and for each of its tensors; ``update_calls`` for each
            tensor that the optimizer then updates. They count where the device waits for the host.
        dispatch_processors: processors of a GPU that such an exchange takes from what runs beside it.
        expert_tp: over how many ranks an expert is cut where a run does not say: as many as layers
            (``"tp"``), ``"one"`` where experts are dealt out, or that is ``"open"``.
        norm_reductions: times that the optimizer sums the gradient of each norm over tensor-parallel ranks,
            one by one: DTensor leaves them partial, and AdamW without fusion asks for each three times.
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
    graphed: tuple[str, ...] = ()
    router_launches: int = 3
    dispatch_launches: int = 0
    latent_launches: int = 2
    update_launches: float = 0.0
    unit_calls: int = 0
    tensor_calls: int = 0
    update_calls: int = 0
    host_per_tensor_rank: float = 0.0
    fused_wgrad: bool = True
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = False
    fp8_param_gather: bool = False
    reduces_in_16_bit: bool = False
    no_sync: bool = True
    copies_once: bool = False
    bucket_mib: float = 0.0
    buckets_first_chunk_only: bool = False
    async_tp: bool = False
    batch_first: bool = False
    overlap_tp_backward: bool = True
    p2p_scattered: bool = False
    context: str = "all_gather"
    expert_dispatch: str = "copies"
    dispatch_fp8: bool = False
    dispatch_processors: int = 0
    expert_tp: str = "open"
    fp8_activation_inputs: bool = False
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
        for name in COUNTS:
            if (value := getattr(self, name)) < 0:
                raise JobError(f"framework {self.name}: {name}={value}: not negative")
        if strange := set(self.graphed) - set(GRAPHED):
            raise JobError(f"framework {self.name}: graphed={sorted(strange)}: of {', '.join(GRAPHED)}")
        if unknown := set(self.eager) - set(EAGER_PARTS):
            raise JobError(
                f"framework {self.name}: eager={sorted(unknown)}: of {', '.join(sorted(EAGER_PARTS))}"
            )


# Profiles of training frameworks: loaded by name, found by what people call them, changed by a job.
#
# Never chosen by a model or a run.


@cache
def framework_names() -> tuple[str, ...]:
    """Return the names of the profiles, sorted."""
    folder = resources.files("foretrace.simulator") / "frameworks"
    found = [entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")]
    return tuple(sorted(found))


@cache
def load_framework(name: str) -> Framework:
    """Return a profile by name. Raises JobError if there is none of that name.

    >>> load_framework("megatron").logits_kept_bytes
    4
    """
    if name not in framework_names():
        raise JobError(f"framework={name!r}: {near_name(name, framework_names(), 'one of')}")
    given = own_table(f"simulator/frameworks/{name}.toml")
    # Lists become tuples: a profile is the key of caches.
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
    }
    missing = [f.name for f in fields(Framework) if f.default is MISSING and f.default_factory is MISSING]
    if absent := [key for key in missing if key not in values and key != "name"]:
        raise JobError(f"framework {name}: missing {', '.join(absent)}")
    return Framework(name=name, **values)


NAMES: Final = ("matches", "library", "technique")
"""What tells which profile a text speaks of, the most telling first."""

OVERRIDABLE: Final = tuple(
    found.name for found in fields(Framework) if found.name not in ("name", *NAMES, "sources")
)
"""Conventions that a job may set for itself."""


def profile(name: str, settings: tuple[tuple[str, object], ...]) -> Framework:
    """Return the profile *name* with *settings* in place of what it says.

    >>> profile("megatron", (("overlap_grad_reduce", False),)).overlap_grad_reduce
    False

    Raises JobError if there is no such profile or convention, or a value has the wrong kind.
    """
    return _profile(name, settings, tuple(type(value) for _, value in settings))


_KINDS: Final[Mapping[type, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a word",
    tuple: "a list of words",
}
"""Types of conventions, as messages name them."""


@cache
def _profile(name: str, settings: tuple[tuple[str, object], ...], _types: tuple[type, ...]) -> Framework:
    """Return what ``profile`` does; by types too, as 1 and True are the same key of a cache."""
    base = load_framework(name)
    for key, value in settings:
        if key not in OVERRIDABLE:
            raise JobError(f"framework convention {key!r}: {near_name(key, OVERRIDABLE, 'it has')}")
        old = getattr(base, key)
        # ``type``, not ``isinstance``: a bool is an int, and no number of launches.
        fits = type(value) is type(old) or (isinstance(old, float) and type(value) is int)
        if not fits:
            raise JobError(f"framework convention {key}={value!r}: must be {_KINDS[type(old)]}")
    return replace(base, **dict(settings))  # type: ignore[arg-type]


def framework_of(text: str, otherwise: str = "megatron") -> str:
    """Return the name of the profile that *text* speaks of; *otherwise* if it speaks of none.

    An engine counts before a library around it, and that before a word for what many frameworks do; of
    several the longest, so that "Megatron-DeepSpeed" is not Megatron-LM.

    >>> framework_of("nanotron v0.5"), framework_of("Megatron-DeepSpeed"), framework_of("TRL, FSDP")
    ('nanotron', 'megatron-deepspeed', 'transformers')
    """
    for kind in NAMES:
        found = [
            (len(part), name)
            for name in framework_names()
            for part in getattr(load_framework(name), kind)
            if part in text.lower()
        ]
        if found:
            # The longest one; of equals the last by name, so that the answer never changes.
            return max(found)[1]
    return otherwise


def profile_meant(text: str) -> str:
    """Return what to add to the refusal of a profile named *text*; nothing if no profile speaks of it.

    >>> profile_meant("accelerate"), profile_meant("x")
    ('; accelerate has the profile transformers', '')
    """
    found = framework_of(text, "")
    return f"; {text} has the profile {found}" if found else ""
