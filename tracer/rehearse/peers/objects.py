"""Collectives of Python objects in a world in which only one rank is run."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from foretrace.tracer.rehearse.peers.gathering import own_numbers
from foretrace.tracer.rehearse.peers.letters import ALL, MOST_NUMBERS, Described
from foretrace.tracer.rehearse.words import asker

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession


def collectives(dist: Any, session: RehearsalSession) -> list[tuple[str, Callable[..., Any]]]:
    """Return collectives of objects, by the names that they have in ``torch.distributed``."""
    acted = _Collectives(dist, session)
    return [
        ("all_gather_object", acted.all_gather),
        ("gather_object", acted.gather),
        ("scatter_object_list", acted.scatter),
        ("broadcast_object_list", acted.broadcast),
        ("send_object_list", acted.send),
        ("recv_object_list", acted.receive),
    ]


class _Collectives:
    """Collectives of objects: all ranks send what this one has, or one what it has left for others.

    Where this rank has nothing, and nobody has left anything, the script is told what it has itself.
    """

    def __init__(self, dist: Any, session: RehearsalSession) -> None:
        self._dist, self._sent = dist, _Sent(dist, session)

    def all_gather(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        """Handle an all-gather: every rank is assumed to send what this one has."""
        object_list[:] = [obj] * self._dist.get_world_size(group)

    def gather(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: Any = None,
        group_dst: int | None = None,
    ) -> None:
        """Handle a gather: every rank is assumed to send what this one has."""
        del dst, group_dst
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * self._dist.get_world_size(group)

    def scatter(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: Any = None,
        src: int | None = None,
        group: Any = None,
        group_src: int | None = None,
    ) -> None:
        """Handle a scatter: take this rank's part of what the sender has written."""
        mine = self._dist.get_rank(group)
        found = self._sent.by_one("scatter", scatter_object_input_list, src, group, group_src)
        if found is not None:
            scatter_object_output_list[0] = found[mine]
        else:
            self._sent.kept(scatter_object_output_list, "gets an object of another rank")

    def broadcast(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
    ) -> None:
        """Handle a broadcast: take what the sender has written, or keep this rank's own."""
        del device
        found = self._sent.by_one(
            "objects", object_list, src, group, group_src, is_there=None not in object_list
        )
        if found is not None:
            object_list[:] = found
        elif None in object_list:
            self._sent.kept(object_list, "hears objects")

    def send(  # noqa: PLR0917 - torch has it so
        self,
        object_list: list[Any],
        dst: int | None = None,
        group: Any = None,
        device: Any = None,
        group_dst: int | None = None,
        use_batch: bool = False,  # noqa: FBT001, FBT002 - torch has it so
    ) -> None:
        """Handle a send: write objects for one rank."""
        del device, use_batch
        self._sent.to_one(object_list, dst, group, group_dst)

    def receive(  # noqa: PLR0917 - torch has it so
        self,
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
        use_batch: bool = False,  # noqa: FBT001, FBT002 - torch has it so
    ) -> int:
        """Handle a receive: take what a rank has written for this one; return the sender."""
        del device, use_batch
        found, sender = self._sent.from_one(src, group, group_src)
        if found is not None:
            object_list[:] = found
        else:
            self._sent.kept(object_list, "receives objects of another rank")
        return sender


class _Sent:
    """Objects that one rank sends others."""

    def __init__(self, dist: Any, session: RehearsalSession) -> None:
        self._dist, self._session = dist, session

    def by_one(
        self,
        kind: str,
        own: Any,
        rank: int | None,
        group: Any,
        place: int | None,
        *,
        is_there: bool = False,
    ) -> Any:
        """Return what one rank sends all of a *group*: *own* if it is this one; None if nobody has left it.

        *is_there*: whether this rank has objects of its own, by which it can do.
        """
        sender, number = self._which(rank, group, place)
        letters = self._session.letters
        address = letters.next(kind, number, sender, ALL)
        if sender == self._session.rank:
            letters.leave(address, own, self._described)
            return own
        found = letters.read(address)
        if found is None and not is_there:
            letters.await_(sender)
        return found

    def to_one(self, own: Any, rank: int | None, group: Any, place: int | None) -> None:
        """Leave *own* for one rank."""
        receiver, number = self._which(rank, group, place)
        letters = self._session.letters
        address = letters.next("object", number, self._session.rank, receiver)
        letters.leave(address, own, self._described)

    def from_one(self, rank: int | None, group: Any, place: int | None) -> tuple[Any, int]:
        """Return what one rank has left for this one, and who; None if nobody has left it."""
        sender, number = self._which(rank, group, place)
        letters = self._session.letters
        address = letters.next("object", number, sender, self._session.rank)
        found = letters.read(address)
        if found is None and sender not in letters.coming and (found := letters.alike(address)) is not None:
            words = f"told what a rank as far from its receiver sends, {reprlib.repr(found)}"
            self._session.stated.tell(f"{asker()} receives objects of another rank: {words}")
        if found is None:
            letters.await_(sender)
        return found, sender

    def kept(self, found: list[Any], does: str) -> None:
        """Report that the script gets back what it has *found* itself."""
        self._session.stated.tell(f"{asker()} {does}: told what it has itself, {reprlib.repr(found)}")

    def _described(self, tensor: Any) -> Described | None:
        """Return what others make of a *tensor* in an object; None for a DTensor, which has a mesh."""
        if hasattr(tensor, "_local_tensor"):
            return None
        is_short = tensor.numel() <= MOST_NUMBERS
        numbers = own_numbers(self._session.stated, tensor) if is_short else None
        device = "cuda" if self._session.host.on_device(tensor) else "cpu"
        return Described(tuple(tensor.shape), tensor.dtype, device, tensor.requires_grad, numbers)

    def _which(self, rank: int | None, group: Any, place: int | None) -> tuple[int, int]:
        """Return the global *rank*, which may be told by its *place*, and the number of the *group*."""
        own = group if group is not None else self._dist.group.WORLD
        if rank is None:
            rank = 0 if place is None else int(self._dist.get_global_rank(own, place))
        return rank, self._session.groups.of(own).id
