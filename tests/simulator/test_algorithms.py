"""Closed forms of ways between nodes of which nothing is measured, and what hosts have to do with them."""

from dataclasses import replace
from math import ceil, log2

import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers, sampled_from

from foretrace.simulator.network.algorithms import Way
from foretrace.simulator.network.cost import Network
from foretrace.simulator.network.nccl import FLUSH_S, PROTOCOLS, choice
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.errors import CatalogError

LATENCY_S = 2.7e-6
"""Of an NDR port, in the catalogue."""

BYTES_PER_S = 0.95 * 50e9
"""What such a port reaches."""


def way(cluster: Cluster, name: str, size: int, ranks: range, kind: str = "all_reduce") -> Way:
    """Return the way *name* of a collective, whichever NCCL would take."""
    algorithm, protocol = name.split("/")
    found = Network(cluster, choice=choice(algorithm, protocol)).ways(kind, size, ranks)
    return next(way for way in found if way.name == name)


@settings(max_examples=25)
@given(size=integers(0, 2**34), nodes=integers(2, 16), kind=sampled_from(["all_gather", "reduce_scatter"]))
def test_parallel_trees_take_a_doubling_each_and_three_quarters_of_the_wire(
    size: int, nodes: int, kind: str
) -> None:
    """NCCL 2.30.7: 8 us, log2 n hops of 14 us over 3.5, 2.8 us per rank; no row of a table shows PAT.

    Of the 14 us 2.7 are the flush, which H100 does without.
    """
    found = way(load_cluster("dgx-h100", 8 * nodes), "pat/simple", size, range(0, 8 * nodes, 8), kind)
    hop_s = (LATENCY_S + PROTOCOLS["simple"].ring_net_s - FLUSH_S) / 3.5
    assert found.latency_s == pytest.approx(8e-6 + ceil(log2(nodes)) * hop_s + nodes * 2.8e-6)
    assert found.wire_s == pytest.approx((nodes - 1) / nodes * size / (0.75 * BYTES_PER_S))


@settings(max_examples=25)
@given(size=integers(0, 2**34), nodes=integers(2, 16))
def test_switches_that_reduce_take_the_array_once_however_many_nodes(size: int, nodes: int) -> None:
    """31 us there and back, of which 2.7 are the link's; a node of 8 sends S over 8 NICs."""
    cluster = load_cluster("dgx-h100", 8 * nodes)
    assert cluster.nic is not None
    sharp = replace(cluster, nic=replace(cluster.nic, reduces=True))
    alone = way(sharp, "collnet/simple", size, range(0, 8 * nodes, 8))
    assert alone.latency_s == pytest.approx(LATENCY_S + 28.3e-6)
    assert alone.wire_s == pytest.approx(size / BYTES_PER_S)  # of eight such groups each has one NIC
    whole = way(sharp, "collnet/simple", size, range(8 * nodes))
    assert whole.far_s == pytest.approx(size / (8 * BYTES_PER_S))
    assert whole.wire_s == max(whole.near_s, whole.far_s)


@pytest.mark.parametrize(("cpu", "two", "more"), [("amd", 22.5e9, 19e9), ("intel", 39e9, 20.4e9)])
def test_the_processor_bounds_what_the_low_latency_protocol_carries(
    cpu: str, two: float, more: float
) -> None:
    size = 2**30
    for nodes, most in ((2, two), (4, more)):
        wide = replace(load_cluster("aws-p5", 8 * nodes), cpu=cpu)  # 32 NICs
        n = 8 * nodes
        found = way(wide, "ring/ll", size, range(n))
        assert found.far_s == pytest.approx(2 * (n - 1) / n * size / most)


def test_buffers_of_the_low_latency_protocol_lie_in_the_host_whatever_nics_reach() -> None:
    direct, staged = load_cluster("dgx-a100", 16), load_cluster("dgx-a100-staged", 16)
    for name in ("ring/ll", "tree/ll"):
        assert way(direct, name, 2**20, range(16)) == way(staged, name, 2**20, range(16))
    assert way(direct, "ring/simple", 2**30, range(16)) < way(staged, "ring/simple", 2**30, range(16))


@pytest.mark.parametrize(("protocol", "more_us"), [("ll", 1.0), ("ll128", 0.1), ("simple", 2.6)])
def test_a_hop_of_a_ring_takes_no_less_than_posting_a_message(protocol: str, more_us: float) -> None:
    """2 us on AMD, 1 us elsewhere, three times that in Simple: 28 hops inside 2 nodes of 8; not a tree."""
    intel = load_cluster("dgx-h100", 16)
    amd = replace(intel, cpu="amd")
    slow, fast = (way(one, f"ring/{protocol}", 8, range(16)) for one in (amd, intel))
    assert slow.latency_s - fast.latency_s == pytest.approx(28 * more_us * 1e-6)
    trees = [way(one, f"tree/{protocol}", 8, range(16)) for one in (amd, intel)]
    assert trees[0].latency_s == trees[1].latency_s


