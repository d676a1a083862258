"""Algorithms and protocols: what settings leave, and laws that every way obeys."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis.strategies import integers, sampled_from

from foretrace.simulator.errors import SimulationError
from foretrace.simulator.network.algorithms import CORRECTION
from foretrace.simulator.network.collectives import bus_factor
from foretrace.simulator.network.cost import Network
from foretrace.simulator.network.nccl import ALGORITHMS, OVER_PCIE, PROTOCOLS, TEXTBOOK, choice
from foretrace.simulator.network.within import _cost
from foretrace.topologies.catalog import load_cluster, load_link

WAYS = ["ring", "tree", "nvls_tree", *TEXTBOOK]
"""Ways to do an all-reduce between nodes of DGX H100."""


@cache
def network(algorithm: str, protocol: str, n_gpus: int = 64) -> Network:
    """Return a DGX H100 with one algorithm and one protocol."""
    return Network(load_cluster("dgx-h100", n_gpus), choice=choice(algorithm, protocol))


def total_ns(net: Network, kind: str, size: int, n_gpus: int) -> int:
    """Return the time of a collective over the first *n_gpus*."""
    transfer = net.collective(kind, size, range(n_gpus))
    return transfer.latency_ns + transfer.wire_ns


@pytest.mark.parametrize("n", [2, 8])
def test_inside_a_node_messages_that_follow_one_another_add_up(n: int) -> None:
    """A ring sends round twice and a chain up and down; both move nearly twice the array."""
    for one in (*PROTOCOLS.values(), *OVER_PCIE.values()):
        ring, chain = (_cost(name, "all_reduce", n, one) for name in ("ring", "tree"))
        assert ring == (one.ring_base_s + 2 * (n - 1) * one.ring_intra_s, bus_factor("all_reduce", n))
        assert chain == (one.tree_base_s + 2 * (n - 1) * one.tree_intra_s, 2)
        assert max(one.ring_intra_s, one.tree_intra_s) < 10e-6


def test_no_way_is_better_than_its_bandwidth_and_twice_the_bytes_take_twice_as_long() -> None:
    assert all(0 < share <= 1 for shares in CORRECTION.values() for share in shares)
    chain = network("tree", "simple", 8)
    half, whole = (chain.collective("all_reduce", size, range(8)).wire_ns for size in (1 << 30, 1 << 31))
    assert whole == pytest.approx(2 * half, rel=1e-6)
    assert half > 2 * (1 << 30) / 450  # bytes over GB/s are ns; NVLink of an H100 has 450 each way


@pytest.mark.parametrize(
    ("algorithm", "protocol", "algorithms", "protocols"),
    [
        ("", "", ALGORITHMS, tuple(PROTOCOLS)),
        ("Ring", "Simple", ("ring",), ("simple",)),
        ("Tree,Ring", "", ("ring", "tree"), tuple(PROTOCOLS)),
        ("^Tree", "^LL", tuple(name for name in ALGORITHMS if name != "tree"), ("ll128", "simple")),
        ("NVLSTree", "", ("nvls_tree",), tuple(PROTOCOLS)),
        ("CollnetDirect", "", ("collnet",), tuple(PROTOCOLS)),
        ("halving-doubling", "", ("halving_doubling",), tuple(PROTOCOLS)),
    ],
)
def test_settings_are_those_of_nccl(
    algorithm: str, protocol: str, algorithms: tuple[str, ...], protocols: tuple[str, ...]
) -> None:
    found = choice(algorithm, protocol)
    assert (found.algorithms, found.protocols) == (algorithms, protocols)


def test_a_collective_may_have_a_setting_of_its_own() -> None:
    """As in NCCL 2.24 and later: all take what has no name before it, but those that are named."""
    found = choice("ring,collnetdirect; AllReduce:tree; broadcast:^tree", "^LL; all_gather: LL128")
    assert found.of("reduce_scatter").algorithms == ("ring", "collnet")
    assert found.of("all_reduce").algorithms == ("tree",)
    assert "tree" not in found.of("broadcast").algorithms
    assert found.of("all_gather") == choice("ring,collnet", "LL128")
    assert found.of("all_reduce").protocols == ("ll128", "simple")
    net = Network(load_cluster("dgx-h100", 64), choice=found)
    taken = [net.collective(kind, 2**20, range(64)).algorithm for kind in ("all_reduce", "all_gather")]
    assert taken == ["tree/ll128", "ring/ll128"]


@pytest.mark.parametrize(
    ("algorithm", "protocol", "says"),
    [
        ("allreduced:ring", "", "collective 'allreduced' in 'allreduced:ring': one of allreduce, allgather"),
        ("ring;allreduce:rnig", "", "algorithm 'rnig': one of ring, tree"),
        ("rnig", "", "algorithm 'rnig': one of ring, tree"),
        ("", "LL256", "protocol 'll256': one of ll, ll128, simple"),
        ("", "^ll,ll128,simple", "leaves nothing of ll, ll128, simple"),
        ("nvls_tree", "LL", "nvls_tree with protocol ll: only ring and tree work in it"),
        ("allreduce:direct", "^simple", "direct with protocol ll, ll128: only ring and tree"),
    ],
)
def test_a_setting_that_nccl_would_not_know_is_refused(algorithm: str, protocol: str, says: str) -> None:
    with pytest.raises(SimulationError, match=says):
        choice(algorithm, protocol)


@given(size=integers(0, 2**34), kind=sampled_from(["all_reduce", "all_gather", "reduce_scatter"]))
def test_the_free_choice_takes_what_its_way_takes_when_asked_for(size: int, kind: str) -> None:
    """Up to what NCCL's own choice inside a node and the sum of a ring's two halves were measured apart."""
    free = network("", "").collective(kind, size, range(64))
    algorithm, _, protocol = free.algorithm.partition("/")
    asked = network(algorithm, protocol).collective(kind, size, range(64))
    assert asked.algorithm == free.algorithm
    assert free.latency_ns + free.wire_ns <= 1.001 * (asked.latency_ns + asked.wire_ns)


@given(size=integers(0, 2**34), kind=sampled_from(["all_gather", "reduce_scatter"]))
def test_a_gather_takes_the_fastest_protocol(size: int, kind: str) -> None:
    """Only an all-reduce has a choice that NCCL makes by its own estimate."""
    free = total_ns(network("", ""), kind, size, 64)
    for protocol in PROTOCOLS:
        assert free <= 1.001 * total_ns(network("ring", protocol), kind, size, 64)


@pytest.mark.parametrize("algorithm", ["nvls", "collnet", "pat", "pairwise"])
def test_an_algorithm_that_cannot_do_it_is_refused_by_name(algorithm: str) -> None:
    """Not replaced by another: NVLS ends at the node, DGX H100's switches do not reduce, PAT only gathers."""
    with pytest.raises(SimulationError, match=f"algorithm {algorithm}: none does an all_reduce over 8 nodes"):
        network(algorithm, "").collective("all_reduce", 1024, range(64))


