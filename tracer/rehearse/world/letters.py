"""Values that one rank sends to another: a few integers in tensors, objects, keys of a store.

Ranks are rehearsed one by one. A rehearsed rank writes the values that it sends to a file, and other ranks
read them where they receive them: the shape that a stage sends ahead of its activations, for example, or the
length of a batch that rank 0 has drawn.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from foretrace.tracer.rehearse.errors import AwaitedError

MOST_NUMBERS: Final = 4096
"""Elements of a tensor above which its numbers are not left for others: shapes and lengths are few."""

ALL: Final = -1
"""The receiver of what all ranks of a group are told."""


class Address(NamedTuple):
    """Identifies a message; sender and receiver number their messages alike."""

    kind: str  # of message
    group: int  # its number
    sender: int  # a global rank
    receiver: int  # another global rank, or ``ALL``
    sequence: int  # number of such messages between the two before this one

    def resembles(self, other: Address) -> bool:
        """Whether *other* is the same message between two ranks that represent these two."""
        return (
            (self.kind, self.sequence) == (other.kind, other.sequence)
            and ALL not in {self.receiver, other.receiver}
            and self.receiver - self.sender == other.receiver - other.sender
        )


class Described(NamedTuple):
    """A tensor inside an object that is sent, described so that the receiver can create it again."""

    shape: tuple[int, ...]  # its sizes
    dtype: Any  # of its elements
    device: str  # its device, as a script names it
    is_trained: bool  # whether it requires a gradient
    numbers: list[int] | None  # its elements in order; None if unknown

    @staticmethod
    def make(*described: Any) -> Any:
        """Return a new tensor as *described*."""
        import torch

        own = Described(*described)
        if own.numbers is not None:
            return torch.tensor(own.numbers, dtype=own.dtype, device=own.device).reshape(own.shape)
        return torch.empty(own.shape, dtype=own.dtype, device=own.device, requires_grad=own.is_trained)


class Letters:
    """Values that ranks have sent each other, as far as they have been rehearsed.

    Args:
        rank: the rank that is rehearsed.
        found: values that other ranks have written.
        coming: ranks that are still to be rehearsed, or have not ended yet.

    Attributes:
        coming: those ranks.
    """

    def __init__(self, rank: int, found: Mapping[Any, bytes], coming: Iterable[int]) -> None:
        self._rank, self._found, self.coming = rank, found, frozenset(coming)
        self._counts: Counter[Any] = Counter()
        self.left: dict[Any, bytes] = {}  # values that this rank has sent so far
        self.missed: set[int] = set()  # ranks whose values were needed before they were written

    def next(self, kind: str, group: int, sender: int, receiver: int = ALL) -> Address:
        """Return the address of the next message of a *kind* that is only numbered here."""
        key = (kind, group, sender, receiver)
        self._counts[key] += 1
        return Address(*key, self._counts[key] - 1)

    def leave(
        self, address: Any, content: Any, described: Callable[[Any], Described | None] = lambda _: None
    ) -> None:
        """Keep *content* for other ranks, unless it cannot be written.

        Its tensors are created again where it is read, as *described*. If that is None for one of them, the
        content is not kept.
        """
        written = io.BytesIO()
        try:
            _Writer(written, described).dump(content)
        # Whatever a script sends may refuse to be pickled.
        except Exception:
            return
        self.left[address] = written.getvalue()

    def read(self, address: Any) -> Any | None:
        """Return what was sent to *address*; None if nothing was."""
        found = self._found.get(address)
        return None if found is None else pickle.loads(found)

    def of(self, kind: str) -> dict[Any, Any]:
        """Return what others have left under a *kind* of name that is no address, by name."""
        return {key[1]: self.read(key) for key in self._found if key[0] == kind}

    def alike(self, address: Address) -> Any | None:
        """Return what a rank sent to one at the same distance from it; None if none has."""
        like = (key for key in self._found if isinstance(key, Address) and address.resembles(key))
        return next((self.read(key) for key in like), None)

    def await_(self, sender: int) -> None:
        """End this rank for now if *sender*, or a rank that may represent it, is still to be rehearsed.

        Else note that it was missed. A negative *sender* means no rank.

        Raises:
            AwaitedError: it is still to be rehearsed.
        """
        if sender < 0:
            return
        if sender in self.coming:
            _ended(sender)
        if earlier := [rank for rank in self.coming if rank < self._rank]:
            _ended(min(earlier))
        # One that has left something has been rehearsed, and does not send this.
        if not any(isinstance(key, Address) and key.sender == sender for key in self._found):
            self.missed.add(sender)

    def await_any(self) -> None:
        """End this rank for now if any is still to be rehearsed. Raises AwaitedError then."""
        if self.coming:
            _ended(min(self.coming))


class _Writer(pickle.Pickler):
    """Writes objects, and in place of their tensors, which may have no numbers, how each is made anew."""

    def __init__(self, file: io.BytesIO, described: Callable[[Any], Described | None]) -> None:
        super().__init__(file)
        self._described = described

    def reducer_override(self, obj: Any) -> Any:
        """Raise PicklingError for a tensor that is not described."""
        if not hasattr(obj, "untyped_storage"):
            return NotImplemented
        if (found := self._described(obj)) is None:
            raise pickle.PicklingError("a tensor")
        return Described.make, tuple(found)


def _ended(sender: int) -> NoReturn:
    raise AwaitedError(sender)


def leave(file: Path, found: Mapping[Any, Any]) -> None:
    """Write what a rank has *found* to *file* for other ranks, all of it or nothing."""
    if found:
        file.with_suffix(".part").write_bytes(pickle.dumps(dict(found)))
        file.with_suffix(".part").replace(file)


def left(folder: Path) -> dict[Any, Any]:
    """Return the values that other ranks have written."""
    found: dict[Any, Any] = {}
    for file in sorted(folder.glob("letters-*.pickle")):
        found |= pickle.loads(file.read_bytes())
    return found
