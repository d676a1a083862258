"""What a dispatch to experts moves: closed forms, laws, and what DeepEP measured."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis.strategies import integers

from foretrace.simulator.errors import SimulationError
from foretrace.simulator.network.cost import Network
from foretrace.simulator.workload.dispatch import Routing, expected_places, traffic
from foretrace.topologies.catalog import load_cluster

BATCH = Routing(tokens=4096, token_bytes=7168, top_k=8, max_nodes=4)


@given(places=integers(1, 64), balls=integers(0, 64))
def test_places_are_no_more_than_there_are_or_were_thrown(places: int, balls: int) -> None:
    assert 0 <= expected_places(places, balls) <= min(places, max(balls, 1)) + 1e-9


@given(nodes=integers(1, 32), local=integers(1, 8), top_k=integers(1, 16), limit=integers(0, 8))
def test_a_token_goes_to_each_place_once(nodes: int, local: int, top_k: int, limit: int) -> None:
    routing = Routing(tokens=1, token_bytes=1, top_k=top_k, max_nodes=limit)
    copies = traffic(routing, nodes, local)
    assert copies.far_nodes <= copies.nodes <= min(nodes, limit or nodes) + 1e-9
    assert copies.near_hops <= copies.gpus <= nodes * local + 1e-9
    assert copies.gpus <= top_k + 1e-9
    assert nodes > 1 or copies.far_nodes == 0
    # Spread evenly, unless a limit is so tight that it decides: no more than without it, and as many if none.
    free = expected_places(nodes, top_k)
    is_tight = limit and top_k >= 2 * limit
    assert is_tight or copies.nodes <= free
    assert 0 < limit < nodes or copies.nodes == free


@pytest.mark.parametrize(("n_nodes", "gb_per_s"), [(2, 43), (4, 58), (8, 51)])
def test_nodes_reach_the_bandwidth_that_deepep_measured(n_nodes: int, gb_per_s: float) -> None:
    """deepseek-ai/DeepEP 1a0c8f6, README: H800, 400 Gb/s per GPU; it counts bytes to the own node, too."""
    network = Network(load_cluster("hgx-h800", 8 * n_nodes))
    transfer = network.experts(BATCH, range(8 * n_nodes))
    counted = traffic(BATCH, n_nodes, 8).nodes * BATCH.tokens * BATCH.token_bytes
    assert counted / (transfer.latency_ns + transfer.wire_ns) == pytest.approx(gb_per_s, rel=0.02)


@pytest.mark.parametrize("machine", ["hgx-h20", "dgx-h200"])
def test_between_two_nodes_a_wider_nvlink_does_not_help(machine: str) -> None:
    """deepseek-ai/DeepEP issue 137: 44.7 GB/s on H20, 43 on H800 of half the NVLink."""
    routing = replace(BATCH, token_bytes=7392)
    wide, narrow = (
        Network(load_cluster(name, 16)).experts(routing, range(16)) for name in (machine, "hgx-h800")
    )
    assert wide.wire_ns == narrow.wire_ns
    assert wide.near < narrow.near < 1.0
    counted = traffic(routing, 2, 8).nodes * routing.tokens * routing.token_bytes
    assert counted / (wide.latency_ns + wide.wire_ns) == pytest.approx(44.7, rel=0.05)


def test_kernels_that_hand_on_tokens_do_not_count_inside_a_node() -> None:
    cluster = load_cluster("dgx-h100", 16)
    slow = replace(cluster, intra=replace(cluster.intra, experts_bytes_per_s=1e9))
    (inside, between), (same, longer) = (
        [Network(machine).experts(BATCH, range(n)).wire_ns for n in (8, 16)] for machine in (cluster, slow)
    )
    assert inside == same
    assert longer == pytest.approx(between * 150, rel=1e-6)


@pytest.mark.parametrize(("n_nodes", "measured_us"), [(1, 163), (2, 173), (4, 182), (8, 186), (32, 194)])
def test_straight_transfers_take_what_deepep_measured(n_nodes: int, measured_us: float) -> None:
    routing = Routing(tokens=128, token_bytes=7168 + 224, top_k=8)
    network = Network(load_cluster("hgx-h800", 8 * n_nodes))
    transfer = network.experts(routing, range(8 * n_nodes), low_latency=True)
    assert (transfer.latency_ns + transfer.wire_ns) / 1e3 == pytest.approx(measured_us, rel=0.05)


def test_a_machine_without_nics_has_no_low_latency_form() -> None:
    network = Network(load_cluster("localhost", 4))
    with pytest.raises(SimulationError, match="cluster localhost has no NICs"):
        network.experts(BATCH, range(4), low_latency=True)


def test_routing_to_no_expert_is_refused() -> None:
    with pytest.raises(SimulationError, match="to 0 experts"):
        Routing(tokens=1, token_bytes=1, top_k=0)


@pytest.mark.parametrize(("n_nodes", "tier"), [(1, "near"), (4, "far")])
def test_a_calibration_of_all_to_alls_counts_for_experts(n_nodes: int, tier: str) -> None:
    cluster = load_cluster("hgx-h800", 8 * n_nodes)
    slower = replace(
        cluster, transfer_factors={f"{tier}.all_to_all.wire": 2.0, f"{tier}.all_to_all.latency": 3.0}
    )
    found, base = (Network(one).experts(BATCH, range(8 * n_nodes)) for one in (slower, cluster))
    assert found.wire_ns == pytest.approx(2 * base.wire_ns, abs=1)
    assert found.latency_ns == pytest.approx(3 * base.latency_ns, abs=3)
    assert (found.near, found.far) == (base.near, base.far)


def test_the_slower_of_rails_and_nvlink_is_full() -> None:
    two, eight = (Network(load_cluster("hgx-h800", 8 * n)).experts(BATCH, range(8 * n)) for n in (2, 8))
    assert 1.0 > two.near > two.far > 0  # kernels set the pace of two nodes, the NICs that of eight
    assert eight.far == 1.0 > eight.near > 0
    alone = Network(load_cluster("hgx-h800", 8)).experts(BATCH, range(8))
    assert (alone.near, alone.far) == (1.0, 0.0)
