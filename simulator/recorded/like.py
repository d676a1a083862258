"""The job that a run was: model, layout, batch and machine, out of what its writer noted and its spans show.

``foretrace simulate --like RUN`` starts from it. What is read off and what is only likely is kept as notes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from foretrace.simulator.config import job_from
from foretrace.simulator.errors import LikeError
from foretrace.simulator.idle import why_idle
from foretrace.simulator.job import PRECISIONS, Job
from foretrace.simulator.models.model import Model
from foretrace.simulator.recorded.model import recorded_model
from foretrace.simulator.settings import CONVENTIONS, KINDS, TABLES, checked
from foretrace.simulator.sharding import SHARDINGS
from foretrace.topologies.catalog import device_named, load_cluster, names
from foretrace.topologies.errors import TopologyError
from foretrace.traces.columns import factorized, int64, is_one_of, labels
from foretrace.traces.run import Run

# What the spans of a recording say of the training that it was, where its writer noted nothing.

NORM_BYTES: Final = 64
"""Most bytes of an all-reduce that sums the norm of all gradients."""

NEVER_NS: Final = np.iinfo(np.int64).max
"""A moment behind all others."""

GATHERED_ONCE: Final = 1.25
"""All-gathers per reduce-scatter up to which inputs are gathered once: between once, 1, and twice, 1.5."""


def norm_reductions(run: Run) -> int:
    """Return how often the optimizer sums the gradient of each norm over tensor-parallel ranks.

    Those are the all-reduces along ``tp`` behind the last backward pass of a step; a rank holds two norms in
    each layer that it has spans of, and the last one another.
    """
    found = []
    for rank in run.stored_ranks:
        table = run.spans([rank])
        step, start = int64(table, "step"), int64(table, "start_ns")
        sums = is_one_of(table, "kind", ("all_reduce",)) & is_one_of(table, "axis", ("tp",))
        passes = is_one_of(table, "kind", ("backward",)) & is_one_of(table, "category", ("compute",))
        # Layer -1 is what is outside of the layers.
        layers = len(np.unique(int64(table, "layer")[passes])) - bool(
            (int64(table, "layer")[passes] < 0).any()
        )
        for number in np.unique(step[passes & (step >= 0)]).tolist():
            last = start[passes & (step == number)].max()
            count = int((sums & (step == number) & (start > last)).sum())
            # Two norms in each layer; the one behind them disappears in the rounding down.
            found.append(count // (2 * layers) if layers else 0)
    return int(np.median(found)) if found else 0


def keeps_gathered(run: Run, rank: int) -> bool:
    """Return whether *rank* gathers inputs of tensor-parallel matrices for forward only, as DTensor does.

    Each block then gathers as often as it reduce-scatters: twice. Where inputs are gathered again for the
    gradients of weights, it gathers three times.
    """
    table = run.spans([rank])
    along = is_one_of(table, "axis", ("tp",)) & (int64(table, "step") >= 0)
    gathers, scatters = (
        int((along & is_one_of(table, "kind", (kind,))).sum()) for kind in ("all_gather", "reduce_scatter")
    )
    return 0 < gathers <= GATHERED_ONCE * scatters


def sums_norm(run: Run, rank: int) -> bool:
    """Return whether *rank* all-reduces a few bytes ahead of its optimizer, as clipping by a norm does.

    Losses that are averaged are as small, but are so ahead of the backward pass or behind the optimizer.
    """
    table = run.spans([rank])
    step, start = int64(table, "step"), int64(table, "start_ns")
    kinds = is_one_of(table, "category", ("compute",))
    passes = kinds & is_one_of(table, "kind", ("backward", "backward_input", "backward_weight"))
    updates = kinds & is_one_of(table, "kind", ("optimizer",))
    small = (int64(table, "size_bytes") <= NORM_BYTES) & is_one_of(table, "kind", ("all_reduce",))
    for number in np.unique(step[small & (step >= 0)]).tolist():
        own = step == number
        # Where one of them is missing, the comparison below leaves out that side.
        behind, ahead = start[passes & own].max(initial=-1), start[updates & own].min(initial=NEVER_NS)
        if ((start[small & own] > behind) & (start[small & own] < ahead)).any():
            return True
    return False


def virtual_stages(run: Run) -> dict[str, int]:
    """Return the stages per pipeline rank, {} if there is one."""
    most = max(int(int64(run.spans([rank]), "virtual_stage").max(initial=-1)) for rank in run.stored_ranks)
    return {"virtual_stages": most + 1} if most > 0 else {}


def kinds_of_work(run: Run) -> dict[str, set[Any]]:
    """Return which kinds of compute and of collectives there are, and in what gradients are reduced."""
    found: dict[str, set[Any]] = {"kinds": set(), "collectives": set(), "reduced": set()}
    for rank in run.stored_ranks:
        table = run.spans([rank])
        columns = [labels(table, name) for name in ("category", "kind", "axis", "dtype")]
        # One row for each combination that there is: thousands of spans have a handful.
        _, rows = np.unique(factorized(*(codes for codes, _ in columns)), return_index=True)
        for row in rows:
            category, kind, axis, dtype = (names[codes[row]] for codes, names in columns)
            if category == "compute":
                found["kinds"].add(kind)
            elif category == "collective":
                found["collectives"].add((kind, axis))
                if axis == "dp" and kind in ("all_reduce", "reduce_scatter"):
                    found["reduced"].add({"float32": "fp32"}.get(dtype, dtype))
    return found


def n_microbatches_of(run: Run, job: Mapping[str, Any]) -> int:
    """Return the forward passes of a rank per step: noted for a pipeline, counted otherwise.

    A block that is called once per pass has one span in it; those that others interrupt have more, so that
    the least number of spans that any block has in a step counts.
    """
    noted = job.get("n_microbatches") or job.get("forwards_per_step")
    if isinstance(noted, int) and noted > 0:
        # A step may call the schedule several times, and the number is that of one call.
        return noted * (int(job.get("schedules_per_step", 1)) if "n_microbatches" in job else 1)
    rank = run.stored_ranks[0]
    table = run.spans([rank])
    kind, kinds = labels(table, "kind")
    name, _ = labels(table, "name")
    step = int64(table, "step")
    if "forward" not in kinds:
        return 1
    forward = (kind == kinds.index("forward")) & (step >= 0)
    if not forward.any():
        return 1
    steps = np.unique(step[forward])
    chosen = forward & (step == steps[len(steps) // 2])
    counts = np.bincount(name[chosen])
    return int(counts[counts > 0].min())


OWN: Final = ("model", "cluster", "gpus", "global_batch", "steps", *TABLES["variation"])
"""Settings that are not taken over from a simulated run: they come from elsewhere, or are of it alone."""

PYTORCH: Final = "torchtitan"
"""Profile of the conventions of PyTorch itself, which the recorder works in."""

MOST_BESIDE: Final = 0.02
"""Share of the parameters that may be trained beside a model without being part of its step: as of a loss."""

_LAYOUT: Final = tuple(TABLES["layout"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Like:
    """What a run says about the job that it was.

    Attributes:
        model: None if ``missing_model`` says why not.
        settings: settings of the job, by name; those that the run does not tell are left out.
        n_microbatches: forward passes of a rank per step.
        conventions: those of PyTorch that are different here, for a recorded run; None for others.
        notes: where the settings come from, as sentences.
    """

    model: Model | None
    missing_model: str
    settings: Mapping[str, Any]
    n_microbatches: int
    conventions: tuple[tuple[str, object], ...] | None
    notes: tuple[str, ...]


def like(run: Run) -> Like:
    """Return what *run* says about the job that it was; a simulated run says all of it."""
    try:
        model, missing = recorded_model(run.info.model, run.path), ""
    except LikeError as error:
        model, missing = None, str(error)
    settings, notes = _reader(run)(run)
    n_microbatches = settings.pop("n_microbatches", 1)
    conventions = settings.pop("conventions", None)
    return Like(
        model=model,
        missing_model=missing,
        settings=settings,
        n_microbatches=n_microbatches,
        conventions=conventions,
        notes=tuple(notes),
    )


def job_like(run: Run, given: Mapping[str, Any]) -> Job:
    """Return the job that *run* was, with the settings *given* in place of its own.

    Degrees that are given are changed, the others stay; ``gpus`` without ``dp`` changes ``dp``. Each
    data-parallel rank keeps its share of the batch, so that the global batch grows with ``dp``. Raises
    LikeError if the run does not tell something that the job needs and *given* does not say. Raises
    SimulationError, TopologyError, TraceError if the job is not possible.
    """
    found = like(run)
    # Fields that no job has are facts for this module alone.
    known = {
        name: checked(f"{run.path}: {name}", name, value)
        for name, value in found.settings.items()
        if name in KINDS
    }
    asked = {name: checked(name, name, value) for name, value in given.items() if value is not None}
    settings = {**known, **asked}
    if single := {**known.get(CONVENTIONS, {}), **(given.get(CONVENTIONS) or {})}:
        settings[CONVENTIONS] = single
    if "gpus" in given and "dp" not in given:
        # Then dp is what fills the GPUs that were asked for, not what the recorded run had.
        settings.pop("dp", None)
    # Degrees that are given decide how many GPUs there are, unless those are given, too.
    elif {*_LAYOUT} & set(given) and "gpus" not in given:
        settings.pop("gpus", None)
    _check_enough(run, found, settings)
    if "global_batch" not in given:
        settings["global_batch"] = settings.get("micro_batch", 1) * found.n_microbatches * _dp(settings)
    job = job_from(settings, model=None if "model" in given else found.model)
    if found.conventions is None:
        return job
    if "framework" in given:
        return job
    said = given.get(CONVENTIONS) or {}
    conventions = dict(found.conventions) | said
    job = replace(job, framework=PYTORCH, unsaid=(), conventions=tuple(sorted(conventions.items())))
    # What has no effect here is left out, for nobody to be told so; what was given stays.
    kept = tuple(one for one in job.conventions if one[0] in said or not why_idle(job, one[0]))
    return replace(job, conventions=kept)


def _check_enough(run: Run, found: Like, settings: Mapping[str, Any]) -> None:
    """Raise LikeError, which names all that is missing, if something is missing that a job needs."""
    missing = []
    if run.info.origin == "ingested" and "explained" not in (run.info.job or {}):
        missing.append(f"{run.path} was taken over without its operators: ingest its files with --explain")
    if "model" not in settings:
        missing += [found.missing_model] if found.model is None else _beside(run)
    if not {"dp", "gpus"} & set(settings):
        missing.append(
            f"{run.path} does not say how its {run.info.world_size} ranks were laid out: give --dp "
            "and the other degrees"
        )
    if "recompute" not in settings and found.conventions is not None:
        missing.append(
            f"{run.path} recomputes a part of its layers: give --recompute none, full, or selective, with "
            "the parts in --recompute-modules"
        )
    if "cluster" not in settings:
        missing.append(_which_cluster(run))
    if "seq_len" not in settings or "micro_batch" not in settings:
        shape = (run.info.job or {}).get("input_shape")
        inputs = f"has inputs of {' x '.join(map(str, shape))}, no" if shape else "does not tell its"
        missing.append(f"{run.path} {inputs} sequences of tokens: give --micro-batch and --seq-len")
    if missing:
        raise LikeError("; ".join(missing))


def _beside(run: Run) -> list[str]:
    """Return what to say of a run that trains more than its model, [] if it does not."""
    described, beside = run.info.model or {}, int((run.info.job or {}).get("beside_params") or 0)
    if beside <= MOST_BESIDE * (beside + int(described.get("n_params") or 0)):
        return []
    told = (
        f"{run.path} trains {beside:,} parameters beside its largest model, {described.get('name')}: "
        "give --model to simulate one model all the same"
    )
    return [told]


def _dp(settings: Mapping[str, Any]) -> int:
    """Return the data-parallel degree of *settings*, given or what fills the GPUs."""
    if "dp" in settings:
        return int(settings["dp"])
    # As ``gpus`` without ``dp`` fills a machine with replicas.
    replica = int(np.prod([settings.get(axis, 1) for axis in ("pp", "cp", "tp")]))
    return max(int(settings["gpus"]) // replica, 1)


def _which_cluster(run: Run) -> str:
    """Say that a machine must be named, and which have the device of the run."""
    if own := (run.info.cluster or {}).get("name"):
        return f"{run.path} is of {own!r}, {why_not_catalogue(run)}: give --cluster FILE.toml"
    device = ((run.info.cluster or {}).get("device") or {}).get("name", "")
    try:
        known = device_named(device).name if device else ""
    except TopologyError:
        known = ""
    has_it = [name for name in names() if load_cluster(name).device.name == known] if known else []
    advice = f": {', '.join(has_it)} have it" if has_it else ", as foretrace topology list shows them"
    what = (
        f"ran on {device}, but does not say how its machines are wired"
        if device
        else "does not say its machine"
    )
    return f"{run.path} {what}: give --cluster{advice}"


def _own_machine(run: Run) -> dict[str, str]:
    """Return the machine that *run* was simulated on; nothing if the catalogue does not have it."""
    name = (run.info.cluster or {}).get("name", "")
    return {"cluster": name} if name and not why_not_catalogue(run) else {}


def _reader(run: Run) -> Callable[[Run], tuple[dict[str, Any], list[str]]]:
    """Return what reads the settings of a run of its kind."""
    if "rehearsed" in (run.info.job or {}):
        return _rehearsed
    return _simulated if run.info.origin == "simulated" else _recorded


def _rehearsed(run: Run) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a script that was rehearsed: as if recorded, its kernels and machine known."""
    settings, notes = _recorded(run)
    job = run.info.job or {}
    settings |= _own_machine(run)
    settings["precision"] = job["precision"]
    settings["conventions"] = (*settings["conventions"], ("eager", tuple(job["eager"])))
    return settings, [*notes, f"in kernels of their own: {', '.join(job['eager'])}"]


