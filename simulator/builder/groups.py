"""The process groups of a job: who talks to whom, for which traffic."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

import numpy as np

from foretrace.traces.layout import Coord, Group, Layout

SCOPES = (
    *("tp", "etp", "cp", "ep", "dp", "edp", "pp", "world"),
    *("dp.shard", "dp.copies", "edp.shard", "edp.copies", "stage"),
)
"""Kinds of traffic that have groups of their own; ``edp`` is the data parallelism of experts, ``etp`` their
tensor parallelism where it is not that of other layers, and all ranks of a pipeline rank form a ``stage``.

Where states are shared out over some replicas only (HSDP), those form ``dp.shard``, and the ranks with the
same share form ``dp.copies``.
"""

OF_REPLICAS = ("dp", "edp")
OF_DATA = (*OF_REPLICAS, "stage")
"""Scopes that the timeline calls data parallelism."""


def axis_of(scope: str) -> str:
    """Return what the timeline calls the traffic of *scope*.

    >>> axis_of("edp.shard"), axis_of("etp"), axis_of("cp")
    ('dp', 'tp', 'cp')
    """
    if scope.partition(".")[0] in OF_DATA:
        return "dp"
    return "tp" if scope == "etp" else scope


class Groups:
    """The process groups of a layout, and which of them a rank uses.

    Gradients of most parameters are reduced over all ranks that hold the same part of the model: ``dp * cp``
    of them. Routed experts have ``dp * cp * tp / (ep * etp)`` replicas (``edp``). Both are data
    parallelism, so that both have axis ``dp`` in the timeline. Reference: Megatron-LM ``parallel_state.py``,
    groups ``dp-cp`` and ``expert_data_parallel``.

    *two_copies*: pipeline ranks *r* and *p - 1 - r* hold the same stages, as in DualPipe, so that they are
    replicas of each other. *shard_ranks*: replicas that share one copy of the states out among them; 0: all.
    *whole_stages*: all ranks of a pipeline rank talk to each other.

    *all*: every group of more than one rank, numbered from 0. *alike*: by network, which groups
    are alike there, as whoever asks for costs has found out.
    """

    def __init__(
        self, layout: Layout, *, two_copies: bool = False, shard_ranks: int = 0, whole_stages: bool = False
    ) -> None:
        self.layout = layout
        self._shard_ranks = shard_ranks
        self._two_copies = two_copies
        self.all: list[Group] = []
        self.alike: dict[object, dict[object, list[tuple[int, ...]]]] = {}
        self._of: dict[str, dict[int, Group]] = {scope: {} for scope in SCOPES}
        for scope in SCOPES if whole_stages else SCOPES[:-1]:
            whole, _, part = scope.partition(".")
            if part and not shard_ranks:  # one copy, over all replicas
                self._of[scope] = self._of[whole] if part == "shard" else {}
                continue
            for ranks in self._members(scope):
                if len(ranks) > 1:
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
        is_of_data = scope.partition(".")[0] in OF_DATA
        # Ranks that reduce dense and expert gradients alike have one communicator for both, as in
        # Megatron-LM.
        known = [self._of[other].get(ranks[0]) for other in SCOPES] if is_of_data else []
        group = next((one for one in known if one and one.axis == "dp" and one.ranks == ranks), None)
        if group is None:
            group = Group(id=len(self.all), axis=axis_of(scope), ranks=ranks)
            self.all.append(group)
        self._of[scope].update(dict.fromkeys(ranks, group))

    def _members(self, scope: str) -> Iterable[tuple[int, ...]]:
        """Return the ranks of every group of *scope*."""
        if "." in scope:
            return self._parts(*scope.split("."))
        if scope == "stage":
            return [tuple(self.of_pipeline_rank(pp)) for pp in range(self.layout.pp)]
        if scope == "etp" and not self.layout.expert_tp:
            return []
        if scope not in OF_REPLICAS:
            return self.layout.groups(scope)
        replica = np.arange(self.layout.world_size)
        for axis in ("edp",) if scope == "edp" else ("dp", "cp"):
            groups = np.array(self.layout.groups(axis))
            first = np.empty_like(replica)
            first[groups] = groups[:, :1]
            replica = first[replica]
        if self._two_copies:
            pp, place = np.divmod(replica, self.layout.world_size // self.layout.pp)
            replica = (
                np.minimum(pp, self.layout.pp - 1 - pp) * (self.layout.world_size // self.layout.pp) + place
            )
        order = np.argsort(replica, kind="stable")
        cuts = np.flatnonzero(np.diff(replica[order])) + 1
        return [tuple(ranks.tolist()) for ranks in np.split(order, cuts)]

    def _parts(self, scope: str, part: str) -> list[tuple[int, ...]]:
        """Return the groups of *scope* cut into shards of neighbours, or the ranks with the same share."""
        found: list[tuple[int, ...]] = []
        for ranks in self._members(scope):
            n = shard_size(self.layout, scope, len(ranks), self._shard_ranks)
            shards = [ranks[at : at + n] for at in range(0, len(ranks), n)]
            found += shards if part == "shard" else list(zip(*shards, strict=True))
        return found


def shard_size(layout: Layout, scope: str, n_replicas: int, shard_ranks: int) -> int:
    """Return how many of *n_replicas* share out one copy if *shard_ranks* are asked for; 0 means all.

    Experts (``edp``) have fewer replicas. Those within *shard_ranks* share a copy out, so that there are as
    many copies as of other states. Reference: Megatron-LM ``parallel_state.py``,
    ``_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP``; torchtitan ``parallel_dims.py``, ``efsdp``.

    >>> shard_size(Layout(dp=16, ep=4), "dp", 16, 8), shard_size(Layout(dp=16, ep=4), "edp", 4, 8)
    (8, 2)
    """
    if not shard_ranks:
        return n_replicas
    wanted = shard_ranks * layout.tp // (layout.ep * layout.etp) if scope == "edp" else shard_ranks
    return gcd(n_replicas, max(wanted, 1))
