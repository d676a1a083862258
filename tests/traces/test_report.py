"""The page says what the analysis says, holds no network address, and takes every name as text."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.traces.unpacked import decode

from foretrace.traces.analysis.metrics import breakdown, summarize
from foretrace.traces.compare import compare
from foretrace.traces.errors import ReportError, RunError
from foretrace.traces.info import RunInfo
from foretrace.traces.report.html import report_html, write_report
from foretrace.traces.report.run import NO_SEQUENCE
from foretrace.traces.run import Run
from foretrace.traces.store import open_run, write_run
from foretrace.traces.timeline import timeline

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{meta}} \"'&"


class Page(HTMLParser):
    """Collects the scripts of a page, and every address that it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: dict[str, str] = {}
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self._open: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")
        ]
        if tag == "script":
            self._open = dict(attrs).get("id") or f"script{len(self.scripts)}"
            self.scripts[self._open] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._open = None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.scripts[self._open] += data


def contents(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Page(text).scripts["meta"])
    return found


def columns(text: str) -> dict[str, np.ndarray[Any, Any]]:
    return decode(contents(text)["columns"], Page(text).scripts["columns"].strip())


RUNS = ("pipeline_run", "many_ranks_run", "recorded_pipeline_run", "fsdp_run")


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> Run:
    found: Run = request.getfixturevalue(request.param)
    return found


def test_numbers_of_every_row_are_those_of_the_analysis(run: Run) -> None:
    document = contents(report_html(run))
    (shown,) = document["runs"]
    expected = {(row.rank, row.step): row for row in breakdown(run)}
    assert {(row["rank"], step["step"]) for row in shown["rows"] for step in shown["steps"]} == set(expected)
    for step in shown["steps"]:
        for row, numbers in zip(shown["rows"], step["rows"], strict=True):
            known = expected[row["rank"], step["step"]]
            total = dict.fromkeys(known.ns, 0)
            for kind, ns in numbers["parts"]:
                entry = document["kinds"][kind]
                total["compute" if entry["group"] == "compute" else entry["id"]] += ns
            assert total == known.ns
            assert numbers["window_ns"] == known.window_ns == sum(ns for _, ns in numbers["parts"])
            assert sorted(numbers["hidden"].values()) == sorted(ns for ns in known.hidden_ns.values() if ns)


def test_headline_is_that_of_the_summary(pipeline_run: Run) -> None:
    figures = {figure["name"]: figure for figure in contents(report_html(pipeline_run))["headline"]}
    summary = summarize(pipeline_run)
    assert figures["Step time"]["value"] == f"{summary['step_time_s'] * 1e3:.2f} ms"
    assert figures["Pipeline bubble"]["value"] == f"{summary['bubble_fraction'] * 100:.1f} %"
    assert figures["Pipeline bubble"]["note"] == "ideal: (p−1)/(m+p−1) = 27.3 %"  # p = 4, m = 8
    assert figures["Computing"]["value"] == f"{summary['shares']['compute'] * 100:.1f} %"
    assert figures["Exposed communication"]["value"] == f"{summary['exposed_comm_fraction'] * 100:.1f} %"
    assert figures["Peak memory"] == {
        "name": "Peak memory", "value": "54 GB", "note": "of 80 GB per device", "tone": ""
    }  # fmt: skip
    assert figures["MFU"]["value"] == "41.0 %"
    assert figures["Throughput per GPU"]["value"] == "812 tok/s"


def test_packed_spans_cover_every_row_and_step(run: Run) -> None:
    text = report_html(run)
    (shown,) = contents(text)["runs"]
    found = columns(text)
    ptr = found["a.ptr"].astype(np.int64)
    n_lanes = len(shown["lanes"])
    assert len(ptr) == len(shown["steps"]) * len(shown["rows"]) * n_lanes + 1
    assert {len(found[f"a.{name}"]) for name in ("gap", "duration", "label", "layer", "hidden")} == {ptr[-1]}
    numbers = [row for step in shown["steps"] for row in step["rows"]]
    for cell, row in enumerate(numbers):
        lane = slice(ptr[cell * n_lanes], ptr[cell * n_lanes + 1])
        length = found["a.duration"][lane].astype(np.int64).sum() * shown["tick_ns"]
        assert abs(length - row["window_ns"]) <= shown["tick_ns"]
        assert not found["a.gap"][lane][1:].any()


def test_every_span_of_the_timeline_is_on_the_page(fsdp_run: Run) -> None:
    text = report_html(fsdp_run)
    found, document = columns(text), contents(text)
    table = fsdp_run.spans()
    said = [document["names"][document["labels"][label][7]] for label in found["a.label"]]
    for kind in ("all_gather", "reduce_scatter"):
        assert said.count(kind) == table["kind"].to_pylist().count(kind)
    known = found["a.sequence"] != NO_SEQUENCE
    assert known.sum() == (table["sequence"].to_numpy() >= 0).sum()


