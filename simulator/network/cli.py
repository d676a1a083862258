"""The verb ``foretrace topology cost``: what one collective takes on a machine, every way it can be done."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from foretrace.door import json_text

if TYPE_CHECKING:
    from foretrace.simulator.network.cost import Network
    from foretrace.simulator.program import Transfer

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "p2p", "barrier")


@click.command("cost")
@click.argument("name")
@click.argument("kind", metavar="OPERATION")
@click.argument("size", default="")
@click.option(
    "--gpus", "n_gpus", type=click.IntRange(min=2), help="GPUs of the machine; its own if left out."
)
@click.option("--ranks", default="", help="The group: 0,8,16 or 0:64:8. [default: all GPUs]")
@click.option("--nccl-algo", default="", help="Algorithms to choose from, as NCCL_ALGO: ring,tree or ^tree.")
@click.option("--nccl-proto", default="", help="Protocols to choose from, as NCCL_PROTO.")
@click.option("--imbalance", type=float, help="all_to_all: how many times its share the busiest rank gets.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def cost(
    name: str,
    kind: str,
    size: str,
    *,
    n_gpus: int | None,
    ranks: str,
    nccl_algo: str,
    nccl_proto: str,
    imbalance: float | None,
    as_json: bool,
) -> None:
    """Say how long a collective takes on machine NAME.

    Every way to do it is listed.

    OPERATION is all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, p2p or barrier. SIZE
    is that of the whole array, as in nccl-tests: "1 GiB", "64 MiB". The group is all GPUs of the machine,
    and every GPU runs a rank. For example:

        foretrace topology cost dgx-h100 all_reduce "1 GiB" --gpus 64 --ranks 0:64:8
    """
    from foretrace.simulator.errors import SimulationError
    from foretrace.simulator.network.cost import Network
    from foretrace.simulator.network.nccl import choice
    from foretrace.topologies.catalog import load_cluster
    from foretrace.topologies.units import parse_bytes

    kind = _kind(kind)
    network = Network(load_cluster(name, n_gpus), choice=choice(nccl_algo, nccl_proto))
    group = _ranks(ranks, network.cluster.n_gpus)
    if imbalance is not None and kind != "all_to_all":
        raise SimulationError(f"imbalance is of an all_to_all, not of {kind}")
    if not size and kind != "barrier":
        raise SimulationError(f'size is missing: {kind} of how many bytes? e.g. "1 GiB"')
    size_bytes = 0 if kind == "barrier" else parse_bytes(size)
    transfer = _cost(network, kind, size_bytes, group, imbalance)
    found = _document(network, kind, size_bytes, group, transfer)
    if imbalance is not None:
        found |= {"imbalance": imbalance, "ways": []}
    if as_json:
        click.echo(json_text(found))
        return
    _show(found)


def _kind(text: str) -> str:
    """Return the operation that *text* spells, with or without strokes. Raises SimulationError."""
    from foretrace.simulator.errors import SimulationError

    found = {kind.replace("_", ""): kind for kind in KINDS}.get(re.sub("[^a-z0-9]", "", text.lower()))
    if found is None:
        raise SimulationError(f"operation {text!r}: one of {', '.join(KINDS)}")
    return found


def _ranks(text: str, n_gpus: int) -> list[int]:
    """Return the ranks that *text* lists; all of them if it is empty. Raises SimulationError."""
    from foretrace.simulator.errors import SimulationError

    if not text:
        return list(range(n_gpus))
    try:
        parts = [_part(part) for part in text.split(",")]
        found = [rank for part in parts for rank in part[: n_gpus + 1]]
    except ValueError:
        raise SimulationError(f"ranks {text!r}: a list 0,8,16 or a range 0:64:8") from None
    if len(found) < 2 or len(set(found)) < len(found) or not set(found) <= set(range(n_gpus)):
        raise SimulationError(
            f"ranks {text!r}: at least 2 different ones of the {n_gpus} ranks 0 to {n_gpus - 1}"
        )
    return found


def _part(text: str) -> range:
    numbers = [int(word) for word in text.split(":")]
    return range(numbers[0], numbers[0] + 1) if len(numbers) == 1 else range(*numbers)


def _cost(
    network: Network, kind: str, size_bytes: int, group: list[int], imbalance: float | None
) -> Transfer:
    from foretrace.simulator.errors import SimulationError
    from foretrace.simulator.network.exchange import skewed

    if kind == "barrier":
        return network.barrier(group)
    if kind == "p2p":
        if len(group) != 2:
            raise SimulationError(f"p2p is between 2 ranks, not {len(group)}: give --ranks 0,8")
        return network.p2p(size_bytes, *group)
    if imbalance is not None:
        return network.all_to_all_v(skewed(size_bytes, len(group), imbalance), group)
    return network.collective(kind, size_bytes, group)


def _document(
    network: Network, kind: str, size_bytes: int, group: list[int], transfer: Transfer
) -> dict[str, Any]:
    """Return everything as plain JSON types."""
    from foretrace.simulator.network.collectives import bus_factor

    shape = network.shape(group)
    named = "all_reduce" if kind == "barrier" else kind
    time_s = (transfer.latency_ns + transfer.wire_ns) / 1e9
    ways = [] if kind in {"barrier", "p2p"} else network.ways(named, size_bytes, group)
    return {
        "cluster": network.cluster.name,
        "kind": kind,
        "size_bytes": size_bytes,
        "n_ranks": shape.n_ranks,
        "n_nodes": shape.n_domains,
        "algorithm": transfer.algorithm,
        "time_s": time_s,
        "latency_s": transfer.latency_ns / 1e9,
        "wire_s": transfer.wire_ns / 1e9,
        "busbw_bytes_per_s": bus_factor(named, shape.n_ranks) * size_bytes / time_s if time_s else 0.0,
        "ways": [
            {"algorithm": way.name, "time_s": way.total_s, "latency_s": way.latency_s, "wire_s": way.wire_s}
            for way in ways
        ],
    }


def _show(found: dict[str, Any]) -> None:
    """Print *found* for a person."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from foretrace.topologies.units import format_bandwidth, format_bytes, format_time
    from foretrace.traces.console import stdout

    size = f" of {format_bytes(found['size_bytes'])}" if found["size_bytes"] else ""
    nodes = "1 node" if found["n_nodes"] == 1 else f"{found['n_nodes']} nodes"
    rate = f", bus bandwidth {format_bandwidth(found['busbw_bytes_per_s'])}" if size else ""
    click.echo(
        f"{found['kind']}{size} among {found['n_ranks']} ranks in {nodes} of {found['cluster']}: "
        f"{format_time(found['time_s'])} by {found['algorithm']}{rate}"
    )
    if not found["ways"]:
        return
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("way", "time", "latency", "wire"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    for way in found["ways"]:
        taken = way["algorithm"] == found["algorithm"]
        times = (format_time(way[key]) for key in ("time_s", "latency_s", "wire_s"))
        table.add_row(escape(way["algorithm"]) + (" (taken)" if taken else ""), *times)
    stdout(highlight=True).print(table)
