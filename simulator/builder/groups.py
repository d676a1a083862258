"""The process groups of a job: who talks to whom, for which traffic."""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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


Ranks = NDArray[Any]


class _Scope(NamedTuple):
    """The groups of a scope: *ranks* group after group, where each *starts*, and which one each rank is *of*.

    Their numbers follow *first*.
    """

    axis: str
    first: int
    ranks: Ranks
    starts: Ranks
    of: Ranks

    def members(self, at: int) -> tuple[int, ...]:
        """Return the ranks of one of the groups."""
        return tuple(self.ranks[self.starts[at] : self.starts[at + 1]].tolist())

    def firsts(self) -> NDArray[np.int32]:
        """Return the first of its group for each rank, -1 if it is in none."""
        return np.append(self.ranks[self.starts[:-1]], np.int32(-1))[self.of]


class Groups:
    """The process groups of a layout, and which of them a rank uses.

    Gradients of most parameters are reduced over all ranks that hold the same part of the model: ``dp * cp``
    of them. Routed experts have ``dp * cp * tp / (ep * etp)`` replicas (``edp``). Both are data
    parallelism, so that both have axis ``dp`` in the timeline. Reference: Megatron-LM ``parallel_state.py``,
    groups ``dp-cp`` and ``expert_data_parallel``.

    *two_copies*: pipeline ranks *r* and *p - 1 - r* hold the same stages, as in DualPipe, so that they are
    replicas of each other. *shard_ranks*: replicas that share one copy of the states out among them; 0: all.
    *whole_stages*: all ranks of a pipeline rank talk to each other.

    All of a scope are one array, and a group is made when it is asked for: of a million ranks there are
    hundreds of thousands, of which a folded program uses a few.

    *alike*: by network, which groups are alike there, as whoever asks for costs has found out.
    """

    def __init__(
        self, layout: Layout, *, two_copies: bool = False, shard_ranks: int = 0, whole_stages: bool = False
    ) -> None:
        self.layout = layout
        self._shard_ranks = shard_ranks
        self._two_copies = two_copies
        self.alike: dict[object, dict[object, list[tuple[int, ...]]]] = {}
        self._scopes: dict[str, _Scope | None] = {}
        self._made: dict[int, Group] = {}
        self.n_groups = 0
        for scope in SCOPES if whole_stages else SCOPES[:-1]:
            whole, _, part = scope.partition(".")
            if part and not shard_ranks:  # one copy, over all replicas
                self._scopes[scope] = self._scopes[whole] if part == "shard" else None
            else:
                self._scopes[scope] = self._scope(scope)

    @property
    def all(self) -> list[Group]:
        """Every group of more than one rank, numbered from 0."""
        scopes = {one.first: one for one in self._scopes.values() if one}
        return [self._group(one, at) for one in scopes.values() for at in range(len(one.starts) - 1)]

    def of(self, scope: str, rank: int) -> Group | None:
        """Return the group that *rank* uses for *scope*, None if it would be alone in it."""
        found = self._scopes.get(scope)
        at = -1 if found is None else int(found.of[rank])
        return None if found is None or at < 0 else self._group(found, at)

    def size(self, scope: str) -> int:
        """Return the number of ranks in a group of *scope*."""
        group = self.of(scope, 0)
        return len(group.ranks) if group else 1

    def of_pipeline_rank(self, pp: int) -> range:
        """Return the ranks whose pipeline coordinate is *pp*; the first one stands for them when folded."""
        first = self.layout.rank(Coord(pp, 0, 0, 0))
        return range(first, first + self.layout.world_size // self.layout.pp)

    def on_pipeline_rank(self, scope: str, pp: int) -> list[tuple[int, ...]]:
        """Return the ranks of each group of *scope* with a member whose pipeline coordinate is *pp*."""
        if (found := self._scopes.get(scope)) is None:
            return []
        numbers = np.unique(found.of[self.of_pipeline_rank(pp)])
        return [found.members(at) for at in numbers.tolist() if at >= 0]

    def _group(self, scope: _Scope, at: int) -> Group:
        number = scope.first + at
        if number not in self._made:
            self._made[number] = Group(id=number, axis=scope.axis, ranks=scope.members(at))
        return self._made[number]

    def _scope(self, scope: str) -> _Scope | None:
        """Return the groups of *scope*, numbered behind those that there are; None if all would be alone."""
        ranks, sizes = self._members(scope)
        keeps = sizes > 1
        if not keeps.any():
            return None
        ranks, sizes = ranks[np.repeat(keeps, sizes)], sizes[keeps]
        starts = np.append(0, np.cumsum(sizes))
        axis = axis_of(scope)
        of = np.full(self.layout.world_size, -1, np.int32)
        of[ranks] = np.repeat(np.arange(len(sizes)), sizes)
        found = _Scope(axis, self.n_groups, ranks.astype(np.int32), starts, of)
        # Ranks that reduce dense and expert gradients alike have one communicator for both, as in
        # Megatron-LM.
        for other in self._scopes.values() if scope.partition(".")[0] in OF_DATA else ():
            if other and other.axis == axis and np.array_equal(other.firsts(), found.firsts()):
                return other
        self.n_groups += len(sizes)
        return found

    def _members(self, scope: str) -> tuple[Ranks, Ranks]:
        """Return the ranks of *scope*, group after group, and the size of each group."""
        if "." in scope:
            return self._parts(*scope.split("."))
        if scope == "etp" and not self.layout.expert_tp:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        # Every rank is told the first of its group.
        first = np.arange(self.layout.world_size)
        if scope == "stage":
            first -= first % (self.layout.world_size // self.layout.pp)
        for axis in {"dp": ("dp", "cp"), "stage": ()}.get(scope, (scope,)):
            members = self.layout.members(axis)
            firsts = np.empty_like(first)
            firsts[members] = members[:, :1]
            first = firsts[first]
        if self._two_copies and scope in OF_REPLICAS:
            pp, place = np.divmod(first, self.layout.world_size // self.layout.pp)
            first = (
                np.minimum(pp, self.layout.pp - 1 - pp) * (self.layout.world_size // self.layout.pp) + place
            )
        _, sizes = np.unique(first, return_counts=True)
        return np.argsort(first, kind="stable"), sizes

    def _parts(self, scope: str, part: str) -> tuple[Ranks, Ranks]:
        """Return the groups of *scope* cut into shards of neighbours, or the ranks with the same share."""
        ranks, sizes = self._members(scope)
        found, each = [], []
        for members in np.split(ranks, np.cumsum(sizes)[:-1]):
            n = shard_size(self.layout, scope, len(members), self._shard_ranks)
            shards = members.reshape(-1, n)
            shards = shards if part == "shard" else shards.T
            found.append(shards.ravel())
            each.append(np.full(len(shards), shards.shape[1]))
        return np.concatenate(found), np.concatenate(each)


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
