"""Timelines as plain tables: CSV for spreadsheets, Parquet for data frames and SQL."""

from __future__ import annotations

from typing import BinaryIO, Final

import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import csv
from pyarrow import parquet as pq

from foretrace.traces.reader import INFO_KEY
from foretrace.traces.run import Run
from foretrace.traces.timeline import TIMELINE

_FORMULA: Final = r"^[=+\-@\t\r]"
"""How a text begins that spreadsheets take for a formula (owasp.org, "CSV Injection")."""


def write_csv(run: Run, ranks: tuple[int, ...], file: BinaryIO) -> None:
    """Write one line per span, with a header; columns as in docs/timeline-format.md.

    A label that a spreadsheet would compute stands behind an apostrophe.
    """
    plain = pa.schema(
        [
            pa.field(field.name, pa.string() if pa.types.is_dictionary(field.type) else field.type)
            for field in TIMELINE
        ]
    )
    with csv.CSVWriter(file, plain) as writer:
        for rank in ranks:
            table = run.spans([rank]).cast(plain)
            for at, field in enumerate(plain):
                if pa.types.is_string(field.type):
                    table = table.set_column(at, field, _labels(table.column(at)))
            writer.write_table(table)


def _labels(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    is_formula = pc.match_substring_regex(texts, _FORMULA)
    return pc.if_else(is_formula, pc.binary_join_element_wise("'", texts, ""), texts)


def write_parquet(run: Run, ranks: tuple[int, ...], file: BinaryIO) -> None:
    """Write one row group per rank; the file carries ``run.json``, so that it can be opened as a run."""
    schema = TIMELINE.with_metadata({**TIMELINE.metadata, INFO_KEY: run.info.to_json().encode()})
    with pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer:
        for rank in ranks:
            writer.write_table(run.spans([rank]).replace_schema_metadata(schema.metadata))
