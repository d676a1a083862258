"""What is known about a run besides its spans: the contents of ``run.json``.

A simulated run is described by one ``RunInfo``. While a run is recorded, every rank writes the part that
it knows as a *sidecar*, ``ranks/rank-00000.json``, in the very same format: its groups, its clock, its
warnings. ``merged`` makes one description out of them, so that a run which never came to its end can be
read like any other.
"""

from __future__ import annotations

import json
import os
import socket
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from foretrace import door
from foretrace.traces.batch import Batch
from foretrace.traces.errors import RunError
from foretrace.traces.layout import Group, Layout
from foretrace.traces.timeline import FORMAT_VERSION

_Described = TypeVar("_Described")

ORIGINS: Final = ("simulated", "recorded", "ingested")
"""Where a timeline comes from; ``"ingested"`` was recorded by another tool."""

UNNAMED: Final = "world"  # axis of a group of which nobody has said what it is for

CHANGED: Final = "the description of this run is not as it was written, by its checksum: edited, or damaged"
"""Warning of a ``run.json`` or a sidecar that was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """How the clock of one rank maps to the common clock of the run."""

    offset_ns: int = 0  # what must be added to the rank's own time
    uncertainty_ns: int = 0  # half width of the interval that holds the true offset
    drift_ppb: float = 0.0  # nanoseconds that the rank's clock loses per second, from ``reference_ns`` on
    reference_ns: int = 0  # own time of the rank at which ``offset_ns`` was measured
    # whether the stored spans are on the common clock already; if not, the reader maps them
    applied: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The process of one recorded rank, as it describes itself."""

    # where it runs, and its number there; machines that share a name, and one before and after it is started
    # anew, have different namespaces
    host: str = ""
    namespace: str = ""
    pid: int = 0
    error: str = ""  # the exception that ended it, "" if none did or it could not say so
    error_ns: int = 0  # when that was noted, on the clock of the run
    # whether a communication of its had failed by then, as those of a peer of the dead do, and it had not
    # gone on since
    call_failed: bool = False
    is_finished: bool = False  # whether its recording came to its end
    # whether its communications are still noted; false once the recorder has given up on them
    sees_calls: bool = True

    @classmethod
    def here(cls) -> Process:
        """Return the process that calls."""
        namespace = ""
        with suppress(OSError):  # elsewhere than on Linux numbers of processes have none
            booted = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
            namespace = f"{Path('/proc/self/ns/pid').readlink()}@{booted}"
        return cls(host=socket.gethostname(), namespace=namespace, pid=os.getpid())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """An entry of the ``structure`` of a recorded model."""

    kind: str = ""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """The ``device`` of a cluster."""

    name: str = ""
    kind: str = ""
    memory_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Intervals:
    """The ``intervals`` of a summary."""

    step_time_s: tuple[float, ...] = ()
    step_time_from: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outer:
    """The ``outer`` of a summary: of outer steps, which several sites share."""

    sites: int


