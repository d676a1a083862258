"""A job runs on every kind of fabric, and feels what is narrow."""

from dataclasses import replace
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis.strategies import DataObject, data, integers, lists, sampled_from, sets
from tests.simulator.predicted import simulate

from foretrace.simulator.job import Job
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.network.collectives import KINDS, bus_factor
from foretrace.simulator.network.cost import Network
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.fabric import FabricSpec
from foretrace.topologies.reach import Reach
from foretrace.topologies.wiring import fabric
from foretrace.traces.layout import Layout

SPECS = {
    "switch": FabricSpec(kind="switch"),
    "rail": FabricSpec(kind="rail", nodes_per_leaf=2, oversubscription=2.0),
    "multi-plane": FabricSpec(kind="multi-plane", nodes_per_leaf=2, oversubscription=2.0),
    "fat-tree": FabricSpec(kind="fat-tree", nodes_per_leaf=2, oversubscription=2.0),
    "dragonfly": FabricSpec(kind="dragonfly", nodes_per_leaf=2, group_nodes=2, group_bytes_per_s=100e9),
    "two-site": FabricSpec(kind="two-site", group_nodes=2, group_bytes_per_s=10e9, group_latency_s=5e-3),
    "torus": FabricSpec(kind="torus", shape=(2, 2)),
}


def machine(kind: str) -> Cluster:
    return replace(load_cluster("dgx-h100", 32), fabric_spec=SPECS[kind])


def step_s(cluster: Cluster) -> float:
    job = Job(model=load_model("llama3-8b"), layout=Layout(dp=4, tp=8), cluster=cluster, global_batch=8)
    return float(simulate(job).summary["step_time_s"])


@pytest.mark.parametrize("kind", sorted(SPECS))
def test_a_step_takes_longer_the_narrower_the_fabric(kind: str) -> None:
    assert step_s(machine("switch")) <= step_s(machine(kind)) <= step_s(machine("two-site"))


def cut_bytes_per_s(cluster: Cluster) -> float:
    """Return what all links between the first half of the nodes and the second carry in one direction."""
    first = cluster.n_gpus // 2
    graph = fabric(cluster).copy()
    side: dict[str, set[str]] = {"near": set(), "far": set()}
    for gpu in range(cluster.n_gpus):
        side["near" if gpu < first else "far"].add(f"gpu:{gpu}")
    for name, gpus in side.items():
        graph.add_edges_from((name, gpu) if name == "near" else (gpu, name) for gpu in gpus)
    flow: float = nx.maximum_flow_value(graph, "near", "far", capacity="bandwidth_bytes_per_s")
    return flow


CUTS = {kind: cut_bytes_per_s(machine(kind)) for kind in SPECS}


@given(kind=sampled_from(sorted(SPECS)), op=sampled_from(KINDS), power=integers(20, 34))
def test_bandwidth_never_above_the_cut(kind: str, op: str, power: int) -> None:
    """What a collective of all ranks must move across the middle of the machine fits through it.

    Half of an array has to cross for a gather, a scatter or a broadcast, twice half for an all-reduce, and
    of an all-to-all half of what each rank of a half has. The maximum flow of the graph is what can cross.
    """
    size_bytes = 2**power
    cluster = machine(kind)
    crossing = {"all_to_all": 8.0, "all_reduce": 1.0}.get(op, 0.5) * size_bytes
    transfer = Network(cluster).collective(op, size_bytes, range(32))
    assert bus_factor(op, 32) > 0
    assert crossing / (transfer.wire_ns * 1e-9) <= CUTS[kind] * (1 + 1e-6)


@settings(max_examples=40)
@given(
    kind=sampled_from(sorted(SPECS.keys() - {"multi-plane"})),
    placed=sets(integers(0, 31), min_size=2),
    data=data(),
)
def test_adding_idle_gpus_changes_nothing(kind: str, placed: set[int], data: DataObject) -> None:
    """GPUs that run no rank take nothing of NICs, leaves and spines: as if they were not there.

    Planes meet over the GPUs of a node alone, so that there a GPU that is not there can be missed.
    """
    ranks = sorted(placed)
    group = data.draw(lists(sampled_from(ranks), min_size=2, unique=True))
    graph = fabric(machine(kind))
    bare = graph.copy()
    bare.remove_nodes_from(f"gpu:{gpu}" for gpu in range(32) if gpu not in placed)
    assert Reach(graph, ranks).shape(group) == Reach(bare, ranks).shape(group)


def test_slower_nodes_hold_up_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "mixed.toml"
    path.write_text('base = "dgx-h100"\nn_gpus = 32\n[[others]]\nmachine = "dgx-a100"\nnodes = 1\n', "utf-8")
    fast, slow = (step_s(load_cluster(name, 32)) for name in ("dgx-h100", "dgx-a100"))
    assert 1.5 * fast < step_s(load_cluster(path)) <= 1.1 * slow
