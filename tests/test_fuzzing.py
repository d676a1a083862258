"""A part of ``make fuzz``: no traceback, no hang, no silent change, whatever the input."""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tests import fuzzing
from tests.fuzzing import CORPUS, OF_REHEARSALS, Case, misplace, prepare, run_folder, tried, undamaged, wrong

from foretrace.cli import main
from foretrace.door import json_text
from foretrace.traces.sealed import Sealed


def test_what_is_damaged_is_answered_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every case of a verb would end at the same door, and nothing behind it be tried."""
    monkeypatch.chdir(tmp_path)
    for words in undamaged():
        found = CliRunner().invoke(main, words)
        assert (found.exit_code, found.exception) == (0, None), (words, found.output)


def test_damaged_inputs_and_absurd_flags_end_in_one_line_or_an_answer() -> None:
    prepare()
    assert [fault for number in range(120) for fault in tried(number, seed=20)] == []


@pytest.mark.parametrize(
    ("name", "verb", "by"),
    [
        ("rehearsed/rehearsal/rank-00000/events.arrow", OF_REHEARSALS[0], "pipe"),
        ("rehearsed/rehearsal/rank-00000/events.arrow", OF_REHEARSALS[0], "endless"),
        ("killed/ranks/rank-00000.json", "analyze {} --json", "endless"),
        ("killed/spans/rank-00000.arrows", "analyze {} --json", "endless"),
        ("recorded/spans/rank-00000.arrow", "analyze {} --json", "endless"),
    ],
)
def test_what_is_no_file_or_has_no_end_is_not_read(name: str, verb: str, by: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_folder() / name.partition("/")[0], run)
    misplace(run / name.partition("/")[2], by)
    Path("/proc/self/clear_refs").write_text("5")
    assert list(wrong(Case(verb.replace("{}", str(run)).split()))) == []
    assert fuzzing.peak_bytes() < fuzzing.MOST_BYTES


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("world_size", 1),
        ("representatives", [0]),
        ("representatives", [0, 9]),
        ("groups", [{"id": 1, "axis": "dp", "ranks": [0, 7]}]),
    ],
)
def test_a_rehearsal_of_ranks_that_its_world_has_not_is_one_line(
    name: str, value: object, tmp_path: Path
) -> None:
    shutil.copytree(run_folder() / "rehearsed", tmp_path / "run")
    file = tmp_path / "run" / "rehearsal" / "rehearsal.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    words = OF_REHEARSALS[0].replace("{}", str(tmp_path / "run")).split()
    found = CliRunner().invoke(main, words)
    assert (found.exit_code, found.stderr.count("\n")) == (2, 1), found.output


@pytest.mark.parametrize("by", fuzzing.MISPLACED[1:])
def test_a_file_of_a_run_that_is_none_is_said(by: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_folder() / "simulated", run)
    misplace(run / "memory.arrow", by)
    found = CliRunner().invoke(main, ["analyze", str(run), "--json"])
    assert found.exit_code == 0, found.output
    assert "memory.arrow is no file: left out" in json.loads(found.stdout)["warnings"]


@pytest.mark.parametrize("value", ["!!binary aGk=", "2026-01-01", "!!set {a}"])
def test_what_yaml_has_and_json_has_not_is_text_in_json(value: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text((CORPUS / "accelerate.yaml").read_text() + f"\nmine: {value}\n")
    words = f"config {tmp_path}/a.yaml --model gpt2 {fuzzing.MACHINE} --json"
    assert list(wrong(Case(words.split()))) == []


def test_numbers_of_numpy_are_numbers_in_json_and_what_json_has_not_is_refused() -> None:
    assert json_text([np.int64(3), np.float32("nan"), np.bool_(True)]) == "[3, null, true]"
    with pytest.raises(TypeError, match="object has no place in JSON"):
        json_text({"a": object()})


def test_an_error_is_no_longer_than_a_page() -> None:
    found = CliRunner().invoke(main, ["topology", "show", "a" * 100_000])
    assert (found.exit_code, len(found.stderr) < 5000) == (2, True)


TOPOLOGY = f"topology read {CORPUS / 'nccl.wiring.xml'} -o mine.toml".split()


def _break(monkeypatch: pytest.MonkeyPatch, broken: Callable[[], object]) -> None:
    """Have *broken* done by the verb of ``TOPOLOGY``."""
    monkeypatch.setattr("foretrace.topologies.discover.discover", lambda *_: broken())
    monkeypatch.setattr(fuzzing, "case", lambda *_: Case(TOPOLOGY))


def test_a_traceback_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _break(monkeypatch, lambda: dict[int, int]()[0])
    assert [fault.what.strip().splitlines()[-1] for fault in tried(0, seed=0)] == ["KeyError: 0"]


def _spin() -> None:
    while True:
        pass


def _spin_deaf() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])
    _spin()


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (_spin, "more than 0.2 s"),
        (_spin_deaf, f"ended by {-signal.SIGXCPU}"),
        (lambda: time.sleep(3600), "stands still"),
    ],
)
def test_a_hang_is_found(broken: Callable[[], object], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a signal ends, one that hears none, and one that uses no processor."""
    _break(monkeypatch, broken)
    monkeypatch.setattr(fuzzing, "MOST_S", 0.2)
    monkeypatch.setattr(fuzzing, "prepare", run_folder)
    assert [fault.what for fault in fuzzing.together(1, 0, 1)] == [what]