def test_a_protocol_that_the_network_does_not_bear_is_refused_by_name() -> None:
    net = Network(load_cluster("aws-p4de", 16), choice=choice("", "LL128"))
    with pytest.raises(SimulationError, match="protocol ll128: link efa-p4 bears only simple"):
        net.collective("all_reduce", 1024, range(16))


@pytest.mark.parametrize("protocol", ["ll", "ll128", "ll,ll128"])
@pytest.mark.parametrize("algorithm", ["", "tree,nvls_tree", "ring,nvls,direct"])
@pytest.mark.parametrize("n_gpus", [8, 64])
def test_a_protocol_asked_for_is_the_one_that_is_taken(algorithm: str, protocol: str, n_gpus: int) -> None:
    """An all-reduce by switches works in Simple alone, and once came back where only LL was left."""
    net = Network(load_cluster("dgx-h100", n_gpus), choice=choice(algorithm, protocol))
    gathers = () if algorithm.startswith("tree") else ("all_gather", "reduce_scatter", "broadcast")
    for kind in ("all_reduce", *gathers):
        names = {way.name.rpartition("/")[2] for way in net.ways(kind, 2**26, range(n_gpus))}
        assert names
        assert names <= set(protocol.split(","))


@given(size=integers(1, 2**36), algorithm=sampled_from(WAYS), n_nodes=integers(2, 8))
def test_no_algorithm_sends_less_than_leaves_a_node(size: int, algorithm: str, n_nodes: int) -> None:
    """Without switches that reduce, each node gives away all that it has but its own share of the result."""
    net = network(algorithm, "simple")
    out = 2 * (n_nodes - 1) / n_nodes if n_nodes > 2 else 1.0
    transfer = net.collective("all_reduce", size, range(8 * n_nodes))
    least_ns = out * size / (8 * 50e9) * 1e9
    assert transfer.wire_ns >= least_ns * (1 - 1e-9) - 1


