"""The job that a run was: model, layout, batch and machine, out of what its writer noted and its spans show.

``foretrace simulate --like RUN`` starts from it. What is read off and what is only likely is kept as notes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from simulator.config import CONVENTIONS, KINDS, TABLES, job_from
from simulator.errors import LikeError, TableError
from simulator.idle import why_idle
from simulator.job import FULLY_SHARDED, PRECISIONS, SHARDINGS, Job
from simulator.models.model import Model
from simulator.recorded.model import recorded_model
from simulator.validate.hardware import device_of
from topologies.catalog import load_cluster, names
from traces.columns import factorized, int64, is_one_of, labels
from traces.run import Run

OWN: Final = ("model", "cluster", "gpus", "global_batch", "steps", *TABLES["variation"])
"""Settings that are not taken over from a simulated run: they come from elsewhere, or are of it alone."""

PYTORCH: Final = "torchtitan"
"""Profile of the conventions of PyTorch itself, which the recorder works in."""

WAITS: Final = ("prefetch_forward", "prefetch_backward", "overlap_tp_backward")
"""Conventions that a processor cannot keep: it has no streams, so that FSDP2 and tensor parallelism wait for
every collective where it is called."""

NORM_BYTES: Final = 64
"""Most bytes of an all-reduce that sums the norm of all gradients; losses are averaged in as few."""

_LAYOUT: Final = tuple(TABLES["layout"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Like:
    """What a run says about the job that it was.

    Attributes:
        model: None if ``missing_model`` says why not.
        missing_model: one line.
        settings: of the job, by name; those that the run does not tell are left out.
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


GATHERED_ONCE: Final = 1.25
"""All-gathers per reduce-scatter up to which inputs are gathered once: between once, 1, and twice, 1.5."""


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
    data-parallel rank keeps its share of the batch, so that the global batch grows with ``dp``.

    Raises:
        LikeError: the run does not tell something that the job needs and *given* does not say.
        SimulationError, TopologyError, TraceError: the job is not possible.
    """
    found = like(run)
    known = {name: value for name, value in found.settings.items() if name in KINDS}
    settings = {**known, **{name: value for name, value in given.items() if value is not None}}
    if single := {**known.get(CONVENTIONS, {}), **(given.get(CONVENTIONS) or {})}:
        settings[CONVENTIONS] = single
    if "gpus" in given and "dp" not in given:
        settings.pop("dp", None)
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
    conventions = dict(found.conventions)
    if job.cluster.device.kind == "cpu":
        conventions |= {name: False for name in WAITS if not why_idle(job, name)}
        conventions["overlap_grad_reduce"] = job.sharding not in FULLY_SHARDED
    conventions |= given.get(CONVENTIONS) or {}
    return replace(job, framework=PYTORCH, conventions=tuple(sorted(conventions.items())))


def _check_enough(run: Run, found: Like, settings: Mapping[str, Any]) -> None:
    """Raise LikeError if something is missing that a job needs."""
    if "model" not in settings and found.model is None:
        raise LikeError(found.missing_model)
    if not {"dp", "gpus"} & set(settings):
        raise LikeError(
            f"{run.path} does not say how its {run.info.world_size} ranks were laid out: give --dp "
            "and the other degrees"
        )
    if "cluster" not in settings:
        raise LikeError(_which_cluster(run))
    if "seq_len" not in settings or "micro_batch" not in settings:
        raise LikeError(f"{run.path} does not say the shape of its batches: give --micro-batch and --seq-len")


def _dp(settings: Mapping[str, Any]) -> int:
    """Return the data-parallel degree of *settings*, given or what fills the GPUs."""
    if "dp" in settings:
        return int(settings["dp"])
    replica = int(np.prod([settings.get(axis, 1) for axis in ("pp", "cp", "tp")]))
    return max(int(settings["gpus"]) // replica, 1)


def _which_cluster(run: Run) -> str:
    """Say that a machine must be named, and which have the device of the run."""
    device = ((run.info.cluster or {}).get("device") or {}).get("name", "")
    try:
        known = device_of(device).name if device else ""
    except TableError:
        known = ""
    has_it = [name for name in names() if load_cluster(name).device.name == known] if known else []
    advice = f": {', '.join(has_it)} have it" if has_it else ", as foretrace topology list shows them"
    what = (
        f"ran on {device}, but does not say how its machines are wired"
        if device
        else "does not say its machine"
    )
    return f"{run.path} {what}: give --cluster{advice}"


def _reader(run: Run) -> Callable[[Run], tuple[dict[str, Any], list[str]]]:
    """Return what reads the settings of a run of its kind."""
    if "rehearsed" in (run.info.job or {}):
        return _rehearsed
    return _simulated if run.info.origin == "simulated" else _recorded


def _rehearsed(run: Run) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a script that was rehearsed: as if recorded, its kernels and machine known."""
    settings, notes = _recorded(run)
    job = run.info.job or {}
    settings["cluster"] = (run.info.cluster or {}).get("name", "")
    settings["precision"] = job["precision"]
    settings["conventions"] = (*settings["conventions"], ("eager", tuple(job["eager"])))
    return settings, [*notes, f"in kernels of their own: {', '.join(job['eager'])}"]


