"""Draws a fabric: as lines of text, or as one page with an SVG and nothing from elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from html import escape
from itertools import pairwise
from typing import Final

import networkx as nx

from foretrace.topologies.cluster import Cluster
from foretrace.topologies.reach import LEVEL
from foretrace.topologies.units import format_bandwidth, format_time
from foretrace.topologies.wiring import fabric

ROWS: Final = ("core", "spine", "leaf", "nic", "gpu", "nvswitch", "host")
"""Tiers from top to bottom."""

MOST_NODES: Final = 400
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
_CALLED: Final = {
    "core": ("core", "cores"),
    "spine": ("spine", "spines"),
    "leaf": ("leaf switch", "leaf switches"),
    "router": ("router", "routers"),
    "nic": ("NIC", "NICs"),
    "gpu": ("GPU", "GPUs"),
    "nvswitch": ("NVSwitch", "NVSwitches"),
    "host": ("host", "hosts"),
}
"""What people call one and several of a tier."""

_STANDS_FOR: Final = (
    ("spine", "A spine stands for a whole layer of spine switches, over which traffic is spread evenly."),
    ("core", "The core stands for the links between groups or sites."),
    ("nvswitch", "An NVSwitch stands for all of its domain."),
)
"""What one mark in a picture is, in words."""

_ROW_PIXELS: Final = (120, 220)
"""From one row to the next, least and most."""

_SLOPE: Final = 0.35
"""Height between two rows over how far their links reach sideways, within those bounds."""

_MARGIN_PIXELS: Final = 40
_LEFT_PIXELS: Final = 150
_ARC_PIXELS: Final = 150
"""Height of the highest arc between nodes of one row."""

_FILLED: Final = 0.2
"""Most of a row that the links at its nodes fill: neighbours can be told apart."""

_THIN_PIXELS: Final = 0.6
_THICK_PIXELS: Final = 5
"""What the widest link has beside that of one that carries nothing, where there is room."""

_TIGHT_PIXELS: Final = 1.5
"""Least width of a link that carries less than what arrives below it, for nobody to miss it."""

_WIDTH_PIXELS: Final = 1130
"""Of every row, however many nodes are in it, so that words keep their size."""

_STYLE: Final = """
body{font:14px system-ui;margin:24px;color:#222;background:#fff}
.scrolls{overflow-x:auto}
svg{width:100%;min-width:760px;max-width:1400px;height:auto;font:13px system-ui}
pre,.said{color:#555} text{fill:#222} .width{fill:#667}
line,path{stroke:#8895a0;stroke-opacity:.6;fill:none} .narrow{stroke:#c0392b;stroke-opacity:.9}
line:hover,path:hover{stroke:#1f6fb2;stroke-opacity:1} b{color:#c0392b}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#15181c}pre,.said{color:#aab}
text{fill:#ddd} .width{fill:#99a} .narrow{stroke:#ff6b5a} b{color:#ff6b5a}}
"""


def lines(cluster: Cluster) -> list[str]:
    """Return how many links of each kind join which tiers, from the top down, one line each."""
    graph = fabric(cluster)
    found: Counter[tuple[str, str, float, float, str]] = Counter()
    for a, b, data in graph.edges(data=True):
        # The graph has every cable once in each direction: both count under one key, which is halved below.
        ends = sorted((_tier(a), _tier(b)), key=ROWS.index)
        key = (ends[0], ends[1], data["bandwidth_bytes_per_s"], data["latency_s"], data["kind"])
        found[key] += 1
    tiers = Counter(_tier(name) for name in graph)
    said = [", ".join(_called(graph, tier, tiers[tier]) for tier in ROWS if tiers[tier])]
    for key, count in sorted(found.items(), key=_from_the_top):
        upper, lower, bytes_per_s, latency_s, kind = key
        said.append(
            f"{_called(graph, upper):>11} - {_called(graph, lower):11} {count // 2:6} x "
            f"{format_bandwidth(bytes_per_s):>10}  {format_time(latency_s):>8}  {kind}"
        )
    return said


def _from_the_top(item: tuple[tuple[str, str, float, float, str], int]) -> tuple[int, int, float]:
    """Return by what links are listed: as they stand in the picture, the wider ones first."""
    (upper, lower, bytes_per_s, _, _), _ = item
    return ROWS.index(upper), ROWS.index(lower), -bytes_per_s


def _called(graph: nx.DiGraph[str], tier: str, count: int = 0) -> str:
    """Return what people call one of a *tier*, or *count* of them."""
    one, several = _CALLED["router" if tier == "leaf" and _routers(graph) else tier]
    return f"{count} {one if count == 1 else several}" if count else one


def drawn(cluster: Cluster) -> Cluster:
    """Return *cluster*, or of a large one as many of its nodes as can be told apart in a picture."""
    size = fabric(cluster).number_of_nodes()
    # Listed links and the shape of a torus are right for one number of nodes only: those stay whole.
    if size <= MOST_NODES or cluster.fabric_spec.links or cluster.fabric_spec.kind == "torus":
        return cluster
    n_nodes = max(2, MOST_NODES * cluster.n_nodes // size)
    return cluster.sized(min(cluster.n_gpus, n_nodes * cluster.gpus_per_node))


def page(cluster: Cluster) -> str:
    """Return an HTML page that shows the fabric; the more a link carries, the thicker it is."""
    shown = drawn(cluster)
    part = "" if shown is cluster else f", of which {shown.n_nodes} nodes are drawn"
    nodes = "1 node" if cluster.n_nodes == 1 else f"{cluster.n_nodes} nodes"
    title = f"{cluster.name}: {cluster.n_gpus} GPUs in {nodes}{part}"
    graph = fabric(shown)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1><p>{escape(_described(cluster))}</p>"
        f'<p class="said">{_legend(graph)}{_more(cluster)}</p><div class="scrolls">{svg(graph)}</div>'
        f'<pre class="scrolls">{escape(chr(10).join(lines(cluster)))}</pre></html>\n'
    )


def _described(cluster: Cluster) -> str:
    """Return what the machine says of itself, and of which kind its last nodes are if of another."""
    others = [f"the last {other.nodes} of its nodes: {other.machine.name}" for other in cluster.others]
    return "; ".join(part for part in (cluster.description, *others) if part)


def _legend(graph: nx.DiGraph[str]) -> str:
    """Return how to read the picture, as HTML."""
    tiers = {_tier(name) for name in graph}
    said = ["The thicker a link, the more it carries; figures are per direction, and show under the pointer."]
    if any(narrow(graph, a, b) for a, b in graph.edges):
        said.append("<b>Red</b> links carry less than what arrives below them.")
    said += [words for tier, words in _STANDS_FOR if tier in tiers]
    if _routers(graph):
        said.append("Each node has a router; arcs join neighbours in the torus, and its two ends.")
    return " ".join(said)


def _more(cluster: Cluster) -> str:
    """Return what a picture of one node does not show of a machine of several."""
    if cluster.nic is None or cluster.n_nodes > 1:
        return ""
    return f" NICs and what is behind them are drawn from two nodes on: --gpus {2 * cluster.gpus_per_node}."


def _routers(graph: nx.DiGraph[str]) -> bool:
    """Return whether the leaves are joined to each other, as the routers of a torus are."""
    return any(_tier(a) == _tier(b) == "leaf" for a, b in graph.edges)


def svg(graph: nx.DiGraph[str]) -> str:
    """Return *graph* as an SVG: a row per tier, every link once, its figures on hover."""
    places = _places(graph)
    margin = _MARGIN_PIXELS
    width, height = _LEFT_PIXELS + _WIDTH_PIXELS + 20, max(y for _, y in places.values()) + 2 * margin
    box = f'viewBox="0 {-margin} {width} {height}"'
    rows = Counter(_tier(name) for name in graph)
    parts = [f'<svg {box} role="img" xmlns="http://www.w3.org/2000/svg">']
    scale = _pixels_per_byte_s(graph, rows)
    for a, b, data in graph.edges(data=True):
        # Both directions are one cable; one of them is drawn.
        if a < b:
            thick = _THIN_PIXELS + scale * data["bandwidth_bytes_per_s"]
            parts.append(_link(graph, (a, b), (places[a], places[b]), thick))
    for name, (x, y) in places.items():
        radius = min(7.0, max(1.5, 0.38 * _WIDTH_PIXELS / rows[_tier(name)]))
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y}" r="{radius:.1f}" fill="{_COLOURS[_tier(name)]}">'
            f"<title>{escape(name)}</title></circle>"
        )
    return "".join([*parts, *_words(graph, places), "</svg>"])


def _pixels_per_byte_s(graph: nx.DiGraph[str], rows: Mapping[str, int]) -> float:
    """Return how much thicker a link is for each byte/s, the same for all; *rows* are the nodes in each."""
    found = []
    for a, b, data in graph.edges(data=True):
        # The fuller of the two rows has more links side by side, and so less room for each.
        room = _FILLED * _WIDTH_PIXELS / max(rows[_tier(a)], rows[_tier(b)])
        pixels = min(_THICK_PIXELS, max(_THIN_PIXELS, room - _THIN_PIXELS))
        found.append(pixels / data["bandwidth_bytes_per_s"])
    # One scale for all links: the one that is tightest beside its neighbours decides.
    return min(found, default=0.0)


def narrow(graph: nx.DiGraph[str], a: str, b: str) -> bool:
    """Return whether the lower end of a link gets more from below than all its links upward carry."""
    below, above = sorted((a, b), key=lambda name: LEVEL.get(_tier(name), -1))
    level = LEVEL.get(_tier(below), -1)
    # Inside a node, and between peers of a torus, nothing is above to be too narrow.
    if level < LEVEL["nic"] or _tier(below) == _tier(above):
        return False
    up = down = 0.0
    for _, end, data in graph.edges(below, data=True):
        if LEVEL.get(_tier(end), -1) > level:
            up += data["bandwidth_bytes_per_s"]
        elif LEVEL.get(_tier(end), -1) < level:
            down += data["bandwidth_bytes_per_s"]
    # Widths are divided and added up: a link that is just as wide must not look narrow by rounding.
    return up < 0.999 * down


def _link(
    graph: nx.DiGraph[str], ends: tuple[str, str], places: tuple[tuple[float, int], ...], thick: float
) -> str:
    """Return a link between *places*, *thick* in pixels: a line, or an arc above a row of both its ends."""
    (x1, y1), (x2, y2) = places
    data = graph.edges[ends]
    said = f"{ends[0]} - {ends[1]}: {format_bandwidth(data['bandwidth_bytes_per_s'])} per direction"
    tight = narrow(graph, *ends)
    drawn_as = f'stroke-width="{max(_TIGHT_PIXELS if tight else 0, thick):.1f}"'
    if tight:
        drawn_as += ' class="narrow"'
    title = f"<title>{escape(said)}, {format_time(data['latency_s'])}, {data['kind']}</title>"
    if y1 == y2:
        # A quadratic curve rises half as high as its control point, hence the 2.
        peak = f"{(x1 + x2) / 2:.1f} {y1 - 2 * min(_ARC_PIXELS, 0.5 * abs(x2 - x1)):.0f}"
        return f'<path d="M{x1:.1f} {y1}Q{peak} {x2:.1f} {y2}" {drawn_as}>{title}</path>'
    return f'<line x1="{x1:.1f}" y1="{y1}" x2="{x2:.1f}" y2="{y2}" {drawn_as}>{title}</line>'


def _words(graph: nx.DiGraph[str], places: dict[str, tuple[float, int]]) -> list[str]:
    """Return the name of each row with the nodes in it, and of the links below it how wide they are."""
    rows = {_tier(name): y for name, (_, y) in places.items()}
    counts = Counter(_tier(name) for name in graph)
    found = [
        f'<text x="4" y="{y + 4}">{_called(graph, tier, counts[tier])}</text>' for tier, y in rows.items()
    ]
    joints = [*pairwise(rows), *((tier, tier) for tier in rows)]
    for upper, lower in joints:
        widths = sorted(
            {
                data["bandwidth_bytes_per_s"]
                for a, b, data in graph.edges(data=True)
                # Each cable is there in both directions, so that asking for one order of the tiers finds all.
                if (_tier(a), _tier(b)) == (upper, lower)
            }
        )
        if widths:
            said = " to ".join(format_bandwidth(width) for width in dict.fromkeys((widths[0], widths[-1])))
            at = (rows[upper] + rows[lower]) // 2 + 4 - (_ARC_PIXELS // 2 if upper == lower else 0)
            found.append(f'<text class="width" x="4" y="{at}">{escape(said)}</text>')
    return found


def _places(graph: nx.DiGraph[str]) -> dict[str, tuple[float, int]]:
    """Return where each node is drawn: rows by tier, each over the full width, arcs' room above peers."""
    tiers = [tier for tier in ROWS if any(_tier(name) == tier for name in graph)]
    joined = {_tier(a) for a, b in graph.edges if _tier(a) == _tier(b)}
    found: dict[str, tuple[float, int]] = {}
    y, left = 0, {name: x for tier in tiers for name, x in _row(graph, tier)}
    for tier, below in zip(tiers, [*tiers[1:], ""], strict=True):
        # Room above the row, before it gets its place: arcs between its nodes rise into it.
        y += _ARC_PIXELS if tier in joined else 0
        found |= {name: (left[name], y) for name in left if _tier(name) == tier}
        reach = max(
            (abs(left[a] - left[b]) for a, b in graph.edges if (_tier(a), _tier(b)) == (tier, below)),
            default=0,
        )
        least, most = _ROW_PIXELS
        y += round(min(most, max(least, _SLOPE * reach)))
    return found


def _row(graph: nx.DiGraph[str], tier: str) -> list[tuple[str, float]]:
    """Return the nodes of a *tier*, each with how far from the left it stands."""
    names = [name for name in graph if _tier(name) == tier]
    return [(name, _LEFT_PIXELS + _WIDTH_PIXELS * (at + 0.5) / len(names)) for at, name in enumerate(names)]


def _tier(name: str) -> str:
    return name.partition(":")[0]
