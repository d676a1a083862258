"""The verb: what a person types, what a script reads, and what a mistake says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from foretrace.cli import main
from foretrace.simulator.cli import simulate
from foretrace.traces.store import open_run

SMALL = ("--model", "llama2-7b", "--cluster", "dgx-h100", "--gpus", "8", "--tp", "8", "--global-batch", "2")
NAMED = (*SMALL, "--framework", "megatron")


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *args])


def as_json(*args: str) -> dict[str, Any]:
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_headline_example_prints_its_figures() -> None:
    found = as_json(
        *("--model", "llama3-70b", "--cluster", "dgx-h100", "--gpus", "512", "--tp", "8", "--pp", "4"),
        *("--global-batch", "1024", "--seq-len", "8192"),
    )
    assert {
        *("step_time_s", "tokens_per_s_per_gpu", "mfu", "peak_memory_bytes", "fits", "bubble_fraction"),
        *("exposed_comm_fraction", "world_size", "n_spans", "engine", "warnings"),
    } <= set(found)
    assert found["world_size"] == 512
    assert found["job"]["dp"] == 16
    assert found["engine"] == "event"
    assert found["fits"] is True
    assert 0.3 < found["mfu"] < 0.6
    assert found["n_spans"] > 10_000_000


def test_the_table_is_for_people(tmp_path: Path) -> None:
    result = invoke(*NAMED, "-o", str(tmp_path / "run"))
    assert result.exit_code == 0
    for words in ("step time", "tokens/s per GPU", "MFU", "exposed communication", "peak memory", "rests on"):
        assert words in result.stdout
    assert str(tmp_path / "run") in result.stdout.replace("\n", "")


def test_output_is_a_run_and_report_a_page(tmp_path: Path) -> None:
    run, page = tmp_path / "run", tmp_path / "report.html"
    found = as_json(*NAMED, "-o", str(run), "--report", str(page))
    assert found["run"] == str(run)
    assert open_run(run).info.summary["step_time_s"] == found["step_time_s"]
    assert page.read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")


def test_flags_go_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'model = "llama2-7b"\ncluster = "dgx-h100"\nglobal_batch = 8\ngpus = 8\ntp = 8\nschedule = "gpipe"',
        encoding="utf-8",
    )
    job = as_json("--config", str(path), "--tp", "4", "--no-sequence-parallel")["job"]
    assert (job["tp"], job["dp"], job["schedule"], job["sequence_parallel"]) == (4, 2, "gpipe", False)
    assert as_json("--config", str(path), "--dp", "4", "--tp", "1")["job"]["gpus"] == 4
    assert as_json(str(path), "--tp", "4", "--no-sequence-parallel")["job"] == job
    both = invoke(str(path), "--config", str(path))
    assert both.exit_code == 2
    assert "give one file of settings" in both.stderr


def test_a_report_that_cannot_be_written_is_known_before_the_run_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    output, page = tmp_path / "run", tmp_path / "file" / "new" / "x.html"
    result = invoke(*NAMED, "-o", str(output), "--report", str(page))
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert f"cannot write {page}: Not a directory" in result.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_all_ranks_are_simulated_when_asked() -> None:
    folded, unfolded = as_json(*NAMED), as_json(*NAMED, "--ranks", "all")
    assert (folded["n_ranks_stored"], unfolded["n_ranks_stored"]) == (1, 8)
    assert folded["step_time_s"] == unfolded["step_time_s"]
    assert folded["n_spans"] == unfolded["n_spans"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("--model", "llama3-70", *NAMED[2:]),
            "unknown model 'llama3-70': not a file, not a preset; near: llama3-70b",
        ),
        ((*NAMED, "--schedule", "zigzag"), "unknown schedule 'zigzag': one of naive, gpipe, 1f1b"),
        ((*NAMED, "--sharding", "zero9"), "sharding='zero9': one of ddp, zero1, zero2, zero3, fsdp"),
        (
            (*NAMED, "--dp", "2"),
            "pp*dp*cp*tp = 1*2*1*8 = 16 ranks, but the cluster has 8 GPUs; with this pp, cp and tp dp=1",
        ),
        ((*NAMED, "--tp", "0"), "tp=0: a parallel degree is a whole number of at least 1"),
        (("--cluster", "dgx-h100"), "model and global_batch are missing: --model"),
        (("--cluster", "dgx-h10"), "no cluster 'dgx-h10' in the catalogue: did you mean dgx-h100"),
        (("--model", "llama3-70"), "unknown model 'llama3-70'"),
        ((*NAMED, "--config", "no-such.toml"), "no-such.toml cannot be read"),
        (("no-such.toml", *NAMED), "no-such.toml cannot be read"),
        (("a.toml", "--like", "run"), "--like run and a.toml: give one of them"),
        (("a.toml", "--rehearsal", "its"), "--rehearsal its and a.toml: give one of them"),
        (("--like", "run", "--rehearsal", "its"), "--rehearsal its and --like run: give one of them"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(args: tuple[str, ...], message: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert not result.stdout


def test_a_directory_that_is_not_a_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    result = invoke(*NAMED, "-o", str(tmp_path))
    assert result.exit_code == 2
    assert "is not a run" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_help_names_every_setting() -> None:
    flags = {option for parameter in simulate.params for option in parameter.opts}
    assert {"--model", "--global-batch", "--config", "--ranks", "--report", "--json", "-o"} <= flags


def test_what_the_host_does_and_steps_that_differ_are_said_where_they_are() -> None:
    """A step that is long for the optimizer, for data or for a checkpoint says so among its figures."""
    plain = invoke(*NAMED).stdout
    assert not any(words in plain for words in ("optimizer on the host", "all steps"))
    assert "optimizer on the host" in invoke(*NAMED, "--offload", "optimizer").stdout
    assert "other  " in invoke(*NAMED, "--set", "step_host_s=1.0").stdout
    saving = ("--steps", "4", "--checkpoint-every", "2", "--checkpoint-bytes-per-s", "1e9")
    found, shown = as_json(*NAMED, *saving), invoke(*NAMED, *saving).stdout
    short, long = min(found["step_times_s"]), max(found["step_times_s"])
    assert found["step_times_s"] == pytest.approx([short, long, short, long], rel=1e-3)
    states_s = 14 * 6.738e9 / 8 / 1e9
    assert long - short == pytest.approx(states_s, rel=0.01), "weights of 2 bytes, states of 12, in 8 shards"
    assert "all steps                4, " in shown
    figures = " ".join(shown.split()).partition("rests on")[0]  # a line may be cut in two
    assert figures.count(" for a checkpoint every 2 steps") == 3, "of throughput, MFU and cost"
    assert found["checkpoint_s"] == pytest.approx(states_s, rel=0.01)
