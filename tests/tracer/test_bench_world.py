"""The health check of a world, on real processes: started here, and under torchrun."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers, lists

from foretrace.tracer.bench import world
from foretrace.tracer.bench.cli import parse_sizes
from foretrace.tracer.bench.world import KINDS, SLOW, _flag
from foretrace.tracer.errors import RecordError


def run(words: str, ranks: Any, *launcher: str) -> Any:
    """Run ``foretrace bench WORDS``."""
    command = [sys.executable, *launcher, "-m", "foretrace", "bench", *words.split("|")]
    (done,) = ranks.launch(command)
    return done


@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--nproc-per-node", "2")])
def test_every_collective_link_and_rank_is_timed(ranks: Any, launcher: tuple[str, ...]) -> None:
    result = run("collectives|--sizes|8 KiB,64 KiB|--repeats|3|--json|--backend|gloo", ranks, *launcher)
    assert result.returncode in {0, 1}, result.stderr  # 1: another user of this machine made a rank slow
    found = json.loads(result.stdout)
    assert found["n_ranks"] == 2
    rows = found["collectives"]
    assert [(row["kind"], row["size_bytes"]) for row in rows] == [
        (kind, size) for kind in KINDS for size in (8 << 10, 64 << 10)
    ]
    for row in rows:  # over two ranks every factor of nccl-tests is 1 or 1/2
        share = row["busbw_bytes_per_s"] * row["time_s"] / row["size_bytes"]
        assert share == pytest.approx(1 if row["kind"] in {"all_reduce", "broadcast"} else 0.5)
    assert [(link["sender"], link["receiver"]) for link in found["links"]] == [(1, 0), (0, 1)]
    assert [row["rank"] for row in found["ranks"]] == [0, 1]
    assert result.returncode == any(row["is_slow"] for row in (*found["links"], *found["ranks"]))


def test_what_a_machine_promises_stands_beside(ranks: Any) -> None:
    result = run("collectives|--sizes|8 KiB|--repeats|3|--json|--against|dgx-h100", ranks)
    found = json.loads(result.stdout)
    assert found["against"] == "dgx-h100"
    assert all(0 < row["promised_s"] < row["time_s"] for row in found["collectives"])  # gloo is no NVLink
    unknown = run("collectives|--against|nowhere", ranks)
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr.count("\n") == 1


UNEVEN = """
import os, sys
if os.environ["RANK"] == "1":
    sys.stderr.write("a line\\n" * 100_000)
open(os.environ["MEETING"], "r" if os.environ["RANK"] == "0" else "w").close()  # waits for the other
os._exit(0)
"""


def test_a_rank_that_says_much_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a pipe takes, while the rank before it waits for it."""
    monkeypatch.setattr(world, "TIMEOUT_S", 60)
    (tmp_path / "sitecustomize.py").write_text(UNEVEN)
    os.mkfifo(tmp_path / "meeting")
    world._run([], 2, {"PYTHONPATH": str(tmp_path), "MEETING": str(tmp_path / "meeting")})


@pytest.mark.usefixtures("planted")
def test_measuring_processes_import_nothing_from_the_folder_they_are_started_in(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os; os._exit(0)")  # what they import first, for want of time
    world._run(["clock", "gloo", "{}", "result"], 1, {"PYTHONPATH": str(tmp_path)})


def test_clocks_of_one_machine_agree_within_what_is_stated(ranks: Any) -> None:
    result = run("clock|--seconds|0.2|--json", ranks)
    assert result.returncode == 0, result.stderr
    for row in json.loads(result.stdout)["ranks"]:
        assert row["shares_clock"]
        assert abs(row["offset_ns"]) <= row["uncertainty_ns"]
        assert abs(row["drift_ppb"]) <= row["drift_uncertainty_ppb"]


@given(times=lists(floats(0.9, 1.1), min_size=3, max_size=9), slow=integers(0, 8))
def test_what_is_slow_among_equals_is_flagged(times: list[float], slow: int) -> None:
    rows: list[dict[str, Any]] = [{"distance": 1, "time_s": time} for time in times]
    rows[slow % len(rows)]["time_s"] = 2 * SLOW
    _flag(rows, "time_s")
    assert [row["is_slow"] for row in rows] == [i == slow % len(rows) for i in range(len(rows))]


@pytest.mark.parametrize("text", ["64", "x", "1 mib", "0 KiB", "1 KiB,,"])
def test_a_size_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(RecordError, match="16 MiB"):
        parse_sizes(text)
