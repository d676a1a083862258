"""Process groups of a trace: members, axis and number, out of what the file says about them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from foretrace.tracer.groups import axis_of
from foretrace.tracer.ingest.events import text, whole
from foretrace.traces.info import stable_group_id
from foretrace.traces.layout import Group

MOST_RANKS: Final = 1 << 20  # ranks of the largest job that is believed


@cache
def _spelled(ranks: str) -> tuple[int, ...]:
    """Return the ranks in a list such as ``[0, 1]``; none if it was cut off."""
    return () if "..." in ranks else _believed(tuple(map(int, re.findall(r"\d{1,18}", ranks))))


def _believed(ranks: Sequence[int]) -> tuple[int, ...]:
    """Return *ranks*; none if one of them is no rank of any job."""
    return tuple(ranks) if all(0 <= rank < MOST_RANKS for rank in ranks) else ()


@dataclass(slots=True)
class TraceGroups:
    """The process groups that one file refers to."""

    rank: int  # whose file it is, -1 if unknown
    world_size: int  # number of ranks of the job, 0 if unknown
    configured: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    known: dict[int, Group] = field(default_factory=dict)  # by number, the groups seen so far
    sources: set[str] = field(default_factory=set)  # where members were taken from, for the evidence
    assumed: set[str] = field(default_factory=set)  # what nothing tells, and is taken to be so

    @classmethod
    def from_header(cls, rank: int, world_size: int, info: Mapping[str, Any]) -> TraceGroups:
        """Return the groups that the ``distributedInfo`` of a Kineto file lists."""
        groups = cls(rank, world_size)
        listed = info.get("pg_config")
        for entry in listed if isinstance(listed, list) else ():
            if isinstance(entry, dict):
                groups.configure(entry.get("pg_name", ""), entry.get("pg_desc", ""), entry.get("ranks"))
        groups.world_size = world_size
        return groups

    def configure(self, name: object, description: object, members: object, size: int = 0) -> None:
        """Note a group that the file lists: the world is no smaller than it, or than *size*.

        Members that are no list, or that no job has, are not believed.
        """
        listed = map(whole, members) if isinstance(members, list) else ()
        found = _believed([rank for rank in listed if rank is not None])
        # Members that are known stay, where a later entry tells none.
        if found or text(name) not in self.configured:
            self.configured[text(name)] = (text(description), found)
        if size <= MOST_RANKS:
            self.world_size = max(self.world_size, size, *(rank + 1 for rank in found))

    def of(self, said: Mapping[str, Any]) -> Group | None:
        """Return the group of a collective with the metadata *said*; None if nothing tells its members."""
        name = said.get("Process Group Name", said.get("Process Group ID"))
        label = "" if name is None else text(str(name))
        description, members = self.configured.get(label, ("", ()))
        description = text(str(said.get("Process Group Description") or description))
        members = self._members(said, members)
        if not members:
            return None
        return self.add(label, description, members)

    def of_size(self, size: int) -> Group | None:
        """Return the group of *size* members that the rank of the file is in; None if nothing tells them.

        The only one that the file lists, or the world; else ranks in a row, which is assumed.
        """
        listed = {
            (name, *known) for name, known in self.configured.items()
            if len(known[1]) == size and self.rank in known[1]
        }  # fmt: skip
        if len(listed) == 1:
            self.sources.add("the only group of the header with as many members as sizes tell")
            return self.add(*listed.pop())
        if size == self.world_size > 1:
            self.sources.add("as large as the world: everybody")
            return self.add("", "", tuple(range(size)))
        if self.rank < 0 or listed or not 1 < size < self.world_size or self.world_size % size:
            return None
        self.assumed.add(f"groups of {size}, which sizes of input and output tell, are ranks in a row")
        first = self.rank // size * size
        return self.add(f"of {size}", "", tuple(range(first, first + size)))

    def add(self, name: str, description: str, ranks: tuple[int, ...]) -> Group:
        """Return the group of *ranks*, noting it."""
        number = stable_group_id(name, ranks)
        if number not in self.known:
            everyone = len(ranks) == self.world_size
            fallback = "world" if everyone else f"group {name}" if name else "unknown"
            axis = axis_of(description, fallback=fallback)
            self.known[number] = Group(id=number, axis=axis, ranks=ranks)
        return self.known[number]

    def _members(self, said: Mapping[str, Any], configured: tuple[int, ...]) -> tuple[int, ...]:
        spelled = said.get("Process Group Ranks")
        size = whole(said.get("Group size"))
        members = _spelled(str(spelled or ""))
        if members:
            self.sources.add("members spelled out by the file")
            return members
        if configured:
            self.sources.add("members from the header of the file")
            return configured
        start, stride = whole(said.get("Global rank start")), whole(said.get("Global rank stride"))
        if size and start is not None and stride and min(size, start + 1, stride) > 0:
            self.sources.add("members from first rank and stride")
            # One more than is believed: a size that no job has is refused without making as many ranks.
            return _believed(range(start, start + min(size, MOST_RANKS + 1) * stride, stride))
        if size and size == self.world_size:
            self.sources.add("as large as the world: everybody")
            return tuple(range(size))
        return ()


def placed(group: Group | None) -> dict[str, Any]:
    """Return the columns of a timeline that say over which group a communication runs."""
    return {"axis": group.axis if group else "unknown", "group": group.id if group else -1}


def whole_bytes(kind: str, given_bytes: int, group: Group | None) -> int:
    """Return the size of an array, as the timeline has it, of which a rank gives *given_bytes*.

    Of an all-gather that is the whole: as many parts as there are ranks.
    """
    parts = len(group.ranks) if kind == "all_gather" and group is not None else 1
    return min(given_bytes * parts, (1 << 62) - 1)
