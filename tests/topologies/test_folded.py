"""A folded fabric answers as the whole one does."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.strategies import DrawFn, composite, integers, sampled_from

from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.errors import FabricError
from foretrace.topologies.fabric import FabricSpec
from foretrace.topologies.folded import FOLDABLE, Folded, reach
from foretrace.topologies.reach import Reach
from foretrace.topologies.shape import GroupShape
from foretrace.topologies.wiring import fabric

BASE = load_cluster("dgx-h100")


@composite
def machines(draw: DrawFn) -> Cluster:
    """A machine of more sets than are kept, the last of them and the last node perhaps partly filled."""
    gpus, per_leaf = draw(sampled_from((1, 2, 4))), draw(integers(1, 3))
    group_nodes = draw(integers(1, 4))
    spec = FabricSpec(
        kind=draw(sampled_from(FOLDABLE)),
        nodes_per_leaf=per_leaf,
        oversubscription=draw(sampled_from((1.0, 2.0, 3.5))),
        hop_latency_s=1e-6,
        group_nodes=group_nodes,
        group_bytes_per_s=draw(sampled_from((5e9, 1e12))),
        group_latency_s=1e-4,
    )
    n_nodes = draw(integers(4, 5)) * max(per_leaf, group_nodes) + draw(integers(0, 3))
    n_gpus = n_nodes * gpus - draw(integers(0, gpus - 1))
    return replace(
        BASE, gpus_per_node=gpus, n_gpus=n_gpus, nics_per_node=draw(sampled_from((1, 2, 4))), fabric_spec=spec
    )


def shape(asked: Reach | Folded, gpus: list[int]) -> GroupShape | str:
    try:
        return asked.shape(gpus)
    except FabricError:
        return "refused"


@settings(max_examples=40)
@given(cluster=machines(), seed=integers(0, 10**9), size=integers(1, 12), stride=integers(1, 9))
def test_a_folded_fabric_answers_as_the_whole_one(
    cluster: Cluster, seed: int, size: int, stride: int
) -> None:
    """Groups with any stride and start, packed nodes, strings of far ones, and pairs."""
    n_gpus = cluster.n_gpus
    gpus = list(dict.fromkeys((seed + at * stride) % n_gpus for at in range(size)))
    folded, whole = reach(cluster, range(n_gpus)), Reach(fabric(cluster), range(n_gpus))
    assert isinstance(folded, Folded)
    assert folded.domain(gpus[0]) == gpus[0] // cluster.gpus_per_node
    for group in (gpus, sorted(gpus), list(range(n_gpus)), list(range(0, n_gpus, cluster.gpus_per_node))):
        found, known = shape(folded, group), shape(whole, group)
        assert shape(folded, folded.first_alike(np.array([group]))[0].tolist()) == found
        assert isinstance(found, GroupShape) == isinstance(known, GroupShape)
        if isinstance(found, GroupShape) and isinstance(known, GroupShape):
            assert found.inter_bytes_per_s == pytest.approx(known.inter_bytes_per_s, rel=1e-9)
            assert replace(found, inter_bytes_per_s=0.0) == replace(known, inter_bytes_per_s=0.0)
            assert found.ring_bytes_per_s >= found.inter_bytes_per_s * (1 - 1e-9)
            assert found.ring_latency_s <= found.inter_latency_s * (1 + 1e-9)


@pytest.mark.parametrize("placed", [range(100), [*range(511), 510]])
def test_what_is_not_alike_is_not_folded(placed: list[int]) -> None:
    """Where some GPUs run no rank, links carry what those send that do."""
    assert isinstance(reach(load_cluster("dgx-h100", 512), placed), Reach)
    assert isinstance(reach(load_cluster("dgx-h100", 512), range(512)), Reach)
    assert isinstance(reach(load_cluster("dgx-h100", 1024), range(1024)), Folded)


def test_the_size_of_a_machine_costs_next_to_nothing() -> None:
    """The whole fabric of 16,384 GPUs has 99,000 edges; a group of all of them is asked for without it."""
    cluster = load_cluster("dgx-a100", 16384)
    asked = reach(cluster, range(cluster.n_gpus))
    assert isinstance(asked, Folded)
    assert asked.shape(range(cluster.n_gpus)).n_domains == 2048
    assert "_fabric" not in vars(cluster)
    neighbours = np.arange(cluster.n_gpus).reshape(-1, 16)
    assert len(np.unique(asked.first_alike(neighbours), axis=0)) < 100
