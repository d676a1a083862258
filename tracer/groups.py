"""Process groups: the number, the axis and the members of each, and the layout that follows from them."""

from __future__ import annotations

import itertools
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

from foretrace.traces.errors import LayoutError
from foretrace.traces.info import stable_group_id
from foretrace.traces.layout import AXES, Group, Layout

AXIS_WORDS: Final = {
    "dp": ("dp", "ddp", "fsdp", "efsdp", "hsdp", "data", "replicate", "shard"),
    "tp": ("tp", "etp", "tensor"),
    "cp": ("cp", "context"),
    "ep": ("ep", "expert"),
    "pp": ("pp", "pipe", "pipeline", "stage"),
}
"""Words in the name of a device-mesh dimension that tell its axis, as torchtitan and others name them. Over
one that names ``dp`` and others, as ``dp_shard_cp`` or ``dp_shard_mod_ep``, gradients are summed."""

_UNNAMED: Final = frozenset({"", "undefined", "default_pg", "mesh_default"})


@dataclass(slots=True, eq=False)
class GroupInfo:
    """One process group as this rank sees it."""

    id: int  # the ``group`` column; the same on every member
    axis: str  # one of ``traces.layout.AXES``, ``"world"``, or the name of the group
    ranks: tuple[int, ...]  # global ranks in group order
    on_gloo: bool = False  # whether tensors of the processor go through gloo
    gpu_on_gloo: bool = False  # whether those of a GPU do
    name: str = ""  # what torch calls it
    is_timed: bool = False  # whether its works on a GPU were asked to tell how long they run
    collectives: Iterator[int] = field(default_factory=itertools.count)  # counts them, on whatever thread
    _transfers: defaultdict[tuple[int, int], Iterator[int]] = field(
        default_factory=lambda: defaultdict(itertools.count)
    )

    @property
    def n_collectives(self) -> int:
        """Collectives that this rank has issued."""
        return _given(self.collectives)

    @property
    def n_transfers(self) -> dict[tuple[int, int], int]:
        """p2p transfers whose side this rank has issued, by (sender, receiver)."""
        # A copy, as the training adds pairs meanwhile.
        return {pair: _given(counter) for pair, counter in list(self._transfers.items())}

    def next_collective(self) -> int:
        """Return the number of the collective that is being issued, on whatever thread."""
        # `next` of a count is one step of the interpreter, so that no two threads get the same number.
        return next(self.collectives)

    def next_transfer(self, pair: tuple[int, int]) -> int:
        """Return the number of the transfer from one rank to the other that is being issued."""
        return next(self._transfers[pair])


def _given(counter: Iterator[int]) -> int:
    """Return how many numbers a count from 0 has given."""
    # Of a second number beside it, the slower of two threads might have the last word.
    return int(repr(counter)[len("count(") : -1])


def _backend_of(group: Any) -> str:
    from torch.distributed import get_backend_config

    return str(get_backend_config(group))


def _ranks_of(group: Any) -> Iterable[int]:
    from torch.distributed import get_process_group_ranks

    return map(int, get_process_group_ranks(group))


