"""What one trace file holds, before it is translated."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from foretrace.tracer.ingest.events import DEVICE, LAUNCH, encoded_schema, joined
from foretrace.tracer.ingest.notes import Note


@dataclass(slots=True)
class Trace:
    """What one trace file holds.

    Attributes:
        header: keys of the file beside its events.
        device: kernels and copies, columns ``DEVICE``.
        launches: runtime calls, columns ``LAUNCH``.
        notes: annotations and calls of collectives.
        operators: CPU operators, as JSON objects; only where the file has no device events.
        n_events: number of events seen.
        lost: what could not be understood, by reason.
        cut: in which way the file is cut off, "" if it is whole.
    """

    header: dict[str, Any] = field(default_factory=dict)
    device: list[pa.Table] = field(default_factory=list)
    launches: list[pa.Table] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    operators: list[dict[str, Any]] = field(default_factory=list)
    n_events: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    cut: str = ""

    def device_table(self) -> pa.Table:
        """Return all device events in one table and forget them, to save memory."""
        parts, self.device = self.device, []
        return joined(parts, encoded_schema(DEVICE))

    def launch_table(self) -> pa.Table:
        """Return all runtime calls in one table and forget them, to save memory."""
        parts, self.launches = self.launches, []
        return joined(parts, encoded_schema(LAUNCH))
