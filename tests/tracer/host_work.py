"""What the host does in a rehearsal, for sums by hand."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from foretrace.traces.rehearsal import ON_HOST, TO_DEVICE, TO_HOST, RankTables


def host_bytes(tables: RankTables, events: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], int]:
    """Return the bytes of all work of the host among *events*, by its kind and operator; copies have none."""
    works = tables.works.to_pylist()
    found: Counter[tuple[str, str]] = Counter()
    for event in events:
        work = works[event["item"]] if event["what"] == 0 else None
        if work and work["kind"] in {ON_HOST, TO_DEVICE, TO_HOST}:
            name = work["name"] if work["kind"] == ON_HOST else ""
            found[work["kind"], name.removeprefix("aten.")] += work["bytes_moved"]
    return dict(found)
