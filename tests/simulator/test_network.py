"""What the network answers: laws that hold on every machine, and figures that others measured."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis.strategies import integers, sampled_from

from foretrace.simulator.errors import SimulationError
from foretrace.simulator.network.collectives import KINDS, bus_factor, nvls_factor
from foretrace.simulator.network.cost import MANY, Network
from foretrace.simulator.network.nccl import choice
from foretrace.simulator.program import Transfer
from foretrace.topologies.catalog import load_cluster, names
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.fabric import FabricSpec
from foretrace.topologies.link import LinkSpec

GIB = 2**30
GPUS = [name for name in names() if name != "localhost"]
SIZES = integers(0, 2**36)
GROUPS: list[Sequence[int]] = [
    range(2),
    range(8),
    range(0, 64, 8),
    range(0, 64, 4),
    range(64),
    range(5, 20),
    (3, 40),
]


@cache
def network(name: str, n_gpus: int = 64) -> Network:
    """Return the network of a machine of the catalogue."""
    return Network(load_cluster(name, n_gpus))


def total_ns(transfer: Transfer) -> int:
    """Return the time of a transfer that nothing else disturbs."""
    return transfer.latency_ns + transfer.wire_ns


def plain(n_gpus: int) -> Cluster:
    """Return nodes of eight GPUs, 450 GiB/s inside, eight NICs of 50 GiB/s, nothing measured or lost."""
    return replace(
        load_cluster("dgx-h100", n_gpus),
        intra=LinkSpec(name="inside", kind="nvlink", bandwidth_bytes_per_s=450 * GIB, latency_s=1e-6),
        nic=LinkSpec(name="nic", kind="infiniband", bandwidth_bytes_per_s=50 * GIB, latency_s=3e-6),
    )


def faster(cluster: Cluster, factor: float) -> Cluster:
    """Return *cluster* with every link *factor* times as wide."""

    def widen(link: LinkSpec) -> LinkSpec:
        """Return a wider link; its tables keep the bandwidth they were measured at."""
        return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor)

    host = widen(cluster.node.host) if cluster.node.host else None
    return replace(
        cluster,
        nic=widen(cluster.nic) if cluster.nic else None,
        intra=widen(cluster.intra),
        node=replace(cluster.node, host=host),
    )


@given(name=sampled_from(names()), kind=sampled_from(KINDS), size=SIZES, group=sampled_from(GROUPS))
def test_more_bytes_never_take_less_time(name: str, kind: str, size: int, group: Sequence[int]) -> None:
    net = network(name)
    assert total_ns(net.collective(kind, size, group)) <= total_ns(net.collective(kind, size + 4096, group))


@given(name=sampled_from(names()), kind=sampled_from(KINDS), size=SIZES, group=sampled_from(GROUPS))
def test_never_below_the_wire(name: str, kind: str, size: int, group: Sequence[int]) -> None:
    """Each rank's traffic fits through its own way into the node, that of a node through its NICs."""
    net = network(name)
    shape, reduces = net.shape(group), net.cluster.intra.reduces
    n, local = shape.n_ranks, shape.n_local
    inside = bus_factor(kind, local) if local > 1 else 0.0
    if kind == "all_reduce" and reduces and local > 1:
        inside = min(inside, nvls_factor(local))
    if kind == "all_to_all":
        inside *= local / n
    across = {"all_reduce": 2 * (shape.n_domains - 1) / shape.n_domains, "broadcast": 1.0}
    out = across.get(kind, (shape.n_domains - 1) / shape.n_domains) if shape.n_domains > 1 else 0.0
    bound_s = size * max(inside / shape.intra_bytes_per_s, out / shape.inter_bytes_per_s)
    if name != "localhost":  # its broadcast between two processes is the unit of its bandwidth
        assert total_ns(net.collective(kind, size, group)) >= bound_s * 1e9 - 1


