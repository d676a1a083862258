"""Products of experts with rows of their own in one launch: tied to even ones, and to single ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists, permutations, sampled_from

from foretrace.simulator.compute.gemm import SUMS_EXPOSED, TORCH_GROUPED_SHARE, gemm_s
from foretrace.simulator.workload.ops import Op, gemm
from foretrace.topologies.catalog import load_device

N, K, MEMBERS = 1024, 512, 6
DEVICES = ("a100-80gb", "h100-sxm", "b200-sxm")
devices, along = sampled_from(DEVICES), sampled_from("mnk")
rows = lists(integers(0, 3000), min_size=MEMBERS, max_size=MEMBERS)


def product(side: str, rows: Sequence[int], *, known: bool = True) -> Op:
    """Return the product of experts with *rows* along *side*, as a rehearsal writes it down.

    Not *known*, they are even, as many as there are for each.
    """
    mean = max(sum(rows) // len(rows), 1)
    sides = {"m": N, "n": N, "k": K, side: mean}
    op = gemm("x", **sides, dtype="bf16", batch=len(rows), grouped=True)
    op = replace(op, kernel="torch", flops=op.flops // mean // len(rows) * sum(rows))
    if not known:
        return op
    each = [{**sides, side: n} for n in rows]
    read = sum(s["k"] * (s["m"] + s["n"]) for s in each if s[side])
    moved = 2 * (read + sum(s["m"] * s["n"] for s in each))
    return replace(op, rows=tuple(rows), along=side, bytes_moved=moved)


@given(side=along, n=integers(1, 5000), n_members=integers(1, 20), name=devices)
def test_even_rows_take_what_they_did(side: str, n: int, n_members: int, name: str) -> None:
    """To the last digit but those of sums."""
    device = load_device(name)
    even, unknown = (product(side, [n] * n_members, known=known) for known in (True, False))
    assert even.bytes_moved == unknown.bytes_moved
    assert gemm_s(even, device) == pytest.approx(gemm_s(unknown, device), rel=1e-9)


@given(side=along, n=integers(1, 20_000), at=integers(0, MEMBERS - 1), name=devices)
def test_one_expert_with_all_rows_is_one_product(side: str, n: int, at: int, name: str) -> None:
    """Others cost nothing but the zeros that are written for their gradients, which are bytes alone."""
    device = load_device(name)
    alone = product(side, [n])
    all_in_one = product(side, [n if other == at else 0 for other in range(MEMBERS)])
    zeros = 2 * (MEMBERS - 1) * N * N if side == "k" else 0
    assert device.gemm_tiles is not None
    rate = TORCH_GROUPED_SHARE * device.gemm_tiles.memory_fraction * device.memory_bytes_per_s
    assert (all_in_one.bytes_moved, all_in_one.flops) == (alone.bytes_moved + zeros, alone.flops)
    more_s = gemm_s(all_in_one, device) - gemm_s(alone, device)
    assert -1e-15 < more_s < zeros / rate + 1e-15


@given(rows=rows, more=rows, side=along, name=devices)
def test_more_rows_never_take_less_time(rows: list[int], more: list[int], side: str, name: str) -> None:
    """Whichever experts they go to."""
    device = load_device(name)
    fuller = [a + b for a, b in zip(rows, more, strict=True)]
    assert gemm_s(product(side, fuller), device) >= gemm_s(product(side, rows), device) * (1 - 1e-9)


@given(side=sampled_from("mn"), rows=rows.flatmap(permutations), name=devices)
def test_it_does_not_matter_which_expert_is_full(side: str, rows: list[int], name: str) -> None:
    """Where tiles are alike."""
    device = load_device(name)
    ordered = product(side, sorted(rows))
    assert gemm_s(product(side, rows), device) == pytest.approx(gemm_s(ordered, device), rel=1e-9)


def test_a_few_rows_more_than_a_tile_take_a_tile_more() -> None:
    """Eight experts of 1,024 rows, 8,192 wide: four rows from one to another, which no mean shows."""
    device = load_device("h100-sxm")
    wide = [replace(product("m", n), n=8192, k=8192) for n in ([1024] * 8, [1025] * 4 + [1023] * 4)]
    even, uneven = (gemm_s(op, device) for op in wide)
    assert uneven > even * 1.03


def test_nothing_takes_the_time_of_a_launch() -> None:
    """A rank whose experts got no rows."""
    device = load_device("h100-sxm")
    assert gemm_s(product("m", [0] * 4), device) == pytest.approx(device.gemm_latency_s)


@pytest.mark.parametrize("name", DEVICES)
def test_one_kernel_over_even_members_reaches_its_share_of_the_rate_of_a_batch(name: str) -> None:
    device = load_device(name)
    op = replace(product("m", [2048] * MEMBERS, known=False), kernel="torch")
    batch_s = gemm_s(replace(op, grouped=False, kernel=""), device) - device.gemm_latency_s
    assert gemm_s(op, device) - device.gemm_latency_s == pytest.approx(batch_s / TORCH_GROUPED_SHARE)


@pytest.mark.parametrize("name", DEVICES)
def test_a_quarter_of_the_traffic_of_sums_is_not_hidden(name: str) -> None:
    """Over the bandwidth that products reach; tiles that wait for memory make it a little more."""
    device = load_device(name)
    plain = gemm("x", 4096, 4096, 8192, "bf16")
    more = replace(plain, bytes_moved=plain.bytes_moved + 10**8)
    assert device.gemm_tiles is not None
    exposed_s = SUMS_EXPOSED * 10**8 / (device.gemm_tiles.memory_fraction * device.memory_bytes_per_s)
    assert gemm_s(more, device) - gemm_s(plain, device) == pytest.approx(1.05 * exposed_s, rel=0.05)
