"""Other tools read the files with no help: the queries of the document, where they are installed."""

import re
from pathlib import Path
from typing import Any

import pytest

from foretrace.traces.export import export
from foretrace.traces.info import RunInfo
from foretrace.traces.store import SpanWriter, open_run, write_run
from foretrace.traces.timeline import TIMELINE, timeline

DOCUMENT = Path(__file__).parents[2] / "docs" / "timeline-format.md"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    columns: dict[str, object] = {
        "rank": [0, 0, 1, 1],
        "category": ["compute", "collective"] * 2,
        "kind": ["forward", "all_reduce"] * 2,
        "axis": ["", "dp"] * 2,
        "start_ns": [0, 10, 0, 40],
        "duration_ns": [10, 35, 40, 5],
        "group": [-1, 0] * 2,
        "sequence": [-1, 0] * 2,
    }
    return write_run(tmp_path / "run", RunInfo(origin="recorded", world_size=2), timeline(columns))


def test_polars(run_dir: Path, tmp_path: Path) -> None:
    pl: Any = pytest.importorskip("polars")
    spans = pl.scan_ipc(str(run_dir / "spans" / "*.arrow"))
    busy = (
        spans.filter(pl.col("category") == "compute")
        .group_by("rank", "kind")
        .agg(pl.sum("duration_ns"))
        .collect()
    )
    assert sorted(busy.rows()) == [(0, "forward", 10), (1, "forward", 40)]
    writer = SpanWriter(tmp_path / "recording", 0)
    for n in range(3):
        writer.append({"category": ["host"], "kind": [f"kind {n}"], "start_ns": [n], "duration_ns": [1]})
    stream = pl.read_ipc_stream(tmp_path / "recording" / "spans" / "rank-00000.arrows")
    assert stream["kind"].to_list() == ["kind 0", "kind 1", "kind 2"]


def test_duckdb(run_dir: Path, tmp_path: Path) -> None:
    duckdb: Any = pytest.importorskip("duckdb")
    dataset: Any = pytest.importorskip("pyarrow.dataset")
    busy = "SELECT rank, sum(duration_ns) FROM {} WHERE category = 'compute' GROUP BY ALL ORDER BY rank"
    spans = dataset.dataset(run_dir / "spans", format="arrow")
    connection = duckdb.connect()
    connection.register("spans", spans)
    parquet = export(open_run(run_dir), tmp_path / "a.parquet")
    for source in ("spans", f"'{parquet}'"):
        assert connection.sql(busy.format(source)).fetchall() == [(0, 10), (1, 40)]
    (query,) = re.findall(r"```sql\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    (row,) = connection.sql(query.replace("'a.parquet'", f"'{parquet}'")).fetchall()
    assert row == (1, "dp", 30e-9)


def test_the_document_names_every_column_and_key() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for name in (*TIMELINE.names, *RunInfo.__slots__):
        assert f"`{name}`" in text, name


def test_the_queries_of_the_analysis_document(run_dir: Path, tmp_path: Path) -> None:
    """Each runs as it is written there, on DuckDB and on polars."""
    duckdb: Any = pytest.importorskip("duckdb")
    pl: Any = pytest.importorskip("polars")
    text = (DOCUMENT.parent / "analysis.md").read_text(encoding="utf-8")
    parquet = export(open_run(run_dir), tmp_path / "a.parquet")
    (block,) = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)
    queries = [query for query in block.split(";") if query.strip()]
    kernels, idle = (
        duckdb.sql(query.replace("'run.parquet'", f"'{parquet}'")).fetchall() for query in queries
    )
    assert [row[1:] for row in kernels] == [(2, 50e-6, 1.0)]
    assert idle == []
    (code,) = re.findall(r"```python\n(import polars.*?)```", text, re.DOTALL)
    *setup, question = code.strip().replace("runs/a", str(run_dir)).splitlines()
    names: dict[str, Any] = {}
    exec("\n".join(setup), names)
    found = eval(question, names)
    assert isinstance(found, pl.DataFrame)
    assert found.columns == ["rank", "duration_ns"]
