"""What the spans of a recording say of the training that it was, where its writer noted nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from foretrace.traces.columns import factorized, int64, is_one_of, labels
from foretrace.traces.run import Run

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
        layers = len(np.unique(int64(table, "layer")[passes])) - bool(
            (int64(table, "layer")[passes] < 0).any()
        )
        for number in np.unique(step[passes & (step >= 0)]).tolist():
            last = start[passes & (step == number)].max()
            count = int((sums & (step == number) & (start > last)).sum())
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
