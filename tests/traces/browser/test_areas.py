"""The law of pictures: the area of a colour is the share of the time that it states, on rendered pixels."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.browsing import Browser, Shown
from tests.simulator.predicted import simulate

from foretrace.simulator.config import job_from
from foretrace.traces.report.cells import rank_step
from foretrace.traces.report.kinds import Kinds, Labels, fill, mix, palette
from foretrace.traces.run import Run

POINTS = 0.02
"""Share of all area by which a colour may be off."""


def counted(function: str) -> str:
    """Return what calls a function of areas.js in the page."""
    script = (Path(__file__).parent / "areas.js").read_text("utf-8")
    return f"given => {{ {script}\n return {function}(given); }}"


@cache
def dualpipe() -> Run:
    layout = {"model": "deepseek-v2-lite", "cluster": "dgx-h100", "gpus": 32, "pp": 4, "ep": 8}
    return simulate(job_from({**layout, "schedule": "dualpipe", "seq_len": 2048, "global_batch": 80})).run


@cache
def tensor_parallel() -> Run:
    layout = {"model": "llama3-8b", "cluster": "dgx-a100", "gpus": 32, "tp": 8, "pp": 4, "global_batch": 16}
    return simulate(job_from({**layout, "seq_len": 2048})).run


@cache
def zero_bubble() -> Run:
    layout = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "pp": 8, "global_batch": 16}
    return simulate(job_from({**layout, "schedule": "zb-h1", "recompute": "full"})).run


MADE: dict[str, Callable[[], Run]] = {
    "dualpipe": dualpipe,
    "tensor_parallel": tensor_parallel,
    "zero_bubble": zero_bubble,
}


@pytest.fixture(scope="module", params=[*MADE, "pipeline_run", "fsdp_run"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs of five kinds, of which a browser test has all."""
    found: Run = MADE[request.param]() if request.param in MADE else request.getfixturevalue(request.param)
    return found


def shares(of: dict[str, float]) -> dict[str, float]:
    """Return shares of the whole."""
    whole = sum(of.values())
    return {name: value / whole for name, value in of.items()}


def is_true(painted: dict[str, float], stated: dict[str, float]) -> None:
    """Compare the shares of areas with those of times."""
    areas, times = shares(painted), shares(stated)
    off = {name: areas.get(name, 0) - times.get(name, 0) for name in {*areas, *times}}
    assert max(map(abs, off.values())) <= POINTS, (areas, times)


@pytest.mark.parametrize(("width", "theme"), [(390, "dark"), (1440, "light"), (2560, "dark")])
def test_the_schedule_is_true(open_report: Any, run: Run, width: int, theme: str) -> None:
    opened = open_report(run, width=width, theme=theme)
    for _ in range(3):
        names, areas, times = opened.page.evaluate(counted("schedule"))
        assert times
        is_true(dict(zip(names, areas, strict=True)), dict(zip(names, times, strict=True)))
        for key in "wwd":
            opened.page.keyboard.press(key)
        opened.settle()


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("name", ["tensor_parallel", "dualpipe"])
def test_the_picture_of_all_ranks_is_true(open_report: Any, name: str, width: int) -> None:
    run = MADE[name]()
    names, areas = open_report(run, width=width).page.evaluate(counted("overview"))
    is_true(dict(zip(names, areas, strict=True)), times_of(run, run.ranks))


def times_of(run: Run, ranks: Any) -> dict[str, float]:
    """Return nanoseconds by kind, of *ranks* together."""
    kinds = Kinds((run,))
    labels = Labels(kinds)
    found: Counter[str] = Counter()
    for rank in ranks:
        stored = run.source(rank)
        for kind, ns in rank_step(run, stored, 0, labels, labels.of_rank(run, stored)).parts_ns():
            found[kinds.entries[kind]["id"]] += ns
    return dict(found)


@pytest.mark.parametrize(("name", "theme"), [("dualpipe", "light"), ("zero_bubble", "dark")])
def test_the_figure_for_notebooks_is_true(browser: Browser, tmp_path: Path, name: str, theme: str) -> None:
    run = MADE[name]()
    figures = pytest.importorskip("foretrace.traces.figures", reason="plotly is not installed")
    ranks = run.stored_ranks[:4]
    figure = figures.schedule(run, ranks=ranks, theme=theme, step=0)
    (tmp_path / "figure.html").write_text(figure.to_html(include_plotlyjs=True), "utf-8")
    shown = Shown(browser, f"file://{tmp_path}/figure.html", 2400, height=700)
    page = shown.page
    page.wait_for_selector(".bars path")
    entries = Kinds((run,)).entries
    colours: list[list[int]] = []
    for entry in entries:
        if entry["group"] not in ("compute", "state"):
            colours.append([])
            continue
        look = fill(entry, palette(), theme)
        own = [look.colour, mix(look.colour, "#000000", 0.3), *([look.line] if look.hatch else [])]
        colours.append([int(colour[1:], 16) for colour in own])
    shot = base64.b64encode(page.screenshot()).decode()
    areas = page.evaluate(counted("plotted"), [shot, colours, int(palette()[theme]["surface"]["bg"][1:], 16)])
    shown.leave()
    is_true(dict(zip((e["id"] for e in entries), areas, strict=True)), times_of(run, ranks))


def test_bars_beside_the_tables_are_true(open_report: Any, run: Run) -> None:
    page = open_report(run).page
    drawn = page.evaluate(
        "() => [...document.querySelectorAll('#shares .stack')].map(bar => [...bar.children].map(part =>"
        " part.getBoundingClientRect().width / bar.getBoundingClientRect().width))"
    )
    stated = page.evaluate(
        "foretrace.view.slots.map(({run, row}) => { const {parts, window_ns} = run.steps[run.step].rows[row];"
        " return parts.map(([, ns]) => ns / window_ns); })"
    )
    assert len(drawn) == len({tuple(row) for row in stated}) or len(drawn) == len(stated)
    for bar, row in zip(drawn, stated, strict=False):
        assert bar == pytest.approx(row, abs=0.005)
