"""Whether the machine that a run describes is the one of the catalogue that has its name.

A run keeps the figures of its machine and their digest, so that a file of one's own that is called like a
machine of the catalogue is told from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from foretrace.topologies.catalog import load_cluster, names
from foretrace.topologies.errors import TopologyError
from foretrace.traces.run import Run

WORDS: Final = frozenset({"name", "description", "sources", "digest"})
"""What is not compared figure by figure."""

MOST_NAMED: Final = 3
"""Most figures that are named where machines differ."""


def why_not_catalogue(run: Run) -> str:
    """Return why the machine of *run* cannot be had by its name, as a clause; empty if it can.

    The digests decide. A run that was made before there were any is compared by the figures that both have.
    """
    described = run.info.cluster or {}
    name = described.get("name", "")
    if name not in names():
        return "which the catalogue does not have"
    try:
        known = load_cluster(name, described.get("n_gpus"))
    except TopologyError as error:
        return f"not that of the catalogue ({error})"
    there = json.loads(json.dumps(known.describe()))
    if described.get("digest") == there["digest"]:
        return ""
    other = different(described, there)
    if not other and "digest" not in described:
        return ""
    more = f" and {len(other) - MOST_NAMED} more" if len(other) > MOST_NAMED else ""
    return f"not that of the catalogue, which has another {', '.join(other[:MOST_NAMED]) or 'table'}{more}"


def different(one: Mapping[str, Any], other: Mapping[str, Any], place: str = "") -> list[str]:
    """Return where two descriptions of machines have another figure, of those that both have."""
    found = []
    for key in one.keys() & other.keys() - WORDS:
        here, there = one[key], other[key]
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            found += different(here, there, f"{place}{key}.")
        elif here != there:
            found.append(f"{place}{key}")
    return sorted(found)
