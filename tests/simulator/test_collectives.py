"""Formulas of collectives: closed forms, laws and the tables they read."""

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers, sampled_from

from foretrace.simulator.network.collectives import (
    KINDS,
    bus_factor,
    half_size_s,
    measured_s,
    nvls_factor,
    ring_steps,
    tree_factor,
    tree_hops,
)
from foretrace.simulator.network.nccl import NVLS_INTRA_S, NVLS_RANKS, PROTOCOLS
from foretrace.topologies.errors import CatalogError
from foretrace.topologies.link import Curve, Table

SIZES = integers(0, 2**40)
RANKS = integers(2, 1024)
ALPHAS = floats(0, 1e-3)
RATES = floats(1e9, 1e13)

TABLE = Table(
    sizes_bytes=(1024, 4096, 16384),
    times_s={2: (1e-6, 1e-6, 4e-6), 4: (2e-6, 3e-6, 8e-6), 8: (4e-6, 5e-6, 2e-5)},
    bytes_per_s=1e9,
)


@given(kind=sampled_from(KINDS), n=RANKS)
def test_steps_and_traffic_grow_with_the_ranks(kind: str, n: int) -> None:
    assert ring_steps(kind, n + 1) > ring_steps(kind, n)
    assert bus_factor(kind, n + 1) >= bus_factor(kind, n) > 0
    assert bus_factor(kind, n) < 2


@given(n=RANKS)
def test_traffic_and_steps_are_the_closed_forms(n: int) -> None:
    """Traffic as in nccl-tests ``doc/PERFORMANCE.md``; two trees, as high as ranks can be halved."""
    once, share = 1.0, (n - 1) / n
    factors = {"all_reduce": 2 * share, "broadcast": once, "reduce": once, "p2p": once}
    for kind in (*KINDS, "p2p"):
        assert bus_factor(kind, n) == pytest.approx(factors.get(kind, share))
        assert ring_steps(kind, n) == (2 if kind == "all_reduce" else 1) * (n - 1)
    assert tree_factor(n) == (1.0 if n == 2 else 2.0)
    assert tree_hops(n) == 2 * ceil(log2(n))
    assert nvls_factor(n) == pytest.approx(1 + 1 / n)


def test_a_ring_of_eight_takes_as_long_as_another_simulator_says() -> None:
    """SimAI: 3.889 ms for 1 GiB at 450 GiB/s."""
    assert bus_factor("all_reduce", 8) * 2**30 / (450 * 2**30) * 1e3 == pytest.approx(3.889, abs=5e-4)


def test_alone_nobody_communicates() -> None:
    assert all(bus_factor(kind, 1) == 0 for kind in KINDS)
    assert tree_factor(1) == 0
    assert tree_hops(1) == 0


