"""What is damaged, missing or somebody else's in a run is said in one line, never guessed."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc
from tests.traces.made_runs import info, some

from foretrace import door
from foretrace.door import sealed_text
from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.ingest import ingest
from foretrace.tracer.memory import write_samples
from foretrace.traces.errors import RunError
from foretrace.traces.info import Clock, RunInfo
from foretrace.traces.pending import read_ended, read_pending
from foretrace.traces.sealed import KEY, read_file, segments, write_file
from foretrace.traces.store import SpanWriter, open_run, write_info, write_run
from foretrace.traces.timeline import FORMAT_VERSION, LINKS, MEMORY, TIMELINE, empty, timeline


def _newer(path: Path) -> None:
    document = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(document | {"format_version": FORMAT_VERSION + 1}))


def _newer_spans(path: Path) -> None:
    spans = timeline(some(1)).replace_schema_metadata({"foretrace.format": str(FORMAT_VERSION + 1)})
    with ipc.new_file(str(path / "spans" / "rank-00000.arrow"), spans.schema) as writer:
        writer.write_table(spans)


def _foreign_columns(path: Path) -> None:
    with ipc.new_file(str(path / "spans" / "rank-00000.arrow"), pa.schema([("x", pa.int8())])):
        pass


def _stream_of_text(path: Path) -> None:
    (path / "spans" / "rank-00000.arrow").unlink()
    (path / "spans" / "rank-00000.arrows").write_text("time,rank\n" * 99)


def _text(name: str, contents: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_text(contents)


def _said(key: str, value: object) -> Callable[[Path], object]:
    document = {"format_version": FORMAT_VERSION, "origin": "recorded", "world_size": 2, key: value}
    return _text("run.json", json.dumps(document))


def _truncated_file(path: Path) -> None:
    file = path / "spans" / "rank-00000.arrow"
    file.write_bytes(file.read_bytes()[:-100])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated json": (_text("run.json", '{"format_version": 1, "ori'), "is not JSON"),
    "foreign json": (_text("run.json", '{"a": 1}'), "does not describe a run"),
    "a list": (_text("run.json", "[]"), "names and values are needed, this is a list"),
    "no world size": (_text("run.json", '{"format_version": 1, "origin": "recorded"}'), "world_size"),
    "bad origin": (_text("run.json", '{"format_version": 1, "origin": "x", "world_size": 1}'), "origin 'x'"),
    "bad layout": (
        _text("run.json", '{"format_version":1,"origin":"recorded","world_size":1,"layout":{"tp":0}}'),
        "tp=0",
    ),
    "bad group": (
        _text("run.json", '{"format_version":1,"origin":"recorded","world_size":1,"groups":[{"id":0}]}'),
        "no 'axis' in groups[0]",
    ),
    "binary json": (lambda path: (path / "run.json").write_bytes(b"\xff\xfe\x00"), "not text"),
    "newer": (_newer, "install a newer foretrace"),
    "newer spans": (_newer_spans, "install a newer foretrace"),
    "foreign columns": (_foreign_columns, "no column"),
    "text for a file": (_text("spans/rank-00000.arrow", "rank,time\n" * 99), "not an Arrow file"),
    "empty file": (_text("spans/rank-00000.arrow", ""), "not an Arrow file"),
    "text for a stream": (_stream_of_text, "not an Arrow stream"),
    "truncated file": (_truncated_file, "not an Arrow file, or is damaged"),
    "no spans": (lambda path: (path / "spans" / "rank-00000.arrow").unlink(), "holds no spans"),
    "a rank too many": (_text("run.json", info().to_json()), "has spans of rank 1, but its world has 1"),
    "world of text": (_said("world_size", "two"), 'world_size is "two", but a whole number is needed'),
    "name of numbers": (_said("name", [1]), "name is [1], but a text is needed"),
    "layout of text": (_said("layout", "tp"), 'layout is "tp", but an object is needed'),
    "unknown degree": (_said("layout", {"xp": 2}), "the layout has 1 ranks"),
    "groups of numbers": (
        _said("groups", [3]),
        "groups[0] is 3, but an object is needed",
    ),
    "clock of text": (
        _said("clock", {"zero": 1}),
        'clock is "zero", but a whole number is needed',
    ),
    "clock of a list": (_said("clock", {"0": [1]}), "clock.0 is [1], but an object is needed"),
    "uncounted": (_said("dropped", {"late": None}), "dropped.late is null, but a whole number is needed"),
    "nobody stands": (_said("representatives", ["a", 1]), 'representatives[0] is "a", but a whole number'),
    "long": (_said("warnings", {"x": "y" * 999}), "..., but a list of texts is needed"),
    "foreign memory": (_text("memory.arrow", "x"), "not an Arrow file"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_line(name: str, tmp_path: Path) -> None:
    spans = timeline(some(2)) if name != "a rank too many" else timeline(some(2, rank=1))
    run_dir = write_run(tmp_path / "run", info(2), spans)
    damage, message = DAMAGE[name]
    damage(run_dir)
    with pytest.raises(RunError, match=re.escape(message)) as caught:
        open_run(run_dir).spans()
    assert str(run_dir) in str(caught.value)
    assert "\n" not in str(caught.value)


def _finished(path: Path) -> None:
    columns = {"rank": [0, 1], "t_ns": [0, 1], "category": ["total"] * 2, "bytes": [5, 6]}
    spans = [timeline(some(50, rank=rank)) for rank in range(2)]
    full = {
        "rank": [0, 1],
        "tier": ["far"] * 2,
        "direction": ["in"] * 2,
        "start_ns": [0, 1],
        "end_ns": [2, 3],
    }
    links = pa.table(full | {"used": [0.5, 1.0]}).cast(LINKS)
    memory = pa.table(columns).cast(MEMORY)
    write_run(path, info(2, summary={"step_time_s": 0.25}), spans, memory, links=links)


def _killed(path: Path) -> None:
    """Two ranks that were killed after four batches; one has written its memory, and what is under way."""
    for rank in range(2):
        writer = SpanWriter(path, rank)
        for first in range(0, 40, 10):
            writer.append(some(10, rank=rank, first=first))
        write_info(path, info(2, finished=False, clock={rank: Clock(offset_ns=7)}), rank)
    columns = {"rank": [0], "t_ns": [0], "category": ["total"], "bytes": [5]}
    write_samples(path / "ranks" / "rank-00000.memory.arrow", pa.table(columns).cast(MEMORY), "")
    said = json.dumps({"rank": 0, "t_ns": 50, "collectives": {"1": 7}, "pending": [], "stack": ["a.py:3"]})
    (path / "ranks" / "rank-00000.pending.json").write_text(sealed_text(said))
    (path / "ranks" / "rank-00001.ended.json").write_text(sealed_text('{"status": -9, "signals_sent": [15]}'))


def _figures(path: Path) -> tuple[RunInfo, list[object], tuple[str, ...]]:
    run = open_run(path)
    said = [run.spans(), run.memory(), run.links, read_pending(path), read_ended(path)]
    return replace(run.info, warnings=()), said, run.warnings


@pytest.mark.parametrize("make", [_finished, _killed])
def test_a_flipped_bit_is_refused_or_named_or_changes_nothing(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "run")
    files = [file for file in sorted((tmp_path / "run").rglob("*")) if file.is_file()]
    before = {file: file.read_bytes() for file in files}
    first, rng, n_told = _figures(tmp_path / "run"), np.random.default_rng(0), 0
    assert not any("checksum" in said for said in first[2])
    for _ in range(200):
        file = files[rng.integers(len(files))]
        damaged = bytearray(before[file])
        damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
        file.write_bytes(damaged)
        try:
            found = _figures(tmp_path / "run")
        except RunError:  # any other exception fails the test
            n_told += 1
        else:
            assert found[2] != first[2] or found[:2] == first[:2], (file, n_told)
            n_told += found[2] != first[2]
        file.write_bytes(before[file])
    assert n_told > 150  # the others are padding, or in the checksum's own name


def test_damage_beside_the_spans_is_named(tmp_path: Path) -> None:
    _finished(tmp_path / "run")
    (tmp_path / "run" / "links.arrow").write_bytes(b"damaged")
    run = open_run(tmp_path / "run")
    assert run.links is None
    assert "how full links were (links.arrow) is damaged: left out" in run.warnings
    _killed(tmp_path / "killed")
    for name in ("rank-00000.pending.json", "rank-00001.ended.json"):
        file = tmp_path / "killed" / "ranks" / name
        file.write_text(file.read_text().replace("5", "6", 1))
        assert f"{file} is damaged: left out" in open_run(tmp_path / "killed").warnings
    assert (read_pending(tmp_path / "killed"), read_ended(tmp_path / "killed")) == ([], {})


@pytest.mark.parametrize("name", ["spans/rank-00001.arrow", "memory.arrow"])
def test_a_file_of_another_run_is_refused(name: str, tmp_path: Path) -> None:
    _finished(tmp_path / "run")
    _finished(tmp_path / "alike")
    file = tmp_path / "run" / name
    file.write_bytes((tmp_path / "alike" / name).read_bytes())
    assert open_run(tmp_path / "run").warnings == ()  # of equal runs files are equal, too
    about = open_run(tmp_path / "run")
    write_run(tmp_path / "other", replace(about.info, name="another"), about.spans(), about.memory())
    file.write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(RunError, match=rf"{file} is of another run: put back the one of this run"):
        open_run(tmp_path / "run")


def test_a_sidecar_of_another_run_is_refused(tmp_path: Path) -> None:
    _finished(tmp_path / "run")
    files = {"spans/rank-00001.arrow": "another"}
    write_info(tmp_path / "run", replace(info(2), files=files), 1)
    with pytest.raises(RunError, match=r"ranks/rank-00001\.json is of another run"):
        open_run(tmp_path / "run")


def test_files_that_a_run_has_lost_are_named_once(tmp_path: Path) -> None:
    _finished(tmp_path / "run")
    for name in ("memory.arrow", "links.arrow"):
        (tmp_path / "run" / name).unlink()
    said = "files of the run are missing, and what they say is not shown: links.arrow, memory.arrow"
    assert open_run(tmp_path / "run").warnings == (said,)


@pytest.mark.parametrize("said", [b"[", b"[3]", b'[{"rank": 1}]', b"\xff"])
def test_changes_of_links_that_are_none_are_damage(tmp_path: Path, said: bytes) -> None:
    _finished(tmp_path / "run")
    links = LINKS.empty_table().replace_schema_metadata({"changes": said})
    write_file(tmp_path / "run" / "links.arrow", links.schema, [links])
    assert "how full links were (links.arrow) is damaged: left out" in open_run(tmp_path / "run").warnings


def test_the_other_batches_of_a_stream_are_used(tmp_path: Path) -> None:
    """Labels that stood in a damaged batch are never read as others."""
    _killed(tmp_path / "run")
    file = tmp_path / "run" / "spans" / "rank-00001.arrows"
    whole = file.read_bytes()
    places = list(segments(pa.BufferReader(whole)))
    for number, (_, end) in enumerate(places[1:], 2):
        file.write_bytes(whole[: end - 9] + bytes([whole[end - 9] ^ 1]) + whole[end - 8 :])
        run = open_run(tmp_path / "run")
        assert f"rank 1: batch {number} of 4 damaged; 3 used" in run.warnings
        assert sorted(run.spans([1])["start_ns"].to_pylist()) == [
            start for start in range(40) if start // 10 != number - 1
        ]
    at = places[0][1] - 9
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(RunError, match=r"its first batch is damaged.* --partial"):
        open_run(tmp_path / "run")
    file.unlink()
    assert open_run(tmp_path / "run").ranks == (0,)


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("end", [b"", b"\xff\xff\xff\xff\0\0\0\0"])
def test_a_last_batch_that_turns_into_another_message_is_named(kind: int, end: bytes, tmp_path: Path) -> None:
    """A byte says what a message is; *end* is the mark of a stream that was closed."""
    _killed(tmp_path / "run")
    file = tmp_path / "run" / "spans" / "rank-00001.arrows"
    whole = file.read_bytes() + end
    file.write_bytes(whole)
    assert not [said for said in open_run(tmp_path / "run").warnings if "left out" in said]
    at = list(segments(pa.BufferReader(whole)))[-1][0]
    is_kind = whole.index(3, at + 20)  # of a record batch, as Schema.fbs and Message.fbs of Arrow number them
    file.write_bytes(whole[:is_kind] + bytes([kind]) + whole[is_kind + 1 :])
    run = open_run(tmp_path / "run")
    assert any(said.startswith("rank 1: 3 batches read, the last") for said in run.warnings)
    assert run.spans([1]).num_rows == 30


def _bare(file: Path) -> None:
    """Write the rows of *file* anew, as who knows nothing of checksums."""
    is_stream = file.suffix == ".arrows"
    table = (ipc.open_stream if is_stream else ipc.open_file)(file.read_bytes()).read_all()
    left = {key: value for key, value in (table.schema.metadata or {}).items() if key != KEY}
    table = table.replace_schema_metadata(left)
    with (ipc.new_stream if is_stream else ipc.new_file)(str(file), table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize("made", [_finished, _killed])
def test_each_file_without_a_checksum_is_noticed(made: Callable[[Path], None], tmp_path: Path) -> None:
    made(tmp_path / "run")
    said = "files without checksums: damage to them would go unnoticed"
    files = sorted((tmp_path / "run").rglob("*.arrow*"))
    assert {file.suffix for file in files} >= ({".arrow"} if made is _finished else {".arrow", ".arrows"})
    for file in files:
        whole = file.read_bytes()
        assert said not in open_run(tmp_path / "run").warnings
        _bare(file)
        assert open_run(tmp_path / "run").warnings.count(said) == 1, file
        file.write_bytes(whole)


def test_a_run_without_checksums_says_so_once(tmp_path: Path) -> None:
    _finished(tmp_path / "run")
    for file in (tmp_path / "run" / "spans").iterdir():
        table = read_file(file)[0].cast(TIMELINE)
        with ipc.new_file(str(file), TIMELINE) as writer:
            writer.write_table(table)
    run = open_run(tmp_path / "run")
    assert run.warnings == (
        "files without checksums: damage to them would go unnoticed",
        "files that do not say of which run they are: others would go unnoticed",
    )
    about = tmp_path / "run" / "run.json"
    document = json.loads(about.read_text())
    del document["files"], document["checksum"]
    about.write_text(json.dumps(document))
    assert open_run(tmp_path / "run").warnings == run.warnings[:1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "does not exist"),
        ("notes.txt", "is not a run: give its directory"),
        (
            "trace.json.gz",
            "a trace of another tool becomes one by foretrace ingest .*trace.json.gz -o DIRECTORY",
        ),
        ("job.toml", "a job becomes one by foretrace simulate"),
        ("empty", "is not a run: neither run.json"),
        ("empty.arrow", "damaged or not a timeline|not an Arrow file"),
        ("nothing.arrows", "holds no complete batch"),
        ("gopher://x/y", "cannot read gopher"),
    ],
)
def test_what_is_not_a_run_is_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "trace.json.gz").touch()
    (tmp_path / "job.toml").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.arrow").touch()
    (tmp_path / "nothing.arrows").touch()
    with pytest.raises(RunError, match=message) as caught:
        open_run(name if "://" in name else tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_rank_that_is_not_there_is_named(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", info(2), timeline(some(1))))
    with pytest.raises(RunError, match=r"no spans of rank 1 in .*; it has ranks 0"):
        run.spans([1])


def test_spans_in_the_file_of_another_rank_are_refused(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", info(2), timeline(some(1)))
    (run_dir / "spans" / "rank-00000.arrow").rename(run_dir / "spans" / "rank-00001.arrow")
    with pytest.raises(RunError, match="file of rank 1 holds spans of rank 0"):
        open_run(run_dir).spans()


def test_a_run_without_a_span_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="without a span"):
        write_run(tmp_path / "run", RunInfo(origin="simulated", world_size=1), empty())
    assert not list(tmp_path.iterdir())


def test_a_pipe_put_in_place_of_a_file_as_it_is_opened_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = tmp_path / "run.json", os.open
    path.write_text("{}")

    def swapped(name: Path, flags: int) -> int:
        path.unlink()
        os.mkfifo(path)
        return opened(name, flags)

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(RunError, match="a pipe or a socket"):
        door.read_text(path, RunError)


def test_what_says_that_it_is_a_file_and_waits_for_a_writer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some files of the system do, such as its log."""
    path = tmp_path / "log.json"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    monkeypatch.setattr(door, "_check_regular", lambda *_: None)
    try:
        assert door.read_text(path, RunError) == ""
        with pytest.raises(IngestError, match="not seekable"):
            ingest([path], tmp_path / "taken")
    finally:
        os.close(writer)
