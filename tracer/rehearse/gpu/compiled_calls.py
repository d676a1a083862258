"""Which values of a compiled forward are held for its backward, by what eager mode holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from foretrace.tracer.rehearse.gpu.forward_values import ForwardValues, Need
from foretrace.tracer.rehearse.gpu.saved_values import BY_ITSELF, saved


class Call(NamedTuple):
    """A compiled forward that is over.

    Attributes:
        forward: its values.
        own: numbers of the memory that it has made.
        alive: of that, what eager mode still holds.
        returned: of that, what the call returns.
        is_packed: whether hooks around the call, as those of a checkpoint, keep what autograd saves.
    """

    forward: ForwardValues
    own: set[int]
    alive: set[int]
    returned: set[int]
    is_packed: bool

    def users(self) -> dict[int, set[int]]:
        """Return the values that are saved, and for which memory of eager mode each of them is."""
        needs, forward = self._needs(), self.forward
        for need in needs:
            value = forward.values[need.value]
            value.need = max(value.need, need.how)
        kept = saved(forward.values) if needs else set()
        users: dict[int, set[int]] = {at: set() for at in kept}
        for need in needs:
            for at in _made_of(forward, need.value, kept):
                users[at].add(need.kept)
        return users

    def unexplained(self) -> set[int]:
        """Return memory that something else than the backward of a known operator holds."""
        return self.alive - self.forward.explained - {need.kept for need in self.forward.needs}

    def _needs(self) -> list[Need]:
        """Return what the backward reads: of what autograd would keep, what eager mode does hold."""
        forward, inside = self.forward, self.alive - self.returned
        needs = [need for need in forward.needs if self._is_read(need)]
        if self.is_packed and not any(need.kept in inside for need in needs):
            needs = []  # a checkpoint around the call keeps nothing of it
        explained = forward.explained | {need.kept for need in needs}
        latest = {key: at for key in inside if (at := forward.latest(key)) >= 0}
        for key, at in latest.items():
            if forward.is_of_region(at):  # a checkpoint within the call has chosen to keep it
                forward.values[at].is_again, forward.values[at].region = False, 0
                forward.explained.add(key)
            elif key not in explained:
                needs.append(Need(at, BY_ITSELF, key))
        return needs

    def _is_read(self, need: Need) -> bool:
        """Whether a backward reads a value: eager mode keeps it, or a checkpoint computes it again."""
        is_again = bool(self.forward.values[need.value].region)
        return is_again or need.kept in self.alive or need.kept not in self.own


def not_in_eager(
    call: Call, users: Mapping[int, set[int]], storages: Mapping[int, Any]
) -> dict[int, list[Any]]:
    """Return the saved values that eager mode does not hold, and the storages for which they are saved.

    Args:
        call: the call.
        users: the saved values, and for which memory each of them is.
        storages: by memory, those that are alive.
    """
    found: dict[int, list[Any]] = {}
    for at, keys in users.items():
        of = [storages[key] for key in keys if key in storages]
        if of and call.forward.memories[at] not in call.alive:
            found[at] = of
    return found


def _made_of(forward: ForwardValues, value: int, kept: set[int]) -> set[int]:
    """Return the values in *kept* of which a *value* is made again."""
    found, seen, waiting = set[int](), {value}, [value]
    while waiting:
        at = waiting.pop()
        if at in kept:
            found.add(at)
            continue
        fresh = [source for source in forward.values[at].sources if source not in seen]
        seen.update(fresh)
        waiting += fresh
    return found