def test_folded_ranks_are_drawn_once_and_overviewed_all(many_ranks_run: Run) -> None:
    text = report_html(many_ranks_run)
    document = contents(text)
    assert [row["represents"] for row in document["runs"][0]["rows"]] == [16, 16, 16, 16]
    overview = document["overview"]
    assert sorted(overview["order"]) == list(range(64))
    assert [overview["order"][i] for i in range(0, 64, 8)] == [0, 2, 4, 6, 8, 10, 12, 14]
    pixels = columns(text)["a.overview"].reshape(4, overview["bins"])
    assert set(np.unique(pixels)) <= {*range(len(document["kinds"])), 255}
    busy = document["runs"][0]["steps"][0]["busy"]
    assert busy == pytest.approx([row.shares["compute"] for row in breakdown(many_ranks_run)])
    for rank, pick in zip(overview["order"], overview["pick"], strict=True):
        pipeline = document["picks"][pick]
        assert rank in pipeline
        assert [many_ranks_run.info.representative(member) for member in pipeline] == [0, 16, 32, 48]


def test_small_runs_have_no_overview(pipeline_run: Run) -> None:
    document = contents(report_html(pipeline_run))
    assert document["overview"] is None
    assert document["picks"] == [[0, 4, 8, 12]]
    assert document["runs"][0]["row_of"] == [rank // 4 for rank in range(16)]


def test_a_recorded_run_begins_at_its_median_step(fsdp_run: Run) -> None:
    (shown,) = contents(report_html(fsdp_run))["runs"]
    assert [step["step"] for step in shown["steps"]] == [0, 1, 2, 3]
    warm = sorted(shown["steps"][1:], key=lambda step: max(row["window_ns"] for row in step["rows"]))
    assert shown["steps"][shown["default_step"]] == warm[1]


def test_memory_peaks_and_their_parts(pipeline_run: Run) -> None:
    text = report_html(pipeline_run)
    document = contents(text)
    peaks = document["runs"][0]["memory_peaks"]
    assert [peak["bytes"] for peak in peaks] == [
        54_000_000_000,
        48_000_000_000,
        42_000_000_000,
        36_000_000_000,
    ]
    assert dict(peaks[0]["parts"]) == {"parameters": 30_000_000_000, "activations": 24_000_000_000}
    assert document["memory_limit_bytes"] == 80_000_000_000
    assert columns(text)["a.memory.bytes"].max() == 54_000_000_000


def test_comparison_adds_up_to_the_difference(pipeline_run: Run, recorded_pipeline_run: Run) -> None:
    text = report_html(pipeline_run, recorded_pipeline_run)
    document = contents(text)
    found = compare(pipeline_run, recorded_pipeline_run)
    lines, total = document["comparison"]["lines"], document["comparison"]["total"]
    assert sum(line["a_ns"] for line in lines) == total["a_ns"] == found.a_step_ns
    assert sum(line["b_ns"] for line in lines) == total["b_ns"] == found.b_step_ns
    assert [run["label"] for run in document["runs"]] == ["simulated", "recorded"]
    operations = {line["name"]: line for line in document["comparison"]["operations"]}
    assert operations["forward"]["n_joined"] == 4 * 8 * 8  # stages, micro-batches, blocks
    assert operations["all reduce, TP"]["median_ratio"] == pytest.approx(1)
    points = columns(text)
    assert len(points["ratio.a"]) == len(points["ratio.b"]) == len(points["ratio.kind"]) > 0


@pytest.mark.parametrize("most", [1, 100, 300, 10_000])
def test_a_picture_has_at_most_so_many_points(
    most: int, pipeline_run: Run, recorded_pipeline_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretrace.traces.report.compare.MOST_POINTS", most)
    points = columns(report_html(pipeline_run, recorded_pipeline_run))
    assert 0 < len(points["ratio.a"]) <= most


def test_rows_of_two_runs_meet_by_rank(pipeline_run: Run, recorded_pipeline_run: Run) -> None:
    document = contents(report_html(pipeline_run, recorded_pipeline_run))
    first, second = document["runs"]
    for rank in document["picks"][0]:
        ours, theirs = first["row_of"][rank], second["row_of"][rank]
        assert first["rows"][ours]["stage"] == second["rows"][theirs]["stage"]


def test_rows_of_runs_of_different_size_meet_by_stage(
    many_ranks_run: Run, recorded_pipeline_run: Run
) -> None:
    document = contents(report_html(many_ranks_run, recorded_pipeline_run))
    first, second = document["runs"]
    assert len(document["picks"][0]) == 4
    for rank in document["picks"][0]:
        ours, theirs = first["row_of"][rank], second["row_of"][rank]
        assert first["rows"][ours]["stage"] == second["rows"][theirs]["stage"]


def test_only_the_error_of_a_prediction_is_good_or_bad(
    pipeline_run: Run, recorded_pipeline_run: Run, fsdp_run: Run
) -> None:
    """Between two recordings a difference is no error, however large: the shorter step must not look bad."""

    def difference(*runs: Run) -> dict[str, str]:
        headline = contents(report_html(*runs))["headline"]
        return next(figure for figure in headline if figure["name"] == "Difference")

    assert difference(pipeline_run, recorded_pipeline_run)["tone"] == "good"
    recorded = difference(recorded_pipeline_run, fsdp_run)
    assert recorded["note"] == "−151.1 % of fsdp"
    assert recorded["tone"] == difference(pipeline_run, pipeline_run)["tone"] == ""


def test_page_loads_nothing(run: Run) -> None:
    text = report_html(run)
    page = Page(text)
    assert page.addresses == []
    assert not {"link", "iframe", "object", "embed", "base"} & set(page.tags)
    assert "default-src 'none'" in text
    code = "".join(script for name, script in page.scripts.items() if name not in ("meta", "columns"))
    assert not re.search(r"https?:|fetch\(|XMLHttpRequest|WebSocket|import\(|innerHTML|eval\(", code)


def hostile(folder: Path) -> Run:
    """A run whose every name is an attack on the page."""
    columns: dict[str, object] = {
        "rank": [0, 0, 0], "category": ["step", "compute", "collective"], "kind": ["step", EVIL, EVIL],
        "name": [EVIL] * 3, "stream": ["step", "compute", EVIL], "start_ns": [0, 1, 2],
        "duration_ns": [9, 4, 6], "axis": ["", "", EVIL], "dtype": [EVIL] * 3, "step": [0] * 3,
    }  # fmt: skip
    info = RunInfo(
        origin="recorded", world_size=1, name=EVIL, warnings=(EVIL,), model={"name": EVIL, EVIL: EVIL},
        cluster={"name": EVIL, "device": {"name": EVIL, "sources": {EVIL: EVIL}}}, versions={EVIL: EVIL},
        summary={"rests_on": [EVIL], "mfu": EVIL, "peak_memory_bytes": "many"}, dropped={EVIL: 1},
    )  # fmt: skip
    return open_run(write_run(folder / "run", info, timeline(columns)))


def test_names_are_text(tmp_path: Path) -> None:
    plain = Page(report_html(hostile(tmp_path)))
    assert plain.tags.count("script") == 3
    assert "img" not in plain.tags
    document = json.loads(plain.scripts["meta"])
    assert EVIL in document["names"]
    assert EVIL in document["warnings"]


def test_a_written_report_is_the_page(pipeline_run: Run, tmp_path: Path) -> None:
    written = write_report(tmp_path / "r.html", pipeline_run)
    text = (tmp_path / "r.html").read_text("utf-8")
    assert text == report_html(pipeline_run)
    assert written["size_bytes"] == len(text.encode())
    assert written["headline"]["MFU"] == "41.0 %"
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_a_report_that_cannot_be_written_says_where(pipeline_run: Run, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ReportError, match=r"file/r\.html: Not a directory"):
        write_report(tmp_path / "file" / "r.html", pipeline_run)
    with pytest.raises(ReportError, match="taken"):
        write_report(tmp_path / "taken", pipeline_run)
    assert {path.name for path in tmp_path.iterdir()} == {"taken", "file"}


def test_parts_of_the_model_on_a_rank_are_counted(tmp_path: Path) -> None:
    columns = {"category": ["compute"] * 3, "kind": ["forward"] * 3, "virtual_stage": [0, 2, 1]}
    times = {"start_ns": [0, 10, 20], "duration_ns": [10] * 3}
    spans = timeline({"rank": [0] * 3, "step": [0] * 3, **columns, **times})
    run = open_run(write_run(tmp_path / "run", RunInfo(origin="simulated", world_size=1), spans))
    assert contents(report_html(run))["runs"][0]["n_chunks"] == 3


def test_a_run_without_a_step_is_refused(tmp_path: Path) -> None:
    nothing = timeline(
        {"rank": [0], "category": ["host"], "kind": ["x"], "start_ns": [0], "duration_ns": [0]}
    )
    run = open_run(write_run(tmp_path / "run", RunInfo(origin="simulated", world_size=1), nothing))
    with pytest.raises(RunError, match="nothing to"):
        report_html(run)


@pytest.mark.parametrize(
    ("step_s", "side"), [(2.0, ""), (1.4, ": more than predicted"), (2.6, ": less than predicted")]
)
def test_what_is_likely_stands_beside_a_figure(
    tmp_path: Path, pipeline_run: Run, step_s: float, side: str
) -> None:
    known = {"step_time_s": [1.5, 2.5], "mfu": [0.3], "peak_memory_bytes": None, "step_time_from": "12 runs"}
    said = {**pipeline_run.info.summary, "step_time_s": step_s, "intervals": known}
    info = replace(pipeline_run.info, summary=said)
    page = contents(report_html(open_run(write_run(tmp_path / "run", info, pipeline_run.spans()))))
    likely = {one["name"]: one.get("likely") for one in page["headline"]}
    assert likely["Step time"] == f"likely 1.500 s to 2.500 s{side}"
    assert not any(said for name, said in likely.items() if name != "Step time")
    ranges = next(section for section in page["basis"] if section["title"] == "Likely ranges")
    assert ranges["lines"] == [["step time", "1.500 s to 2.500 s", "12 runs"]]