def _simulated(run: Run) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a simulated run, which knows its job."""
    job, layout = run.info.job or {}, run.info.layout
    settings = {name: value for name, value in job.items() if name in KINDS and name not in OWN}
    own = {"gpus": run.info.world_size, **(layout.degrees if layout is not None else {})}
    if "outer" in (run.info.summary or {}):  # ranks and layout of the run are of one site, its job is of all
        own = {name: job[name] for name in own if name in job}
    settings["n_microbatches"] = int(job.get("n_microbatches", 1))
    settings |= _own_machine(run) | own
    return settings, ["every setting is that of the simulated run"]


def _recorded(run: Run) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a recorded run, as far as it tells them."""
    job, layout, notes = run.info.job or {}, run.info.layout, []
    settings: dict[str, Any] = {"n_microbatches": n_microbatches_of(run, job)}
    if layout is not None:
        settings |= layout.degrees | {"gpus": run.info.world_size}
    shape = job.get("input_shape")
    n_sides = 3 if job.get("input_is_embedded") else 2  # sequences, tokens, and the width of what is embedded
    if isinstance(shape, list) and len(shape) == n_sides:
        parts = 1 if layout is None else layout.cp  # of a sequence, of which the model is called with one
        settings |= {"micro_batch": int(shape[0]), "seq_len": int(shape[1]) * parts}
        if (n_shapes := job.get("input_shapes", 1)) > 1:
            notes.append(f"batches had {n_shapes} shapes, most often {shape[0]} x {shape[1]} tokens")
    device = (run.info.cluster or {}).get("device") or {}
    if device.get("kind") == "cpu":
        settings["cluster"] = "localhost"
        notes.append("no GPU was used: the machine is localhost")
    precision = (run.info.model or {}).get("dtype")
    if precision in PRECISIONS:
        settings["precision"] = precision
    seen = kinds_of_work(run)
    sharding = job.get("sharding")
    settings["sharding"] = sharding if sharding in SHARDINGS else "ddp"
    if isinstance(shard_ranks := job.get("shard_ranks"), int):
        settings["shard_ranks"] = shard_ranks
    # A run without reductions tells nothing of their type.
    settings["fp32_gradients"] = ("fp32" in seen["reduced"]) if seen["reduced"] else True
    # A part may be of many kinds: ``_check_enough`` asks which.
    if (recompute := recomputed(run)) != "part":
        settings["recompute"] = recompute
    if _has_tensor_parallelism(run):
        settings["sequence_parallel"] = ("reduce_scatter", "tp") in seen["collectives"]
    settings["conventions"] = _conventions(run)
    notes.append("conventions are those of PyTorch, run eagerly")
    if schedule := job.get("schedule"):
        settings |= {"schedule": schedule} | virtual_stages(run)
    return settings, notes


