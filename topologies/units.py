"""Quantities as people write them, and the one door through which they enter.

Inside, every number is in bytes, seconds, bytes per second or FLOP per second, and its name says so. A bare
number is refused: ``450`` could be gigabytes, gibibytes or gigabits, and a factor of eight goes unnoticed.
GB is 10^9 bytes, GiB is 2^30 bytes, Gb is 10^9 bits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from foretrace.topologies.errors import UnitError

_SI: Final = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_IEC: Final = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

BYTES: Final[Mapping[str, float]] = MappingProxyType({f"{p}B": f for p, f in {**_SI, **_IEC}.items()})
BYTES_PER_S: Final[Mapping[str, float]] = MappingProxyType(
    {f"{unit}/s": factor for unit, factor in BYTES.items()} | {f"{p}b/s": f / 8 for p, f in _SI.items()}
)
SECONDS: Final[Mapping[str, float]] = MappingProxyType(
    {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
)
FLOP_PER_S: Final[Mapping[str, float]] = MappingProxyType({f"{p}FLOP/s": f for p, f in _SI.items()})
WATTS: Final[Mapping[str, float]] = MappingProxyType({f"{p}W": _SI[p] for p in ("", "k", "M")})
G_CO2E_PER_KWH: Final[Mapping[str, float]] = MappingProxyType(
    {f"{p}g{gas}/kWh": _SI[p] for gas in ("CO2", "CO2e", "CO2eq", "") for p in ("", "k")}
)
USD_PER_HOUR: Final[Mapping[str, float]] = MappingProxyType({"USD/h": 1.0})

_QUANTITY: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*(\S*)\s*")

_DOLLARS: Final = re.compile(
    r"\s*\$?\s*([0-9][0-9,]*(?:\.[0-9]*)?(?:[eE]\+?[0-9]+)?)\s*([kKmMbB]?)\s*(?:USD|usd|\$)?\s*"
)
_COUNT: Final = re.compile(r"\s*([0-9][0-9,]{0,20}(?:\.[0-9]{0,12})?)\s*([kKmMbBtT]?)\s*")
_MANY: Final = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}


def parse_bytes(text: object) -> int:
    """Return ``"80 GB"`` as whole bytes. Raises UnitError without a unit of bytes.

    >>> parse_bytes("80 GB"), parse_bytes("1 KiB")
    (80000000000, 1024)
    """
    # A product with a decimal fraction may be off by a hair; bytes are whole.
    return round(_parse(text, BYTES, "a size", "80 GB"))


def parse_bandwidth(text: object) -> float:
    """Return ``"400 Gb/s"`` as bytes per second. Raises UnitError without a unit of bandwidth.

    >>> parse_bandwidth("400 Gb/s") == parse_bandwidth("50 GB/s") == 50e9
    True
    """
    return _parse(text, BYTES_PER_S, "a bandwidth", "450 GB/s")


def parse_time(text: object) -> float:
    """Return ``"2 us"`` as seconds. Raises UnitError without a unit of time.

    >>> parse_time("2 us")
    2e-06
    """
    return _parse(text, SECONDS, "a time", "2 us")


def parse_flops(text: object) -> float:
    """Return ``"989 TFLOP/s"`` as FLOP per second. Raises UnitError without that unit.

    >>> parse_flops("989 TFLOP/s")
    989000000000000.0
    """
    return _parse(text, FLOP_PER_S, "a compute rate", "989 TFLOP/s")


def parse_price(text: object) -> float:
    """Return ``"2.5 USD/h"`` as US dollars per hour. Raises UnitError without that unit.

    >>> parse_price("2.5 USD/h")
    2.5
    """
    return _parse(text, USD_PER_HOUR, "a price", "2.5 USD/h")


def parse_power(text: object) -> float:
    """Return ``"10.2 kW"`` as watts. Raises UnitError without that unit.

    >>> parse_power("10.2 kW")
    10200.0
    """
    return _parse(text, WATTS, "a power", "700 W")


def parse_grid(text: object) -> float:
    """Return ``"400 gCO2/kWh"`` as grams of CO2 equivalent per kWh. Raises UnitError without that unit.

    >>> parse_grid("0.4 kgCO2e/kWh")
    400.0
    """
    return _parse(text, G_CO2E_PER_KWH, "a grid's factor", "400 gCO2/kWh")


def parse_usd(text: object) -> float:
    """Return ``"1.5M USD"`` as US dollars; the unit may be left out, or be a ``$`` in front.

    >>> parse_usd("250k"), parse_usd("$1.5M"), parse_usd("200000"), parse_usd("2 M USD")
    (250000.0, 1500000.0, 200000.0, 2000000.0)
    >>> parse_usd("-3k")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    foretrace.topologies.errors.UnitError: '-3k' is not an amount of US dollars: write e.g. 200000, ...

    Raises:
        UnitError: that is no amount of dollars above zero.
    """
    match = _DOLLARS.fullmatch(str(text))
    if match is None or not (amount := float(match[1].replace(",", "")) * _MANY[match[2].upper()]):
        raise UnitError(f"{text!r} is not an amount of US dollars: write e.g. 200000, 250k or '1.5M USD'")
    return amount


def format_bytes(size_bytes: float) -> str:
    """Return a size in SI units, three significant digits.

    >>> format_bytes(80e9), format_bytes(1536)
    ('80 GB', '1.54 kB')
    """
    return _format(size_bytes, {unit: BYTES[unit] for unit in ("B", "kB", "MB", "GB", "TB", "PB")})


def format_capacity(size_bytes: float) -> str:
    """Return the memory of a device in SI units, and in those that its name and nvidia-smi count in.

    >>> format_capacity(81920 * 2**20)
    '85.9 GB (80 GiB)'
    """
    return f"{format_bytes(size_bytes)} ({_format(size_bytes, {'GiB': BYTES['GiB']})})"


def format_bandwidth(bytes_per_s: float) -> str:
    """Return a bandwidth in SI bytes per second, three significant digits.

    >>> format_bandwidth(450e9)
    '450 GB/s'
    """
    return f"{format_bytes(bytes_per_s)}/s"


def format_power(watts: float) -> str:
    """Return a power, three significant digits.

    >>> format_power(10200.0)
    '10.2 kW'
    """
    return _format(watts, dict(WATTS))


def format_energy(kwh: float) -> str:
    """Return an energy, three significant digits.

    >>> format_energy(0.25), format_energy(1287e3)
    ('250 Wh', '1.29 GWh')
    """
    return _format(kwh, {"Wh": 1e-3, "kWh": 1.0, "MWh": 1e3, "GWh": 1e6})


def format_mass(kg: float) -> str:
    """Return a mass, three significant digits.

    >>> format_mass(0.25), format_mass(552e3)
    ('250 g', '552 t')
    """
    return _format(kg, {"g": 1e-3, "kg": 1.0, "t": 1e3})


def format_time(seconds: float) -> str:
    """Return a time in the unit that suits it, three significant digits.

    >>> format_time(0.0123), format_time(4e-6)
    ('12.3 ms', '4 µs')
    """
    return _format(seconds, {unit: SECONDS[unit] for unit in ("ns", "µs", "ms", "s")})


def format_flops(flops_per_s: float) -> str:
    """Return a compute rate, three significant digits.

    >>> format_flops(989.4e12)
    '989 TFLOP/s'
    """
    return _format(flops_per_s, dict(FLOP_PER_S))


def parse_count(text: str) -> tuple[float, int] | None:
    """Return a number of things and how many decimals of a billion it has; None if *text* is no number.

    >>> parse_count("8.03B"), parse_count("8,030,261,248"), parse_count("270M"), parse_count("gpt2")
    ((8030000000.0, 2), (8030261248.0, 9), (270000000.0, 3), None)
    """
    match = _COUNT.fullmatch(text)
    if match is None:
        return None
    decimals = {"": 9, "K": 6, "M": 3, "B": 0, "T": -3}[match[2].upper()]
    # The decimal point is moved in the text: a product, 8.03 x 1e9, could be off in the last digit.
    value = float(f"{match[1].replace(',', '')}e{9 - decimals}")
    return value, decimals + len(match[1].partition(".")[2])


def _parse(text: object, units: Mapping[str, float], what: str, example: str) -> float:
    """Return *text* in the base of *units*; the only place where a unit is read."""
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2] not in units:
        raise UnitError(
            f"{text!r} is not {what}: write a number and one of {', '.join(units)}, e.g. '{example}'"
        )
    value = float(match[1]) * units[match[2]]
    if not math.isfinite(value):
        raise UnitError(f"{text!r} is not {what}: the number is too large, e.g. '{example}'")
    return value


def _format(value: float, units: Mapping[str, float]) -> str:
    """Return *value* with the largest of *units* (ascending) that leaves at least one before the point."""
    # From 0.9995 on three digits round up to 1: 999.6 kB is 1 MB, not 1e+03 kB.
    fitting = [unit for unit, factor in units.items() if abs(value) >= factor * 0.9995]
    unit = fitting[-1] if fitting else next(iter(units))
    scaled = value / units[unit]
    # ``.3g`` writes 1,000 and more with a power of ten.
    return f"{scaled:.0f} {unit}" if abs(scaled) >= 99.95 else f"{scaled:.3g} {unit}"
