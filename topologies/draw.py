"""Draws a fabric: as lines of text, or as one page with an SVG and nothing from elsewhere."""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import Final

import networkx as nx

from topologies.cluster import Cluster
from topologies.units import format_bandwidth, format_time

ROWS: Final = ("core", "spine", "leaf", "nic", "gpu", "nvswitch", "host")
"""Tiers from top to bottom."""

MOST_NODES: Final = 600
"""Most nodes of a graph that are drawn; of larger machines as many domains as fit."""

_COLOURS: Final = {
    "core": "#7a3e9d",
    "spine": "#9d5bb8",
    "leaf": "#c08bd6",
    "nic": "#d99a2b",
    "gpu": "#2b7bb9",
    "nvswitch": "#3c9d5b",
    "host": "#7f8c8d",
}
_ROW_PIXELS: Final = 110
_LEFT_PIXELS: Final = 90


def lines(cluster: Cluster) -> list[str]:
    """Return how many links of each kind join which tiers, widest first, one line each."""
    graph = cluster.fabric()
    found: Counter[tuple[str, str, float, float, str]] = Counter()
    for a, b, data in graph.edges(data=True):
        ends = sorted((_tier(a), _tier(b)), key=ROWS.index, reverse=True)
        key = (ends[0], ends[1], data["bandwidth_bytes_per_s"], data["latency_s"], data["kind"])
        found[key] += 1
    tiers = Counter(_tier(name) for name in graph)
    said = [", ".join(f"{tiers[tier]} {tier}" for tier in ROWS if tiers[tier])]
    for (a, b, bytes_per_s, latency_s, kind), count in sorted(found.items(), key=lambda item: -item[0][2]):
        said.append(
            f"{a:>8} - {b:8} {count // 2:6} x {format_bandwidth(bytes_per_s):>10}  "
            f"{format_time(latency_s):>8}  {kind}"
        )
    return said


def drawn(cluster: Cluster) -> Cluster:
    """Return *cluster*, or of a large one as many of its nodes as can be told apart in a picture."""
    size = cluster.fabric().number_of_nodes()
    if size <= MOST_NODES or cluster.fabric_spec.links or cluster.fabric_spec.kind == "torus":
        return cluster
    n_nodes = max(2, MOST_NODES * cluster.n_nodes // size)
    return cluster.sized(min(cluster.n_gpus, n_nodes * cluster.gpus_per_node))


def page(cluster: Cluster) -> str:
    """Return an HTML page that shows the fabric; links are as thick as they are wide."""
    shown = drawn(cluster)
    part = "" if shown is cluster else f", of which {shown.n_nodes} nodes are drawn"
    title = f"{cluster.name}: {cluster.n_gpus} GPUs in {cluster.n_nodes} nodes{part}"
    text = escape("\n".join(lines(cluster)))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        "<style>body{font:14px system-ui;margin:24px}svg{width:100%;height:auto}pre{color:#555}"
        "line{stroke:#8895a0;stroke-opacity:.55}line:hover{stroke:#c0392b;stroke-opacity:1}</style>"
        f"<h1>{escape(title)}</h1><p>{escape(cluster.description)}</p>{svg(shown.fabric())}"
        f"<pre>{text}</pre></html>\n"
    )


def svg(graph: nx.DiGraph[str]) -> str:
    """Return *graph* as an SVG: a row per tier, every link once, its figures on hover."""
    places = _places(graph)
    width = _LEFT_PIXELS + max(x for x, _ in places.values()) + 40
    height = max(y for _, y in places.values()) + 60
    widest = max((data["bandwidth_bytes_per_s"] for _, _, data in graph.edges(data=True)), default=1.0)
    parts = [f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" xmlns="http://www.w3.org/2000/svg">']
    for a, b, data in graph.edges(data=True):
        if a < b:
            (x1, y1), (x2, y2) = places[a], places[b]
            stroke = 0.6 + 5 * data["bandwidth_bytes_per_s"] / widest
            said = (
                f"{a} - {b}: {format_bandwidth(data['bandwidth_bytes_per_s'])} per direction, {data['kind']}"
            )
            parts.append(
                f'<line x1="{x1 + _LEFT_PIXELS:.1f}" y1="{y1}" x2="{x2 + _LEFT_PIXELS:.1f}" y2="{y2}" '
                f'stroke-width="{stroke:.1f}"><title>{escape(said)}</title></line>'
            )
    for name, (x, y) in places.items():
        parts.append(
            f'<circle cx="{x + _LEFT_PIXELS:.1f}" cy="{y}" r="6" fill="{_COLOURS[_tier(name)]}">'
            f"<title>{escape(name)}</title></circle>"
        )
    rows = {_tier(name): y for name, (_, y) in places.items()}
    parts += [f'<text x="4" y="{y + 5}">{tier}</text>' for tier, y in rows.items()]
    return "".join([*parts, "</svg>"])


def _places(graph: nx.DiGraph[str]) -> dict[str, tuple[float, int]]:
    """Return where each node is drawn: rows by tier, each spread over the full width."""
    tiers = [tier for tier in ROWS if any(_tier(name) == tier for name in graph)]
    members = {tier: [name for name in graph if _tier(name) == tier] for tier in tiers}
    width = max(24 * max(len(names) for names in members.values()), 400)
    return {
        name: (width * (at + 0.5) / len(names), 30 + _ROW_PIXELS * row)
        for row, names in enumerate(members.values())
        for at, name in enumerate(names)
    }


def _tier(name: str) -> str:
    return name.partition(":")[0]