def _conventions(run: Run) -> tuple[tuple[str, object], ...]:
    """Return how this training differs from what PyTorch does by default."""
    clips = any(sums_norm(run, rank) for rank in run.stored_ranks)
    said: dict[str, object] = {"copies_gathered": True, "grad_norm": clips}
    if (run.info.job or {}).get("reshard_after_forward") is False:
        said["reshard_after_forward"] = False
    if _has_tensor_parallelism(run):
        said["keeps_gathered_inputs"] = any(keeps_gathered(run, rank) for rank in run.stored_ranks)
        said["norm_reductions"] = norm_reductions(run)
    return tuple(said.items())


def _has_tensor_parallelism(run: Run) -> bool:
    """Whether the ranks of *run* cut layers; otherwise it cannot tell how that is done."""
    return run.info.layout is not None and run.info.layout.tp > 1


WORDS: Final = frozenset({"name", "description", "sources", "digest"})
"""What is not compared figure by figure."""

MOST_NAMED: Final = 3
"""Most figures that are named where machines differ."""


def why_not_catalogue(run: Run) -> str:
    """Return why the machine of *run* cannot be had by its name, as a clause; empty if it can.

    The digests decide. A run that was made before there were any is compared by the figures that both have.
    """
    described = run.info.cluster or {}
    name = described.get("name", "")
    if name not in names():
        return "which the catalogue does not have"
    try:
        known = load_cluster(name, described.get("n_gpus"))
    except TopologyError as error:
        return f"not that of the catalogue ({error})"
    # Through JSON, as the description of the run came: tuples are lists then.
    there = json.loads(json.dumps(known.describe()))
    if described.get("digest") == there["digest"]:
        return ""
    other = different(described, there)
    if not other and "digest" not in described:
        return ""
    more = f" and {len(other) - MOST_NAMED} more" if len(other) > MOST_NAMED else ""
    return f"not that of the catalogue, which has another {', '.join(other[:MOST_NAMED]) or 'table'}{more}"


