"""What is said of a rehearsed run beside its figures: what does not fit, is missing, or is not known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from foretrace.simulator.rehearsed.figures import stage_of
from foretrace.simulator.rehearsed.program import Joiner
from foretrace.simulator.rehearsed.rank import OP
from foretrace.simulator.rehearsed.works import Priced, counts_of
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.units import format_bytes
from foretrace.traces.rehearsal import RankTables, Rehearsal
from foretrace.traces.report.format import format_share

SHOWN: Final = 5
"""Most unknown operators that a note lists."""

SHOWN_TOLD: Final = 8
"""Numbers told to the script that a warning names."""

ON_CPU: Final = (
    "the script puts nothing on a GPU: a real run of it trains on CPUs, while these times are those of "
    "{device}; time it on a CPU machine, as foretrace topology detect describes one"
)
"""What is said of the times of such a script on a machine with GPUs."""

ALONE: Final = (
    "{n} transfers go to or come from ranks that were not rehearsed ({peers}), so that waiting for them is "
    "not in the times: rehearse them, too, those of a pipeline with --ranks auto, others by their numbers"
)
ONE_SIDE: Final = (
    "{n} transfers with ranks that were rehearsed ({peers}) have no other side in the steps that are kept, "
    "so that waiting for them is not in the times: it is in another step, or before the first forward"
)
"""What is said of transfers of which one side is nobody's."""

SHOWN_PARTS: Final = 3
"""Parts of a memory that is too full that are named."""

BUILDING: Final = (
    "before its first step, rank {rank} allocates {most} on the GPU, of {limit}, such as for a model that is "
    "cut only then: a real run ends out of memory; build it on the meta device, cut it, then call to_empty"
)
"""What is said of a script that does not come to its first step."""

TIGHT: Final = (
    "rank {rank} fits, but with what PyTorch's allocator keeps for later it would hold {held} of {limit}: "
    "once the GPU is full, that is freed and asked for again, which stalls the step, or ends out of memory"
)
GROWING: Final = "; less may do with PYTORCH_ALLOC_CONF=expandable_segments:True (-- env THAT COMMAND)"
"""What is said of memory that is full only by what the allocator keeps, and what may help."""


def notes(
    rehearsal: Rehearsal,
    machine: Cluster,
    joiner: Joiner,
    tables: Mapping[int, RankTables],
    costs: Mapping[int, Priced],
) -> list[str]:
    """Return all of it, a sentence each; among them what the rehearsal itself has noted.

    Args:
        rehearsal: what is simulated.
        machine: on which.
        joiner: has joined what its ranks sent each other.
        tables: what each rank did.
        costs: what the works of each cost.
    """
    return [
        *_too_full(rehearsal, machine, tables),
        *elsewhere(rehearsal, [machine]),
        *_missing(joiner, rehearsal.ranks),
        *rehearsal.notes,
        *_told(rehearsal.stated),
        *_unknown(tables, costs),
    ]


def _too_full(rehearsal: Rehearsal, machine: Cluster, tables: Mapping[int, RankTables]) -> list[str]:
    """Return a sentence about rehearsed ranks that do not fit into a device, if there are any."""
    limit = machine.device.memory_bytes
    return [*_building(rehearsal, machine), *_full(rehearsal, machine, tables, limit)]


def _building(rehearsal: Rehearsal, machine: Cluster) -> list[str]:
    """Return a sentence about a rank that needs too much before its first step, if there is one."""
    limit, own = machine.device.memory_bytes, machine.device.reserved_bytes
    sizes = {rank: one.get("building_bytes", 0) + own for rank, one in rehearsal.memory.items()}
    rank = max(sizes, key=lambda one: sizes[one], default="0")
    if sizes.get(rank, 0) <= limit:
        return []
    return [BUILDING.format(rank=rank, most=format_bytes(sizes[rank]), limit=format_bytes(limit))]


