"""Stores that a script makes itself, or asks its group for: what other ranks set is what they have left.

A real one waits until all ranks have come.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.peers.letters import Letters
from foretrace.tracer.rehearse.script.libraries import everywhere
from foretrace.tracer.rehearse.words import asker

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.values.stated import Stated

KINDS: Final = ("TCPStore", "FileStore")
"""Stores of torch that ranks share."""


def install(dist: Any, letters: Letters, stated: Stated, world_size: int) -> Callable[[], Any]:
    """Put rehearsed stores in the place of torch's; return what makes one for the group of all ranks.

    Args:
        dist: ``torch.distributed``.
        letters: what other ranks have set.
        stated: told what the script is told.
        world_size: number of ranks, all of which are taken to add what this one adds.
    """
    of_the_world = {"letters": letters, "stated": stated, "world_size": world_size}
    kind: Any = type("RehearsedStore", (OneRanksStore, dist.Store), of_the_world)
    for name in KINDS:
        everywhere(name, getattr(dist, name), type(name, (kind,), {}))
    made: Callable[[], Any] = kind
    return made


class OneRanksStore:
    """What a store of torch does in a world of which only one rank is there; a base beside ``dist.Store``.

    Attributes:
        letters: what other ranks have set.
        stated: told what the script is told.
        world_size: number of ranks, all of which are taken to add what this one adds.
    """

    letters: Letters
    stated: Stated
    world_size: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.host, self.port = (*args, "127.0.0.1", 29500)[:2] if len(args) > 1 else ("127.0.0.1", 29500)
        self.is_master = bool(kwargs.get("is_master", False))
        self.path = args[0] if args else ""
        self._own: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Set *key*, for other ranks, too."""
        self._own[key] = _bytes(value)
        self.letters.leave(("store", key), self._own[key])

    def get(self, key: str) -> bytes:
        """Return what this rank, or one before it, has set; else what it has set under a key like that.

        Raises:
            RehearsalError: there is nothing like it.
        """
        found = self._own.get(key, self.letters.read(("store", key)))
        if found is None:
            self.letters.await_any()
            found = self._like(key)
        if found is None:
            raise RehearsalError(
                f"the script waits for the key {key!r} of a store, which no rank has set that was "
                "rehearsed before: say in a stub file what it is (--stub, docs/rehearse.md section 6)"
            )
        return found

    def _like(self, key: str) -> bytes | None:
        """Return what this rank has set under a key that is *key* but for numbers."""
        found = next((self._own[own] for own in self._own if _shape(own) == _shape(key)), None)
        if found is not None:
            own = reprlib.repr(found)
            self.stated.tell(f"{asker()} asks a store what another rank has set: told its own, {own}")
        return found

    def add(self, key: str, number: int) -> int:
        """Add *number* as if all ranks had done so at once; return the sum."""
        total = int(self._own.get(key, b"0")) + number * self.world_size
        self._own[key] = str(total).encode()
        return total

    def append(self, key: str, value: Any) -> None:
        """Put *value* behind what is there."""
        self.set(key, self._own.get(key, b"") + _bytes(value))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set *key* to *desired* if it is as *expected*, or is not there and nothing is expected."""
        held = self._own.get(key, self.letters.read(("store", key)))
        if (held or b"") == _bytes(expected):
            self.set(key, desired)
            return _bytes(desired)
        return _bytes(expected) if held is None else held

    def check(self, keys: Sequence[str]) -> bool:
        """Say that all are there: other ranks have come as far as this one."""
        del keys
        return True

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        """Wait for nobody."""

    def delete_key(self, key: str) -> bool:
        """Forget *key*."""
        return self._own.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return how many keys this rank has set."""
        return len(self._own)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return what stands under each of *keys*."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Set each of *keys*."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)


def _shape(key: str) -> str:
    """Return *key* without the numbers in it.

    >>> _shape("host12/done")
    'host#/done'
    """
    return re.sub(r"\d+", "#", key)


def _bytes(value: Any) -> bytes:
    """Return *value* as a store has it: of words that a script gives, or bytes of another store."""
    return value if isinstance(value, bytes) else str(value).encode()
