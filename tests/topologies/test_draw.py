"""Pictures of fabrics."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner

from foretrace.cli import main
from foretrace.topologies.catalog import load_cluster, names
from foretrace.topologies.draw import MOST_NODES, drawn, lines, narrow, page, svg
from foretrace.topologies.fabric import FabricSpec
from foretrace.topologies.wiring import fabric


@pytest.mark.parametrize("name", names())
def test_every_machine_can_be_drawn_with_each_link_once(name: str) -> None:
    cluster = load_cluster(name)
    cluster = cluster.sized(2 * cluster.gpus_per_node) if cluster.nic else cluster
    graph = fabric(cluster)
    picture = ET.fromstring(svg(graph))
    tags = [element.tag.rpartition("}")[2] for element in picture]
    peers = sum(a.partition(":")[0] == b.partition(":")[0] for a, b in graph.edges)
    assert (tags.count("path"), tags.count("circle")) == (peers // 2, len(graph))
    assert tags.count("line") == (graph.number_of_edges() - peers) // 2


@pytest.mark.parametrize(("oversubscription", "n_narrow"), [(1.0, 0), (1.01, 2), (3.0, 2)])
def test_links_that_carry_less_than_arrives_below_are_marked(oversubscription: float, n_narrow: int) -> None:
    spec = FabricSpec(kind="fat-tree", nodes_per_leaf=2, oversubscription=oversubscription)
    cluster = replace(load_cluster("dgx-h100", 32), fabric_spec=spec)
    graph = fabric(cluster)
    found = {(a, b) for a, b in graph.edges if a < b and narrow(graph, a, b)}
    assert len(found) == n_narrow
    assert all({a[:4], b[:4]} == {"leaf", "spin"} for a, b in found)
    assert ("Red" in page(cluster)) == bool(n_narrow)


def test_text_counts_links_by_kind() -> None:
    said, *links = lines(load_cluster("dgx-h100", 16))
    assert said == "1 spine, 8 leaf switches, 16 NICs, 16 GPUs, 2 NVSwitches"
    assert [" ".join(line.split()) for line in links] == [
        "spine - leaf switch 8 x 1.6 TB/s 200 ns infiniband",
        "leaf switch - NIC 16 x 50 GB/s 1.35 µs infiniband",
        "NIC - GPU 16 x 50 GB/s 0 ns pcie",
        "GPU - NVSwitch 16 x 450 GB/s 500 ns nvlink",
    ]


def test_of_a_large_machine_a_part_is_drawn_and_said() -> None:
    large = load_cluster("dgx-h100", 8192)
    assert fabric(drawn(large)).number_of_nodes() <= MOST_NODES
    assert re.search(r"8192 GPUs in 1024 nodes, of which \d+ nodes are drawn", page(large))
    small = load_cluster("dgx-h100", 16)
    assert drawn(small) is small


def test_a_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "fabric.html"
    result = CliRunner().invoke(main, ["topology", "draw", "dgx-h100", "--gpus", "32", "-o", str(path)])
    assert result.exit_code == 0
    text = path.read_text(encoding="utf-8")
    assert "<script" not in text
    assert not re.findall(r'(?:src|href)="', text)


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "nowhere").write_text("a file, not a folder", encoding="utf-8")
    path = tmp_path / "nowhere" / "fabric.html"
    done = CliRunner().invoke(main, ["topology", "draw", "dgx-h100", "-o", str(path)])
    assert (done.exit_code, done.stderr) == (2, f"Error: cannot write {path}: Not a directory\n")


def test_without_a_file_it_is_text() -> None:
    result = CliRunner().invoke(main, ["topology", "draw", "localhost"], catch_exceptions=False)
    assert "GPU - host" in result.stdout


def test_a_picture_says_what_its_marks_stand_for(tmp_path: Path) -> None:
    path = tmp_path / "mixed.toml"
    path.write_text('base = "dgx-h100"\nn_gpus = 32\n[[others]]\nmachine = "dgx-a100"\nnodes = 1\n')
    mixed = load_cluster(path)
    assert "the last 1 of its nodes: dgx-a100" in page(mixed)
    assert "default-src 'none'" in page(mixed).partition("<title>")[0]
    assert "A spine stands for" in page(mixed)
    torus = replace(load_cluster("dgx-h100", 32), fabric_spec=FabricSpec(kind="torus", shape=(2, 2)))
    assert ">4 routers<" in page(torus)
    assert "A spine" not in page(torus)
    assert ">200 GB/s<" in svg(fabric(torus))  # the arcs between routers


@pytest.mark.parametrize("n_gpus", [72, 144])
def test_a_link_is_thicker_than_another_if_it_carries_more_and_leaves_room_beside_it(n_gpus: int) -> None:
    cluster = load_cluster("gb200-nvl72", n_gpus)
    picture = ET.fromstring(svg(fabric(cluster)))
    drawn_as = {
        float(element.attrib["stroke-width"]): element[0].text or ""
        for element in picture
        if element.tag.endswith("line")
    }
    by_width = [re.search(r"([\d.]+ [GT]B/s)", drawn_as[width]) for width in sorted(drawn_as)]
    expected = ["900 GB/s"] if n_gpus == 72 else ["50 GB/s", "400 GB/s", "900 GB/s"]
    assert [found[1] for found in by_width if found] == expected
    circles = [one for one in picture if one.tag.endswith("circle")]
    columns = sorted(float(one.attrib["cx"]) for one in circles if (one[0].text or "").startswith("gpu"))
    assert max(drawn_as) < 0.3 * min(b - a for a, b in pairwise(columns))
