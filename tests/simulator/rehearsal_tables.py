"""Small rehearsals, written by hand: what a rank issues, and the machine that it is timed on."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.rehearsed.rank import RankWriter
from foretrace.simulator.rehearsed.run import simulate_rehearsal
from foretrace.simulator.rehearsed.works import priced
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.cluster import Cluster
from foretrace.traces.batch import Batch
from foretrace.traces.layout import Group, Layout
from foretrace.traces.rehearsal import (
    EVENTS,
    MESSAGES,
    PLACES,
    WHAT,
    WORKS,
    RankTables,
    Rehearsal,
    write_rank,
    write_rehearsal,
)

MACHINE = "dgx-h100"
SIDE = 8192
GIB = 2**30
GROUPS = {1: Group(id=1, axis="dp", ranks=(0, 1)), 2: Group(id=2, axis="tp", ranks=(0, 1, 2, 3))}

Event = tuple[str, int, int, int] | tuple[str, int, int, int, int] | tuple[str, int, int, int, int, int]
"""What, item, stream and number of an event; its place, 0 if left out; bytes in use, 100 if left out."""


@cache
def machine(n_gpus: int) -> Cluster:
    """Return the machine of all tests."""
    return load_cluster(MACHINE, max(n_gpus, 8))


def work(**changes: Any) -> dict[str, Any]:
    """Return a large product, or something else."""
    product = {
        "name": "aten.mm",
        "kind": "gemm",
        "shapes": "",
        "dtype": "bf16",
        "m": SIDE,
        "n": SIDE,
        "k": SIDE,
    }
    sizes = {"flops": 2 * SIDE**3, "bytes_moved": 6 * SIDE**2, "batch": 1, "v_dim": 0}
    even = {"rows": (), "along": "", "aligned": True}
    return {**product, **sizes, **even, "causal": False, "kernels": 1, "is_known": True, **changes}


def message(kind: str = "all_reduce", **changes: Any) -> dict[str, Any]:
    """Return a collective of group 1, or a transfer."""
    fixed = {
        "group": 1,
        "size_bytes": GIB,
        "dtype": "bf16",
        "peer": -1,
        "is_async": True,
        "name": "gradients",
        "sent_bytes": (),
        "received_bytes": (),
    }
    return {"kind": kind, **fixed, **changes}


def place(**changes: Any) -> dict[str, Any]:
    """Return a place in a forward."""
    fixed = {"kind": "forward", "name": "layers.0", "layer": 0, "step": 1, "microbatch": -1, "stage": -1}
    return {**fixed, "virtual_stage": -1, "trains": True, **changes}


def tables(
    events: Sequence[Event],
    works: Sequence[dict[str, Any]] = (),
    messages: Sequence[dict[str, Any]] = (),
    places: Sequence[dict[str, Any]] = (),
) -> RankTables:
    """Return the tables of *events*."""
    rows = [
        {
            "what": WHAT.index(what),
            "item": item,
            "place": rest[0] if rest else 0,
            "stream": stream,
            "number": number,
            "allocated_bytes": rest[1] if len(rest) > 1 else 100,
        }
        for what, item, stream, number, *rest in events
    ]
    return RankTables(
        pa.Table.from_pylist(rows, EVENTS),
        pa.Table.from_pylist(list(works) or [work()], WORKS),
        pa.Table.from_pylist(list(messages) or [message()], MESSAGES),
        pa.Table.from_pylist(list(places) or [place()], PLACES),
    )


def written(found: RankTables, **asked: Any) -> RankWriter:
    """Return the tasks of a rank."""
    compute = ComputeModel(machine(8).device, "bf16")
    return RankWriter(found, priced(found.works, compute), GROUPS, range(1, 2), **asked)


def batch(rows: int, length: int) -> dict[str, Any]:
    """Return the entry of a job whose step has so many *rows* of *length* tokens, over all ranks."""
    return Batch(rows=rows, tokens=rows * length, equation=f"{rows} rows × {length}").job


def run(folder: Path, ranks: dict[int, RankTables], groups: Sequence[Group], **changes: Any) -> Any:
    """Write a rehearsal and time it."""
    world = changes.pop("world_size", 2)
    for rank, found in ranks.items():
        write_rank(folder / "rehearsal", rank, found)
    settings: dict[str, Any] = {
        "layout": Layout(dp=world),
        "representatives": (0,) * world,
        "job": {"first_step": 1, "steps": 1, **batch(world, 4096)},
    }
    rehearsal = Rehearsal(
        world_size=world, ranks=tuple(ranks), name="test", groups=tuple(groups), **{**settings, **changes}
    )
    write_rehearsal(folder / "rehearsal", rehearsal)
    return simulate_rehearsal(folder, machine)
