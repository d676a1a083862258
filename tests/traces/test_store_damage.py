"""What is damaged, missing or somebody else's in a run is said in one line, never guessed."""

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc
from tests.traces.made_runs import info, some

from foretrace.traces.errors import RunError
from foretrace.traces.info import RunInfo
from foretrace.traces.store import open_run, write_run
from foretrace.traces.timeline import FORMAT_VERSION, empty, timeline


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
    "truncated json": (_text("run.json", '{"format_version": 1, "ori'), "not complete JSON"),
    "foreign json": (_text("run.json", '{"a": 1}'), "does not describe a run"),
    "a list": (_text("run.json", "[]"), "does not describe a run"),
    "no world size": (_text("run.json", '{"format_version": 1, "origin": "recorded"}'), "world_size"),
    "bad origin": (_text("run.json", '{"format_version": 1, "origin": "x", "world_size": 1}'), "origin 'x'"),
    "bad layout": (
        _text("run.json", '{"format_version":1,"origin":"recorded","world_size":1,"layout":{"tp":0}}'),
        "tp=0",
    ),
    "bad group": (
        _text("run.json", '{"format_version":1,"origin":"recorded","world_size":1,"groups":[{"id":0}]}'),
        'groups is [{"id": 0}], but a list of objects with id, axis and ranks is needed',
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
    "layout of text": (_said("layout", "tp"), 'layout is "tp", but an object or null is needed'),
    "unknown degree": (_said("layout", {"xp": 2}), 'layout is {"xp": 2}, but an object of degrees pp, dp'),
    "groups of numbers": (
        _said("groups", [3]),
        "groups is [3], but a list of objects with id, axis and ranks",
    ),
    "clock of text": (
        _said("clock", {"zero": 1}),
        'clock is {"zero": 1}, but an object that leads from a rank',
    ),
    "clock of a list": (_said("clock", {"0": [1]}), 'clock is {"0": [1]}, but an object'),
    "uncounted": (_said("dropped", {"late": None}), "but an object that leads from a reason to a count"),
    "nobody stands": (_said("representatives", ["a", 1]), 'representatives is ["a", 1], but a list of ranks'),
    "long": (_said("warnings", {"x": "y" * 999}), "..., but a list is needed"),
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


def test_every_flipped_byte_is_an_error_or_a_timeline(tmp_path: Path) -> None:
    """Damage inside a file never becomes a crash or an error of another kind."""
    file = write_run(tmp_path / "run", info(), timeline(some(50))) / "spans" / "rank-00000.arrow"
    contents = file.read_bytes()
    rng = np.random.default_rng(0)
    for at in rng.integers(0, len(contents), 300):
        file.write_bytes(contents[:at] + bytes([contents[at] ^ 0xFF]) + contents[at + 1 :])
        with contextlib.suppress(RunError):  # any other exception fails the test
            open_run(tmp_path / "run").spans().validate(full=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "does not exist"),
        ("notes.txt", "is not a run: give its directory"),
        ("job.toml", "a job becomes one by foretrace simulate"),
        ("empty", "is not a run: neither run.json"),
        ("empty.arrow", "damaged or not a timeline|not an Arrow file"),
        ("nothing.arrows", "holds no complete batch"),
        ("gopher://x/y", "cannot read gopher"),
    ],
)
def test_what_is_not_a_run_is_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
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
