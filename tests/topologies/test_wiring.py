"""Kinds of fabric: what a group of GPUs gets follows from how switches are joined."""

from collections.abc import Sequence
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers, sampled_from

from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.errors import FabricError
from foretrace.topologies.fabric import KINDS, FabricSpec
from foretrace.topologies.reach import Reach, tiers
from foretrace.topologies.shape import GroupShape
from foretrace.topologies.wiring import BUILDERS, fabric

NIC = 50e9


def machine(n_nodes: int, **spec: object) -> Cluster:
    """Return DGX H100 nodes in a fabric of some kind."""
    cluster = load_cluster("dgx-h100", 8 * n_nodes)
    return replace(cluster, fabric_spec=FabricSpec(**spec))  # type: ignore[arg-type]


def shape(cluster: Cluster, gpus: Sequence[int]) -> GroupShape:
    """Return what *gpus* get when every GPU communicates."""
    return Reach(fabric(cluster), range(cluster.n_gpus)).shape(gpus)


def any_machine(kind: str, n_nodes: int) -> Cluster:
    """Return a machine of *kind* with everything that it needs."""
    needs: dict[str, dict[str, object]] = {
        "torus": {"shape": (2, n_nodes // 2)},
        "two-site": {"group_nodes": n_nodes // 2, "group_bytes_per_s": 1e9},
        "dragonfly": {"group_nodes": n_nodes // 2, "group_bytes_per_s": 400e9},
    }
    return machine(n_nodes, kind=kind, nodes_per_leaf=2, **needs.get(kind, {}))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "node"])
def test_every_kind_joins_all_gpus_and_no_group_gets_more_than_its_nics(kind: str) -> None:
    cluster = any_machine(kind, 8)
    assert nx.is_strongly_connected(fabric(cluster))
    for gpus in (range(64), range(0, 64, 8), (3, 40), range(12)):
        found = shape(cluster, gpus)
        assert 0 < found.inter_bytes_per_s <= found.n_local * NIC
    assert next(tier.name for tier in tiers(cluster)) == "node"


@settings(max_examples=25)
@given(kind=sampled_from([kind for kind in KINDS if kind != "node"]), a=integers(0, 7), b=integers(0, 7))
def test_equal_groups_get_the_same(kind: str, a: int, b: int) -> None:
    """Every rail of a machine is like every other."""
    cluster = any_machine(kind, 4)
    rails = [range(rail, 32, 8) for rail in (a, b)]
    assert len({shape(cluster, rail) for rail in rails}) == 1


def test_one_switch_is_felt_by_nobody() -> None:
    cluster = machine(64, kind="switch")
    assert shape(cluster, range(0, 512, 8)).inter_bytes_per_s == pytest.approx(NIC)
    assert "spine:0" not in fabric(cluster)


def test_two_sites_share_the_way_between_them() -> None:
    """Four nodes of eight GPUs behind each end of 100 GB/s: 3.1 GB/s for each GPU that crosses."""
    cluster = machine(8, kind="two-site", group_nodes=4, group_bytes_per_s=100e9, group_latency_s=5e-3)
    near, far = shape(cluster, range(0, 32, 8)), shape(cluster, range(0, 64, 8))
    assert near.inter_bytes_per_s == pytest.approx(NIC)
    assert far.inter_bytes_per_s == pytest.approx(100e9 / 32)
    assert far.inter_latency_s > 5e-3 > near.inter_latency_s


def test_planes_are_joined_by_nvlink_alone() -> None:
    cluster = machine(8, kind="multi-plane", nodes_per_leaf=2)
    outside = fabric(cluster).subgraph([name for name in fabric(cluster) if name[:3] in {"lea", "spi"}])
    assert nx.number_weakly_connected_components(outside) == 8
    assert shape(cluster, (0, 9)).inter_bytes_per_s == pytest.approx(NIC)
    assert shape(cluster, range(0, 64, 8)).inter_bytes_per_s == pytest.approx(NIC)


@pytest.mark.parametrize("n_gpus", [10, 12, 16])
@pytest.mark.parametrize("placed", [(0, 9), (0, 1, 9), (3, 0, 9)])
def test_planes_are_joined_by_the_nics_of_idle_gpus_too(n_gpus: int, placed: tuple[int, ...]) -> None:
    """Of nodes that are partly filled, by ranks or by GPUs, no rank need sit on the rail of another."""
    cluster = machine(2, kind="multi-plane").sized(n_gpus)
    found = Reach(fabric(cluster), placed).shape((0, 9))
    assert found.n_domains == 2
    assert found.inter_bytes_per_s == pytest.approx(NIC)


@pytest.mark.parametrize(("sides", "n_links"), [((8,), 8), ((4, 4), 32), ((2, 2, 2), 12), ((4, 1), 4)])
def test_a_torus_goes_round_in_every_dimension(sides: tuple[int, ...], n_links: int) -> None:
    n_nodes = 1
    for side in sides:
        n_nodes *= side
    graph = fabric(machine(n_nodes, kind="torus", shape=sides))
    peers = [edge for edge in graph.edges if edge[0].startswith("leaf") and edge[1].startswith("leaf")]
    assert len(peers) == 2 * n_links


def test_neighbours_on_a_torus_get_more_than_those_far_apart() -> None:
    """A ring through all nodes takes one hop a step, every other node two: half the rate."""
    cluster = machine(8, kind="torus", shape=(8,))
    near, far = shape(cluster, range(64)), shape(cluster, range(0, 64, 16))
    assert near.inter_bytes_per_s == pytest.approx(8 * NIC)
    assert far.inter_bytes_per_s == pytest.approx(NIC / 2)


def test_a_torus_of_another_size_is_refused() -> None:
    with pytest.raises(FabricError, match=r"shape = \[4, 4\] is a torus of 16 nodes, but cluster .* has 8"):
        fabric(machine(8, kind="torus", shape=(4, 4)))


def test_an_idle_gpu_changes_nothing() -> None:
    """Reach looks at GPUs that run a rank; others do not send."""
    small, large = load_cluster("dgx-h100", 64), load_cluster("dgx-h100", 128)
    for group in (range(64), range(0, 64, 8), (1, 62)):
        shapes = {Reach(fabric(cluster), range(64)).shape(group) for cluster in (small, large)}
        assert len(shapes) == 1


def test_every_kind_of_fabric_is_wired() -> None:
    assert tuple(BUILDERS) == KINDS
