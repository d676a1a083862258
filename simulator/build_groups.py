"""The process groups of a job: who talks to whom, for which traffic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable

from traces.layout import Coord, Group, Layout

SCOPES = ("tp", "cp", "ep", "dp", "edp", "pp", "world")
"""Kinds of traffic that have groups of their own; ``edp`` is the data parallelism of experts."""


class Groups:
    """The process groups of a layout, and which of them a rank uses.

    Gradients of most parameters are reduced over all ranks that hold the same part of the model: ``dp * cp``
    of them. Routed experts have ``dp * cp / ep`` replicas (``edp``). Both are data parallelism, so that both
    have axis ``dp`` in the timeline. Reference: Megatron-LM ``parallel_state.py``, groups ``dp-cp`` and
    ``expert_data_parallel``.

    Args:
        layout: the parallel degrees.
        two_copies: pipeline ranks *r* and *p - 1 - r* hold the same stages, as in DualPipe, so that they are
            replicas of each other.

    Attributes:
        layout: the parallel degrees.
        all: every group of more than one rank, numbered from 0.
    """

    def __init__(self, layout: Layout, *, two_copies: bool = False) -> None:
        self.layout = layout
        self._two_copies = two_copies
        self.all: list[Group] = []
        self._of: dict[str, dict[int, Group]] = {scope: {} for scope in SCOPES}
        for scope in SCOPES:
            for ranks in self._members(scope):
                self._add(scope, ranks)

    def of(self, scope: str, rank: int) -> Group | None:
        """Return the group that *rank* uses for *scope*, None if it would be alone in it."""
        return self._of[scope].get(rank)

    def size(self, scope: str) -> int:
        """Return the number of ranks in a group of *scope*."""
        group = self.of(scope, 0)
        return len(group.ranks) if group else 1

    def of_pipeline_rank(self, pp: int) -> range:
        """Return the ranks whose pipeline coordinate is *pp*; the first one stands for them when folded."""
        first = self.layout.rank(Coord(pp, 0, 0, 0))
        return range(first, first + self.layout.world_size // self.layout.pp)

    def on_pipeline_rank(self, scope: str, pp: int) -> list[Group]:
        """Return the groups of *scope* with a member whose pipeline coordinate is *pp*, each once."""
        found = (self.of(scope, rank) for rank in self.of_pipeline_rank(pp))
        return list({group.id: group for group in found if group}.values())

    def _add(self, scope: str, ranks: tuple[int, ...]) -> None:
        if len(ranks) == 1:
            return
        axis = "dp" if scope == "edp" else scope
        group = self._of["dp"].get(ranks[0]) if scope == "edp" else None
        if group is None or group.ranks != ranks:
            group = Group(id=len(self.all), axis=axis, ranks=ranks)
            self.all.append(group)
        self._of[scope].update(dict.fromkeys(ranks, group))

    def _members(self, scope: str) -> Iterable[tuple[int, ...]]:
        """Return the ranks of every group of *scope*."""
        if scope not in ("dp", "edp"):
            return self.layout.groups(scope)
        place = {rank: at for ranks in self.layout.groups("ep") for at, rank in enumerate(ranks)}
        found: dict[Hashable, list[int]] = defaultdict(list)
        for rank in range(self.layout.world_size):
            replica = self.layout.coord(rank)._replace(dp=0, cp=0)
            if self._two_copies:
                replica = replica._replace(pp=min(replica.pp, self.layout.pp - 1 - replica.pp))
            found[replica, place[rank] if scope == "edp" else 0].append(rank)
        return sorted(tuple(ranks) for ranks in found.values())
