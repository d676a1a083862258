"""How wide the rings inside a node are, for nodes with a switch and without."""

from __future__ import annotations

from itertools import permutations as permutations_of
from math import inf

import networkx as nx
import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists, permutations, sampled_from

from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.errors import CatalogError
from foretrace.topologies.node import CUBE_LINKS, NODES, NodeSpec
from foretrace.topologies.reach import Reach
from foretrace.topologies.rings import ring_bytes_per_s
from foretrace.topologies.wiring import fabric

GB = 1e9


def cube() -> nx.DiGraph[str]:
    """Return the hybrid cube mesh with one GB/s per link."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    for a, b, links in CUBE_LINKS:
        for ends in ((a, b), (b, a)):
            graph.add_edge(f"gpu:{ends[0]}", f"gpu:{ends[1]}", bandwidth_bytes_per_s=links * GB)
    return graph


def test_every_v100_has_six_links() -> None:
    graph = cube()
    for gpu in range(8):
        edges = graph.out_edges(f"gpu:{gpu}", data=True)
        assert sum(data["bandwidth_bytes_per_s"] for _, _, data in edges) == 6 * GB


@pytest.mark.parametrize(("n_gpus", "rings"), [(2, 1), (4, 4), (6, 2), (8, 6)])
def test_a_cube_mesh_has_as_many_rings_as_were_measured(n_gpus: int, rings: int) -> None:
    """VIA-Research/vTrain f8dda84, trace/v100: 22.5, 85, 45.7 and 134 GB/s, at 22.5 GB/s per link."""
    assert ring_bytes_per_s(cube(), range(n_gpus)) == rings * GB


@given(gpus=permutations(range(8)))
def test_the_order_of_the_gpus_does_not_matter(gpus: list[int]) -> None:
    assert ring_bytes_per_s(cube(), gpus) == 6 * GB


@given(gpus=lists(integers(0, 7), min_size=2, unique=True))
def test_rings_never_carry_more_than_a_gpu_has_links(gpus: list[int]) -> None:
    assert GB <= ring_bytes_per_s(cube(), gpus) <= 6 * GB


@given(n_gpus=integers(3, 8))
def test_rings_fill_every_link_of_a_full_mesh(n_gpus: int) -> None:
    graph: nx.DiGraph[str] = nx.DiGraph()
    for a, b in permutations_of(range(n_gpus), 2):
        graph.add_edge(f"gpu:{a}", f"gpu:{b}", bandwidth_bytes_per_s=GB)
    assert ring_bytes_per_s(graph, range(n_gpus)) == pytest.approx((n_gpus - 1) * GB)


def test_one_gpu_needs_no_ring() -> None:
    assert ring_bytes_per_s(cube(), [3]) == inf


@pytest.mark.parametrize(
    ("name", "n_gpus", "gb_per_s"),
    [
        ("dgx-h100", 2, 450),
        ("dgx-h100", 8, 450),
        ("dgx1-v100", 8, 150),
        ("jean-zay-v100", 2, 50),  # two of the six links join each pair
        ("mi300x", 2, 64),
        ("jean-zay-v100", 4, 150),  # NCCL's six rings: every link is shared by two
        ("mi300x", 8, 448),  # all seven links, each shared by two rings
        ("azure-nc-a100-v4", 2, 300),
        ("azure-nc-a100-v4", 4, 32),  # between the pairs there is only PCIe
        ("l40s-8", 8, 32),
    ],
)
def test_what_a_group_gets_inside_a_node_follows_from_its_wiring(
    name: str, n_gpus: int, gb_per_s: float
) -> None:
    cluster = load_cluster(name)
    shape = Reach(fabric(cluster), range(cluster.n_gpus)).shape(range(n_gpus))
    assert shape.intra_bytes_per_s == pytest.approx(gb_per_s * GB)


@given(kind=sampled_from(sorted(NODES)))
def test_a_way_over_pcie_belongs_to_pairs_alone(kind: str) -> None:
    if kind == "pairs":
        with pytest.raises(CatalogError, match="'pairs' needs host"):
            NodeSpec(kind=kind)
    else:
        assert NodeSpec(kind=kind).describe() == {"kind": kind, "host": None}


def test_a_kind_of_node_that_nobody_knows_is_refused() -> None:
    with pytest.raises(CatalogError, match="node kind 'star': one of switch, full-mesh, cube-mesh, pairs"):
        NodeSpec(kind="star")