def _full(rehearsal: Rehearsal, machine: Cluster, tables: Mapping[int, RankTables], limit: int) -> list[str]:
    stages = [stage_of(rehearsal, rank, machine, tables[rank]) for rank in rehearsal.ranks]
    full = sorted((one for one in stages if one["peak_bytes"] > limit), key=lambda one: -one["peak_bytes"])
    if not full:
        return _tight(rehearsal, limit, stages)
    parts = sorted(full[0]["bytes"].items(), key=lambda item: -item[1])[:SHOWN_PARTS]
    words = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    which = f"rank {full[0]['rank']} does not fit"
    if len(full) > 1:
        which = f"{len(full)} of {len(stages)} rehearsed ranks do not fit, rank {full[0]['rank']} least"
    return [f"{which}: {format_bytes(full[0]['peak_bytes'])} of {format_bytes(limit)}; largest: {words}"]


def _tight(rehearsal: Rehearsal, limit: int, stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence about a rank of which only the memory in use fits, if there is one."""
    found = max(stages, key=lambda stage: int(stage.get("reserved_bytes", 0)))
    held = found.get("reserved_bytes", 0)
    if held <= limit:
        return []
    grows = rehearsal.memory[str(found["rank"])].get("expandable_segments", False)
    said = TIGHT.format(rank=found["rank"], held=format_bytes(held), limit=format_bytes(limit))
    return [said if grows else said + GROWING]


def elsewhere(rehearsal: Rehearsal, machines: Sequence[Cluster]) -> list[str]:
    """Return a sentence about a script for CPUs that is timed on *machines* with other devices."""
    others = [machine.device.name for machine in machines if machine.device.kind != "cpu"]
    is_for_cpus = rehearsal.job.get("device") == "cpu"
    return [ON_CPU.format(device=", ".join(dict.fromkeys(others)))] if others and is_for_cpus else []


def _missing(joiner: Joiner, rehearsed: Sequence[int]) -> list[str]:
    """Return a sentence about transfers whose other side was not *rehearsed*, and one about others."""
    alone = [meeting.peer for _, meeting in joiner.alone()]
    strangers = [peer for peer in alone if peer not in rehearsed]
    found = []
    if strangers:
        found.append(ALONE.format(n=len(strangers), peers=_ranks(strangers)))
    if n := len(alone) - len(strangers):
        known = _ranks([peer for peer in alone if peer in rehearsed])
        found.append(ONE_SIDE.format(n=n, peers=known))
    return found


def _ranks(ranks: Sequence[int]) -> str:
    listed = sorted({*ranks})
    return ", ".join(map(str, listed[:SHOWN])) + (", ..." if len(listed) > SHOWN else "")


def _told(stated: Sequence[str]) -> list[str]:
    """Return one sentence about all numbers that the script was told, if there are any."""
    if not stated:
        return []
    shown = [
        told.replace(" reads a number: told", ":").replace(" (nothing is known of it)", "")
        for told in stated[:SHOWN_TOLD]
    ]
    rest = f"; and {len(stated) - SHOWN_TOLD} more" if len(stated) > SHOWN_TOLD else ""
    return [
        f"the script read numbers that a rehearsal does not compute, and was told: {'; '.join(shown)}{rest}"
    ]


def _unknown(tables: Mapping[int, RankTables], costs: Mapping[int, Priced]) -> list[str]:
    """Return a sentence about operators whose kernels nobody knows, with the share of time they stand for."""
    seconds: Counter[str] = Counter()
    total = 0.0
    for rank, one in tables.items():
        counts = counts_of(one.events, one.works.num_rows, OP)
        for name, known, n, s in zip(
            costs[rank].names, costs[rank].is_known, counts.tolist(), costs[rank].seconds, strict=True
        ):
            total += n * s
            if not known:
                seconds[name] += n * s
    if not seconds:
        return []
    listed = ", ".join(f"{name} {format_share(s / total)}" for name, s in seconds.most_common(SHOWN))
    how = "priced by the bytes of their operands or as a product of as many FLOPs"
    return [f"kernels whose time nobody has measured, {how}, with their share of compute: {listed}"]