@given(
    name=sampled_from(names()),
    kind=sampled_from(KINDS),
    size=SIZES,
    group=sampled_from(GROUPS),
    factor=sampled_from([1.01, 2.0, 10.0]),
)
def test_a_faster_link_never_makes_it_longer(
    name: str, kind: str, size: int, group: Sequence[int], factor: float
) -> None:
    """No way takes longer; NCCL, which counts what links are said to carry, may take another for it."""
    slow = network(name)
    fast = _faster_network(name, factor)
    before = {way.name: way.total_s for way in slow.ways(kind, size, group)}
    after = {way.name: way.total_s for way in fast.ways(kind, size, group)}
    assert before.keys() == after.keys()
    assert all(after[way] <= before[way] + 1e-12 for way in before)
    assert total_ns(fast.p2p(size, group[0], group[-1])) <= total_ns(slow.p2p(size, group[0], group[-1]))


@cache
def _faster_network(name: str, factor: float) -> Network:
    return Network(faster(load_cluster(name, 64), factor))


@pytest.mark.parametrize("kind", KINDS)
def test_a_link_twice_as_wide_halves_the_wire_time_that_was_measured(kind: str) -> None:
    """What was measured at 450 GB/s says how a link of another width is used, too."""
    wide = _faster_network("dgx-h100", 2.0).collective(kind, GIB, range(8))
    assert wide.wire_ns == pytest.approx(
        network("dgx-h100").collective(kind, GIB, range(8)).wire_ns / 2, abs=1
    )


@given(
    name=sampled_from(GPUS),
    kind=sampled_from(KINDS),
    size=SIZES,
    node=integers(0, 3),
    local=integers(0, 71),
)
def test_equal_groups_cost_the_same(name: str, kind: str, size: int, node: int, local: int) -> None:
    """Whichever node it is, whichever GPU of each node, and in whatever order they are said."""
    g = load_cluster(name).gpus_per_node
    net = network(name, 4 * g)
    first, other, local = range(g), range(g * node, g * node + g), local % g
    assert net.collective(kind, size, first) == net.collective(kind, size, other)
    across = [net.collective(kind, size, range(start, 4 * g, g)) for start in (0, local)]
    assert across[0] == across[1]
    assert net.collective(kind, size, first) == net.collective(kind, size, first[::-1])


@given(size=SIZES, a=integers(0, 63), b=integers(0, 63))
def test_there_and_back_cost_the_same(size: int, a: int, b: int) -> None:
    net = network("dgx-a100")
    assert net.p2p(size, a, b) == net.p2p(size, b, a)
    assert (total_ns(net.p2p(size, a, b)) == 0) == (a == b)


@pytest.mark.parametrize(("n_gpus", "bound_ms"), [(8, 3.889), (64, 4.375), (512, 4.922)])
def test_one_gibibyte_stays_above_the_bound_and_near_it(n_gpus: int, bound_ms: float) -> None:
    """Bounds of a ring inside eight GPUs, and of a hierarchical ring between nodes with eight rails.

    ASTRA-sim answers 1.4 to 40 ms for the same network, depending on how the array is cut. Among 512 GPUs
    NCCL takes a tree, whose channels carry 36 of 50 GiB/s.
    """
    transfer = Network(plain(n_gpus)).collective("all_reduce", GIB, range(n_gpus))
    assert bound_ms < total_ns(transfer) / 1e6 < 1.6 * bound_ms
    assert transfer.wire_ns / 1e6 >= bound_ms - 1e-3


