"""Which ranks must behave alike, so that one of them can be simulated for all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from foretrace.traces.layout import Coord, Layout


def representatives(layout: Layout, special: Iterable[int] = ()) -> tuple[int, ...]:
    """Return for every rank the one that stands for it.

    Ranks with the same pipeline coordinate do the same, unless one is *special*: then its data, context and
    tensor coordinates are kept apart from the others along each axis. What remains is a smaller grid in which
    every group has a member of each kind, so that who waits for whom is the same as in the whole grid. Expert
    groups lie across two axes; with them and a special rank, ``dp`` and ``cp`` are kept as they are, and
    ``tp`` too if experts are cut over another number of ranks.

    >>> representatives(Layout(pp=2, dp=3))
    (0, 0, 0, 3, 3, 3)
    >>> representatives(Layout(dp=4, tp=2), special=[3])
    (0, 1, 2, 3, 0, 1, 0, 1)
    """
    coords = [layout.coord(rank) for rank in special]
    kept: dict[str, NDArray[np.int64]] = {}
    for axis in ("dp", "cp", "tp"):
        size = getattr(layout, axis)
        apart = {getattr(coord, axis) for coord in coords}
        if coords and (layout.expert_tp or (layout.ep > 1 and axis != "tp")):
            apart = set(range(size))
        ordinary = next((at for at in range(size) if at not in apart), 0)
        kept[axis] = np.array([at if at in apart else ordinary for at in range(size)])
    pp, dp, cp, tp = np.ix_(np.arange(layout.pp), kept["dp"], kept["cp"], kept["tp"])
    ranks = layout.rank(
        cast("Any", Coord(cast("Any", pp), cast("Any", dp), cast("Any", cp), cast("Any", tp)))
    )
    return tuple(cast("Any", ranks).ravel().tolist())
