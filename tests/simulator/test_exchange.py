"""All-to-alls that are not even, barriers, hierarchical collectives, and the verb that prices one
collective."""

import json
from random import Random

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis.strategies import DrawFn, composite, floats, integers, lists, randoms, sampled_from

from foretrace.cli import main
from foretrace.simulator.errors import SimulationError
from foretrace.simulator.network.cost import Network
from foretrace.simulator.network.exchange import load, skewed
from foretrace.simulator.network.nccl import choice
from foretrace.simulator.program import Transfer
from foretrace.topologies.catalog import load_cluster

H100 = Network(load_cluster("dgx-h100", 32))
MACHINES = {"dgx-h100": H100, "mi300x": Network(load_cluster("mi300x", 32))}


def total_ns(transfer: Transfer) -> int:
    return int(transfer.latency_ns + transfer.wire_ns)


@composite
def matrices(draw: DrawFn) -> list[list[int]]:
    n = draw(integers(2, 6))
    return draw(lists(lists(integers(0, 1000), min_size=n, max_size=n), min_size=n, max_size=n))


@given(sent=matrices())
def test_the_busiest_rank_counts_in_both_directions(sent: list[list[int]]) -> None:
    """Turned round, so that all receive what they sent, an exchange is as heavy; and no sum is above it."""
    nodes = [rank // 2 for rank in range(len(sent))]
    found = load(sent, nodes)
    assert found == load([list(column) for column in zip(*sent, strict=True)], nodes)
    for rank, row in enumerate(sent):
        far = sum(size for peer, size in enumerate(row) if nodes[peer] != nodes[rank])
        assert far <= found.far_bytes
        assert sum(row) - row[rank] - far <= found.near_bytes


@given(power=integers(5, 30), n_nodes=integers(1, 4))
def test_an_even_exchange_is_an_all_to_all(power: int, n_nodes: int) -> None:
    """And a byte more from one rank to another makes no difference but that byte."""
    n = 8 * n_nodes
    ranks, each = range(n), 2**power // n
    sent = [[each] * n for _ in ranks]
    known = H100.collective("all_to_all", each * n, ranks)
    assert H100.all_to_all_v(sent, ranks) == known
    sent[0][-1] += 1
    nearly = H100.all_to_all_v(sent, ranks)
    if each:
        assert nearly.latency_ns == known.latency_ns
        assert nearly.wire_ns == pytest.approx(known.wire_ns, rel=1 / each, abs=2)


@given(sent=matrices(), name=sampled_from(["dgx-h100", "mi300x"]), order=randoms())
def test_it_does_not_matter_what_ranks_are_called(sent: list[list[int]], name: str, order: Random) -> None:
    """Nor which way bytes go: turned round, so that all get what they sent, they take as long."""
    network, n = MACHINES[name], len(sent)
    places = order.sample(range(n), n)
    renamed = [[sent[i][j] << 20 for j in places] for i in places]
    there = [[size << 20 for size in row] for row in sent]
    back = [list(column) for column in zip(*there, strict=True)]
    gpus = [5 * rank for rank in range(n)]  # in up to four nodes
    found = network.all_to_all_v(there, gpus)
    assert network.all_to_all_v(renamed, [gpus[at] for at in places]) == found
    assert network.all_to_all_v(back, gpus) == found


@given(sent=matrices())
def test_no_port_moves_more_than_it_can(sent: list[list[int]]) -> None:
    """What a rank sends out of its node, and what it gets, takes the time of its own NIC, of 50 GB/s."""
    there = [[size << 20 for size in row] for row in sent]
    gpus = [8 * (rank // 2) + rank % 2 for rank in range(len(sent))]
    found = H100.all_to_all_v(there, gpus)
    for way in (there, list(zip(*there, strict=True))):
        for rank, sizes in enumerate(way):
            far = sum(size for peer, size in enumerate(sizes) if peer // 2 != rank // 2)
            assert found.wire_ns + 1 >= far / 50


def test_a_cable_of_its_own_bounds_a_pair() -> None:
    """On a full mesh a GPU that sends one other 1 GiB takes as long as one that sends 1 GiB to each."""
    network, size = MACHINES["mi300x"], 1 << 30
    one = [[size if (i, j) == (0, 1) else 0 for j in range(8)] for i in range(8)]
    assert network.all_to_all_v(one, range(8)) == network.collective("all_to_all", 8 * size, range(8))
    switched = H100.all_to_all_v(one, range(8))
    assert switched == H100.collective("all_to_all", round(size * 8 / 7), range(8))


@given(imbalance=floats(1.0, 16.0), power=integers(10, 30))
def test_a_favourite_never_makes_it_faster(imbalance: float, power: int) -> None:
    even = H100.all_to_all_v(skewed(2**power, 16, 1.0), range(16))
    assert total_ns(H100.all_to_all_v(skewed(2**power, 16, imbalance), range(16))) >= total_ns(even)


def test_one_rank_that_gets_it_all_is_bound_by_its_own_way() -> None:
    """15 ranks send 1 GiB each to the first, 8 of them over its own NIC: 95 % of 50 GB/s, 0.8 us per
    128 KiB."""
    transfer = H100.all_to_all_v(skewed(2**30, 16, 16.0), range(16))
    far_s = 8 * 2**30 / (0.95 * 50e9) + 8 * 2**30 / 2**17 * 0.8e-6
    assert transfer.wire_ns == pytest.approx(far_s * 1e9, rel=1e-6)


def test_sends_reach_what_was_measured_between_two_nodes() -> None:
    """36 of 50 GB/s for a send of 64 MiB between two DGX H100 (microsoft/vidur 7d47513, network/h100_dgx)."""
    transfer = H100.p2p(64 << 20, 0, 8)
    assert (64 << 20) / total_ns(transfer) == pytest.approx(35.9, rel=0.06)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ([[0, 1]], r"all_to_all_v among 2 ranks needs 2 rows of 2 sizes, not 1 rows of \[2\]"),
        ([[0, 1], [1]], r"not 2 rows of \[1, 2\]"),
        ([[0, -1], [1, 0]], "fewer than 0 bytes"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sent: list[list[int]], said: str) -> None:
    with pytest.raises(SimulationError, match=said):
        H100.all_to_all_v(sent, range(2))


@pytest.mark.parametrize("imbalance", [-0.1, 4.1])
def test_no_rank_gets_more_than_there_is(imbalance: float) -> None:
    with pytest.raises(SimulationError, match=r"imbalance = .* from 0 to 4"):
        skewed(1024, 4, imbalance)


@pytest.mark.parametrize("n", [8, 32])
def test_a_barrier_is_a_small_all_reduce(n: int) -> None:
    barrier = H100.barrier(range(n))
    assert barrier == H100.collective("all_reduce", 4, range(n))
    assert 5e3 < total_ns(barrier) < 1e5


@given(power=integers(0, 33))
def test_three_steps_one_after_another_are_no_faster_than_their_parts(power: int) -> None:
    """A hierarchical all-reduce is a scatter inside, a ring between, a gather inside, without overlap."""
    size = 2**power
    net = Network(load_cluster("dgx-h100", 32), choice=choice("hierarchical", "simple"))
    whole = net.collective("all_reduce", size, range(32))
    free = Network(load_cluster("dgx-h100", 8))
    inside = [free.collective(kind, size, range(8)) for kind in ("reduce_scatter", "all_gather")]
    between_ns = 2 * 3 / 4 * size / (0.95 * 400e9) * 1e9
    assert whole.algorithm == "hierarchical/simple"
    assert whole.wire_ns == pytest.approx(sum(part.wire_ns for part in inside) + between_ns, rel=1e-6, abs=3)
    assert 0.0 <= whole.near + whole.far <= 1.0 + 1e-9


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["topology", "cost", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_verb_prices_a_collective_and_shows_every_way() -> None:
    text = printed("dgx-h100", "all_reduce", "1 GiB", "--gpus", "64")
    assert "among 64 ranks in 8 nodes of dgx-h100" in text
    assert text.count("(taken)") == 1
    for way in ("ring/simple", "tree/ll128", "nvls_tree/simple"):
        assert way in text


def test_the_verb_prints_one_json_object() -> None:
    exchange = ("dgx-h100", "all_to_all", "64 MiB", "--gpus", "16", "--json")
    found, even = json.loads(printed(*exchange, "--imbalance", "2")), json.loads(printed(*exchange))
    assert found["time_s"] > 1.5 * even["time_s"]
    assert even["ways"][0]["algorithm"] == even["algorithm"]
    rail = ("--gpus", "64", "--ranks", "0:64:8", "--json")
    group = json.loads(printed("dgx-h100", "all_gather", "1 MiB", *rail))
    assert (group["n_ranks"], group["n_nodes"]) == (8, 8)
    asked = ("--gpus", "64", "--nccl-algo", "hierarchical", "--json")
    assert (
        json.loads(printed("dgx-h100", "all_reduce", "1 GiB", *asked))["algorithm"] == "hierarchical/simple"
    )
    spelt = [printed("dgx-h100", kind, "1 MiB") for kind in ("all_gather", "AllGather", "all-gather")]
    assert spelt[0] == spelt[1] == spelt[2]
    assert json.loads(printed("dgx-h100", "barrier", "--json"))["time_s"] > 0
    assert json.loads(printed("dgx-h100", "p2p", "1 MiB", "--ranks", "0,1", "--json"))["n_ranks"] == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("all_reduce",), "size is missing"),
        (("allreduse", "1 MiB"), "operation 'allreduse': one of all_reduce, all_gather"),
        (("all_reduce", "1 MiB", "--ranks", "0,9"), "at least 2 different ones of the 8 ranks"),
        (("all_reduce", "1 MiB", "--ranks", "a"), "a list 0,8,16 or a range"),
        (("all_reduce", "1 MiB", "--imbalance", "2"), "imbalance is of an all_to_all"),
        (("p2p", "1 MiB"), "p2p is between 2 ranks, not 8"),
        (("all_reduce", "12"), "12"),
    ],
)
def test_what_cannot_be_priced_is_refused_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(main, ["topology", "cost", "dgx-h100", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.strip().splitlines()) == 1
    assert said in result.stderr