@pytest.mark.parametrize("name", ["ring/ll", "ring/ll128", "ring/simple", "tree/simple", "nvls_tree/simple"])
def test_what_nics_write_is_flushed_in_simple_and_on_gpus_before_hopper(name: str) -> None:
    """A read by the NIC of what it wrote, on each of two hops."""
    hopper = load_cluster("dgx-h100", 16)
    before = replace(hopper, device=replace(hopper.device, compute_capability=8.0))
    older, newer = (way(one, name, 8, range(16)).latency_s for one in (before, hopper))
    assert older - newer == pytest.approx(2 * 2.7e-6 if name.endswith("simple") else 0.0)


def test_a_hop_between_single_gpus_is_as_exposed_as_in_a_tree() -> None:
    cluster = load_cluster("dgx-a100", 32)
    for name, protocol in PROTOCOLS.items():
        found = way(cluster, f"ring/{name}", 8, range(0, 32, 8))
        assert found.latency_s == pytest.approx(
            protocol.ring_base_s + 6 * (LATENCY_S + protocol.tree_net_s), abs=1e-12
        )


WAITING = {
    "tree/ll": ("all_reduce", 1, 0),
    "tree/simple": ("all_reduce", 1, 0),
    "ring/ll": ("all_reduce", 16, 0),
    "ring/simple": ("all_gather", 16, 0),
    "pairwise/simple": ("all_to_all", 16, 0),
    "nvls_tree/simple": ("all_reduce", 1, 25),
}
"""Way, what it does, in how many messages an array passes, and what of the word is hidden, in us."""


@pytest.mark.parametrize("name", WAITING)
def test_a_long_message_waits_for_the_word_of_its_receiver(name: str) -> None:
    """The word crosses the network once, 30 us; what switches do before the first message hides 25 of it."""
    kind, parts, hidden_us = WAITING[name]
    cluster = load_cluster("aws-p5", 16)
    assert cluster.nic is not None
    told = replace(cluster, nic=replace(cluster.nic, latency_s=30e-6))
    never = replace(cluster, nic=replace(cluster.nic, latency_s=30e-6, eager_bytes=0))
    size = 8192 * parts
    for size_bytes, waits_us in ((size, 0.0), (size + parts, 30 - hidden_us)):
        one, other = (way(machine, name, size_bytes, range(16), kind) for machine in (told, never))
        assert one.latency_s - other.latency_s == pytest.approx(waits_us * 1e-6, abs=1e-12)
        assert one.wire_s == other.wire_s


def test_a_maker_that_is_not_known_is_refused() -> None:
    with pytest.raises(CatalogError, match="cpu = 'AMD': one of amd, arm, intel"):
        replace(load_cluster("dgx-h100"), cpu="AMD")


@pytest.mark.parametrize("protocol", ["", "LL", "LL128", "Simple"])
@pytest.mark.parametrize(("kind", "n_messages"), [("p2p", 1), ("all_to_all", 16)])
def test_sends_are_in_ll_up_to_16_kib_a_channel_else_in_simple_whatever_is_asked_for(
    protocol: str, kind: str, n_messages: int
) -> None:
    """``addP2pToPlan`` knows these two; a send in LL128 alone once had no way at all."""
    net = Network(load_cluster("dgx-h100", 16), choice=choice("", protocol))
    for message_bytes, names in ((32768, {"ll", "simple"}), (32769, {"simple"})):
        ranks = (0, 8) if kind == "p2p" else range(16)
        if kind == "p2p":
            assert net.p2p(message_bytes, *ranks).algorithm.split("/")[1] in names
        else:
            found = net.ways(kind, message_bytes * n_messages, ranks)
            assert {way.name.split("/")[1] for way in found} == names


@pytest.mark.parametrize(
    ("name", "nodes", "protocol", "channel"),
    [
        ("dgx-b200", 2, "simple", 42.8e9),
        ("dgx-b200", 4, "simple", 24.0e9),
        ("dgx-b200", 64, "ll128", 20.0e9),
        ("dgx-h100", 16, "simple", 36.0e9),
        ("dgx-a100", 16, "simple", 17.8e9),
    ],
)
def test_a_tree_carries_what_its_channels_do(name: str, nodes: int, protocol: str, channel: float) -> None:
    """One per NIC, as bus bandwidth (``perChMaxTreeBws`` of NCCL)."""
    size = 2**33
    found = way(load_cluster(name, 8 * nodes), f"tree/{protocol}", size, range(8 * nodes))
    assert found.far_s == pytest.approx(2 * size / (8 * channel))


def test_a_rank_per_node_has_two_channels_and_its_whole_nic() -> None:
    """As ``ncclTopoDupChannels`` of NCCL makes of one on Hopper: 72 GB/s of them are more than a port is."""
    found = way(load_cluster("dgx-h100", 64), "tree/simple", 2**33, range(0, 64, 8))
    assert found.far_s == pytest.approx(2 * 2**33 / BYTES_PER_S)


@given(size=integers(2**20, 2**34), nodes=integers(2, 64), name=sampled_from(["dgx-h100", "dgx-b200"]))
def test_a_tree_is_never_above_its_wire(size: int, nodes: int, name: str) -> None:
    found = way(load_cluster(name, 8 * nodes), "tree/simple", size, range(8 * nodes))
    assert found.far_s >= (2 if nodes > 2 else 1) * size / (8 * BYTES_PER_S) * (1 - 1e-9)
