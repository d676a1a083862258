"""Which values of a compiled forward are kept for its backward: the minimum cut that PyTorch makes.

The rules are those of ``torch/_functorch/partitioners.py`` (``min_cut_rematerialization_partition`` with its
default settings): what the backward computes again costs nothing, what is saved costs its bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Final

from foretrace.tracer.rehearse.gpu.min_cut import Network

NOT_NEEDED, IN_A_KERNEL, BY_ITSELF = range(3)
"""How a backward needs a value: not; in a kernel that can compute it again; as an operand in memory."""

LONGEST_CHAIN: Final = 100
"""Operators after which a chain that could be fused is broken (``ban_if_long_fusible_chains``)."""

PER_STEP: Final = 1.1
"""Factor by which a value costs more per operator between it and the backward, up to 100 of them."""

SMALL: Final = 4
"""A result that is so many times smaller than its operands, a reduction, is not computed again."""

_FAR: Final = 10**9
_ENDLESS: Final = 1 << 80


class Value:
    """A tensor of a forward.

    Attributes:
        n_bytes: its size.
        sources: numbers of what it is made of; they are lower than its own.
        users: numbers of what is made of it.
        is_again: whether its operator may be computed again.
        is_fused: whether its operator can share a kernel with others.
        is_view: whether it is another one in other dimensions.
        is_input: whether the forward is called with it.
        is_free: whether it is there anyway, as a parameter.
        is_joined: whether other kernels may write into it (``cat``).
        is_forward: whether the forward makes it, not only the backward.
        is_output: whether the forward returns it.
        region: number of the checkpoint in the forward that makes it, 0: none does.
        need: how the backward needs it.
    """

    __slots__ = (
        *("is_again", "is_forward", "is_free", "is_fused", "is_input", "is_joined", "is_output", "is_view"),
        *("n_bytes", "need", "region", "sources", "users"),
    )

    def __init__(self, n_bytes: int, sources: Sequence[int] = (), *, is_fused: bool = False) -> None:
        self.n_bytes, self.sources, self.users = n_bytes, sources, list[int]()
        self.is_again = self.is_fused = is_fused
        self.is_view = self.is_input = self.is_free = self.is_joined = self.is_output = False
        self.is_forward, self.need, self.region = True, NOT_NEEDED, 0

    def fuses(self, user: Value) -> bool:
        """Return whether *user* can read it without its being written."""
        return user.is_joined or (self.is_fused and user.is_fused)


def saved(values: Sequence[Value]) -> set[int]:
    """Return the numbers of the *values* that are kept until the backward."""
    return _Cut(values).saved()


class _Cut:
    """The network of some values: each is an edge between two nodes, from its operands to its users."""

    def __init__(self, values: Sequence[Value]) -> None:
        self._values, self._distances = values, _distances(values)
        self._banned = {at for at in range(len(values)) if self._is_banned(at)}
        self._ban_far_apart()
        self._ban_long_chains()

    def saved(self) -> set[int]:
        """Return the values that the cut goes through."""
        values, banned = self._values, self._banned
        needed = {at for at, value in enumerate(values) if value.need}
        known = needed & banned
        part, waiting = set(needed - known), list(needed - known)
        while waiting:
            at = waiting.pop()
            for source in values[at].sources if at not in banned else ():
                if source not in known and source not in part:
                    part.add(source)
                    waiting.append(source)
        numbers = {at: 2 * n for n, at in enumerate(sorted(part))}
        begin, end = 2 * len(part), 2 * len(part) + 1
        network = Network(2 * len(part) + 2)
        for at, number in numbers.items():
            network.add(number, number + 1, self._cost(at))
            if at in banned:
                network.add(begin, number, _ENDLESS)
            if at in needed:
                network.add(number + 1, end, _ENDLESS)
            for source in values[at].sources if at not in banned else ():
                if source in numbers:
                    network.add(numbers[source] + 1, number, _ENDLESS)
        behind = network.side_of_sink(begin, end)
        return known | {at for at, n in numbers.items() if n not in behind and n + 1 in behind}

    def _cost(self, at: int) -> int:
        """Return what saving a value costs: a fused one would have to be written and read for it."""
        value = self._values[at]
        if value.is_free:
            return 0
        if value.region:
            return _ENDLESS
        cost = int(value.n_bytes * PER_STEP ** max(min(self._distances[at], 100), 1))
        is_written = value.is_input or value.is_output or value.need == BY_ITSELF
        is_written |= bool(value.need) and not value.is_fused
        is_written |= not all(value.fuses(self._values[user]) for user in value.users)
        return cost if is_written else 2 * cost

    def _is_banned(self, at: int) -> bool:
        """Whether a value is not computed again, by its operator and its users alone."""
        value = self._values[at]
        if value.is_input or not value.is_forward:
            return value.is_input
        if value.region:  # computed again, unless another checkpoint begins with it
            return any(self._values[user].region > value.region for user in value.users)
        if value.is_view:
            return False
        if not value.is_again or self._is_written_in_backward(value):
            return True
        return value.n_bytes * SMALL < sum(self._values[source].n_bytes for source in value.sources)

    def _is_written_in_backward(self, value: Value) -> bool:
        """Whether an operator that is not fused reads *value*, or a view of it, in the backward."""
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if one.need == BY_ITSELF or one.is_output or (one.need and not one.is_fused):
                return True
            waiting += [self._values[user] for user in one.users if self._values[user].is_view]
        return False

    def _may_be_banned(self, at: int) -> bool:
        """Whether a value may be saved for its place: no view, nor what a checkpoint computes again."""
        return not self._values[at].is_view and not self._values[at].region

    def _forward_users(self, at: int) -> Iterator[int]:
        return (user for user in self._values[at].users if self._values[user].is_forward)

    def _ban_far_apart(self) -> None:
        """Compute nothing again that is made of a value before and behind an operator that is not fused."""
        for at, value in enumerate(self._values):
            if value.region:
                continue
            users = list(self._forward_users(at)) if value.is_forward else []
            if len(users) < 2 or max(users) - min(users) < 2:
                continue
            first = self._first_unfused(users, max(users))
            for user in users:
                if user > first and value.fuses(self._values[user]) and self._may_be_banned(user):
                    self._banned.add(user)

    def _first_unfused(self, users: list[int], last: int) -> int:
        """Return the first value behind *users*, up to *last*, that is not fused with what it is made of."""
        waiting = [(user, True) for user in users]
        heapq.heapify(waiting)
        seen = set(waiting)
        while waiting:
            at, is_fused = heapq.heappop(waiting)
            if not is_fused:
                return at
            for user in self._forward_users(at):
                found = (user, self._values[at].fuses(self._values[user]))
                if user <= last and found not in seen:
                    seen.add(found)
                    heapq.heappush(waiting, found)
        return last

    def _ban_long_chains(self) -> None:
        """Break chains of fused operators that are longer than ``LONGEST_CHAIN``."""
        visited = set[int]()
        for start, value in enumerate(self._values):
            waiting = [start] if value.is_forward else []
            while waiting:
                at = heapq.heappop(waiting)
                if at in visited:
                    continue
                visited.add(at)
                if at > start + LONGEST_CHAIN and not waiting:
                    if self._may_be_banned(at):
                        self._banned.add(at)
                    break
                for user in self._forward_users(at):
                    if user not in self._banned and self._values[at].fuses(self._values[user]):
                        heapq.heappush(waiting, user)


def _distances(values: Sequence[Value]) -> list[int]:
    """Return how many operators each value is away from the backward."""
    found = [_FAR] * len(values)
    for at in range(len(values) - 1, -1, -1):
        value = values[at]
        if not value.is_forward:
            found[at] = 0
        elif value.need:
            found[at] = 1
        else:
            found[at] = min((found[user] + 1 for user in value.users), default=_FAR)
    return found