@given(n=integers(2, 4096))
def test_a_tree_is_lower_than_a_ring_is_long(n: int) -> None:
    assert tree_hops(n) <= 2 * (n - 1)
    assert 2 ** (tree_hops(n) // 2) >= n
    assert tree_factor(n) >= bus_factor("all_reduce", n)


@given(n=integers(4, 1024))
def test_switches_that_reduce_move_less_than_a_ring(n: int) -> None:
    assert 1 < nvls_factor(n) < bus_factor("all_reduce", n)


@given(size=integers(1, 2**40), n=RANKS, half=floats(0, 1e9), exponent=floats(0.1, 1), rate=RATES)
def test_a_curve_stays_above_its_line_and_rises(
    size: int, n: int, half: float, exponent: float, rate: float
) -> None:
    curve = Curve(
        efficiency=0.8, latency_s=1e-5, latency_per_rank_s=1e-6, half_size_bytes=half, exponent=exponent
    )
    latency_s, wire_s = half_size_s(curve, size, n, size, rate)
    assert latency_s == pytest.approx(1e-5 + (n - 2) * 1e-6)
    assert wire_s >= size / (0.8 * rate)
    assert half_size_s(curve, size + 1, n, size + 1, rate)[1] >= wire_s * (1 - 1e-12)


@given(exponent=floats(0.1, 1), factor=floats(0.1, 100))
def test_a_curve_comes_near_its_line_as_its_exponent_says(exponent: float, factor: float) -> None:
    """What it is longer by falls with that power of the size."""
    curve = Curve(efficiency=0.5, latency_s=0.0, half_size_bytes=1e6, exponent=exponent)
    size = 1e6 * factor
    line_s = 3 * size / (0.5 * 1e9)
    assert half_size_s(curve, size, 2, 3 * size, 1e9)[1] == pytest.approx(line_s * (1 + factor**-exponent))


def test_half_of_the_bandwidth_is_reached_at_the_half_size() -> None:
    curve = Curve(efficiency=1.0, latency_s=0.0, half_size_bytes=1e6, exponent=0.5)
    assert half_size_s(curve, 1e6, 2, 1e6, 1e9)[1] == pytest.approx(2 * 1e6 / 1e9)
    assert half_size_s(curve, 0, 2, 0, 1e9) == (0.0, 0.0)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("column", [0, 1, 2])
def test_measured_times_come_back_as_they_are(n: int, column: int) -> None:
    assert sum(measured_s(TABLE, "all_gather", TABLE.sizes_bytes[column], n)) == pytest.approx(
        TABLE.times_s[n][column]
    )


@given(size=integers(0, 2**40), n=integers(2, 72))
def test_measured_times_never_fall_with_size_or_ranks(size: int, n: int) -> None:
    latency_s, wire_s = measured_s(TABLE, "all_gather", size, n)
    assert measured_s(TABLE, "all_gather", size + 1, n)[1] >= wire_s * (1 - 1e-12)
    assert measured_s(TABLE, "all_gather", size, n + 1)[0] >= latency_s * (1 - 1e-12)
    assert wire_s >= 0 < latency_s


def test_beyond_a_table_size_goes_on_in_a_line_and_ranks_as_the_bus_factor() -> None:
    rate = (2e-5 - 5e-6) / (16384 - 4096)
    latency_s, wire_s = measured_s(TABLE, "all_gather", 10**6, 8)
    assert latency_s == 4e-6
    assert wire_s == pytest.approx(2e-5 - 4e-6 + rate * (10**6 - 16384))
    wider_latency_s, wider_wire_s = measured_s(TABLE, "all_gather", 10**6, 16)
    assert wider_latency_s == pytest.approx(4e-6 + 2e-6)
    assert wider_wire_s == pytest.approx(wire_s * (15 / 16) / (7 / 8))


def test_where_switches_reduce_more_ranks_move_no_more_bytes() -> None:
    plain = measured_s(TABLE, "all_reduce", 10**6, 16)
    reduced = measured_s(TABLE, "all_reduce", 10**6, 16, reduces=True)
    assert reduced[1] == measured_s(TABLE, "all_reduce", 10**6, 8)[1] < plain[1]
    assert reduced[0] == plain[0]


def test_between_ranks_a_table_is_read_in_the_logarithm() -> None:
    latency_s, _ = measured_s(TABLE, "all_gather", 512, 6)
    assert 2e-6 < latency_s < 4e-6
    assert measured_s(TABLE, "all_gather", 512, 4)[0] == 2e-6


def test_a_table_is_read_along_straight_lines_in_the_logarithm() -> None:
    """Half way between two sizes is their mean in the logarithm; between ranks both parts are lines."""
    low, high = measured_s(TABLE, "all_gather", 8192, 4), measured_s(TABLE, "all_gather", 8192, 8)
    assert high == pytest.approx((4e-6, (5e-6 * 2e-5) ** 0.5 - 4e-6))
    weight = log2(6 / 4)
    between = tuple(a + (b - a) * weight for a, b in zip(low, high, strict=True))
    assert measured_s(TABLE, "all_gather", 8192, 6) == pytest.approx(between)


def test_among_fewer_ranks_than_were_measured_on_switches_what_a_rank_moves_counts() -> None:
    """``(n + 1) / n`` of its array; a table of one number of ranks knows no rise with them."""
    alone = Table(sizes_bytes=TABLE.sizes_bytes, times_s={8: TABLE.times_s[8]}, bytes_per_s=1e9)
    latency_s, wire_s = measured_s(alone, "all_reduce", 10**6, 8)
    fewer = measured_s(alone, "all_reduce", 10**6, NVLS_RANKS, reduces=True)
    assert fewer == pytest.approx((latency_s, wire_s * nvls_factor(NVLS_RANKS) / nvls_factor(8)))
    assert measured_s(alone, "all_reduce", 10**6, NVLS_RANKS) == pytest.approx((latency_s, wire_s))
    assert measured_s(alone, "all_gather", 10**6, 32)[0] == latency_s


def test_more_ranks_on_switches_take_no_longer_than_their_one_step() -> None:
    """However many there are, but no less than was measured."""
    assert measured_s(TABLE, "all_reduce", 512, 8 << 20, reduces=True)[0] == pytest.approx(NVLS_INTRA_S)
    steep = {2: (1e-6, 1e-5, 4e-5), 4: (1e-4, 2e-4, 4e-4)}
    table = Table(sizes_bytes=TABLE.sizes_bytes, times_s=steep, bytes_per_s=1e9)
    assert measured_s(table, "all_reduce", 512, 64, reduces=True)[0] == 1e-4


def test_protocols_trade_latency_for_bandwidth() -> None:
    """LL is for small messages, Simple for large, LL128 between them."""
    ll, ll128, simple = PROTOCOLS["ll"], PROTOCOLS["ll128"], PROTOCOLS["simple"]
    assert ll.ring_net_s < ll128.ring_net_s < simple.ring_net_s
    assert ll.tree_net_s < ll128.tree_net_s < simple.tree_net_s
    assert ll.share < ll128.share < simple.share == 1


@pytest.mark.parametrize(
    ("sizes", "times", "says"),
    [
        ((1024,), {2: (1e-6,)}, "at least two"),
        ((2048, 1024), {2: (1e-6, 2e-6)}, "must rise"),
        ((1024, 2048), {}, "at least one number of ranks"),
        ((1024, 2048), {2: (2e-6, 1e-6)}, "never fall"),
        ((1024, 2048), {2: (1e-6,)}, "give 2, one per size"),
        ((1024, 2048), {1: (1e-6, 1e-6)}, "at least 2 ranks"),
    ],
)
def test_a_table_that_cannot_be_is_refused(
    sizes: tuple[int, ...], times: dict[int, tuple[float, ...]], says: str
) -> None:
    with pytest.raises(CatalogError, match=says):
        Table(sizes_bytes=sizes, times_s=times, bytes_per_s=1e9)