class Groups:
    """The process groups that this rank has used.

    Attributes:
        by_object: what is known by the identity of a ``ProcessGroup``, for as long as that object lives.
    """

    def __init__(
        self,
        world_size: int,
        backend_of: Callable[[Any], str] = _backend_of,
        ranks_of: Callable[[Any], Iterable[int]] = _ranks_of,
    ) -> None:
        self.world_size = world_size
        self.n_changes = 0  # how often what is known has changed
        self._backend_of = backend_of
        self._ranks_of = ranks_of
        self.by_object: dict[int, GroupInfo] = {}
        self._by_name: dict[str, GroupInfo] = {}
        self._lives: dict[int, weakref.ref[Any]] = {}

    def of(self, process_group: Any) -> GroupInfo:
        """Return what is known about a ``torch.distributed.ProcessGroup``."""
        name = process_group.group_name
        found = self._by_name.get(name)
        info = self._added(name, process_group) if found is None else found
        number = id(process_group)
        # The identity of a group that is gone may become that of another one.
        if number not in self._lives:
            self._lives[number] = weakref.ref(process_group, lambda _: self._forget(number))
        self.by_object[number] = info
        return info

    def _forget(self, number: int) -> None:
        self.by_object.pop(number, None)
        self._lives.pop(number, None)

    def name_axis(self, process_group: Any, axis: str) -> None:
        """Note that *process_group* serves *axis*, one of AXES, unless it has one already."""
        self.name_known(self.of(process_group), axis)

    def name_known(self, info: GroupInfo, axis: str) -> None:
        """Note that the group of *info* serves *axis*; as `name_axis`."""
        if info.axis not in AXES and info.axis != axis:
            info.axis = axis
            self.n_changes += 1

    def table(self) -> tuple[Group, ...]:
        """Return the groups as ``run.json`` stores them."""
        return _stored(self.known())

    def layout(self, rank: int) -> Layout | None:
        """Return the parallel degrees that the groups of *rank* tell: those in use, or all if none is.

        A mesh that is only there, as of a training before this one, says nothing of what is recorded.
        """
        used = [group for group in self.known() if group.n_collectives or group.n_transfers]
        return deduced_layout(_stored(used or self.known()), rank, self.world_size)

    def named(self, name: str) -> GroupInfo | None:
        """Return the group that torch calls *name*, None if this rank has not used it."""
        return self._by_name.get(name)

    def axis_of_name(self, name: str) -> str:
        """Return the axis of the group that torch calls *name*, empty if this rank has not used it."""
        found = self._by_name.get(name)
        return found.axis if found is not None else ""

    def known(self) -> list[GroupInfo]:
        """Return the groups that this rank has used so far."""
        return list(self._by_name.values())

    def _added(self, name: str, process_group: Any) -> GroupInfo:
        ranks = tuple(self._ranks_of(process_group))
        description = getattr(process_group, "group_desc", "")
        # Torch writes a backend for each kind of device, as `cpu:gloo,cuda:nccl`.
        backends = str(self._backend_of(process_group)).split(",")
        info = GroupInfo(
            id=stable_group_id(name, ranks),
            axis=axis_of(description, fallback=self._fallback(name, ranks)),
            ranks=ranks,
            on_gloo=not {"gloo", "cpu:gloo"}.isdisjoint(backends),
            gpu_on_gloo=not {"gloo", "cuda:gloo"}.isdisjoint(backends),
            name=name,
        )
        self._by_name[name] = info
        self.n_changes += 1
        return info

    def _fallback(self, name: str, ranks: tuple[int, ...]) -> str:
        return "world" if len(ranks) == self.world_size else f"group {name}"


def _stored(groups: Iterable[GroupInfo]) -> tuple[Group, ...]:
    return tuple(Group(id=g.id, axis=g.axis, ranks=g.ranks) for g in groups)


def axis_of(description: str, *, fallback: str) -> str:
    """Return the axis that the description of a group or the name of a mesh dimension tells.

    >>> axis_of("mesh_dp_shard", fallback="world"), axis_of("default_pg", fallback="world")
    ('dp', 'world')
    """
    words = set(re.split(r"[\W_]+", description.lower()))
    for axis, known in AXIS_WORDS.items():
        if words.intersection(known):
            return axis
    return fallback if description in _UNNAMED else description


def deduced_layout(groups: Iterable[Group], rank: int, world_size: int) -> Layout | None:
    """Return the parallel degrees that the groups of *rank* tell, None if they do not tell.

    An answer is given only if the degrees fill the world and put the same ranks together as the groups do.
    """
    members: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for group in groups:
        is_new = (
            group.ranks not in members[group.axis]
        )  # a training may make several groups of the same ranks
        if group.axis in AXES and rank in group.ranks and len(group.ranks) > 1 and is_new:
            members[group.axis].append(group.ranks)
    degrees = {axis: degree_of(found) for axis, found in members.items() if found}
    folded = _folded(members, degrees)
    if "ep" in degrees and "dp" not in degrees:  # experts are spread over ranks that have a batch each
        degrees["dp"] = max(world_size // prod(n for axis, n in degrees.items() if axis != "ep"), 1)
    try:
        layout = Layout(**degrees)
    except LayoutError:
        return None
    if layout.world_size != world_size:
        return None
    single = {axis: found[0] for axis, found in members.items() if len(found) == 1 and axis not in folded}
    agrees = all(tuple(sorted(ranks)) in layout.groups(axis) for axis, ranks in single.items())
    return layout if agrees else None


def _folded(members: Mapping[str, list[tuple[int, ...]]], degrees: dict[str, int]) -> set[str]:
    """Take context-parallel ranks out of the data-parallel degree; return the axes whose groups hold others.

    Gradients are summed over both, often in one group.
    """
    largest = max(members.get("dp", ()), key=len, default=())
    if "cp" not in degrees or not all(set(group) <= set(largest) for group in members["cp"]):
        return set()
    degrees["dp"] //= degrees["cp"]
    return {"dp"}


def degree_of(found: Iterable[Iterable[int]]) -> int:
    """Return how many ranks the groups of one rank along an axis reach together.

    Those of hybrid sharding multiply; a group within another adds nothing.

    >>> degree_of([(0, 1), (0, 2)]), degree_of([(0, 1), (0, 2), (0, 1, 2, 3)]), degree_of([])
    (4, 4, 1)
    """
    sets = {frozenset(ranks) for ranks in found}
    return prod(len(one) for one in sets if not any(one < other for other in sets))
