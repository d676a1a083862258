"""Chakra graphs: read back by another reader, without a circle, lengths kept to the microsecond."""

import io
import tempfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

from foretrace.tracer.ingest.ingest import ingest
from foretrace.traces.analysis.communications import COMMUNICATION, arrivals
from foretrace.traces.errors import RunError
from foretrace.traces.export import export
from foretrace.traces.rehearsal import WHAT, RankTables, read_rank, read_rehearsal
from foretrace.traces.run import Run
from foretrace.traces.store import open_run


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at *at*, and where the next thing begins."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def fields(data: bytes) -> list[tuple[int, Any]]:
    """Return the fields of a message: numbers, or bytes."""
    found: list[tuple[int, Any]] = []
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        value: Any
        value, at = varint(data, at)
        if key & 7 == 2:
            at, value = at + value, data[at : at + value]
        found.append((key >> 3, value))
    return found


def nodes(data: bytes) -> list[list[tuple[int, Any]]]:
    """Return the nodes of a file: what follows the metadata, each after its length."""
    found, at = [], 0
    while at < len(data):
        size, at = varint(data, at)
        found.append(data[at : at + size])
        at += size
    return [fields(body) for body in found[1:]]


def graph(run: Run, rank: int) -> list[list[tuple[int, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        return nodes(export(run, Path(folder) / "a.et", ranks=[rank]).read_bytes())


@pytest.mark.parametrize("name", ["pipeline_run", "fsdp_run"])
def test_every_span_is_a_node_that_waits_for_earlier_ones_alone(
    name: str, request: pytest.FixtureRequest
) -> None:
    run: Run = request.getfixturevalue(name)
    rank = run.stored_ranks[1]
    found = graph(run, rank)
    spans = run.spans([rank]).to_pylist()
    real = [row for row in spans if row["category"] in {"compute", "copy", "host", *COMMUNICATION}]
    assert len(found) == len(real)
    ends: dict[int, int] = {}
    for number, node in enumerate(found):
        one = {field: value for field, value in node if field != 5}
        begun = one.get(6, 0)
        for before in (value for field, value in node if field == 5):
            assert before < number
            assert ends[before] <= begun + 1 or one[3] >= 5  # a transfer may be posted beside another
        ends[number] = begun + one.get(7, 0)
        assert one[1] == number
    moving = dict(zip(range(len(spans)), arrivals(run).last_ns[rank].tolist(), strict=True))
    own_us = sum(
        (
            row["start_ns"]
            + row["duration_ns"]
            - min(max(moving[i], row["start_ns"]), row["start_ns"] + row["duration_ns"])
        )
        / 1e3
        for i, row in enumerate(spans)
        if row in real
    )
    written = sum(value for node in found for field, value in node if field == 7)
    assert written == pytest.approx(own_us, abs=len(real))


def test_the_reader_of_other_tools_reads_it(tmp_path: Path, pipeline_run: Run) -> None:
    rank = pipeline_run.stored_ranks[0]
    path = export(pipeline_run, tmp_path / "trace.0.et", ranks=[rank])
    ingest([path], tmp_path / "again")
    again = open_run(tmp_path / "again").spans().to_pylist()
    known = pipeline_run.spans([rank]).to_pylist()
    moving_ns = [
        row["start_ns"] + row["duration_ns"] - max(last, row["start_ns"])
        for row, last in zip(known, arrivals(pipeline_run).last_ns[rank].tolist(), strict=True)
    ]
    for kind in ("all_reduce", "reduce_scatter", "send", "recv"):
        sizes = sorted(
            row["size_bytes"]
            for row, ns in zip(known, moving_ns, strict=True)
            if row["kind"] == kind and ns >= 1000  # the reader leaves out what takes no time
        )
        assert sizes == sorted(row["size_bytes"] for row in again if row["kind"] == kind), kind
    n_compute = sum(row["category"] == "compute" for row in known)
    assert sum(row["category"] == "compute" for row in again) == n_compute


@pytest.mark.parametrize("name", ["pipeline_run", "fsdp_run"])
def test_what_is_exported_simulates_as_it_was(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Groups and sizes of all its collectives, with a file of groups beside or without."""
    run: Run = request.getfixturevalue(name)
    ranks = run.stored_ranks
    kinds = ("all_gather", "all_reduce", "reduce_scatter")
    known = Counter(
        (row["kind"], row["size_bytes"], members(run, row["group"]))
        for row in run.spans(ranks).to_pylist()
        if row["kind"] in kinds
    )
    export(run, tmp_path / "all.et.zip")
    for rank in ranks:
        export(run, tmp_path / "apart" / f"w.{rank}.et", ranks=[rank])
    for source in ("all.et.zip", "apart"):
        ingest([tmp_path / source], tmp_path / f"of {source}")
        found = Counter(
            (message["kind"], message["size_bytes"], groups[message["group"]])
            for groups in [{g.id: g.ranks for g in read_rehearsal(tmp_path / f"of {source}").groups}]
            for rank in ranks
            for table in [read_rank(tmp_path / f"of {source}" / "rehearsal", rank)]
            for message in table.messages.take(communications(table)).to_pylist()
            if message["kind"] in kinds
        )
        assert found == known


def members(run: Run, group: int) -> tuple[int, ...]:
    return next(one.ranks for one in run.info.groups if one.id == group)


def communications(table: RankTables) -> Any:
    """Return the row of ``messages`` of each communication of a rank."""
    events = table.events
    return events.filter(pc.equal(events["what"], WHAT.index("communication")))["item"]


def test_several_ranks_are_an_archive_and_say_so(tmp_path: Path, pipeline_run: Run) -> None:
    with pytest.raises(RunError, match=r"\.et\.zip"):
        export(pipeline_run, tmp_path / "a.et")
    assert not list(tmp_path.iterdir())
    first, second = (export(pipeline_run, tmp_path / f"{name}.et.zip").read_bytes() for name in "ab")
    assert first == second
    with zipfile.ZipFile(io.BytesIO(first)) as archive:
        ranks = pipeline_run.stored_ranks
        assert archive.namelist() == ["groups.json", *[f"rank.{rank}.et" for rank in ranks]]
        alone = export(pipeline_run, tmp_path / "one.et", ranks=[ranks[2]]).read_bytes()
        assert archive.read(f"rank.{ranks[2]}.et") == alone
