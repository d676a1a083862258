"""What a GPU costs by the hour, what tokens cost then, and how that is said."""

from __future__ import annotations

from typing import Final

from foretrace.topologies.units import parse_price

HINT: Final = "give --price '2.5 USD/h'"
"""How to give a price, for people."""


def usd_per_gpu_hour(given: str | None, listed: float | None) -> float | None:
    """Return the price of a GPU: *given* as a person writes it, else that of its machine's file, if any.

    Raises UnitError if *given* is no price.
    """
    return listed if given is None else parse_price(given)


def usd_per_1b_tokens(price: float, tokens_per_s_per_gpu: float) -> float:
    """Return what 1e9 tokens cost at *price* dollars per GPU and hour.

    >>> usd_per_1b_tokens(3.6, 1000)
    1000.0
    """
    return price / 3600 / tokens_per_s_per_gpu * 1e9


def unknown(name: str) -> str:
    """Return the line for a machine whose price nobody knows."""
    return f"no price is known of {name}: {HINT}"


def without(n_idle: int) -> str:
    """Return that a cost leaves out the *n_idle* GPUs of its nodes without a rank; empty if all have one."""
    has = "GPU of its nodes has no rank and is" if n_idle == 1 else "GPUs of its nodes have no rank and are"
    return f"; {n_idle:,} {has} not counted" if n_idle else ""


def whose(name: str, price: float, *, given: bool) -> str:
    """Return what stands behind a cost: *price*, and where it comes from."""
    listed = "" if given else f", the price in the file of {name} (--price for another)"
    return f"at {price:g} USD per GPU-hour{listed}"
