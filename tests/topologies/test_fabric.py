"""Fabrics: who is wired to whom, what a group gets out of it, and who is cut off."""

from itertools import product
from math import inf
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given
from hypothesis.strategies import integers, sampled_from

from foretrace.topologies.catalog import load_cluster, names
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.errors import CatalogError, FabricError
from foretrace.topologies.placement import place
from foretrace.topologies.reach import Reach, tiers
from foretrace.topologies.wiring import fabric

GPUS = [name for name in names() if name != "localhost"]


def reach(cluster: Cluster) -> Reach:
    """Return what groups get when every GPU of *cluster* runs a rank."""
    return Reach(fabric(cluster), range(cluster.n_gpus))


def from_toml(folder: Path, text: str) -> Cluster:
    """Return the cluster that *text* describes."""
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return load_cluster(path)


def machine(folder: Path, fabric: str, n_gpus: int, nics_per_node: int = 4) -> Cluster:
    """Return nodes of 4 GPUs, 100 GB/s inside and 10 GB/s per NIC, wired as *fabric* says."""
    return from_toml(
        folder,
        f"""
        device = "h100-sxm"
        gpus_per_node = 4
        n_gpus = {n_gpus}
        intra = {{ bandwidth = "100 GB/s", latency = "1 us" }}
        nic = {{ bandwidth = "10 GB/s", latency = "4 us" }}
        nics_per_node = {nics_per_node}
        fabric = {{ {fabric} }}
        """,
    )


@given(name=sampled_from(GPUS), n_gpus=integers(1, 200))
def test_every_gpu_reaches_every_other_and_links_carry_both_ways(name: str, n_gpus: int) -> None:
    graph = fabric(load_cluster(name, n_gpus))
    assert nx.is_strongly_connected(graph)
    assert sum(data["tier"] == "gpu" for _, data in graph.nodes(data=True)) == n_gpus
    for source, target, data in graph.edges(data=True):
        assert data["bandwidth_bytes_per_s"] > 0
        assert data == graph.edges[target, source]


def test_the_graph_of_two_h100_nodes() -> None:
    graph = fabric(load_cluster("dgx-h100", 16))
    assert graph.edges["gpu:0", "nvswitch:0"]["bandwidth_bytes_per_s"] == 450e9
    assert graph.edges["gpu:9", "nic:1.1"]["kind"] == "pcie"
    assert graph.edges["nic:1.3", "leaf:3"]["bandwidth_bytes_per_s"] == 50e9
    assert nx.shortest_path(graph, "gpu:3", "gpu:11") == ["gpu:3", "nic:0.3", "leaf:3", "nic:1.3", "gpu:11"]
    assert "gpu:0" not in graph["nvswitch:1"]


def test_the_graph_is_built_once() -> None:
    cluster = load_cluster("dgx-h100", 16)
    assert fabric(cluster) is fabric(cluster)


