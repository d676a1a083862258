"""Kinds of values that several verbs take."""

from __future__ import annotations

import math
import re
from typing import Any

import click


class Number(click.FloatRange):
    """A number in a range; NaN and infinity are in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{found} is not a finite number", param, ctx)
        return found


def usd_per_hour(value: str) -> float:
    """Return ``2.5 USD/h`` as dollars per hour, as ``topologies.units.parse_price`` does.

    Raises:
        click.BadParameter: *value* is no price.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*USD/h\s*", value)
    if found is None:
        raise click.BadParameter(f"{value!r}: write a number and USD/h, e.g. '2.5 USD/h'")
    return float(found[1])