def test_memory_beyond_the_limit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    list(tried(0, seed=20))  # what a case loads is there
    _break(monkeypatch, lambda: sys.exit(bytearray(os.urandom(200 << 20)) == b""))
    monkeypatch.setattr(fuzzing, "MOST_BYTES", 150 << 20)
    assert [fault.what[-3:] for fault in tried(0, seed=0)] == ["GiB"]


def test_a_silent_change_of_a_figure_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Once the checksums are not looked at, flipped bits change figures, and that is seen."""
    shutil.copytree(run_folder() / "killed", tmp_path / "run")
    file = next((tmp_path / "run" / "spans").iterdir())
    whole, luck = file.read_bytes(), random.Random(0)
    words = Case(["analyze", str(tmp_path / "run"), "--json", "--partial"], "killed")
    assert list(wrong(words)) == []
    monkeypatch.setattr("foretrace.traces.sealed.look", lambda _: Sealed(True, True))
    found: list[str] = []
    for _ in range(40):
        damaged = bytearray(whole)
        damaged[luck.randrange(len(damaged))] ^= 1 << luck.randrange(8)
        file.write_bytes(damaged)
        found += wrong(words)
        if any(what.endswith("changed silently") for what in found):
            return
    pytest.fail(str(found))


@pytest.mark.parametrize(
    "words",
    [
        "config bomb.yaml",
        "config merged.yaml",
        "config self.yaml",
        "config infinite.ds.json",
        "config huge.ds.json",
        "simulate --model layers.config.json --cluster dgx-h100 --gpus 8 --global-batch 8",
        "memory --model kind.config.json --cluster dgx-h100 --gpus 8 --global-batch 8",
        "simulate --model gpt2 --cluster dgx-h100 --gpus 8 --ep 8 --dp 2147483647 --global-batch 8",
        "topology cost /dev/zero all_reduce 1MB",
        "analyze memo.trace.pkl",
        "ingest memo.trace.pkl -o taken",
        "analyze /",
        "report dump_rank_0.trace.json",
    ],
)
def test_what_was_heavy_once_is_refused_at_once(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each took minutes, gigabytes or a traceback before there was one door."""
    monkeypatch.chdir(CORPUS)
    assert list(wrong(Case(words.split()))) == []
    assert not (CORPUS / "taken").exists()
