"""Kinds of values that several verbs take."""

from __future__ import annotations

import re

import click


def usd_per_hour(value: str) -> float:
    """Return ``2.5 USD/h`` as dollars per hour, as ``topologies.units.parse_price`` does.

    Raises:
        click.BadParameter: *value* is no price.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*USD/h\s*", value)
    if found is None:
        raise click.BadParameter(f"{value!r}: write a number and USD/h, e.g. '2.5 USD/h'")
    return float(found[1])