@given(size=integers(0, 2**34), n_nodes=integers(2, 8), narrow=sampled_from(["inside", "between"]))
def test_a_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather(
    size: int, n_nodes: int, narrow: str
) -> None:
    """On the wire, to the nanosecond, where links inside the nodes set the pace, and where NICs do."""
    nic = load_link("ib-edr" if narrow == "between" else "ib-ndr")
    machine = replace(load_cluster("dgx-h100", 64), intra=load_link("nvlink2"), nic=nic)
    net = Network(machine, choice=choice("ring", "simple"))
    parts = [net.collective(kind, size, range(8 * n_nodes)) for kind in ("reduce_scatter", "all_gather")]
    whole = net.collective("all_reduce", size, range(8 * n_nodes))
    assert whole.wire_ns == pytest.approx(sum(part.wire_ns for part in parts), abs=2)


def test_switches_that_reduce_halve_what_a_node_sends() -> None:
    cluster = load_cluster("dgx-h100", 64)
    assert cluster.nic is not None
    sharp = Network(replace(cluster, nic=replace(cluster.nic, reduces=True)), range(0, 64, 8))
    plain = Network(cluster, range(0, 64, 8))
    size = 1 << 30
    fast, slow = (net.collective("all_reduce", size, range(8)) for net in (sharp, plain))
    assert fast.algorithm == "collnet/simple"
    assert slow.wire_ns == pytest.approx(bus_factor("all_reduce", 8) * fast.wire_ns, rel=1e-6)


def test_small_gathers_of_one_gpu_per_node_take_parallel_trees() -> None:
    """Many nodes: the doublings of PAT instead of as many steps as there are nodes."""
    net = Network(load_cluster("dgx-h100", 2048), range(0, 2048, 8))
    assert net.collective("all_gather", 1 << 24, range(256)).algorithm.startswith(("pat", "ring"))
    forced = Network(net.cluster, range(0, 2048, 8), choice("pat"))
    assert forced.collective("all_gather", 1024, range(256)).algorithm == "pat/simple"


def test_a_link_that_bears_no_low_latency_protocol_gets_none() -> None:
    net = Network(load_cluster("aws-p4de", 16))
    assert net.collective("all_reduce", 8, range(16)).algorithm.endswith("/simple")


@pytest.mark.parametrize(
    ("name", "size", "measured_us"),
    [
        ("aws-p4de", 8, 164.3),
        ("aws-p4de", 64 << 20, 2644.6),
        ("aws-p4de", 1 << 30, 26217.0),
        ("aws-p5", 8, 69.1),
        ("aws-p5", 8 << 20, 204.8),
        ("aws-p5", 128 << 20, 870.3),
        ("aws-p5", 1 << 30, 4607.6),
    ],
)
def test_all_reduces_over_efa_take_what_aws_measured(name: str, size: int, measured_us: float) -> None:
    """aws-samples/awsome-distributed-training, nccl-tests on two nodes."""
    net = Network(load_cluster(name, 16))
    assert total_ns(net, "all_reduce", size, 16) / 1e3 == pytest.approx(measured_us, rel=0.17)