def test_a_machine_of_16384_gpus_is_built_in_links_of_its_size() -> None:
    graph = fabric(load_cluster("dgx-h100", 16_384))
    assert graph.number_of_edges() == 2 * (16_384 * 3 + 16_384 // 32)


@given(n_local=integers(1, 8), n_nodes=integers(2, 8))
def test_a_group_gets_the_rails_of_the_gpus_it_has_in_a_node(n_local: int, n_nodes: int) -> None:
    ranks = [8 * node + local for node in range(n_nodes) for local in range(n_local)]
    shape = reach(load_cluster("dgx-h100", 8 * n_nodes)).shape(ranks)
    assert shape.inter_bytes_per_s == pytest.approx(n_local * 50e9)
    assert shape.intra_bytes_per_s == (450e9 if n_local > 1 else inf)
    assert (shape.n_ranks, shape.n_domains, shape.n_local) == (len(ranks), n_nodes, n_local)


@pytest.mark.parametrize("n_nics", [1, 2, 4, 8])
def test_nics_are_shared_out_evenly(tmp_path: Path, n_nics: int) -> None:
    shape = reach(machine(tmp_path, 'kind = "fat-tree"', 8, n_nics)).shape([0, 4])
    assert shape.inter_bytes_per_s == pytest.approx(n_nics * 10e9 / 4)


def test_gpus_without_a_rank_leave_their_share_to_others(tmp_path: Path) -> None:
    cluster = machine(tmp_path, 'kind = "fat-tree"', 8, nics_per_node=1)
    assert Reach(fabric(cluster), [0, 4]).shape([0, 4]).inter_bytes_per_s == pytest.approx(10e9)
    assert Reach(fabric(cluster), [0, 1, 4, 5]).shape([0, 4]).inter_bytes_per_s == pytest.approx(5e9)


@pytest.mark.parametrize("kind", ["fat-tree", "multi-plane", "rail"])
@pytest.mark.parametrize("oversubscription", [1.0, 2.0, 4.0])
def test_oversubscription_divides_what_crosses_the_spine(
    tmp_path: Path, kind: str, oversubscription: float
) -> None:
    spec = f'kind = "{kind}", nodes_per_leaf = 2, oversubscription = {oversubscription}'
    found = reach(machine(tmp_path, spec, 32))
    assert found.shape([0, 4]).inter_bytes_per_s == pytest.approx(10e9)
    assert found.shape([0, 16]).inter_bytes_per_s == pytest.approx(10e9 / oversubscription)


def test_the_way_through_the_spine_is_longer(tmp_path: Path) -> None:
    found = reach(machine(tmp_path, 'kind = "rail", nodes_per_leaf = 2, hop_latency = "0.5 us"', 32))
    assert found.shape([0, 4]).inter_latency_s == pytest.approx(4e-6)
    assert found.shape([0, 16]).inter_latency_s == pytest.approx(5e-6)


def test_rails_meet_under_one_leaf_and_strangers_in_the_spine(tmp_path: Path) -> None:
    found = reach(machine(tmp_path, 'kind = "rail", oversubscription = 2.0', 8))
    assert found.tier(0, 4).name == "leaf"
    assert found.tier(0, 5).name == "spine"
    assert found.tier(0, 3).name == "node"


def test_seventy_two_gpus_are_one_domain() -> None:
    found = reach(load_cluster("gb200-nvl72", 144))
    assert found.shape(range(72)).n_domains == 1
    assert found.shape(range(144)).n_domains == 2
    assert found.shape(range(72)).intra_bytes_per_s == 900e9


def test_equal_groups_have_equal_shapes() -> None:
    found = reach(load_cluster("dgx-h100", 512))
    shapes = {
        found.shape([8 * node + local for node in range(first, 64, 8)])
        for first, local in product(range(8), range(8))
    }
    assert len(shapes) == 1


@pytest.mark.parametrize("name", names())
def test_farther_is_never_faster(name: str) -> None:
    cluster = load_cluster(name)
    found = tiers(cluster)
    assert found[0].name == ("node" if cluster.gpus_per_node > 1 else "leaf")
    assert [tier.bytes_per_s for tier in found] == sorted((t.bytes_per_s for t in found), reverse=True)
    assert [tier.latency_s for tier in found] == sorted(tier.latency_s for tier in found)


def test_every_distance_of_a_machine_has_a_tier() -> None:
    assert [tier.name for tier in tiers(load_cluster("dgx-h100"))] == ["node", "leaf", "spine"]


LINKS = """
device = "h100-sxm"
gpus_per_node = 4
intra = { bandwidth = "100 GB/s", latency = "1 us" }
nic = { bandwidth = "10 GB/s", latency = "4 us" }

[[links]]
between = ["gpu:0", "nvswitch:0"]

[[links]]
between = ["gpu:1", "nvswitch:0"]
bandwidth = "25 GB/s"

[[links]]
between = ["gpu:2", "leaf:0"]

[[links]]
between = ["gpu:0", "leaf:0"]

[[links]]
between = ["gpu:1", "leaf:0"]
"""
LAST = '[[links]]\nbetween = ["gpu:3", "leaf:0"]\nbandwidth = "5 GB/s"\n'


def test_links_of_ones_own_make_a_fabric(tmp_path: Path) -> None:
    found = reach(from_toml(tmp_path, LINKS + LAST))
    assert found.shape([0, 1]).intra_bytes_per_s == 25e9
    assert found.shape([0, 2]).inter_bytes_per_s == 10e9
    assert found.shape([2, 3]).inter_bytes_per_s == 5e9
    assert found.shape([0, 1, 2]).n_domains == 2


@pytest.mark.parametrize("kind", ["full-mesh", "switch"])
def test_a_listed_link_has_the_latency_of_one_that_a_kind_of_node_wires(tmp_path: Path, kind: str) -> None:
    machine = LINKS.partition("[[links]]")[0]
    wired = fabric(from_toml(tmp_path, f'{machine}\n[node]\nkind = "{kind}"\n'))
    text = "".join(f'[[links]]\nbetween = ["{a}", "{b}"]\n' for a, b in wired.edges if a < b)
    listed = fabric(from_toml(tmp_path, machine + text))
    assert nx.get_edge_attributes(listed, "latency_s") == nx.get_edge_attributes(wired, "latency_s")


@pytest.mark.parametrize("kind", ["rail", "fat-tree", "switch"])
def test_a_listed_link_has_the_latency_of_one_that_a_kind_of_fabric_wires(tmp_path: Path, kind: str) -> None:
    wired = fabric(machine(tmp_path, f'kind = "{kind}", nodes_per_leaf = 1', 12))
    assert any(end.startswith("spine") for end in wired) == (kind != "switch")
    text = (tmp_path / "mine.toml").read_text(encoding="utf-8").partition("fabric =")[0]
    links = "".join(f'[[links]]\nbetween = ["{a}", "{b}"]\n' for a, b in wired.edges if a < b)
    listed = fabric(from_toml(tmp_path, f"{text}\n{links}"))
    assert nx.get_edge_attributes(listed, "latency_s") == nx.get_edge_attributes(wired, "latency_s")


def test_a_gpu_that_no_link_reaches_is_named(tmp_path: Path) -> None:
    with pytest.raises(FabricError, match=r"gpu:3 cannot reach gpu:0 in cluster mine.*\[\[links\]\]"):
        fabric(from_toml(tmp_path, LINKS))


@pytest.mark.parametrize(
    ("link", "says"),
    [
        ('between = ["gpu:3", "switch:0"]', "a name begins with one of gpu"),
        ('between = ["gpu:9", "leaf:0"]', "gpu:9 is not one of gpu:0 to gpu:3"),
        ('between = ["gpu:3", "gpu:3"]', "both ends are the same"),
        ('between = ["gpu:3", "leaf:0"]\nbandwidth = "0 GB/s"', "has no bandwidth"),
        ('between = ["gpu:3"]', "must name two ends"),
        ('betwen = ["gpu:3", "leaf:0"]', "between is missing; is 'betwen' meant for it"),
    ],
)
def test_a_link_that_cannot_be_is_refused(tmp_path: Path, link: str, says: str) -> None:
    with pytest.raises((FabricError, CatalogError), match=says):
        fabric(from_toml(tmp_path, f"{LINKS}\n[[links]]\n{link}\n"))


def test_gpus_that_meet_in_no_switch_are_named(tmp_path: Path) -> None:
    """Two NICs joined back to back: connected, and still no switch to turn around at."""
    text = LINKS.replace('["gpu:2", "leaf:0"]', '["gpu:2", "nic:1"]') + LAST.replace("leaf:0", "nic:1")
    text = text.replace("leaf:0", "nic:0") + '[[links]]\nbetween = ["nic:0", "nic:1"]\n'
    with pytest.raises(FabricError, match="gpu:0 and gpu:2 meet in no switch above them"):
        reach(from_toml(tmp_path, text)).shape([0, 2])


def test_switches_joined_side_by_side_carry_what_crosses_them(tmp_path: Path) -> None:
    text = LINKS.replace('["gpu:2", "leaf:0"]', '["gpu:2", "leaf:1"]') + LAST
    text += '[[links]]\nbetween = ["leaf:0", "leaf:1"]\nbandwidth = "1 GB/s"\n'
    assert reach(from_toml(tmp_path, text)).shape([0, 2]).inter_bytes_per_s == pytest.approx(2e9 / 4)


def test_a_wired_machine_keeps_its_size(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="cannot be resized to 8"):
        from_toml(tmp_path, LINKS + LAST).sized(8)


def test_one_node_without_nics_does_not_grow(tmp_path: Path) -> None:
    one = from_toml(tmp_path, 'device = "h100-sxm"\ngpus_per_node = 8\nintra = "nvlink4"')
    assert fabric(one).number_of_nodes() == 9
    with pytest.raises(CatalogError, match="16 do not fit"):
        one.sized(16)


def test_ranks_fill_nodes_in_order_and_no_more_than_there_are_gpus() -> None:
    cluster = load_cluster("dgx-h100", 16)
    assert list(place(16, cluster)) == list(range(16))
    with pytest.raises(CatalogError, match="17 ranks do not fit on the 16 GPUs of dgx-h100"):
        place(17, cluster)
