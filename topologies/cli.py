"""The verbs about machines: list the catalogue, show one, check a file of one's own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.table import Table

    from topologies.cluster import Cluster

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")


@click.group()
def topology() -> None:
    """Machines: what is in the catalogue, what one is made of, whether a file of yours describes one."""


@topology.command("list")
@_JSON
def list_(*, as_json: bool) -> None:
    """List the machines of the catalogue."""
    from topologies.catalog import load_cluster, names

    clusters = [load_cluster(name) for name in names()]
    if as_json:
        click.echo(json.dumps({"clusters": [_row(cluster) for cluster in clusters]}))
        return
    table = _table("name", "a node", "memory", "16 bit", "per GPU", "per node")
    for cluster in clusters:
        row = _row(cluster)
        _add(
            table,
            row["name"],
            f"{row['gpus_per_node']} {row['device']}",
            _bytes(row["memory_bytes"]),
            _flops(max(row["peak_flops_per_s"].get(name, 0.0) for name in ("bf16", "fp16")) or None),
            _bandwidth(row["intra_bytes_per_s"]),
            _bandwidth(row["node_bytes_per_s"]),
        )
    _print(table)
    click.echo(
        "16 bit: dense peak in bf16 or fp16. per GPU: into its node, per node: through all its NICs, per "
        "direction."
    )


@topology.command("show")
@click.argument("name")
@click.option(
    "--gpus", "n_gpus", type=click.IntRange(min=1), help="Number of GPUs; the file's own if left out."
)
@_JSON
def show(name: str, *, n_gpus: int | None, as_json: bool) -> None:
    """Show a machine: NAME is one of `foretrace topology list`, or the path of a TOML file."""
    from topologies.catalog import load_cluster
    from topologies.tiers import tiers

    cluster = load_cluster(name, n_gpus)
    distances = tiers(cluster)
    if as_json:
        rows = [{"tier": t.name, "bytes_per_s": t.bytes_per_s, "latency_s": t.latency_s} for t in distances]
        click.echo(json.dumps({**cluster.describe(), "tiers": rows}))
        return
    click.echo(f"{cluster.name}: {cluster.description}" if cluster.description else cluster.name)
    click.echo(f"{cluster.n_gpus} devices in {cluster.n_nodes} node(s), fabric {cluster.fabric_spec.kind}\n")
    table = _table("what one device can send, all at once", "per direction", "one way")
    for tier in distances:
        _add(table, _DISTANCE[tier.name], _bandwidth(tier.bytes_per_s), _time(tier.latency_s))
    _print(table)
    numbers: dict[str, int] = {}
    for title, facts, sources in _parts(cluster):
        table = _table(title, "", "source")
        for key, value in facts.items():
            source = sources.get(key) or next((s for k, s in sources.items() if k.startswith(f"{key}.")), "")
            _add(table, key, value, f"[{numbers.setdefault(source, len(numbers) + 1)}]" if source else "")
        _print(table)
    for source, number in numbers.items():
        click.echo(f"[{number}] {source}")


@topology.command("check")
@click.argument("path")
@_JSON
def check(path: str, *, as_json: bool) -> None:
    """Check that PATH describes a machine in which every GPU reaches every other."""
    from topologies.catalog import load_cluster
    from topologies.reach import Reach

    cluster = load_cluster(path)
    graph = cluster.fabric()
    shape = Reach(graph, range(cluster.n_gpus)).shape(range(cluster.n_gpus))
    found = {
        "name": cluster.name,
        "n_gpus": cluster.n_gpus,
        "n_domains": shape.n_domains,
        "n_switches": sum(data["tier"] not in {"gpu", "nic"} for _, data in graph.nodes(data=True)),
        "n_links": graph.number_of_edges() // 2,
    }
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo(
        f"{path}: {found['n_gpus']} GPUs in {found['n_domains']} NVLink domain(s), {found['n_switches']} "
        f"switches, {found['n_links']} links; every GPU reaches every other"
    )


@topology.command("draw")
@click.argument("name")
@click.option(
    "--gpus", "n_gpus", type=click.IntRange(min=1), help="Number of GPUs; the file's own if left out."
)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), help="Write a page with a picture to this file."
)
def draw(name: str, *, n_gpus: int | None, output: str | None) -> None:
    """Draw the fabric of a machine, as text or as an HTML page.

    For example: foretrace topology draw dgx-h100 --gpus 32 -o fabric.html
    """
    from topologies.catalog import load_cluster
    from topologies.draw import lines, page

    cluster = load_cluster(name, n_gpus)
    if output is None:
        click.echo("\n".join(lines(cluster)))
        return
    _write(output, page(cluster))
    click.echo(f"{output}: {cluster.n_gpus} GPUs of {cluster.name}")


@topology.command("read")
@click.argument("path")
@click.option(
    "--device", default="", help="Device of the catalogue, where the file does not say which it is."
)
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write the machine to this TOML file.")
def read(path: str, *, device: str, output: str | None) -> None:
    """Turn NCCL's topology XML, or the text of `nvidia-smi topo -m`, into a machine.

    For example: nvidia-smi topo -m > topo.txt; foretrace topology read topo.txt -o mine.toml
    """
    from topologies.discover import discover, to_toml

    text = to_toml(discover(path), device)
    if output is None:
        click.echo(text, nl=False)
        return
    _write(output, text)
    click.echo(f"{output}: try foretrace topology check {output}")


def _write(path: str, text: str) -> None:
    from pathlib import Path

    from topologies.errors import CatalogError

    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CatalogError(f"{path} cannot be written: {error.strerror or error}") from None


_DISTANCE: Mapping[str, str] = {
    "node": "inside its node",
    "nic": "over a NIC that two nodes share",
    "leaf": "to a node under the same leaf switch",
    "spine": "through the spine",
    "core": "to another site or group",
    "peer": "from switch to switch",
}


def _row(cluster: Cluster) -> dict[str, Any]:
    """Return what the list shows of *cluster*."""
    nic = cluster.nic
    return {
        "name": cluster.name,
        "gpus_per_node": cluster.gpus_per_node,
        "device": cluster.device.name,
        "memory_bytes": cluster.device.memory_bytes,
        "peak_flops_per_s": dict(cluster.device.peak_flops_per_s),
        "intra_bytes_per_s": cluster.intra.bandwidth_bytes_per_s,
        "node_bytes_per_s": nic.bandwidth_bytes_per_s * cluster.nics_per_node if nic else None,
        "description": cluster.description,
    }


def _parts(cluster: Cluster) -> Iterator[tuple[str, dict[str, str], Mapping[str, str]]]:
    """Yield title, figures and sources of the machine, its device and its links, as a file names them."""
    from topologies.device import KEYS

    spec = cluster.fabric_spec
    facts = {"gpus_per_node": str(cluster.gpus_per_node), "nics_per_node": str(cluster.nics_per_node)}
    if cluster.nic and not spec.links:
        facts["fabric.nodes_per_leaf"] = str(spec.nodes_per_leaf)
        facts["fabric.oversubscription"] = f"{spec.oversubscription:g}"
    if spec.crowding:
        facts["fabric.crowding"] = f"{spec.crowding:g}"
    for other in cluster.others:
        facts[f"others, {other.machine.name}"] = f"the last {other.nodes} nodes"
    if cluster.cores:
        facts |= {"cores": str(cluster.cores), "time_slice": _time(cluster.time_slice_s)}
    if cluster.price_usd_per_gpu_hour is not None:
        facts["price_per_gpu"] = f"{cluster.price_usd_per_gpu_hour:g} USD/h"
    yield "machine", facts, cluster.sources
    device = cluster.device
    facts = {f"peak.{dtype}": _flops(peak) for dtype, peak in device.peak_flops_per_s.items()}
    facts |= {key: _figure(name, getattr(device, name)) for name, key in KEYS.items()}
    if device.gemm_tiles:
        facts["tiles"] = f"{len(device.gemm_tiles.tiles)} sizes on {device.gemm_tiles.processors} processors"
    for name, kernel in device.attention_kernels.items():
        facts[f"attention.kernels.{name}"] = f"{kernel.forward.efficiency:g} of the peak forward"
    yield f"device {device.name}", facts, device.sources
    for link in filter(None, (cluster.intra, cluster.nic)):
        facts = {
            "bandwidth": _bandwidth(link.bandwidth_bytes_per_s),
            "latency": _time(link.latency_s),
            "efficiency": f"{link.efficiency:g}",
        }
        for op, curve in link.curves.items():
            facts[op] = (
                f"{_bandwidth(curve.efficiency * link.bandwidth_bytes_per_s)} after {_time(curve.latency_s)}"
            )
        facts |= {op: _extent(sorted(table.times_s)) for op, table in link.tables.items()}
        yield f"link {link.name}", facts, link.sources


def _figure(name: str, value: float) -> str:
    """Return a figure with the unit that the name of its field says."""
    ways = {"_bytes_per_s": _bandwidth, "_bytes": _bytes, "_s": _time}
    return next((way(value) for ending, way in ways.items() if name.endswith(ending)), f"{value:g}")


def _extent(ranks: list[int]) -> str:
    return f"measured on {', '.join(map(str, ranks))} GPUs"


def _table(*columns: str) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(escape(column), no_wrap=True)
    return table


def _add(table: Table, *cells: str) -> None:
    """Add a row of plain text: what a file calls things is never markup."""
    from rich.markup import escape

    table.add_row(*map(escape, cells))


def _print(table: Table) -> None:
    from rich.console import Console

    Console().print(table)


def _bytes(value: float) -> str:
    from topologies.units import format_bytes

    return format_bytes(value)


def _bandwidth(value: float | None) -> str:
    from topologies.units import format_bandwidth

    return "none" if value is None else format_bandwidth(value)


def _flops(value: float | None) -> str:
    from topologies.units import format_flops

    return "none" if value is None else format_flops(value)


def _time(value: float) -> str:
    from topologies.units import format_time

    return format_time(value)
