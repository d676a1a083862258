"""How the layers of a model are shared out over the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

from foretrace.simulator.errors import JobError

ENDS: Final = ("none", "embedding", "head", "both")
"""Ends of the model that may count as a layer each when layers are shared out."""


def check_layers(layers_per_stage: Sequence[int], n_layers: int, model: str) -> None:
    """Check a list of layers per stage; an empty one means that none is given.

    Raises JobError if an inner stage has none, a number is below zero, or they do not add up to *n_layers*.
    """
    if not layers_per_stage:
        return
    listed = ", ".join(map(str, layers_per_stage))
    if any(n < (0 if at in (0, len(layers_per_stage) - 1) else 1) for at, n in enumerate(layers_per_stage)):
        raise JobError(f"layers_per_stage={listed}: at least 1 each; the first and the last may have 0")
    if (total := sum(layers_per_stage)) != n_layers:
        raise JobError(
            f"layers_per_stage={listed} are {total} layers, but {model} has {n_layers}: "
            f"{abs(n_layers - total)} too {'many' if total > n_layers else 'few'}"
        )


def ranges(sizes: Sequence[int]) -> list[range]:
    """Return the layers of stages that have so many each.

    >>> ranges([2, 1])
    [range(0, 2), range(2, 3)]
    """
    return [range(a, b) for a, b in pairwise(accumulate(sizes, initial=0))]


def split_layers(n_layers: int, n_stages: int, counted_ends: str = "none") -> list[range]:
    """Return the layers of each stage: contiguous, and as equal as they can be.

    Layers that do not divide evenly go to the inner stages, from the last of them backwards: the ends
    already hold the embedding and the head, and a later stage keeps fewer micro-batches in flight. Llama 3
    405B does the same: 126 layers on a pipeline of equal parts, one layer less at both ends
    (arXiv:2407.21783, section 3.3.2).

    *counted_ends*: one of ``ENDS``: ends that count as a layer, so that their stage has one less.

    >>> [len(layers) for layers in split_layers(126, 8)]
    [15, 16, 16, 16, 16, 16, 16, 15]
    >>> [len(layers) for layers in split_layers(6, 4, "both")]
    [1, 2, 2, 1]

    Raises JobError if there are more stages than layers.
    """
    first, last = (int(counted_ends in (end, "both")) for end in ("embedding", "head"))
    n_shared = n_layers + first + last
    if n_stages > n_shared:
        raise JobError(f"{n_stages} pipeline stages for {n_shared} layers: at most one stage per layer")
    each, left = divmod(n_shared, n_stages)
    sizes = [each] * n_stages
    for stage in [*range(n_stages - 2, 0, -1), 0, n_stages - 1][:left]:
        sizes[stage] += 1
    sizes[0] -= first
    sizes[-1] -= last
    return ranges(sizes)


def split_by_cost(costs: Sequence[int], head: int, n_stages: int) -> list[range]:
    """Return the layers of each stage, which ends with the layer that takes the sum of costs over its share.

    Reference: nanotron ``PipelineBlock``, ``get_block_compute_costs``.

    *head*: cost of the head, which follows them.
    """
    total, done, starts = sum(costs) + head, 0, [0]
    for block, cost in enumerate(costs):
        done += cost
        if done > total * len(starts) / n_stages and len(starts) < n_stages:
            starts.append(block + 1)
    starts += [len(costs)] * (n_stages - len(starts))
    return [range(a, b) for a, b in pairwise([*starts, len(costs)])]
