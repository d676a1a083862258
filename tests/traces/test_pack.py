"""What is packed comes back: any arrays, any times, in fewer bytes."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.traces.unpacked import decode, taken_apart

from foretrace.traces.pack import LARGE, Pack, smallest, tick_ns, to_ticks

DTYPES = ("uint8", "int8", "int16", "uint16", "int32", "uint32", "float64")


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 100), max_size=9)), max_size=7))
def test_what_is_packed_comes_back(columns: list[tuple[str, list[int]]]) -> None:
    pack = Pack()
    for number, (dtype, values) in enumerate(columns):
        pack.add(f"c{number}", np.array(values, dtype))
    found = decode(pack.columns, pack.encode())
    assert len(found) == len(columns)
    for number, (dtype, values) in enumerate(columns):
        assert found[f"c{number}"].dtype == np.dtype(dtype)
        assert found[f"c{number}"].tolist() == values


def test_high_bytes_that_are_equal_cost_little() -> None:
    pack = Pack()
    pack.add("time", np.random.default_rng(0).integers(0, 256, 10_000).astype(np.uint32))
    assert len(pack.encode()) < 1.4 * 10_000  # one noisy byte of four, in base64


def test_an_array_of_one_value_costs_no_bytes() -> None:
    pack = Pack()
    pack.add("peer", np.full(1000, -1, np.int8))
    pack.add("layer", np.arange(3, dtype=np.uint8))
    assert len(pack.raw()) == 3
    assert decode(pack.columns, pack.encode())["peer"].tolist() == [-1] * 1000


@given(st.integers(0, 40), st.integers(0, 40), st.booleans())
def test_parts_together_are_the_whole(low: int, high: int, split: bool) -> None:
    n = 40 if low + high < 60 else LARGE + 40  # a small array is never parted
    values = np.arange(n, dtype=np.uint32)
    pack = Pack(split=split)
    first, until = pack.add_parts({"x": values}, (min(low, high), max(low, high)))
    here = taken_apart(pack.columns, pack.raw())["x"]
    later = pack.later or Pack()
    elsewhere = taken_apart(later.columns, later.raw()).get("x", np.zeros(0, np.uint32))
    assert until - first == len(here)
    assert len(elsewhere) == (0 if n <= LARGE or not split else n - len(here))
    assert [*elsewhere[:first], *here, *elsewhere[first:]] == values.tolist()


def test_equal_arrays_give_equal_text() -> None:
    texts = set()
    for _ in range(2):
        pack = Pack()
        pack.add("x", np.arange(5, dtype=np.uint8))
        texts.add(pack.encode())
    assert len(texts) == 1


@st.composite
def lanes(draw: st.DrawFn) -> tuple[list[list[tuple[int, int]]], int]:
    """Lanes of spans that do not overlap, and the length of the step."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        edges = sorted(draw(st.lists(st.integers(0, 10**11), max_size=12)))
        found.append(list(zip(edges[::2], edges[1::2], strict=False)))
    return found, max((end for lane in found for _, end in lane), default=1)


@given(lanes())
def test_times_come_back_to_within_half_a_tick(given_lanes: tuple[list[list[tuple[int, int]]], int]) -> None:
    spans, length_ns = given_lanes
    ptr = np.cumsum([0, *map(len, spans)])
    start = np.array([a for lane in spans for a, _ in lane], np.int64)
    end = np.array([b for lane in spans for _, b in lane], np.int64)
    tick = tick_ns(length_ns)
    gap, duration = (ticks.astype(np.int64) for ticks in to_ticks(start, end, ptr, tick))
    for low, high in pairwise(ptr):
        found = np.cumsum(gap[low:high] + duration[low:high]) - duration[low:high]
        assert (abs(found * tick - start[low:high]) <= tick // 2).all()
        assert (abs((found + duration[low:high]) * tick - end[low:high]) <= tick // 2).all()


@given(st.integers(1, 10**15))
def test_a_step_fits_into_32_bits_of_the_finest_tick(length_ns: int) -> None:
    tick = tick_ns(length_ns)
    assert length_ns // tick <= 2**29
    assert tick == 1 or length_ns // (tick // 10) > 2**29


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1))
def test_smallest_type_holds_every_value(values: list[int]) -> None:
    found = smallest(np.array(values, np.int64))
    assert found.tolist() == values
    assert found.dtype.name in DTYPES


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(OverflowError):
        smallest(np.array([-1, 2**40]))
