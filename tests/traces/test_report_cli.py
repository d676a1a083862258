"""The verb ``report``: writes one file, says what it says, and what went wrong in one line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from foretrace.cli import main
from foretrace.traces.errors import RunError
from foretrace.traces.report.cli import report
from foretrace.traces.run import Run
from foretrace.traces.store import write_info, write_run
from foretrace.traces.writer import SpanWriter


def test_report_says_what_the_page_says(fsdp_run: Run, tmp_path: Path) -> None:
    target = tmp_path / "r.html"
    result = CliRunner().invoke(report, [fsdp_run.path, "-o", str(target)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "Step time" in result.output
    assert f"{target} (0." in result.output
    assert target.read_text("utf-8").startswith("<!doctype html>")


def test_json_is_one_object_and_nothing_else(
    pipeline_run: Run, recorded_pipeline_run: Run, tmp_path: Path
) -> None:
    target = tmp_path / "r.html"
    words = [pipeline_run.path, recorded_pipeline_run.path, "--partial", "-o", str(target), "--json"]
    said = json.loads(CliRunner().invoke(report, words, catch_exceptions=False).output)
    assert said["report"] == str(target)
    assert said["size_bytes"] == target.stat().st_size
    assert {"Step time, simulated", "Step time, recorded", "Difference"} <= set(said["headline"])


def test_long_names_of_two_runs_are_cut_to_what_tells_them_apart(fsdp_run: Run, tmp_path: Path) -> None:
    """Every value stands apart from the name of its figure, however long that is."""
    paths = []
    for run, degrees in ((fsdp_run, "tp8 pp4 dp16"), (fsdp_run, "tp4 pp8 dp16")):
        info = replace(run.info, origin="simulated", name=f"llama3-70b on 512 dgx-h100, {degrees}")
        paths.append(str(write_run(tmp_path / degrees[:3], info, run.spans())))
    words = [*paths, "-o", str(tmp_path / "r.html")]
    lines = CliRunner().invoke(report, words, catch_exceptions=False).output.splitlines()
    assert lines[0].endswith(": tp8 pp4 dp16 and tp4 pp8 dp16")
    figures = [line for line in lines if line.startswith("  Step time, ")]
    assert [line.split(", ")[1][:14] for line in figures] == ["tp8 pp4 dp16  ", "tp4 pp8 dp16  "]


def test_without_a_name_the_page_is_called_after_the_run(
    fsdp_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(report, [fsdp_run.path, fsdp_run.path], catch_exceptions=False)
    assert [path.name for path in tmp_path.iterdir()] == ["fsdp-and-fsdp.html"]


def test_a_run_that_is_not_there_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="missing"):
        CliRunner().invoke(
            report, [str(tmp_path / "missing"), "-o", str(tmp_path / "r.html")], catch_exceptions=False
        )
    assert list(tmp_path.iterdir()) == []


def test_a_page_takes_the_place_of_no_part_of_a_run(fsdp_run: Run, tmp_path: Path) -> None:
    write_run(tmp_path / "run", fsdp_run.info, [fsdp_run.spans()])
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for target in before:
        for verb in ("report", "export"):
            result = CliRunner().invoke(main, [verb, str(tmp_path / "run"), "-o", str(target)])
            assert result.exit_code == 2
            assert "a part of a run" in result.output
    assert {path: path.read_bytes() for path in before} == before


def test_nor_of_a_part_of_a_recording_that_was_killed(fsdp_run: Run, tmp_path: Path) -> None:
    """It has spans and what each rank says of itself, and no description of the whole."""
    run, rank = tmp_path / "run", fsdp_run.stored_ranks[0]
    with SpanWriter(run, rank) as writer:
        writer.append_table(fsdp_run.spans([rank]))
    write_info(run, replace(fsdp_run.info, representatives=None, finished=False), rank)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for target in before:
        result = CliRunner().invoke(main, ["report", str(run), "-o", str(target)])
        assert (result.exit_code, "a part of a run" in result.output) == (2, True)
    assert {path: path.read_bytes() for path in before} == before


def test_what_is_written_beside_the_parts_of_a_run_changes_no_figure(fsdp_run: Run, tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, fsdp_run.info, [fsdp_run.spans()])

    def said() -> list[str]:
        return [CliRunner().invoke(main, [*verb, "--json"]).stdout for verb in verbs]

    verbs = (["analyze", str(run)], ["compare", str(run), str(run)])
    before = said()
    names = ("page.html", "rank-00000.html", "spans.csv", "rank-00000.parquet", "memory.json", "kernels.json")
    for name in names:
        verb = "report" if name.endswith("html") else "export"
        assert CliRunner().invoke(main, [verb, str(run), "-o", str(run / name)]).exit_code == 0
    assert said() == before
    write_run(run, fsdp_run.info, [fsdp_run.spans()])
    assert said() == before
    assert all((run / name).is_file() for name in names)


def test_a_recording_that_ended_before_anything_happened_is_told_in_one_line(
    fsdp_run: Run, tmp_path: Path
) -> None:
    """As one that was interrupted at once: every verb says that there is nothing to show."""
    rank = fsdp_run.stored_ranks[0]
    with SpanWriter(tmp_path / "run", rank):
        pass
    info = replace(fsdp_run.info, representatives=None, finished=False)
    for which in (rank, None):
        write_info(tmp_path / "run", info, which)
    for verb in ("analyze", "report", "compare"):
        words = [verb, *[str(tmp_path / "run")] * (1 + (verb == "compare"))]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 2, result.exception
        assert "holds no span" in result.output
