"""Builds timelines out of columns, with every label encoded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from foretrace.traces.timeline import empty, timeline


def rows(columns: dict[str, Any]) -> pa.Table:
    """Return a checked timeline from *columns*; ``kind`` and all with a default may be left out."""
    return timeline(columns)


def stacked(tables: Sequence[pa.Table]) -> pa.Table:
    """Return timelines one below the other, in one piece per column."""
    filled = [table for table in tables if table.num_rows]
    if not filled:
        return empty()
    return pa.concat_tables(filled).unify_dictionaries().combine_chunks()


def coded(codes: Any, names: Sequence[str]) -> pa.DictionaryArray:
    """Return a label column from numbers and the names that they stand for."""
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(list(names), pa.string()))