def different(one: Mapping[str, Any], other: Mapping[str, Any], place: str = "") -> list[str]:
    """Return where two descriptions of machines have another figure, of those that both have."""
    found = []
    for key in one.keys() & other.keys() - WORDS:
        here, there = one[key], other[key]
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            found += different(here, there, f"{place}{key}.")
        elif here != there:
            found.append(f"{place}{key}")
    return sorted(found)


WHOLE: Final = 0.75
"""Share of the FLOPs of a block from which it is taken to be computed again as a whole."""

Block = tuple[str, int, int, int]
"""Name of a block of a layer, its spans, their FLOPs, and when the first one began."""


def recomputed(run: Run) -> str:
    """Return ``"none"``, ``"full"``, or ``"part"``: of some layers, of their insides, all but some results.

    A checkpoint stops once it has what the backward needs, so that the last block of a layer may lack its
    last product, or be left out. Where nobody noted FLOPs, that a block is there counts for the whole of it.
    """
    found = set()
    for rank in run.stored_ranks:
        forward, again = _blocks(run, rank, "forward"), _blocks(run, rank, "recompute")
        if again and (-1 in again or not set(again) <= set(forward)):
            found.add("full")  # no layers to look into
        elif again:
            wholly = [_is_whole(forward[layer], again.get(layer, [])) for layer in forward if layer >= 0]
            found.add("full" if all(wholly) else "part")
    return "part" if "part" in found else "full" if found else "none"