def _simulated(run: Run) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a simulated run, which knows its job."""
    job, layout = run.info.job or {}, run.info.layout
    settings = {name: value for name, value in job.items() if name in KINDS and name not in OWN}
    settings |= dict(layout.degrees) if layout is not None else {}
    settings["n_microbatches"] = int(job.get("n_microbatches", 1))
    if name := (run.info.cluster or {}).get("name"):
        settings |= {"cluster": name, "gpus": run.info.world_size}
    return settings, ["every setting is that of the simulated run"]


def _recorded(run: Run) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a recorded run, as far as it tells them."""
    job, layout, notes = run.info.job or {}, run.info.layout, []
    settings: dict[str, Any] = {"n_microbatches": _n_microbatches(run, job)}
    if layout is not None:
        settings |= layout.degrees | {"gpus": run.info.world_size}
    shape = job.get("input_shape")
    if isinstance(shape, list) and len(shape) == 2:  # sequences, tokens
        settings |= {"micro_batch": int(shape[0]), "seq_len": int(shape[1])}
    device = (run.info.cluster or {}).get("device") or {}
    if device.get("kind") == "cpu":
        settings["cluster"] = "localhost"
        notes.append("no GPU was used: the machine is localhost")
    precision = (run.info.model or {}).get("dtype")
    if precision in PRECISIONS:
        settings["precision"] = precision
    seen = _seen(run)
    sharding = job.get("sharding")
    settings["sharding"] = sharding if sharding in SHARDINGS else "ddp"
    settings["fp32_gradients"] = ("fp32" in seen["reduced"]) if seen["reduced"] else True
    settings["recompute"] = "full" if "recompute" in seen["kinds"] else "none"
    settings["sequence_parallel"] = ("reduce_scatter", "tp") in seen["collectives"]
    settings["conventions"] = _conventions(run)
    notes.append("conventions are those of PyTorch, run eagerly")
    if schedule := job.get("schedule"):
        settings |= {"schedule": schedule} | _virtual(run)
    return settings, notes


def _conventions(run: Run) -> tuple[tuple[str, object], ...]:
    """Return how this training differs from what PyTorch does by default."""
    clips = any(_sums_norm(run, rank) for rank in run.stored_ranks)
    keeps = any(_keeps_gathered(run, rank) for rank in run.stored_ranks)
    said = {"copies_gathered": True, "grad_norm": clips, "keeps_gathered_inputs": keeps}
    return *said.items(), ("norm_reductions", _norm_reductions(run))


def _norm_reductions(run: Run) -> int:
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
        layers = len(np.unique(int64(table, "layer")[passes])) - bool(
            (int64(table, "layer")[passes] < 0).any()
        )
        for number in np.unique(step[passes & (step >= 0)]).tolist():
            last = start[passes & (step == number)].max()
            count = int((sums & (step == number) & (start > last)).sum())
            found.append(count // (2 * layers) if layers else 0)
    return int(np.median(found)) if found else 0


def _keeps_gathered(run: Run, rank: int) -> bool:
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


def _sums_norm(run: Run, rank: int) -> bool:
    """Return whether *rank* all-reduces a few bytes in steps, as clipping by the norm of gradients does."""
    table = run.spans([rank])
    small = (int64(table, "size_bytes") <= NORM_BYTES) & (int64(table, "step") >= 0)
    return bool((small & is_one_of(table, "kind", ("all_reduce",))).any())


def _virtual(run: Run) -> dict[str, int]:
    """Return the stages per pipeline rank, {} if there is one."""
    most = max(int(int64(run.spans([rank]), "virtual_stage").max(initial=-1)) for rank in run.stored_ranks)
    return {"virtual_stages": most + 1} if most > 0 else {}


def _seen(run: Run) -> dict[str, set[Any]]:
    """Return which kinds of compute and of collectives there are, and in what gradients are reduced."""
    found: dict[str, set[Any]] = {"kinds": set(), "collectives": set(), "reduced": set()}
    for rank in run.stored_ranks:
        table = run.spans([rank])
        columns = [labels(table, name) for name in ("category", "kind", "axis", "dtype")]
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


def _n_microbatches(run: Run, job: Mapping[str, Any]) -> int:
    """Return the forward passes of a rank per step: noted for a pipeline, counted otherwise.

    A block that is called once per pass has one span in it; those that others interrupt have more, so that
    the least number of spans that any block has in a step counts.
    """
    noted = job.get("n_microbatches") or job.get("forwards_per_step")
    if isinstance(noted, int) and noted > 0:
        return noted
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