def test_eight_plain_gpus_are_the_textbook_ring() -> None:
    transfer = Network(plain(8)).collective("all_reduce", GIB, range(8))
    assert transfer == Transfer(14_000, round(1.75 / 450 * 1e9), "inside/ring", 1.0, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_parallelism_leaves_one_rail_to_each_data_parallel_group(kind: str) -> None:
    """A group with one GPU per node has an eighth of the way out that a group of whole nodes has."""
    net = Network(plain(512))
    one_rail, all_rails = (net.shape(ranks).inter_bytes_per_s for ranks in (range(0, 512, 8), range(512)))
    assert all_rails == 8 * one_rail == 8 * 50 * GIB
    if kind != "all_to_all":  # there, a rank on the only rail sends an eighth of what it has
        slow, fast = (
            net.collective(kind, 8 * GIB, ranks).wire_ns for ranks in (range(0, 512, 8), range(512))
        )
        assert slow > 5 * fast


def test_a_narrow_spine_is_felt_as_often_as_it_is_crossed() -> None:
    """A ring in the order of its nodes leaves each leaf once; one that leaves it with every hop has less, and
    so has an all-to-all, of which all but what stays under a leaf is taken to cross."""

    def slower(kind: str, oversubscription: float, ranks: Sequence[int]) -> float:
        spec = FabricSpec(kind="rail", nodes_per_leaf=4, oversubscription=oversubscription)
        wide, tight = (
            Network(replace(plain(64), fabric_spec=replace(spec, oversubscription=by)))
            for by in (1.0, oversubscription)
        )
        return tight.collective(kind, GIB, ranks).wire_ns / wide.collective(kind, GIB, ranks).wire_ns

    below, across = range(0, 32, 8), range(0, 64, 8)
    to_and_fro = [rank for pair in zip(below, range(32, 64, 8), strict=True) for rank in pair]
    assert slower("all_gather", 8.0, below) == 1.0
    assert slower("all_gather", 4.0, across) == pytest.approx(1.0)
    assert slower("all_gather", 8.0, across) == pytest.approx(2.0, rel=1e-6)
    assert slower("all_gather", 8.0, to_and_fro) == pytest.approx(8.0, rel=1e-6)
    assert slower("all_to_all", 8.0, across) > 6


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_what_crosses_between_two_sites_fits_their_link(kind: str) -> None:
    """Each site has to get what the other has; a ring of four nodes in each takes seven eighths of the array
    across, and waits for the slow hop with a quarter of its own."""
    spec = FabricSpec(kind="two-site", group_nodes=4, group_bytes_per_s=10e9, group_latency_s=4e-3)
    net = Network(replace(plain(64), fabric_spec=spec))
    found = net.collective(kind, GIB, range(64))
    assert found.wire_ns == pytest.approx(63 / 64 * GIB / 10e9 * 1e9, rel=1e-6)
    assert found.latency_ns == pytest.approx(7 * 2 / 8 * 4e6, rel=0.1)
    assert net.collective("all_to_all", GIB, range(64)).latency_ns > 4e6


def test_without_gpudirect_what_leaves_a_node_passes_the_host() -> None:
    """6.4 GB/s per NIC both ways over the fifth root of nodes, 7.7 one way; inside a node nothing changes."""
    direct, staged = network("dgx-a100", 64), network("dgx-a100-staged", 64)
    size = 2**30
    for n_nodes in (2, 8):
        n, rate = 8 * n_nodes, 6.4 * n_nodes**-0.2
        found = staged.collective("all_gather", size, range(n)).wire_ns
        assert found == pytest.approx((n - 1) / n * size / (8 * rate), rel=1e-6)
    assert staged.p2p(size, 0, 8).wire_ns > size / 7.7 > 2 * direct.p2p(size, 0, 8).wire_ns
    assert staged.collective("all_reduce", size, range(8)) == direct.collective("all_reduce", size, range(8))


@pytest.mark.parametrize(("name", "kept"), [("dgx-a100", True), ("dgx-a100-staged", False), ("a40-8", False)])
def test_lines_of_128_bytes_pass_no_hosts_memory(name: str, kept: bool) -> None:
    cluster = load_cluster(name, 16)
    ways = Network(cluster).ways("all_reduce", 2**20, range(16))
    assert any(way.name.endswith("/ll128") for way in ways) == kept
    asked = Network(cluster, choice=choice("", "LL128")).ways("all_reduce", 2**20, range(16))
    assert any(way.name.endswith("/ll128") for way in asked)


def test_a_ring_leaves_by_as_many_nics_as_nccl_finds_rings() -> None:
    """Jean Zay: of four ports NCCL uses two; on A100 nodes a group has one ring, on V100 nodes two."""
    one, two = network("jean-zay-a100", 16), network("jean-zay-v100", 16)
    size = 2**32
    rates = [15 / 16 * size / net.collective("all_gather", size, range(16)).wire_ns for net in (one, two)]
    n_nodes = [len(range(0, 16, cluster.cluster.gpus_per_node)) for cluster in (one, two)]
    assert rates == pytest.approx([6.4 * n_nodes[0] ** -0.2, 2 * 6.4 * n_nodes[1] ** -0.2], rel=1e-3)
    together = one.collective("all_gather", size, range(0, 16, 8))
    assert together.wire_ns == pytest.approx(
        size / 2 / (2 * 6.4 * 2**-0.2 / 8), rel=1e-3
    )  # eight such groups at once


def test_sends_around_a_ring_have_the_nics_of_a_node_to_themselves() -> None:
    shared = network("aws-p4d", 16)  # 4 NICs for 8 GPUs
    one = Network(load_cluster("aws-p4d", 16), (7, 8)).p2p(GIB, 0, 1)
    assert shared.shift(GIB, range(16)) == one
    assert total_ns(one) < 0.6 * total_ns(shared.p2p(GIB, 7, 8))


def test_a_rack_of_72_needs_no_nic() -> None:
    net = network("gb200-nvl72", 144)
    inside, across = (net.collective("all_gather", GIB, range(n)) for n in (72, 144))
    assert inside.algorithm == "nvlink5/measured"
    assert across.algorithm.startswith("ring/")
    assert total_ns(inside) < total_ns(across)


def test_small_messages_take_the_protocol_of_low_latency() -> None:
    net = network("dgx-h100")
    assert net.collective("all_reduce", 1024, range(64)).algorithm.endswith("/ll")
    assert net.collective("all_reduce", GIB, range(64)).algorithm.endswith("/simple")


@pytest.mark.parametrize("kind", KINDS)
def test_more_nodes_with_the_same_rails_never_take_less(kind: str) -> None:
    net = network("dgx-h100", 512)
    times = [total_ns(net.collective(kind, 2**26, range(8 * nodes))) for nodes in (2, 4, 8, 16, 32, 64)]
    assert times == sorted(times)


def test_answers_are_remembered_by_the_shape_of_the_group() -> None:
    net = network("dgx-h100")
    first = net.collective("all_reduce", 12345, range(0, 64, 8))
    assert net.collective("all_reduce", 12345, range(1, 64, 8)) is first


def test_a_placement_decides_who_is_near() -> None:
    cluster = load_cluster("dgx-h100", 16)
    spread = Network(cluster, [gpu for local in range(8) for gpu in (local, local + 8)])
    assert spread.shape([0, 1]).n_domains == 2
    assert Network(cluster).shape([0, 1]).n_domains == 1


def test_a_crowded_machine_waits_for_its_cores() -> None:
    """Four processes on two cores: every step of a ring waits until the receiver runs."""
    two, four = (network("localhost", n).collective("all_reduce", 0, range(n)) for n in (2, 4))
    assert two.latency_ns == 394_000
    assert four.latency_ns == 3 * 394_000 + 6 * 750_000


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_a_group_of_one_costs_nothing(n: int) -> None:
    assert network("dgx-h100").collective("all_reduce", GIB, [n]) == Transfer(0, 0, "none")


def test_an_unknown_collective_is_refused() -> None:
    with pytest.raises(SimulationError, match="collective 'gossip': one of all_reduce, all_gather"):
        network("dgx-h100").collective("gossip", 1, range(8))


MEASURED = [
    # machine, GPUs, bytes, measured us, source; none of them is in the catalogue
    ("dgx-a100", 2, 448 << 20, 2484, "VIA-Research/vTrain f8dda84 (MIT), trace/a100: nccl-tests"),
    ("dgx-a100", 4, 192 << 20, 1442, "VIA-Research/vTrain f8dda84 (MIT), trace/a100: nccl-tests"),
    ("dgx-a100", 8, 64 << 20, 580, "VIA-Research/vTrain f8dda84 (MIT), trace/a100: nccl-tests"),
    ("dgx-a100", 8, 960 << 20, 7693, "VIA-Research/vTrain f8dda84 (MIT), trace/a100: nccl-tests"),
    ("dgx-h100", 4, 32 << 20, 167, "microsoft/vidur 7d47513 (MIT), data/profiling/network/h100_dgx"),
    ("dgx-h100", 8, 32 << 20, 196, "microsoft/vidur 7d47513 (MIT), data/profiling/network/h100_dgx"),
    ("dgx-h200", 8, 512 << 20, 2086, "stas00/ml-engineering: all_reduce_bench.py"),
    ("dgx-h200", 8, 16 << 30, 62635, "stas00/ml-engineering: nccl-tests"),
    ("dgx-b200", 8, 2 << 30, 5113, "stas00/ml-engineering: all_reduce_bench.py"),
    ("aws-p5", 16, 8 << 30, 33605, "aws-samples/awsome-distributed-training: nccl-tests on 2 p5.48xlarge"),
]


@pytest.mark.parametrize(("name", "n_gpus", "size", "measured_us", "source"), MEASURED)
def test_all_reduce_that_others_measured(
    name: str, n_gpus: int, size: int, measured_us: int, source: str
) -> None:
    """Other people's machines and other versions of NCCL: within 6 %."""
    simulated_us = total_ns(network(name).collective("all_reduce", size, range(n_gpus))) / 1e3
    assert simulated_us == pytest.approx(measured_us, rel=0.06), source


@pytest.mark.parametrize("name", GPUS)
def test_what_was_measured_inside_a_node_comes_back(name: str) -> None:
    """The tables of the catalogue, entry by entry."""
    net = network(name, 8)
    tables = net.cluster.intra.tables
    own = [kind for kind in tables if tables[kind].bytes_per_s == net.cluster.intra.bandwidth_bytes_per_s]
    for kind, table in ((kind, tables[kind]) for kind in own):
        direct = [n for n in table.times_s if net.shape(range(n)).intra_bytes_per_s == table.bytes_per_s]
        for n, column in ((n, column) for n in direct for column in (0, 7, 14, 20)):
            simulated = net.collective(kind, table.sizes_bytes[column], range(n))
            assert total_ns(simulated) == pytest.approx(table.times_s[n][column] * 1e9, abs=1)


@pytest.mark.parametrize(("small", "large"), list(combinations([2, 4, 8, 16, 72], 2)))
def test_more_gpus_in_a_rack_never_take_less(small: int, large: int) -> None:
    """Except where all bytes pass each link: two GPUs reach less of their link than eight."""
    net = network("gb200-nvl72", 72)
    for kind in sorted(set(KINDS) - {"broadcast", "reduce"}):
        few, many = (net.collective(kind, GIB, range(n)) for n in (small, large))
        assert total_ns(few) <= total_ns(many)


def test_a_group_of_neighbours_is_kept_by_its_ends() -> None:
    """If it is large, not by its members; in any other order a group is another one."""
    n_ranks = 4 * MANY
    net = Network(plain(n_ranks))
    every = range(0, n_ranks, 2)
    turned = (*range(2, n_ranks, 2), 0)
    shapes = [net.shape(ranks) for ranks in (every, tuple(every), turned, (0, 8))]
    assert shapes[0] == shapes[1]
    assert list(net._shapes) == [every, turned, (0, 8)]