def _is_whole(forward: list[Block], again: list[Block]) -> bool:
    """Return whether the blocks of a layer are computed *again* as in its *forward*, its last one aside."""
    if not again:
        return False
    # Blocks that are interrupted have several spans for each pass; the least is the number of passes.
    done = {name: flops / min(n for _, n, _, _ in again) for name, _, flops, _ in again}
    n_passes = min(n for _, n, _, _ in forward)
    last = max(forward, key=lambda block: block[3])[0]
    return all(
        name == last or (name in done and done[name] >= WHOLE * flops / n_passes)
        for name, _, flops, _ in forward
        # Where FLOPs are noted at all, blocks without any are not asked for.
        if flops or not any(other for _, _, other, _ in forward)
    )


def _blocks(run: Run, rank: int, kind: str) -> dict[int, list[Block]]:
    """Return the blocks of each layer of *rank* in passes of a kind."""
    table = run.spans([rank])
    codes, kinds = labels(table, "kind")
    categories, of = labels(table, "category")
    names, named = labels(table, "name")
    step, layer, flops, start = (int64(table, name) for name in ("step", "layer", "flops", "start_ns"))
    wanted = np.isin(codes, [i for i, one in enumerate(kinds) if one == kind])
    wanted &= np.isin(categories, [i for i, one in enumerate(of) if one == "compute"]) & (step >= 0)
    found: dict[int, list[Block]] = defaultdict(list)
    pairs, inverse = np.unique(np.stack([layer[wanted], names[wanted]]), axis=1, return_inverse=True)
    inverse = inverse.reshape(-1)
    for number, (at, code) in enumerate(pairs.T.tolist()):
        own = inverse == number
        block = (named[code], int(own.sum()), int(flops[wanted][own].sum()), int(start[wanted][own].min()))
        found[at].append(block)
    return found
