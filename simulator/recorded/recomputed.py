"""What of its layers a recorded run computes again in the backward."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import numpy as np

from foretrace.traces.columns import int64, labels
from foretrace.traces.run import Run

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
    done = {name: flops / min(n for _, n, _, _ in again) for name, _, flops, _ in again}
    n_passes = min(n for _, n, _, _ in forward)
    last = max(forward, key=lambda block: block[3])[0]
    return all(
        name == last or (name in done and done[name] >= WHOLE * flops / n_passes)
        for name, _, flops, _ in forward
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
