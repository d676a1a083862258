"""Figures show the numbers of the analysis, in colours that colour-blind people can tell apart."""

import html
import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from foretrace.traces import figures
from foretrace.traces.analysis.metrics import breakdown, step_times_ns, summarize, typical_step
from foretrace.traces.analysis.windows import windows
from foretrace.traces.compare import compare
from foretrace.traces.errors import FigureError
from foretrace.traces.figures import timelines
from foretrace.traces.info import RunInfo
from foretrace.traces.report.kinds import palette
from foretrace.traces.report.words import headline
from foretrace.traces.run import Run
from foretrace.traces.store import open_run, write_run
from foretrace.traces.text_picture import picture
from foretrace.traces.timeline import timeline

VISION = {  # Machado, Oliveira and Fernandes 2009, doi:10.1109/TVCG.2009.113, severity 1, in linear RGB
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deutan": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.01182, 0.04294, 0.968881),
    ),
    "tritan": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.3039),
    ),
}


def linear(colour: str) -> NDArray[np.float64]:
    value = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def oklab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """Björn Ottosson 2020, https://bottosson.github.io/posts/oklab."""
    cone = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566]]
    cone.append([0.0883024619, 0.2817188376, 0.6299787005])
    lab = [[0.2104542553, 0.793617785, -0.0040720468], [1.9779984951, -2.428592205, 0.4505937099]]
    lab.append([0.0259040371, 0.7827717662, -0.808675766])
    found: NDArray[np.float64] = np.array(lab) @ np.cbrt(np.array(cone) @ rgb)
    return found


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("vision", sorted(VISION))
@pytest.mark.parametrize(("group", "least"), [("compute", 9.0), ("axes", 7.5)])
def test_colours_can_be_told_apart(theme: str, vision: str, group: str, least: float) -> None:
    """Distances in OKLab × 100; about 2 is just noticeable. Axes also have labelled lanes of their own."""
    colours = set(palette()[theme][group].values()) - {palette()[theme]["compute"]["copy"]}
    seen = [oklab(np.clip(np.array(VISION[vision]) @ linear(colour), 0, 1)) for colour in sorted(colours)]
    assert min(100 * float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2)) >= least


def test_waiting_states_differ_in_hatch_where_they_can_meet() -> None:
    hatch = palette()["hatch"]
    directions = [hatch[name] for name in ("bubble", "other", "tp", "cp", "ep", "dp", "pp")]
    assert len(set(directions)) == len(directions)


