"""Inside a node, what a user leaves of NCCL's choice is what is priced."""

from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis.strategies import integers, sampled_from, tuples

from foretrace.simulator.errors import SimulationError
from foretrace.simulator.network.collectives import KINDS
from foretrace.simulator.network.cost import Network
from foretrace.simulator.network.nccl import PROTOCOLS, choice
from foretrace.topologies.catalog import load_cluster

MACHINES = ("dgx-h100", "dgx-a100", "dgx-b200", "dgx1-v100", "rtx4090-8")

UNABLE = {
    "tree": ("all_gather", "reduce_scatter", "broadcast", "reduce"),
    "halving_doubling": ("broadcast", "reduce"),
    "direct": ("broadcast", "reduce"),
}
"""What an algorithm does not do, in a node or between nodes."""


@cache
def network(name: str, algorithm: str = "", protocol: str = "") -> Network:
    return Network(load_cluster(name, 8), choice=choice(algorithm, protocol))


def took(net: Network, kind: str, size_bytes: int, n: int = 8) -> tuple[str, int]:
    """Return the way of a collective among the first *n* GPUs, and its time in ns."""
    found = net.collective(kind, size_bytes, range(n))
    return found.algorithm, found.latency_ns + found.wire_ns


@given(
    name=sampled_from(MACHINES),
    kind=sampled_from(KINDS),
    size=integers(1, 2**33),
    n=integers(2, 8),
    words=tuples(sampled_from(("", "ring", "tree")), sampled_from(("", *PROTOCOLS)))
    | tuples(sampled_from(("halving_doubling", "direct")), sampled_from(("", "simple"))),
)
def test_whoever_asks_for_a_way_is_no_faster_than_nccl(
    name: str, kind: str, size: int, n: int, words: tuple[str, str]
) -> None:
    assume(kind not in UNABLE.get(words[0], ()))
    free, asked = (took(network(name, *found), kind, size, n) for found in (("", ""), words))
    assert asked[1] >= free[1] - 1


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
@pytest.mark.parametrize("protocol", ["LL", "LL128", "Simple"])
def test_over_pcie_what_is_asked_for_is_taken(algorithm: str, protocol: str) -> None:
    """Ring in LL was the answer to all of them once, and to LL128 a time that no formula of NCCL has."""
    assert took(network("rtx4090-8", algorithm, protocol), "all_reduce", 2**20)[0] == (
        f"pcie4/{algorithm}/{protocol.lower()}"
    )
    left = [took(network("rtx4090-8", algorithm), "all_reduce", 2**power)[0] for power in (3, 20, 30)]
    assert not any(name.endswith("ll128") for name in left)


@pytest.mark.parametrize(
    ("algorithm", "protocol", "way"),
    [
        ("", "", "nvlink3/measured"),
        ("", "LL", "nvlink3/ring/ll"),
        ("", "Simple", "nvlink3/ring/simple"),
        ("tree", "", "nvlink3/tree/ll"),
        ("tree", "LL128", "nvlink3/tree/ll128"),
        ("halving_doubling", "", "nvlink3/halving_doubling/simple"),
        ("direct", "", "nvlink3/direct/simple"),
    ],
)
def test_the_way_that_is_asked_for_is_named(algorithm: str, protocol: str, way: str) -> None:
    assert took(network("dgx-a100", algorithm, protocol), "all_reduce", 4096)[0] == way


def test_halving_and_doubling_is_a_hop_for_each_halving_and_one_back() -> None:
    """Among three or four ranks 4 hops; among others no less than NCCL takes unasked."""
    net, plain = network("dgx-a100", "halving_doubling"), PROTOCOLS["simple"]
    for n in (3, 4):
        found_ns = net.collective("all_reduce", 1, range(n)).latency_ns
        assert found_ns == pytest.approx(1e9 * (plain.ring_base_s + 4 * plain.ring_intra_s), abs=2)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"])
def test_flags_beside_the_data_take_half_of_the_link_on_long_arrays(kind: str) -> None:
    """LL carries 4 bytes in 8, LL128 120 in 128; NCCL counts 0.92 of the latter."""
    flags, lines, plain = (took(network("dgx-a100", "ring", name), kind, 2**32)[1] for name in PROTOCOLS)
    assert flags / plain == pytest.approx(2.0, rel=0.01)
    assert lines / plain == pytest.approx(1 / 0.92, rel=0.01)


@pytest.mark.parametrize("kind", ["all_to_all", "p2p"])
def test_sends_take_no_notice_of_it(kind: str) -> None:
    free, asked = network("dgx-h100"), network("dgx-h100", "", "LL128")
    if kind == "p2p":
        assert free.p2p(2**20, 0, 1) == asked.p2p(2**20, 0, 1)
    else:
        assert took(free, kind, 2**20) == took(asked, kind, 2**20)


def test_switches_reduce_in_simple_alone() -> None:
    assert took(network("dgx-h100", "", "Simple"), "all_reduce", 2**28)[0] == "nvlink4/nvls/simple"
    assert took(network("dgx-h100", "", "Simple"), "all_reduce", 2**28, 4)[0] == "nvlink4/ring/simple"
    assert took(network("dgx-h100", "", "^Simple"), "all_reduce", 2**28)[0] == "nvlink4/ring/ll128"


@pytest.mark.parametrize(
    ("algorithm", "kind", "n", "instead"),
    [
        (
            "tree",
            "all_gather",
            8,
            "one of ring, halving_doubling, direct, hierarchical, nvls; for all-reduces",
        ),
        ("tree", "all_gather", 64, "one of ring, halving_doubling, direct, hierarchical; for all-reduces"),
        ("nvls,nvls_tree", "broadcast", 64, "one of ring; for all-reduces alone: allreduce:nvls,nvls_tree"),
        ("pat", "all_reduce", 8, "inside a node of dgx-h100, and NCCL stops there; one of ring, tree"),
        ("nvls_tree", "all_reduce", 8, "one of ring, tree, halving_doubling, direct, hierarchical, nvls"),
        ("collnet", "reduce", 64, "over 8 nodes of dgx-h100, and NCCL stops there; one of ring"),
    ],
)
def test_an_algorithm_that_does_not_do_a_collective_is_refused(
    algorithm: str, kind: str, n: int, instead: str
) -> None:
    """NCCL stops since 2.24: no algorithm/protocol available for function. A ring was the answer once."""
    net = Network(load_cluster("dgx-h100", 64), choice=choice(algorithm))
    with pytest.raises(SimulationError, match=f"none does an? {kind} .*{instead}"):
        took(net, kind, 2**20, n)


def test_what_is_asked_for_one_collective_leaves_the_others_alone() -> None:
    net, free = (
        Network(load_cluster("dgx-h100", 64), choice=choice(words)) for words in ("allreduce:tree", "")
    )
    for kind in set(KINDS) - {"all_reduce"}:
        assert took(net, kind, 2**20, 64) == took(free, kind, 2**20, 64)


def test_what_it_would_take_inside_a_node_is_known_also_where_the_choice_does_nothing_there() -> None:
    """The advice about layouts asks for it; a job whose groups all span nodes is not refused for that."""
    net = Network(load_cluster("dgx-h100", 64), choice=choice("nvls_tree"))
    free = Network(load_cluster("dgx-h100", 64))
    assert net.neighbours_s("all_reduce", 2**20, 8) == free.neighbours_s("all_reduce", 2**20, 8)
