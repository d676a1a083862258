"""The verbs about machines: list the catalogue, show one, check a file of one's own."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

import click

from foretrace.door import json_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_GPUS = click.option(
    "--gpus", "n_gpus", type=click.IntRange(min=1), help="Number of GPUs; by default that of the file."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group()
def topology() -> None:
    """List, show and draw machines, check a file that describes one, and measure this one."""


@topology.command("list")
@click.argument("words", nargs=-1)
@click.option("--devices", is_flag=True, help="The devices that a file may name, instead of machines.")
@click.option("--links", is_flag=True, help="The links that a file may name, instead of machines.")
@_JSON
def list_(words: tuple[str, ...], *, devices: bool, links: bool, as_json: bool) -> None:
    """List the machines of the catalogue.

    Of WORDS, if there are any, all have to be in the name, the GPU or the description.

    For example: foretrace topology list h100 aws
    """
    from foretrace.topologies.catalog import load_cluster, names
    from foretrace.topologies.facts import bandwidth, row
    from foretrace.topologies.render import add_row, print_table, table_of
    from foretrace.topologies.units import format_bytes

    if devices and links:
        raise click.UsageError("--devices and --links: give one of them")
    if devices or links:
        _list_parts(words, devices=devices, as_json=as_json)
        return
    rows = [one for one in map(row, map(load_cluster, names())) if _has(one, words)]
    if as_json:
        click.echo(json_text({"clusters": rows}))
        return
    if not rows:
        click.echo(f"no machine of the catalogue has {' and '.join(words)} in its name, GPU or description")
        return
    table = table_of("name", "a node", "memory", "TFLOP/s", "per GPU", "per node", "USD/h")
    for facts in rows:
        price = facts["price_usd_per_gpu_hour"]
        add_row(
            table,
            facts["name"],
            f"{facts['gpus_per_node']} {facts['device']}",
            format_bytes(facts["memory_bytes"]),
            f"{_peak_16_bit(facts) / 1e12:,.0f}" if _peak_16_bit(facts) else "none",
            bandwidth(facts["intra_bytes_per_s"]),
            bandwidth(facts["node_bytes_per_s"]),
            "?" if price is None else f"{price:.2f}",
        )
    print_table(table)
    click.echo(
        "TFLOP/s: dense peak in bf16 or fp16. per GPU: into its node, per node: through\n"
        "all NICs, each way. USD/h: list price of a GPU, ? where none was found;\n"
        "topology show NAME says whose and of when, --price gives yours."
    )


def _list_parts(words: tuple[str, ...], *, devices: bool, as_json: bool) -> None:
    """List the devices, or the links, of the catalogue whose names have all *words*."""
    from foretrace.topologies.catalog import device_names, link_names, load_device, load_link
    from foretrace.topologies.facts import device_row, link_row
    from foretrace.topologies.render import add_row, print_table, table_of

    wanted = (one for one in (device_names() if devices else link_names()) if _named(one, words))
    rows = [device_row(load_device(one)) if devices else link_row(load_link(one)) for one in wanted]
    if as_json:
        click.echo(json_text({"devices" if devices else "links": rows}))
        return
    if not rows:
        click.echo(
            f"no {'device' if devices else 'link'} of the catalogue has {' and '.join(words)} in its name"
        )
        return
    table = table_of(*rows[0])
    for facts in rows:
        add_row(table, *facts.values())
    print_table(table)


def _named(name: str, words: tuple[str, ...]) -> bool:
    return all(word.lower() in name for word in words)


def _peak_16_bit(facts: Mapping[str, Any]) -> float:
    peaks: Mapping[str, float] = facts["peak_flops_per_s"]
    return max(peaks.get(name, 0.0) for name in ("bf16", "fp16"))


def _has(facts: Mapping[str, Any], words: tuple[str, ...]) -> bool:
    """Return whether name, GPU and description of a machine have all *words*."""
    text = f"{facts['name']} {facts['device']} {facts['description']}".lower()
    return all(word.lower() in text for word in words)


@topology.command("show")
@click.argument("name")
@_GPUS
@_JSON
def show(name: str, *, n_gpus: int | None, as_json: bool) -> None:
    """Show what a machine is made of.

    NAME is one of `foretrace topology list`, or the path of a TOML file.
    """
    from foretrace.topologies.catalog import load_cluster
    from foretrace.topologies.facts import bandwidth, parts
    from foretrace.topologies.reach import tiers
    from foretrace.topologies.render import add_row, print_table, table_of
    from foretrace.topologies.units import format_time

    cluster = load_cluster(name, n_gpus)
    distances = tiers(cluster)
    if as_json:
        rows = [{"tier": t.name, "bytes_per_s": t.bytes_per_s, "latency_s": t.latency_s} for t in distances]
        click.echo(json_text({**cluster.describe(), "tiers": rows}))
        return
    click.echo(f"{cluster.name}: {cluster.description}" if cluster.description else cluster.name)
    size = f"{_count(cluster.n_gpus, 'device')} in {_count(cluster.n_nodes, 'node')}"
    click.echo(f"{size}, fabric {cluster.fabric_spec.kind}\n")
    table = table_of("what one device can send, all at once", "per direction", "one way")
    for tier in distances:
        add_row(table, _DISTANCE[tier.name], bandwidth(tier.bytes_per_s), format_time(tier.latency_s))
    print_table(table)
    numbers: dict[str, int] = {}
    for title, facts, sources in parts(cluster):
        table = table_of(title, "", "source")
        for key, value in facts.items():
            source = sources.get(key) or next((s for k, s in sources.items() if k.startswith(f"{key}.")), "")
            add_row(table, key, value, f"[{numbers.setdefault(source, len(numbers) + 1)}]" if source else "")
        print_table(table)
    for source, number in numbers.items():
        click.echo(f"[{number}] {source}")


@topology.command("check")
@click.argument("path")
@_GPUS
@_JSON
def check(path: str, *, n_gpus: int | None, as_json: bool) -> None:
    """Check a file that describes a machine.

    Every GPU has to reach every other.

    Without n_gpus in the file, or --gpus, that is one node, and what joins nodes is not looked at.
    """
    from foretrace.topologies.catalog import load_cluster
    from foretrace.topologies.reach import Reach
    from foretrace.topologies.wiring import fabric

    cluster = load_cluster(path, n_gpus)
    graph = fabric(cluster)
    shape = Reach(graph, range(cluster.n_gpus)).shape(range(cluster.n_gpus))
    counts = {
        "n_gpus": cluster.n_gpus,
        "n_domains": shape.n_domains,
        "n_switches": sum(data["tier"] not in {"gpu", "nic"} for _, data in graph.nodes(data=True)),
        "n_links": graph.number_of_edges() // 2,
    }
    if as_json:
        click.echo(json_text({"name": cluster.name, **counts}))
        return
    domains = _count(counts["n_domains"], f"{_WIRES.get(cluster.intra.kind, '')}domain")
    switches = _count(counts["n_switches"], "switch", "es")
    click.echo(
        f"{path}: {_count(counts['n_gpus'], 'GPU')} in {domains}, {switches}, "
        f"{_count(counts['n_links'], 'link')}; every GPU reaches every other"
    )


@topology.command("draw")
@click.argument("name")
@_GPUS
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), help="Write a page with a picture to this file."
)
@click.pass_context
def draw(ctx: click.Context, name: str, *, n_gpus: int | None, output: str | None) -> None:
    """Draw the fabric of a machine, as text or as an HTML page.

    For example: foretrace topology draw dgx-h100 --gpus 32 -o fabric.html
    """
    from foretrace.topologies.catalog import load_cluster
    from foretrace.topologies.draw import lines, page

    cluster = load_cluster(name, n_gpus)
    if output is None:
        click.echo("\n".join(lines(cluster)))
        return
    ctx.obj(output, page(cluster))
    click.echo(f"{output}: {cluster.n_gpus} GPUs of {cluster.name}")


@topology.command("read")
@click.argument("path")
@click.option(
    "--device", default="", help="Device of the catalogue, where the file does not say which it is."
)
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write the machine to this TOML file.")
@_JSON
@click.pass_context
def read(ctx: click.Context, path: str, *, device: str, output: str | None, as_json: bool) -> None:
    """Read a machine from NCCL's topology XML or `nvidia-smi topo -m`.

    For example: nvidia-smi topo -m > topo.txt; foretrace topology read topo.txt -o mine.toml
    """
    from foretrace.topologies.discover import discover, to_toml

    text = to_toml(discover(path), device)
    if output is not None:
        ctx.obj(output, text)
    if as_json:
        click.echo(json_text({"machine": tomllib.loads(text), "toml": text, "file": output}))
    elif output is None:
        click.echo(text, nl=False)
    else:
        click.echo(f"{output}: try foretrace topology check {output}")


def _count(n: int, what: str, plural: str = "s") -> str:
    return f"{n} {what}{'' if n == 1 else plural}"


_DISTANCE: Mapping[str, str] = {
    "node": "inside its node",
    "nic": "over a NIC that two nodes share",
    "leaf": "to a node under the same leaf switch",
    "spine": "through the spine",
    "core": "to another site or group",
    "peer": "from switch to switch",
}


_WIRES: Mapping[str, str] = {"nvlink": "NVLink ", "pcie": "PCIe ", "xgmi": "Infinity Fabric "}
"""What joins the GPUs of a domain, for people."""
