"""What happens to links in a run: a slow NIC, a link that fails and comes back; and how full links were."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from foretrace.simulator.clock import to_ns
from foretrace.simulator.engine.changes import FAR, IN, NEAR, OUT, SWITCHES, Change, Way
from foretrace.simulator.engine.filled import Filled
from foretrace.simulator.errors import JobError
from foretrace.simulator.program import Int64Array
from foretrace.topologies.errors import UnitError
from foretrace.topologies.units import parse_time

LINKS = pa.schema(
    [
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("tier", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("direction", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("start_ns", pa.int64(), nullable=False),
        pa.field("end_ns", pa.int64(), nullable=False),
        pa.field("used", pa.float64(), nullable=False),
    ]
)
"""Columns of ``links.arrow``: how full a rank's way into its node (``near``) or out of it (``far``) was, or
the way of a switch upward (``leaf``, ``spine``; ``rank`` is its number)."""


def link_changes(text: str) -> list[Change]:
    """Return the changes that *text* lists, ``rank:tier:capacity[@time]`` separated by commas.

    A tier is ``near``, the rank's way into its node, or ``far``, its way out; or ``leaf`` or ``spine``, the
    way of the switch of that number upward. Capacity is what is left of the width, 0 if it is down. Both
    directions change.

    Raises:
        JobError: a part is not of that form.

    >>> [(change.at_ns, change.way.rank, change.capacity) for change in link_changes("3:far:0.25@2 ms")][:1]
    [(2000000, 3, 0.25)]
    """
    return [change for part in text.split(",") if part.strip() for change in _changes(part.strip())]


def _changes(part: str) -> Iterator[Change]:
    what, _, when = part.partition("@")
    rank, _, rest = what.partition(":")
    tier, _, capacity = rest.partition(":")
    try:
        at_ns = to_ns(parse_time(when)) if when else 0
        found = int(rank), float(capacity)
    except (ValueError, UnitError):
        raise JobError(
            f"link_changes: {part!r} is not rank:tier:capacity or rank:tier:capacity@time, "
            "e.g. 3:far:0.25@2ms"
        ) from None
    if tier not in {NEAR, FAR, *SWITCHES}:
        raise JobError(
            f"link_changes: {part!r}: no tier {tier!r}; near and far are ways of a rank, leaf and spine of a "
            "switch"
        )
    if found[0] < 0 or not 0 <= found[1] <= 1:
        raise JobError(
            f"link_changes: {part!r}: a rank or number of at least 0, and a capacity between 0 and 1, the "
            "share of the width that is left"
        )
    for direction in (IN, OUT):
        yield Change(at_ns, Way(found[0], tier, direction), found[1])


def links_table(filled: Filled, changes: Sequence[Change] = ()) -> pa.Table:
    """Return how full links were in the columns of ``LINKS``, by link and time.

    The metadata of the schema hold *changes* under ``"changes"``: a list in JSON of ``rank``, ``tier``,
    ``direction``, ``at_ns`` and ``capacity``, the share of the width from then on.
    """
    rank = np.array([way.rank for way in filled.ways], np.int32)[filled.way]
    tier = _names([way.tier for way in filled.ways], filled.way)
    direction = _names([way.direction for way in filled.ways], filled.way)
    said = [
        {**change.way._asdict(), "at_ns": change.at_ns, "capacity": change.capacity} for change in changes
    ]
    return pa.Table.from_arrays(
        [rank, tier, direction, filled.start_ns, filled.end_ns, filled.used],
        schema=LINKS.with_metadata({"changes": json.dumps(said)}) if said else LINKS,
    )


def _names(of: Sequence[str], chosen: Int64Array) -> pa.DictionaryArray:
    """Return the *chosen* ones of names that come up many times."""
    names = sorted(set(of))
    numbers = np.array([names.index(name) for name in of], np.int32)
    return pa.DictionaryArray.from_arrays(numbers[chosen], pa.array(names, pa.string()))
