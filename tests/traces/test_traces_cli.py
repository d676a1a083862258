"""The verbs analyze, compare and export, as a user calls them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from foretrace import cli
from foretrace.traces.info import RunInfo
from foretrace.traces.layout import Layout
from foretrace.traces.render import percents
from foretrace.traces.store import open_run, write_run
from foretrace.traces.timeline import timeline

MS = 10**6


def written(path: Path, *, pp: int = 2, dp: int = 1, fold: bool = False, slow: int = 1, **info: Any) -> Path:
    """Write a pipeline of one micro-batch: F on each stage in turn, then B back; two steps."""
    layout = Layout(pp=pp, dp=dp)
    stored = range(0, pp * dp, dp) if fold else range(pp * dp)
    rows: list[tuple[Any, ...]] = []
    length = pp * 30 * slow
    for rank in stored:
        stage = layout.coord(rank).pp
        for step in range(2):
            zero = step * length
            rows += [
                (rank, "compute", "compute", "forward", zero + stage * 10 * slow, 10 * slow, step, stage),
                (
                    rank,
                    "compute",
                    "compute",
                    "backward",
                    zero + (3 * pp - 2 * (stage + 1)) * 10 * slow,
                    20 * slow,
                    step,
                    stage,
                ),
                (rank, "step", "step", "step", zero, length, step, stage),
            ]
    names = ("rank", "stream", "category", "kind", "start_ns", "duration_ns", "step", "stage")
    columns: dict[str, object] = dict(zip(names, zip(*rows, strict=True), strict=True))
    columns |= {name: [value * MS for value in columns[name]] for name in ("start_ns", "duration_ns")}  # type: ignore[attr-defined]
    representatives = tuple(rank - rank % dp for rank in range(pp * dp)) if fold else None
    given: dict[str, Any] = {"origin": "simulated", "name": path.name} | info
    described = RunInfo(
        world_size=pp * dp,
        layout=layout,
        groups=tuple(layout.process_groups()),
        representatives=representatives,
        **given,
    )
    return write_run(path, described, timeline(columns))


def call(*args: object) -> Result:
    return CliRunner().invoke(cli.main, [str(arg) for arg in args])


def document(*args: object) -> Any:
    result = call(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # nothing else is on stdout


def assert_one_line(result: Result, message: str) -> None:
    assert result.exit_code == 2
    assert re.fullmatch(r"Error: [^\n]+\n", result.output)  # all that is printed: click 8.1 joins both
    assert message in result.output


@pytest.mark.parametrize("fold", [False, True])
def test_analyze_as_json(tmp_path: Path, fold: bool) -> None:
    said = document("analyze", written(tmp_path / "run", dp=3, fold=fold))
    assert (said["origin"], said["world_size"], said["step_time_s"]) == ("simulated", 6, 0.06)
    # Half of each rank is idle; stage 0 in the middle of its work, where only a receive would say why.
    assert said["bubble_fraction"] == said["shares"]["other"] == pytest.approx(0.25)
    assert said["exposed_comm_fraction"] == 0
    assert said["n_spans"] == 36
    assert [step["step"] for step in said["steps"]] == [0, 1]
    assert said["warnings"] == []
    assert sum(row["represents"] for row in said["ranks"] if row["step"] == 0) == 6
    for row in said["ranks"]:
        assert abs(sum(row["shares"].values()) - 1) < 1e-9
        assert sum(row["ns"].values()) == row["window_ns"]


@pytest.mark.parametrize(
    ("world", "rows"),
    [
        ({"pp": 2}, ["rank 0, stage 0", "rank 1, stage 1", "mean"]),
        ({"pp": 2, "dp": 4, "fold": True}, ["rank 0 ×4, stage 0", "rank 4 ×4, stage 1", "mean"]),
        ({"pp": 2, "dp": 9}, ["stage 0", "stage 1", "mean"]),
        ({"pp": 1, "dp": 17}, ["all ranks", "mean"]),
    ],
)
def test_analyze_for_people_adds_up(
    tmp_path: Path, world: dict[str, Any], rows: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = call("analyze", written(tmp_path / "run", **world))
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    for row in rows:
        (line,) = (line for line in result.stdout.splitlines() if line.startswith(row))
        *shares, total, _hidden = map(float, line.removeprefix(row).split())
        assert sum(shares) == pytest.approx(100, abs=1e-9)
        assert total == 100
    assert ("least of any rank" in result.stdout) == (len(rows) < 3 or world.get("dp", 1) > 8)


def test_analyze_says_what_to_know(tmp_path: Path) -> None:
    run = written(tmp_path / "run", warnings=("GEMM 7x7x7 not measured",), origin="recorded")
    (run / "spans" / "rank-00001.arrow").unlink()
    result = call("analyze", run, "--partial")
    assert "! GEMM 7x7x7 not measured" in result.stdout
    assert "! no spans of rank 1 of 2" in result.stdout
    assert len(document("analyze", run, "--partial")["warnings"]) == 2


def test_compare_as_json(tmp_path: Path) -> None:
    said = document("compare", written(tmp_path / "a"), written(tmp_path / "b", slow=2))
    assert said["ratio"] == 0.5
    assert said["difference_s"] == pytest.approx(0.06)
    assert sum(cause["difference_s"] for cause in said["causes"]) == pytest.approx(0.06, abs=1e-12)
    assert said["spans"]["n_joined"] == 4
    assert {kind["median_ratio"] for kind in said["spans"]["kinds"]} == {0.5}


def test_compare_for_people(tmp_path: Path) -> None:
    result = call("compare", written(tmp_path / "a"), written(tmp_path / "b", slow=2, origin="recorded"))
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["a", "60.00", "ms", "simulated:", "a,", "step", "0"]
    assert lines[1][:5] == ["b", "120.00", "ms", "recorded:", "b,"]
    assert ["a", "/", "b", "0.500"] in lines
    assert ["compute", "backward", "20.00", "ms", "40.00", "ms", "20.00", "ms", "+16.7", "%"] in lines
    assert ["step", "60.00", "ms", "120.00", "ms", "60.00", "ms", "+50.0", "%"] in lines
    assert ["forward", "2", "20.00", "ms", "40.00", "ms", "0.500"] in lines


def test_export(tmp_path: Path) -> None:
    run = written(tmp_path / "run", dp=2, fold=True)
    said = document("export", run, "-o", tmp_path / "t.pftrace.gz")
    assert (said["ranks"], said["n_spans"]) == ([0, 2], 12)
    assert Path(said["file"]).stat().st_size == said["size_bytes"]
    assert document("export", run, "-o", tmp_path / "t.parquet", "--ranks", "all")["ranks"] == [0, 1, 2, 3]
    assert open_run(tmp_path / "t.parquet").stored_ranks == (0, 1, 2, 3)
    assert (
        document("export", run, "-o", tmp_path / "t", "--format", "csv", "--ranks", "1-2, 0")["n_spans"] == 18
    )
    result = call("export", run, "-o", tmp_path / "t.json")
    assert result.stdout.startswith(f"{tmp_path / 't.json'}: 12 spans of rank 0, 2\n")
    assert "https://ui.perfetto.dev" in result.stdout


def test_an_expanded_file_has_the_figures_of_the_folded_run(tmp_path: Path) -> None:
    run = written(tmp_path / "run", dp=3, fold=True)
    document("export", run, "-o", tmp_path / "all.parquet", "--ranks", "all")
    folded, expanded = (document("analyze", path) for path in (run, tmp_path / "all.parquet"))
    for key in ("step_time_s", "shares", "n_spans", "kinds", "steps", "hidden_by_axis"):
        assert folded[key] == expanded[key]


def test_what_a_user_gets_wrong_is_one_line(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text('{"format_version": 1,')
    for args, message in (
        (("analyze", tmp_path / "missing"), "does not exist"),
        (("analyze", tmp_path / "notes.txt"), "is not a run"),
        (("analyze", tmp_path / "broken"), "is not JSON"),
        (("compare", run, tmp_path / "missing"), "does not exist"),
        (("export", run, "-o", tmp_path / "t.xls"), "does not say its format"),
        (("export", run, "-o", tmp_path / "t.csv", "--ranks", "x"), "is not a list of ranks"),
        (("export", run, "-o", tmp_path / "t.csv", "--ranks", "0-9"), "names rank 9; there are 0 to 1"),
        (("export", run, "-o", tmp_path / "t.csv", "--ranks", "0,5-2"), "5-2 in '0,5-2' goes down"),
        (("export", run, "-o", tmp_path / "t.csv", "--ranks", ""), "is not a list of ranks"),
        (("export", run, "-o", tmp_path / "t.csv", "--format", "xls"), "unknown format"),
    ):
        assert_one_line(call(*args), message)
        assert_one_line(call(*args, "--json"), message)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "notes.txt", "run"]


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=12).filter(any))
def test_percentages_add_up_as_printed(parts: list[int]) -> None:
    shares = [part / sum(parts) for part in parts]
    printed = percents(shares)
    assert round(sum(map(float, printed)), 6) == 100
    assert all(
        abs(float(text) - share * 100) <= 0.1 + 1e-9 for text, share in zip(printed, shares, strict=True)
    )