@pytest.mark.parametrize("name", ["pipeline_run", "fsdp_run"])
def test_schedule_covers_each_row(name: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(name)
    figure = figures.schedule(run)
    step = {row.rank: row for row in breakdown(run) if row.step == 1 or len(breakdown(run)) == 4}
    width: dict[str, float] = {}
    for bar in figure.data:
        for row, length in zip(bar.y, bar.x, strict=True):
            width[row] = width.get(row, 0) + length
    assert sorted(width.values()) == pytest.approx(sorted(row.window_ns / 1e6 for row in step.values()))


def test_schedule_names_every_microbatch(pipeline_run: Run) -> None:
    (forward,) = [bar for bar in figures.schedule(pipeline_run).data if bar.name == "Forward"]
    assert sorted(zip(forward.y, forward.text, strict=True)) == [
        (f"Stage {stage}", str(batch)) for stage in range(4) for batch in range(8)
    ]


def test_a_long_schedule_is_refused_with_advice(fsdp_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MOST_CELLS", 10)
    with pytest.raises(FigureError, match=r"fewer ranks.*report_html"):
        figures.schedule(fsdp_run)


def test_breakdown_is_that_of_the_analysis(fsdp_run: Run) -> None:
    figure = figures.breakdown(fsdp_run, step=2)
    expected = {f"Rank {row.rank}": row.shares for row in breakdown(fsdp_run) if row.step == 2}
    (exposed,) = [bar for bar in figure.data if bar.name == "Exposed DP"]
    for row, share in zip(exposed.y, exposed.x, strict=True):
        assert share == pytest.approx(100 * expected[row]["exposed:dp"])
    totals = np.sum([bar.x for bar in figure.data], axis=0)
    assert totals == pytest.approx([100] * 4)


def test_memory_rises_to_its_peak(pipeline_run: Run) -> None:
    figure = figures.memory(pipeline_run)
    assert [max(line.y) for line in figure.data] == pytest.approx([54, 48, 42, 36])
    assert figure.layout.shapes[0].y0 == 80


def test_compare_ends_at_the_difference(pipeline_run: Run, recorded_pipeline_run: Run) -> None:
    found = compare(pipeline_run, recorded_pipeline_run)
    (bars,) = figures.compare(pipeline_run, recorded_pipeline_run).data
    assert bars.x[-1] == pytest.approx((found.b_step_ns - found.a_step_ns) / 1e6)
    assert sum(bars.x[:-1]) == pytest.approx(bars.x[-1])


def test_overlap_is_that_of_the_analysis(fsdp_run: Run) -> None:
    figure = figures.overlap(fsdp_run, step=1)
    rows = [row for row in breakdown(fsdp_run) if row.step == 1]
    drawn = {bar.name: list(bar.x) for bar in figure.data}
    assert drawn["DP hidden behind compute"] == pytest.approx([row.hidden_ns["dp"] / 1e6 for row in rows])
    assert drawn["DP exposed"] == pytest.approx([row.ns["exposed:dp"] / 1e6 for row in rows])


def test_links_are_drawn_where_a_run_has_them(tmp_path: Path, fsdp_run: Run) -> None:
    with pytest.raises(FigureError, match="--engine contended"):
        figures.links(fsdp_run)
    path = write_run(tmp_path / "run", fsdp_run.info, fsdp_run.spans())
    word = pa.dictionary(pa.int32(), pa.string())
    begin = min(row["start_ns"] for row in fsdp_run.spans().to_pylist())
    table = pa.table(
        {"rank": pa.array([0, 1], pa.int32()), "tier": pa.array(["far", "near"], word),
         "direction": pa.array(["in", "out"], word), "start_ns": [begin, begin],
         "end_ns": [10**12, 10**12], "used": [0.5, 1.0]}
    )  # fmt: skip
    with pa.OSFile(str(path / "links.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    near, far = figures.links(open_run(path)).data
    assert (list(far.y), list(near.y)) == (["rank 0 in"], ["rank 1 out"])
    assert np.array(far.z).max() == pytest.approx(50), "percent"
    assert np.array(near.z).max() == pytest.approx(100)


SWEEP = [
    {"name": "a", "peak_memory_bytes": 20e9, "tokens_per_s_per_gpu": 700, "memory_limit_bytes": 80e9},
    {"name": "b", "peak_memory_bytes": 60e9, "tokens_per_s_per_gpu": 900, "memory_limit_bytes": 80e9},
    {"name": "c", "peak_memory_bytes": 90e9, "tokens_per_s_per_gpu": 950, "memory_limit_bytes": 80e9},
    {"name": "d", "peak_memory_bytes": 70e9, "tokens_per_s_per_gpu": 600, "memory_limit_bytes": 80e9},
]


def test_pareto_names_the_best_that_fits_and_the_front() -> None:
    figure = figures.pareto(SWEEP)
    fits, misfits, edge = figure.data
    assert sorted(fits.text) == ["a", "b", "d"]
    assert list(misfits.text) == ["c"]
    assert list(edge.x) == [20, 60, 90]
    assert [note.text for note in figure.layout.annotations if "best that fits: b" in note.text]
    with pytest.raises(FigureError, match="d: tokens_per_s_per_gpu=None"):
        figures.pareto([{"name": "d", "peak_memory_bytes": 1}])
    with pytest.raises(FigureError, match="no layout"):
        figures.pareto([])


def test_pareto_tells_a_setting_apart_by_colour_and_shape() -> None:
    rows = [row | {"tp": 2 ** (number % 3)} for number, row in enumerate(SWEEP)]
    groups = [trace for trace in figures.pareto(rows).data if trace.mode == "markers"]
    assert [trace.name for trace in groups] == ["tp 1, fits", "tp 2, fits", "tp 4, does not fit"]
    assert len({(trace.marker.color, trace.marker.symbol) for trace in groups}) == 3
    assert sum(len(trace.x) for trace in groups) == len(rows)


def test_accuracy_draws_every_prediction_once() -> None:
    rows = [
        {"id": f"{i}", "family": "ab"[i % 2], "predicted": 2.0 + i, "measured": 3.0 + i} for i in range(9)
    ]
    figure = figures.accuracy(rows)
    assert sorted(point for trace in figure.data for point in trace.y) == pytest.approx(
        sorted((3 + i) / (2 + i) for i in range(9))
    )
    for bad in (0, -1, None, True, float("nan")):
        with pytest.raises(FigureError, match="a number above zero"):
            figures.accuracy([{"predicted": bad, "measured": 1.0}])


@pytest.mark.parametrize("name", ["pipeline_run", "fsdp_run"])
def test_a_notebook_shows_the_key_figures_of_a_run(name: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(name)
    shown = run._repr_html_() or ""
    for one in headline(run, summarize(run)):
        assert f"<b>{html.escape(one['value'])}</b>" in shown
    drawn = picture(run, 72)
    assert drawn is not None
    letters = re.sub(r"<[^>]*>", "", shown[shown.index("<pre ") : shown.index("</pre>")])
    for line in drawn.lines[:8]:
        assert html.escape(line.name) in letters
        assert "".join(piece.text for piece in line.pieces) in html.unescape(letters)
    found = compare(run, run)._repr_html_()
    assert "difference" in found
    assert "<script" not in shown + found


def test_a_run_is_one_line_without_its_spans(pipeline_run: Run, tmp_path: Path) -> None:
    info = replace(pipeline_run.info, name="mine", summary={"step_time_s": 0.25})
    described = open_run(write_run(tmp_path / "run", info, pipeline_run.spans()))
    ranks = pipeline_run.info.world_size
    assert repr(described) == f"<Run 'mine': {info.origin}, {ranks} ranks, step 250.00 ms>"
    for path in (tmp_path / "run").glob("*.arrow"):
        path.write_bytes(b"")
    assert repr(described) == f"<Run 'mine': {info.origin}, {ranks} ranks, step 250.00 ms>"
    unknown = replace(info, summary={})
    assert "step" not in repr(open_run(write_run(tmp_path / "other", unknown, pipeline_run.spans())))
    found = repr(compare(pipeline_run, pipeline_run))
    assert found.startswith("<Comparison of a step: ")
    assert len(found) < 200


def test_a_notebook_takes_names_as_text(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    info = RunInfo(origin="recorded", world_size=1, name=evil, warnings=(evil,), model={"name": evil})
    nothing = {"rank": [0], "category": ["compute"], "kind": [evil], "start_ns": [0], "duration_ns": [0]}
    empty = open_run(write_run(tmp_path / "run", info, timeline(nothing)))
    shown = empty._repr_html_() or ""
    assert "<img" not in shown
    assert "&lt;img" in shown


VIEWER = Path(figures.__file__).parents[1] / "viewer"
PICTURES = {  # of report.html and sweep.html, by the id of what they are drawn into
    "schedule": (figures.schedule, figures.lanes),
    "overlay": (figures.critical_path,),
    "waterfall": (figures.compare,),
    "overview": (figures.overview,),
    "history": (figures.history,),
    "links": (figures.links,),
    "memory": (figures.memory,),
    "shares": (figures.breakdown, figures.overlap),  # bars in a table
    "ratios": (figures.operations,),
    "points": (figures.pareto,),
}


def test_every_picture_of_the_report_is_a_figure() -> None:
    pages = "".join((VIEWER / f"{name}.html").read_text() for name in ("report", "sweep"))
    drawn = re.findall(r'<(?:canvas id|div id|table id)="(\w+)"', pages)
    no_pictures = {"differences", "peaks", "operations", "tables", "basis", "warnings", "legend", "tip"}
    assert set(re.findall(r'<canvas id="(\w+)"', pages)) <= set(PICTURES) <= set(drawn) - no_pictures
    of_pictures = {function.__name__ for functions in PICTURES.values() for function in functions}
    assert of_pictures | {"accuracy"} == set(figures.__all__)  # of validate, which has a page of its own


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_picture_is_drawn(
    theme: str, pipeline_run: Run, recorded_pipeline_run: Run, fsdp_run: Run
) -> None:
    for draw in (figures.schedule, figures.lanes, figures.overview, figures.critical_path, figures.breakdown):
        for run in (pipeline_run, fsdp_run):
            assert draw(run, theme=theme).to_json()
    for beside in (figures.schedule, figures.compare, figures.operations):
        assert beside(pipeline_run, recorded_pipeline_run, theme=theme).to_json()
    assert figures.history([pipeline_run, recorded_pipeline_run], theme=theme).to_json()


def test_a_schedule_of_two_has_the_rows_of_both(pipeline_run: Run, recorded_pipeline_run: Run) -> None:
    both = figures.schedule(pipeline_run, recorded_pipeline_run)
    rows = both.layout.yaxis.categoryarray
    assert [row.rpartition(", ")[2] for row in rows] == ["simulated", "recorded"] * 4
    alone = figures.schedule(pipeline_run)

    def time(figure: object, ending: str) -> float:
        bars = figure.data  # type: ignore[attr-defined]
        return float(sum(x for bar in bars for y, x in zip(bar.y, bar.x, strict=True) if y.endswith(ending)))

    assert time(both, ", simulated") == pytest.approx(time(alone, ""))
    assert time(both, ", recorded") == pytest.approx(time(figures.schedule(recorded_pipeline_run), ""))


def test_lanes_draw_waiting_hidden_and_exposed_transfers(fsdp_run: Run) -> None:
    drawn = {bar.name: sum(bar.x) for bar in figures.lanes(fsdp_run, step=1).data}
    rows = [row for row in breakdown(fsdp_run) if row.step == 1]
    assert drawn["DP hidden behind compute"] == pytest.approx(sum(row.hidden_ns["dp"] for row in rows) / 1e6)
    spans = fsdp_run.spans().to_pylist()
    ends = [row for row in spans if row["axis"] == "dp" and row["step"] == 1]
    assert sum(length for name, length in drawn.items() if name.startswith("DP")) == pytest.approx(
        sum(row["duration_ns"] for row in ends) / 1e6
    )


def test_the_overview_has_a_line_for_every_rank_and_the_colours_of_the_step(pipeline_run: Run) -> None:
    (picture_,) = figures.overview(pipeline_run).data
    assert len(picture_.y) == len(pipeline_run.ranks) == len(picture_.z)
    names = list(picture_.colorbar.ticktext)
    shares = {name: float((np.array(picture_.z) == at).mean()) for at, name in enumerate(names)}
    step = [row for row in breakdown(pipeline_run) if row.step == breakdown(pipeline_run)[0].step]
    length = max(row.window_ns for row in step)
    busy = sum(row.shares["compute"] * row.window_ns for row in step) / len(step) / length
    worked = {"Forward", "Backward", "Optimizer", "Other compute", "Recompute", "Copy"}
    assert sum(share for name, share in shares.items() if name in worked) == pytest.approx(busy, abs=0.01)


def test_the_critical_path_is_as_long_as_the_step(pipeline_run: Run, fsdp_run: Run) -> None:
    for run in (pipeline_run, fsdp_run):
        figure = figures.critical_path(run)
        bars = [bar for bar in figure.data if bar.type == "bar"]
        chosen = typical_step(run)[0]
        ends = [window for window in windows(run) if window.step == chosen]
        length = max(one.end_ns for one in ends) - min(one.start_ns for one in ends)
        assert sum(sum(bar.x) for bar in bars) == pytest.approx(length / 1e6)


def test_history_and_operations_are_those_of_the_runs(pipeline_run: Run, recorded_pipeline_run: Run) -> None:
    for line, run in zip(
        figures.history([pipeline_run, recorded_pipeline_run]).data,
        (pipeline_run, recorded_pipeline_run),
        strict=True,
    ):
        assert dict(zip(line.x, line.y, strict=True)) == pytest.approx(
            {step: ns / 1e6 for step, ns in step_times_ns(breakdown(run)).items()}
        )
        assert line.line.dash == ("dash" if run.info.origin == "simulated" else "solid")
    same = figures.operations(pipeline_run, pipeline_run).data
    assert {float(ratio) for marks in same for ratio in marks.y} == {1.0}
    with pytest.raises(FigureError, match="no run to draw"):
        figures.history([])


def test_what_cannot_be_drawn_is_said(fsdp_run: Run) -> None:
    with pytest.raises(FigureError, match=r"step 9: .* has steps 0, 1, 2, 3"):
        figures.schedule(fsdp_run, step=9)
    with pytest.raises(FigureError, match="rank 7 is not stored"):
        figures.breakdown(fsdp_run, ranks=[7])
    with pytest.raises(FigureError, match="no memory over time"):
        figures.memory(fsdp_run)
    with pytest.raises(FigureError, match="theme 'blue': one of light, dark"):
        figures.schedule(fsdp_run, theme="blue")
