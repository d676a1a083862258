"""How long blocks computed in a recorded run, beside what each kind of operation in them should have taken.

Spans are put together by phase and part: attention, MLP, what else a layer does (norms, residuals), and what
is outside of the layers. Parts are made of matrix products, memory traffic and fixed costs in different
shares; that is what tells the factors apart.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from foretrace.simulator.compute.timing import ComputeModel, factor_of, fixed_s
from foretrace.simulator.errors import CalibrationError
from foretrace.simulator.job import Job
from foretrace.simulator.recorded.calibration import Factor
from foretrace.simulator.recorded.least_squares import Fit, Floats, fit_factors, median_error
from foretrace.simulator.workload.micro_batch import embedding_block, head_block, layer_blocks
from foretrace.simulator.workload.ops import DTYPE_BYTES, Comm, Op, memory
from foretrace.traces.columns import int64, labels
from foretrace.traces.run import Run

PHASES: Final = ("forward", "backward", "backward_input", "backward_weight", "recompute")
EXPECTED: Final[Mapping[str, float]] = MappingProxyType(
    {"products": 1.5, "attention": 2.0, "memory": 2.0, "fixed": 3.0, "copies": 3.0}
)
"""By what factor each may be off, either way, before anything was measured. A convention: products are known
best; what is in a cache moves many times as fast as memory, what was just allocated several times slower."""

COLUMNS: Final = tuple(EXPECTED)

MISFIT: Final = 0.05
"""Relative error of predicted compute of one part that no factor explains. A convention, of the size that
``foretrace validate kernels`` finds for single products."""

_ATTENTION: Final = re.compile(r"att|(^|\.)(wq|wk|wv|wo|qkv)\b")
_BETWEEN: Final = re.compile(r"\.(norm|residual)(\.|$)")
"""Names of operations that stand between the parts of a layer: of its own, not of its attention or MLP."""

Key = tuple[str, str]
"""Phase and part."""


class Compute(NamedTuple):
    """Factors on compute, and what the run cannot say about it."""

    factors: dict[str, Factor]
    not_identified: list[str]


def compute_factors(run: Run, job: Job, steps: Sequence[int], optimizer_s: float) -> Compute:
    """Return the factors with which the compute of *job* takes as long as it did in *steps* of *run*.

    Args:
        run: recorded, with spans that say forward and backward.
        job: the same job, on the machine of the catalogue.
        steps: to fit on.
        optimizer_s: how long an optimizer step should take on the mean rank.

    Raises:
        CalibrationError: the run has no compute that can be told by phase.
    """
    times, updates = measured(run, steps)
    has_glue = any(part == "layer" for _, part in times)
    wanted = predicted(run, job, has_glue=has_glue)
    keys = [key for key in sorted(times) if key in wanted and wanted[key].sum() > 0]
    if not keys:
        raise CalibrationError(
            f"{run.path} has no forward or backward compute in blocks: record it with foretrace record"
        )
    design = np.array([wanted[key] for key in keys])
    seen = np.array([times[key] for key in keys]).T  # (steps, keys)
    missed = sum(float(np.median(times[key])) for key in times if key not in keys and key[0] in PHASES)
    found = _identified(job, design, seen)
    if missed > 0:
        found.not_identified.append(f"{missed * 1e3:.2f} ms a step of compute that the job does not have")
    if optimizer_s > 0 and updates.any():
        ratio = updates / optimizer_s
        found.factors["optimizer"] = Factor(float(np.median(ratio)), median_error(ratio))
    else:
        found.not_identified.append("optimizer: no optimizer step in the run; the catalogue is used")
    return found


def measured(run: Run, steps: Sequence[int]) -> tuple[dict[Key, list[float]], Floats]:
    """Return by phase and part the seconds of each of *steps*, mean over ranks; and of the optimizer."""
    total: dict[Key, Floats] = defaultdict(lambda: np.zeros(len(steps)))
    place = {step: at for at, step in enumerate(steps)}
    for rank in run.stored_ranks:
        table = run.spans([rank])
        category, categories = labels(table, "category")
        if "compute" not in categories:
            continue
        rows = np.flatnonzero(category == categories.index("compute"))
        kinds, kind_names = labels(table, "kind")
        names, name_labels = labels(table, "name")
        layer, step, ns = (int64(table, name)[rows] for name in ("layer", "step", "duration_ns"))
        phase = [kind_names[code] for code in kinds[rows]]
        parts = [_part(name_labels[code], at) for code, at in zip(names[rows], layer.tolist(), strict=True)]
        for at, one, part, took in zip(step.tolist(), phase, parts, ns.tolist(), strict=True):
            if at in place:
                total[one, part if one in PHASES else ""][place[at]] += took / 1e9
    n = max(len(run.stored_ranks), 1)
    updates = total.pop(("optimizer", ""), np.zeros(len(steps))) / n
    return {key: (values / n).tolist() for key, values in total.items()}, updates


def predicted(run: Run, job: Job, *, has_glue: bool) -> dict[Key, Floats]:
    """Return by phase and part the seconds of products, memory traffic and fixed costs, mean over ranks."""
    compute = ComputeModel(job.cluster.device, job.precision)
    total: dict[Key, Floats] = defaultdict(lambda: np.zeros(len(COLUMNS)))
    for rank in run.stored_ranks:
        for block, part in _blocks(run, job, rank):
            for phase in PHASES:
                for op in block.phases[phase]:
                    if not isinstance(op, Comm):
                        between = has_glue and part != "ends" and _BETWEEN.search(op.name)
                        total[phase, "layer" if between else part] += _by_cause(op, compute)
        if has_glue:
            for part, phase, op in _copies(run, job, rank):
                total[phase, part] += _by_cause(op, compute)
    n = max(len(run.stored_ranks), 1)
    return {key: values * job.n_microbatches / n for key, values in total.items()}


def _copies(run: Run, job: Job, rank: int) -> Iterable[tuple[str, str, Op]]:
    """Yield the part, phase and operation of what full sharding copies: gathered parameters, gradients.

    The recorder counts it to the layer around its parts, or to what is outside; the simulator to nobody.
    """
    if not job.shards.parameters or not job.profile.copies_gathered:
        return
    width, other = DTYPE_BYTES[job.precision], DTYPE_BYTES[job.gradient_dtype]
    layout, model = job.layout, job.model
    split = layout.tp, layout.ep, layout.etp
    again = job.profile.reshard_after_forward and job.profile.wrap == "block"
    sizes = [("layer", model.layer_params(layer, *split), again) for layer in _layers(run, job, rank)]
    ends = [block for block, part in _blocks(run, job, rank) if part == "ends"]
    sizes += [("ends", block.params, again and block.name != "head") for block in ends]
    for part, n_params, twice in sizes:
        gathered = memory("copy.parameters", 2 * width * n_params, job.precision)
        yield part, "forward", gathered
        if twice:
            yield part, "backward", gathered
        yield part, "backward", memory("copy.gradients", (width + other) * n_params, job.precision)


def _layers(run: Run, job: Job, rank: int) -> list[int]:
    """Return the layers of the model that *rank* has spans of."""
    layers = np.unique(int64(run.spans([rank]), "layer")).tolist()
    return [layer for layer in layers if 0 <= layer < job.model.n_layers]


def _blocks(run: Run, job: Job, rank: int) -> Iterable[tuple[Any, str]]:
    """Yield the blocks that *rank* has spans of, and the part that each is."""
    pp = job.layout.coord(rank).pp
    for layer in _layers(run, job, rank):
        attention, mlp = layer_blocks(job, layer)
        yield attention, "attention"
        yield mlp, "mlp"
    if pp == 0:
        yield embedding_block(job), "ends"
    if pp == job.layout.pp - 1:
        yield head_block(job), "ends"


def _part(name: str, layer: int) -> str:
    """Return the part of the model that a span is of.

    >>> _part("layers.3.self_attn", 3), _part("layers.3", 3), _part("mlp", 3), _part("lm_head", -1)
    ('attention', 'layer', 'mlp', 'ends')
    """
    if layer < 0:
        return "ends"
    number = f".{layer}"
    if name.endswith(number):
        return "layer"
    within = name.partition(f"{number}.")[2] or name
    return "attention" if _ATTENTION.search(within) else "mlp"


def _by_cause(op: Op, compute: ComputeModel) -> Floats:
    """Return the seconds of *op* by cause, in the order of ``COLUMNS``; the optimizer is counted apart."""
    seconds = compute.op_s(op)
    fixed = fixed_s(op, compute.device)
    found = np.zeros(len(COLUMNS))
    found[COLUMNS.index(factor_of(op))] = seconds - fixed
    found[COLUMNS.index("fixed")] = fixed
    return found


def _identified(job: Job, design: Floats, seen: Floats) -> Compute:
    """Return the factors that the times identify."""
    there = [at for at in range(len(COLUMNS)) if design[:, at].any()]
    expected = [EXPECTED[COLUMNS[at]] for at in there]
    found: Fit = fit_factors(design[:, there], seen, expected, misfit=MISFIT, power=1.0)
    factors, said = {}, []
    columns = zip(there, found.values, found.errors, found.told, found.held, strict=True)
    for at, value, error, told, held in columns:
        factors[COLUMNS[at]] = Factor(float(value), float(error))
        if held:
            said.append(f"{COLUMNS[at]}: too small a part of the run to be told; held at the catalogue")
        elif not told:
            said.append(f"{COLUMNS[at]}: told to +- {error:.2f} only, hardly better than it was expected")
    if COLUMNS.index("copies") not in there:
        said.append("copies: the run does not gather parameters; the catalogue is used")
    if job.cluster.device.kind == "gpu":
        said.append("launch: the device is not seen waiting for the host; the catalogue is used")
    return Compute(factors, said)


def pass_seconds(times: Mapping[Key, Sequence[float]]) -> float:
    """Return how long all passes together take in the step of the middle."""
    total = sum(np.array(values) for values in times.values())
    return float(np.median(total))
