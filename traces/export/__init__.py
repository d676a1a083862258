"""Writes runs for other tools: Perfetto, Chrome's trace viewer, simulators, spreadsheets, data frames."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final

import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import csv
from pyarrow import parquet as pq

from foretrace.traces.errors import RunError, reason
from foretrace.traces.export.chakra import write_chakra
from foretrace.traces.export.chrome import write_chrome, write_kineto
from foretrace.traces.export.perfetto import write_perfetto
from foretrace.traces.export.snapshot import write_snapshot
from foretrace.traces.info import rank_list
from foretrace.traces.reader import INFO_KEY
from foretrace.traces.replacing import replacing
from foretrace.traces.run import Run
from foretrace.traces.timeline import TIMELINE

# Timelines as plain tables: CSV for spreadsheets, Parquet for data frames and SQL.

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


Writer = Callable[[Run, tuple[int, ...], BinaryIO], None]

FORMATS: Final[Mapping[str, Writer]] = MappingProxyType(
    {
        "perfetto": write_perfetto,  # https://ui.perfetto.dev, native protobuf
        "kineto": write_kineto,  # as torch.profiler writes it: Holistic Trace Analysis
        "chrome": write_chrome,  # chrome://tracing, Perfetto, speedscope: JSON
        "chakra": write_chakra,  # https://github.com/mlcommons/chakra, for ASTRA-sim and others
        "memory": write_snapshot,  # https://pytorch.org/memory_viz
        "csv": write_csv,
        "parquet": write_parquet,
    }
)
"""Formats by name."""

ENDINGS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "perfetto": (".pftrace", ".pftrace.gz", ".perfetto-trace"),
        "kineto": (".pt.trace.json", ".pt.trace.json.gz"),
        "chrome": (".json", ".json.gz"),
        "chakra": (".et", ".et.zip"),
        "memory": (".pickle",),
        "csv": (".csv", ".csv.gz"),
        "parquet": (".parquet",),
    }
)
"""Endings of file names that say a format; ``.gz`` compresses."""

_COMPATIBLE: Final = {("kineto", "chrome")}
"""Formats that may bear the name of another: a Kineto file is Chrome's JSON, with more in it."""


def export(
    run: Run, path: str | os.PathLike[str], kind: str | None = None, ranks: Iterable[int] | None = None
) -> Path:
    """Write *run* to the file *path*, all of it or nothing; return the file.

    Args:
        run: an open run.
        path: the file; one that exists is replaced. ``.gz`` at its end compresses it.
        kind: a key of ``FORMATS``; None takes the one that the ending of *path* says.
        ranks: whose spans to write, folded ones are expanded; None: the stored ranks.

    Raises:
        RunError: the format is unknown or not what the name of the file says, a rank is not in
            the run, or the file cannot be written.
    """
    target = Path(path)
    said = format_of(target, kind)
    writer = FORMATS[said]
    chosen = run.stored_ranks if ranks is None else tuple(sorted(set(ranks)))
    if said == "chakra" and len(chosen) > 1 and target.suffix != ".zip":
        raise RunError(
            f"{target.name}: Chakra has a file per rank; for these {len(chosen)} end the name in .et.zip, or "
            "choose one rank"
        )
    if absent := set(chosen) - set(run.ranks):
        raise RunError(f"no rank {rank_list(absent)} in {run.path}; it has ranks {rank_list(run.ranks)}")
    try:
        with replacing(target) as file:
            if target.suffix == ".gz":
                with gzip.open(file, "wb", compresslevel=6) as packed:
                    writer(run, chosen, packed)  # type: ignore[arg-type]  # GzipFile is a binary file
            else:
                writer(run, chosen, file)
    except OSError as error:
        raise RunError(f"cannot write {target}: {reason(error)}") from error
    return target


def format_of(target: Path, kind: str | None) -> str:
    """Return the format that is asked for, or that the name of the file says; they must not contradict."""
    if kind is not None and kind not in FORMATS:
        raise RunError(f"unknown format {kind!r}: one of {', '.join(FORMATS)}")
    told = next((name for name, endings in ENDINGS.items() if target.name.endswith(endings)), None)
    if kind is None:
        if told is None:
            known = ", ".join(ending for endings in ENDINGS.values() for ending in endings)
            raise RunError(
                f"{target.name} does not say its format: end it in one of {known}, or name the format"
            )
        return told
    # A wrong name misleads: tools of the profiler take all of a plain Chrome file for computing.
    if told not in {None, kind} and (kind, told) not in _COMPATIBLE:
        raise RunError(
            f"{target.name} is the name of a {told} file, which this {kind} file would be taken for: "
            f"end it in {ENDINGS[kind][0]}, or choose the format {told}"
        )
    return kind
