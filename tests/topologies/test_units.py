"""Quantities: one door in, one way out, and no bare numbers."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers, sampled_from

from foretrace.topologies.errors import UnitError
from foretrace.topologies.units import (
    BYTES,
    BYTES_PER_S,
    FLOP_PER_S,
    SECONDS,
    format_bandwidth,
    format_bytes,
    format_flops,
    format_time,
    parse_bandwidth,
    parse_bytes,
    parse_flops,
    parse_price,
    parse_time,
)

PARSERS = [parse_bandwidth, parse_bytes, parse_time, parse_flops, parse_price]


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("400 Gb/s", 50e9), ("50 GB/s", 50e9), ("1 GiB/s", 2**30), ("3.35 TB/s", 3.35e12), (" 8 b/s ", 1)],
)
def test_bits_bytes_and_powers_of_two_are_told_apart(text: str, bytes_per_s: float) -> None:
    assert parse_bandwidth(text) == bytes_per_s


def test_sizes_are_whole_bytes() -> None:
    assert parse_bytes("80 GB") == 80_000_000_000
    assert parse_bytes("80 GiB") == 80 * 2**30
    assert isinstance(parse_bytes("1.5 kB"), int)


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize(
    "text", ["450", "", "GB/s", "450 GBps", "-1 GB/s", "nan s", "inf s", "1 GB/s x", 450, None]
)
def test_what_is_not_a_quantity_is_refused_with_an_example(
    parse: Callable[[object], float], text: object
) -> None:
    with pytest.raises(UnitError, match=r"e\.g\. '"):
        parse(text)


def test_the_unit_of_another_quantity_is_refused() -> None:
    with pytest.raises(UnitError, match="'80 GB' is not a bandwidth"):
        parse_bandwidth("80 GB")


def test_a_number_beyond_floating_point_is_refused() -> None:
    with pytest.raises(UnitError, match="too large"):
        parse_time("1e400 s")


@given(integers(1, 999_999), sampled_from(sorted(BYTES_PER_S)))
def test_a_bandwidth_is_its_number_times_its_unit(value: int, unit: str) -> None:
    assert parse_bandwidth(f"{value} {unit}") == value * BYTES_PER_S[unit]


@pytest.mark.parametrize(
    ("form", "parse", "units"),
    [
        (format_bytes, parse_bytes, BYTES),
        (format_bandwidth, parse_bandwidth, BYTES_PER_S),
        (format_time, parse_time, SECONDS),
        (format_flops, parse_flops, FLOP_PER_S),
    ],
)
@given(value=floats(1e-7, 1e15))
def test_what_is_printed_can_be_read_again(
    form: Callable[[float], str], parse: Callable[[object], float], units: dict[str, float], value: float
) -> None:
    """Three digits survive; sizes are whole bytes, so they start at 1."""
    if form is not format_time:
        value = max(value, 1.0)
    text = form(value)
    assert text.partition(" ")[2] in units
    assert math.isclose(parse(text), value, rel_tol=0.006, abs_tol=0.6 if form is format_bytes else 0)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999.9e9, "1 TB"), (1e9, "1 GB"), (85.5e9, "85.5 GB"), (2e18, "2000 PB")]
)
def test_sizes_read_well(value: float, text: str) -> None:
    assert format_bytes(value) == text