_FIGURES: Final = ("step_time_s", "average_step_time_s", "memory_bound_share")
_COUNTS: Final = (
    *("input_shapes", "beside_params", "n_microbatches", "forwards_per_step", "schedules_per_step"),
    *("global_batch", "seq_len", "tokens_per_step", "shard_ranks", "first_step", "steps"),
)
SAID: Final[Mapping[str, Mapping[str, Any]]] = {
    "job": {
        **dict.fromkeys(_COUNTS, int),
        **dict.fromkeys(("input_shape", "recorded_ranks"), tuple[int, ...]),
        **dict.fromkeys(("precision", "schedule", "sharding", "times"), str),
        "eager": tuple[str, ...],
        "batch": Batch,
    },
    "model": {
        "name": str,
        "n_params": int,
        "structure": Mapping[str, _Part],
        "stages": tuple[int, ...],
        "dtype": str,
        "config": Mapping[str, Any],
        "head_dim": int,
    },
    "cluster": {
        "name": str,
        "device": _Device,
        "gpus_per_node": int,
        "n_gpus": int,
        "price_usd_per_gpu_hour": float,
    },
    "summary": {
        **dict.fromkeys(_FIGURES, float | None),
        "ranks_per_node": int,
        "outer": _Outer | None,
        "intervals": _Intervals,
    },
}
"""Keys of the descriptions that readers count on, where they are given, and their types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Description of a run, as stored in ``run.json`` and in the sidecar of a rank."""

    origin: str  # one of ``ORIGINS``
    world_size: int  # number of ranks of the job; not all of them need to be stored
    name: str = ""  # what a person calls the run
    layout: Layout | None = None  # parallel degrees, None if unknown
    # descriptions for people and reports, as JSON objects; None if unknown
    model: Mapping[str, Any] | None = None
    cluster: Mapping[str, Any] | None = None
    job: Mapping[str, Any] | None = None
    groups: tuple[Group, ...] = ()  # the process groups that the ``group`` column refers to
    # index rank, value the rank whose spans it shares; None if every rank has its own
    representatives: tuple[int, ...] | None = None
    clock: Mapping[int, Clock] = field(default_factory=dict)  # by rank, how its clock maps to the common one
    processes: Mapping[int, Process] = field(default_factory=dict)  # by rank, the process that was recorded
    # headline figures that the writer knew, e.g. ``step_time_s``.
    summary: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()  # what a reader should know before trusting the run
    # how many spans (or other things) the writer lost, by reason
    dropped: Mapping[str, int] = field(default_factory=dict)
    # how much of a recording torch's own flight recorder confirms, None if no rank has asked it
    audit: Audit | None = None
    # versions of the programs that made it, e.g. ``{"foretrace": "0.1.0", "torch": "2.13.0"}``.
    versions: Mapping[str, str] = field(default_factory=dict)
    # files of the run, and what each holds under ``sealed.ID``
    files: Mapping[str, str] = field(default_factory=dict)
    started: str | None = None  # ISO 8601 time of the start, None for a simulated run
    finished: bool = True  # whether the writer came to its end
    format_version: int = FORMAT_VERSION  # version of the format; readers refuse a newer one

    def __post_init__(self) -> None:
        if self.origin not in ORIGINS:
            raise RunError(f"origin {self.origin!r}: one of {', '.join(ORIGINS)}")
        check_world(self.world_size, self.groups)
        if self.layout is not None and self.layout.world_size != self.world_size:
            raise RunError(f"the layout has {self.layout.world_size} ranks, but world_size={self.world_size}")
        if self.representatives is not None:
            check_representatives(self.representatives, self.world_size)

    def to_json(self) -> str:
        """Return the text of ``run.json``. Raises RunError if a description holds what JSON cannot say."""
        document = document_of(self) | {"audit": None if self.audit is None else asdict(self.audit)}
        for name in ("clock", "processes"):
            document[name] = {str(rank): asdict(one) for rank, one in sorted(getattr(self, name).items())}
        try:
            return door.sealed_text(json.dumps(document, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise RunError(f"this description of a run cannot be written as JSON: {error}") from error

    @classmethod
    def from_json(cls, text: str, source: str = "run.json") -> RunInfo:
        """Return the description in *text*, called *source* in an error. Raises RunError as `described`."""
        info, is_as_written = described(cls, text, source, "a run", FORMAT_VERSION)
        if is_as_written or CHANGED in info.warnings:
            return info
        return replace(info, warnings=(*info.warnings, CHANGED))

    @property
    def recorded_ranks(self) -> tuple[int, ...]:
        """The ranks whose spans there should be: all, unless the recording was asked for some of them."""
        chosen = (self.job or {}).get("recorded_ranks")
        return tuple(range(self.world_size) if not isinstance(chosen, list) else chosen)

    def audited(self) -> dict[str, Any]:
        """Return ``audit`` as JSON with its ``lines`` for a person; nothing if nothing was compared."""
        return {} if self.audit is None else {"audit": {**asdict(self.audit), "lines": self.audit.lines()}}

    def representative(self, rank: int) -> int:
        """Return the rank whose stored spans *rank* shares: itself unless the run is folded."""
        return rank if self.representatives is None else self.representatives[rank]


def document_of(described: Any) -> dict[str, Any]:
    """Return the fields of the description of a run or of a rehearsal, as JSON has them."""
    document = {name: getattr(described, name) for name in described.__slots__}
    layout = None if described.layout is None else described.layout.degrees
    return document | {"layout": layout, "groups": [asdict(group) for group in described.groups]}


def described(
    kind: type[_Described], text: str, source: str, what: str, newest: int
) -> tuple[_Described, bool]:
    """Return the description of a *kind* in *text*, and whether it is as it was written, by its checksum.

    Keys that it does not know are left out. An error calls *text* the *source*, and says *what* it should
    describe. Raises RunError: *text* is not JSON, describes something else, or is newer than *newest*.
    """
    document = door.as_table(door.parse(text, "JSON", source, RunError), source, RunError)
    if "format_version" not in document:
        raise RunError(f"{source} does not describe {what}: no format_version in it")
    version = document["format_version"]
    if not isinstance(version, int) or version > newest:
        raise RunError(
            f"{source} has format version {version!r}, this foretrace reads up to {newest}; "
            "install a newer foretrace"
        )
    try:
        found = door.shaped(kind, document)
        for name, kinds in SAID.items():
            door.check_known(getattr(found, name, None), kinds, name)
    except ValueError as error:
        raise RunError(f"{source} does not describe {what}: {error}") from error
    return found, door.is_as_sealed(text, document)


def read_info(path: Path, name: str = "") -> RunInfo:
    """Return the description in the file *path*, called *name* in an error. Raises RunError."""
    return RunInfo.from_json(door.read_text(path, RunError), name or str(path))


def stable_group_id(name: str, ranks: Sequence[int]) -> int:
    """Return a number for a process group that every rank finds by itself, without asking another.

    Args:
        name: what distinguishes groups of the same ranks, e.g. the axis or torch's group name.
        ranks: global ranks of the group.

    >>> stable_group_id("dp", [0, 2]) == stable_group_id("dp", (0, 2))
    True
    """
    members = ",".join(map(str, ranks))
    return zlib.crc32(f"{name}:{members}".encode()) & 0x7FFF_FFFF  # group is int32, -1 means unknown


def merged(base: RunInfo | None, parts: Mapping[int, RunInfo]) -> RunInfo:
    """Return one description out of ``run.json`` and the sidecars of the ranks.

    What ``run.json`` says goes first; what it leaves open comes from the lowest rank that knows. Groups and
    clocks are joined, numbers of dropped spans added, equal warnings of several ranks said once. The run is
    finished if ``run.json`` says so or if every rank of the world says so.

    Args:
        base: contents of ``run.json``, None if there is none yet.
        parts: sidecar by rank; at least one if *base* is None.
    """
    ordered = [parts[rank] for rank in sorted(parts)]
    first = base if base is not None else ordered[0]
    known = [first, *ordered]
    groups, clashes = _joined_groups(known)
    dropped: Counter[str] = Counter()
    # Without a run.json the first sidecar is *first* as well, and counts once.
    for info in {id(info): info for info in known}.values():
        dropped.update(info.dropped)
    everyone = len(parts) == len(first.recorded_ranks) and all(info.finished for info in ordered)
    own = base.warnings if base is not None else ()
    return replace(
        first,
        **{name: _first_known(known, name) for name in ("layout", "cluster", "started", "representatives")},
        # Backwards: of two that say something the first one stays.
        job={key: value for info in reversed(known) for key, value in (info.job or {}).items()} or None,
        model=joined_models(info.model for info in known),
        name=next((info.name for info in known if info.name), ""),
        groups=groups,
        clock={rank: clock for info in reversed(known) for rank, clock in info.clock.items()},
        # Forwards: what a rank says of its own process is newer than what run.json says.
        processes={rank: one for info in known for rank, one in info.processes.items()},
        summary={key: value for info in reversed(known) for key, value in info.summary.items()},
        audit=joined_audits([info.audit for info in ordered], len(ordered)) or first.audit,
        versions={key: value for info in reversed(known) for key, value in info.versions.items()},
        files={name: one for info in reversed(known) for name, one in info.files.items()},
        warnings=(*own, *(said for said in _collected(parts) if said not in own), *clashes),
        dropped=dict(dropped),
        finished=(base is not None and base.finished) or everyone,
    )


def rank_list(ranks: Iterable[int]) -> str:
    """Return ranks as a person writes them.

    >>> rank_list([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[1]}" for run in runs)


def _first_known(infos: Sequence[RunInfo], name: str) -> Any:
    """Return the first value of attribute *name* that is not None."""
    return next((value for info in infos if (value := getattr(info, name)) is not None), None)


def _joined_groups(infos: Sequence[RunInfo]) -> tuple[tuple[Group, ...], list[str]]:
    """Return every group once, and a warning for each number that two different groups claim."""
    found: dict[int, Group] = {}
    clashes: list[str] = []
    for group in (group for info in infos for group in info.groups):
        known = found.setdefault(group.id, group)
        if known.ranks != group.ranks:
            one, other = rank_list(known.ranks), rank_list(group.ranks)
            if one == other:  # only their order differs
                one, other = (", ".join(map(str, of.ranks)) for of in (known, group))
            clashes.append(f"group {group.id} means ranks {one} to one rank and {other} to another")
        elif known.axis == UNNAMED:  # by a sidecar that is older than what the group is known by
            found[group.id] = group
        elif group.axis not in (UNNAMED, known.axis):
            clashes.append(f"group {group.id} is {known.axis} to one rank and {group.axis} to another")
    return tuple(found[number] for number in sorted(found)), sorted(set(clashes))


def _collected(parts: Mapping[int, RunInfo]) -> list[str]:
    """Return the warnings of all ranks; one that several ranks give is said once, with their numbers."""
    said: dict[str, list[int]] = {}
    for rank in sorted(parts):
        for warning in parts[rank].warnings:
            said.setdefault(warning, []).append(rank)
    return [f"rank {rank_list(ranks)}: {warning}" for warning, ranks in said.items()]


def check_world(world_size: int, groups: Sequence[Group]) -> None:
    """Raise RunError if a world is empty or too large, or a group has ranks outside of it."""
    if not 1 <= world_size <= door.MOST_RANKS:
        raise RunError(f"world_size={world_size}: a run has from 1 to {door.MOST_RANKS:,} ranks")
    for group in groups:
        if group.ranks and not 0 <= min(group.ranks) <= max(group.ranks) < world_size:
            raise RunError(f"group {group.id} has ranks outside of the world of {world_size}")


def check_representatives(representatives: Sequence[int], world_size: int) -> None:
    """Raise RunError unless every rank has a representative that represents itself."""
    if len(representatives) != world_size:
        raise RunError(f"{len(representatives)} representatives for a world of {world_size} ranks")
    for rank, representative in enumerate(representatives):
        if not 0 <= representative < world_size or representatives[representative] != representative:
            raise RunError(f"rank {rank} is represented by {representative}, which does not stand for itself")


# Puts the description of a model together from the parts of it that ranks and pipeline stages hold.
#
# A description may have a ``structure``: by path, in which ``*`` stands for the number of a layer, the class
# of the module there, the ``shapes`` of its parameters, its whole-number attributes and the ``layers`` that
# have it. That of stages of a pipeline has their numbers, ``stages``: each may count its layers from 0.


def joined_models(parts: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Return the first of *parts* with everything that others of them hold besides; None if there is none.

    Parts that say nothing new, as those of data-parallel ranks, change nothing. The parameters of a part that
    does are added. Layers of other stages are others, also where they have the same numbers.

    >>> a = {"n_params": 8, "structure": {"layers.*.up": {"layers": [0]}}}
    >>> b = {"n_params": 9, "stages": None, "structure": {"layers.*.up": {"layers": [1]}, "head": {}}}
    >>> joined_models([None, a, b, a])["structure"]
    {'layers.*.up': {'layers': [0, 1]}, 'head': {}}
    """
    joined: dict[str, Any] | None = None
    for part in parts:
        if part is None:
            continue
        if joined is None:
            joined = dict(part)
        elif _has_structure(joined) and _has_structure(part):
            stages, more = (set(one.get("stages") or ()) for one in (joined, part))  # null: unknown
            others = more - stages
            structure = _united(joined["structure"], _behind(joined, part) if others else part["structure"])
            if others or (structure != joined["structure"] and not more):
                sizes = joined.get("n_params", 0), part.get("n_params", 0)
                n_params = None if None in sizes else sum(sizes)
                joined |= {"n_params": n_params, "structure": structure}
                joined |= {"stages": sorted(stages | more)} if others else {}
    return joined


def _behind(one: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the structure of stages *other*, its layers behind those of *one* where both count from 0."""
    known, structure = _layers(one["structure"]), other["structure"]
    own = _layers(structure)
    if not known & own:
        return dict(structure)
    shift = 1 + max(known) - min(own)
    return {
        path: {**entry, "layers": [layer + shift for layer in entry["layers"]]}
        if "layers" in entry
        else entry
        for path, entry in structure.items()
    }


def _layers(structure: Mapping[str, Any]) -> set[int]:
    return {layer for entry in structure.values() for layer in entry.get("layers", ())}


def _has_structure(model: Mapping[str, Any]) -> bool:
    structure = model.get("structure")
    return isinstance(structure, Mapping) and all(isinstance(entry, Mapping) for entry in structure.values())


def _united(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    found = {path: dict(entry) for path, entry in one.items()}
    for path, entry in other.items():
        if path not in found:
            found[path] = dict(entry)
        elif entry.get("layers"):
            found[path]["layers"] = sorted({*found[path].get("layers", ()), *entry["layers"]})
    return found


# What a recording says of itself: how much of it the flight recorder of c10d, torch's own, confirms.
#
# Each rank compares what it has recorded when its recording ends (``foretrace.tracer.audit``) and writes the
# result into its sidecar; here the results of the ranks become one, and words.

SHOWN_DIFFERENCES: Final = 6  # differences that a person reads; all are in the JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Calls of one sort."""

    recorded: int = 0  # calls that were recorded, in steps that were left out, too
    compared: int = 0  # those of which c10d's flight recorder holds an entry of the same kind and size
    counted: int = 0  # those of which only the number agrees with c10d's

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            recorded=self.recorded + other.recorded,
            compared=self.compared + other.compared,
            counted=self.counted + other.counted,
        )

    def words(self, sort: str) -> str:
        """Return how many calls of *sort* are confirmed, e.g. ``"3 of 4 collectives confirmed by c10d"``."""
        by_number = f"{self.counted:,} of {self.recorded:,} {sort} confirmed by c10d by their number only"
        if self.counted and not self.compared:
            return by_number
        compared = f"{self.compared:,} of {self.recorded:,} {sort} confirmed by c10d"
        return f"{compared}, {self.counted:,} more by their number only" if self.counted else compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What c10d says of the calls that were recorded."""

    collectives: Tally = field(default_factory=Tally)  # the collectives
    transfers: Tally = field(default_factory=Tally)  # the sides of point-to-point transfers
    # what is not confirmed, or by its number only, and why; how many there are of it
    reasons: Mapping[str, int] = field(default_factory=dict)
    differences: tuple[str, ...] = ()  # what was recorded otherwise than c10d holds it, in words

    def lines(self) -> list[str]:
        """Return what a person should read: what is confirmed, what is not and why, and what differs."""
        sorts = (("collectives", self.collectives), ("transfers", self.transfers))
        found = [tally.words(sort) for sort, tally in sorts if tally.recorded]
        found += [f"{n:,} {why if n > 1 else _singular(why)}" for why, n in self.reasons.items()]
        shown = [f"differs from c10d: {text}" for text in self.differences[:SHOWN_DIFFERENCES]]
        if (n_more := len(self.differences) - len(shown)) > 0:
            shown.append(f"differs from c10d: {n_more} more, see --json")
        return ["; ".join(found), *shown] if found else shown


def joined_audits(audits: Iterable[Audit | None], n_ranks: int) -> Audit | None:
    """Return the audits of all ranks as one, None if no rank has made one.

    Args:
        audits: by rank, None where the recording of a rank did not come to its end.
        n_ranks: ranks that were recorded; what those without an audit recorded is unknown.
    """
    made = [audit for audit in audits if audit is not None]
    if not made:
        return None
    reasons: Counter[str] = Counter()
    for audit in made:
        reasons.update(audit.reasons)
    if n_ranks > len(made):
        reasons["ranks that ended before the comparison"] = n_ranks - len(made)
    return Audit(
        collectives=sum((audit.collectives for audit in made), Tally()),
        transfers=sum((audit.transfers for audit in made), Tally()),
        reasons=dict(reasons),
        differences=tuple(text for audit in made for text in audit.differences),
    )


def _singular(reason: str) -> str:
    """Return a reason, which begins with a noun for several, for one."""
    noun, _, rest = reason.partition(" ")
    return f"{noun.removesuffix('s')} {rest}"
