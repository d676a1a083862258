"""Layouts that send much over slow links are named, with the cost."""

import pytest
from hypothesis import given
from hypothesis.strategies import sampled_from

from foretrace.simulator.network.advice import slow_axes
from foretrace.simulator.network.cost import Network
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.placement import place
from foretrace.traces.layout import Layout

MIB = 2**20
CLUSTER = load_cluster("dgx-h100", 64)


@given(tp=sampled_from([1, 2, 4, 8]))
def test_tensor_parallelism_inside_a_node_is_nothing_to_speak_of(tp: int) -> None:
    assert slow_axes(Layout(tp=tp, dp=64 // tp), Network(CLUSTER), 32 * MIB) == []


def test_tensor_parallelism_over_two_nodes_is_named_with_its_cost() -> None:
    (found,) = slow_axes(Layout(tp=16, dp=4), Network(CLUSTER), 32 * MIB)
    assert (found.axis, found.n_nodes, found.fits) == ("tp", 2, False)
    assert found.time_s > 1.2 * found.inside_s
    assert "tp=16 lies across 2 nodes (ranks 0, 1, 2, 3, ...)" in found.sentence(32 * MIB)
    assert "no node has 16 GPUs: a smaller tp would stay inside" in found.sentence(32 * MIB)


def test_ranks_dealt_out_in_turn_put_tensor_parallelism_on_the_network() -> None:
    """What comes of numbering ranks with data parallelism innermost."""
    network = Network(CLUSTER, place(64, CLUSTER, "spread"))
    (found,) = slow_axes(Layout(tp=8, dp=8), network, 32 * MIB)
    assert (found.n_nodes, found.fits) == (8, True)
    assert found.time_s > 4 * found.inside_s
    assert "another placement would keep it inside" in found.sentence(32 * MIB)


@pytest.mark.parametrize(("layout", "axis"), [(Layout(cp=16, dp=4), "cp"), (Layout(dp=64, ep=16), "ep")])
def test_context_and_expert_parallelism_count_too(layout: Layout, axis: str) -> None:
    assert [found.axis for found in slow_axes(layout, Network(CLUSTER), 32 * MIB)] == [axis]


def test_data_and_pipeline_parallelism_may_cross_nodes() -> None:
    assert slow_axes(Layout(dp=8, pp=8), Network(CLUSTER), 32 * MIB) == []


def test_a_node_of_one_gpu_is_compared_with_nothing() -> None:
    cluster = load_cluster("gh200", 8)
    (found,) = slow_axes(Layout(tp=8), Network(cluster), 32 * MIB)
    assert found.inside_s == 0
    assert "times" not in found.sentence(32 * MIB)
