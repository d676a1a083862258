"""The page draws, loads nothing, and runs nothing that a run says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foretrace.traces.info import RunInfo
from foretrace.traces.run import Run
from foretrace.traces.store import open_run, write_run
from foretrace.traces.timeline import timeline

NAMES = ("pipeline_run", "many_ranks_run", "fsdp_run")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("screen", [(1400, "light"), (390, "dark")])
def test_page_draws_without_errors_or_requests(
    open_report: Any, request: pytest.FixtureRequest, name: str, screen: tuple[int, str]
) -> None:
    width, theme = screen
    opened = open_report(request.getfixturevalue(name), width=width, theme=theme)
    assert opened.problems == []
    assert all(url.startswith(("file:", "data:")) for url in opened.requests)
    colours = opened.page.evaluate(
        "() => { const c = document.querySelector('#schedule'); const d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; const s = new Set();"
        "for (let i = 0; i < d.length; i += 4) s.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]); return s.size; }"
    )
    assert colours > 20
    overflow = opened.page.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    assert overflow <= 0
    assert opened.page.evaluate("document.documentElement.dataset.theme") == theme


def paired(folder: Path) -> Run:
    """Return a rank on which the layers of a forward and of a backward pass take turns."""
    n = 16
    columns: dict[str, object] = {
        "rank": [0] * (n + 1), "stream": ["compute"] * n + ["step"], "category": ["compute"] * n + ["step"],
        "kind": ["forward", "backward"] * (n // 2) + ["step"], "start_ns": [1000 * i for i in range(n)] + [0],
        "duration_ns": [900] * n + [40_000], "microbatch": [7, 3] * (n // 2) + [-1],
        "layer": [i // 2 for i in range(n)] + [-1], "step": [0] * (n + 1),
    }  # fmt: skip
    return open_run(write_run(folder / "run", RunInfo(origin="recorded", world_size=1), timeline(columns)))


def test_a_pair_is_one_cell_in_two_halves_until_its_turns_can_be_seen(
    open_report: Any, tmp_path: Path
) -> None:
    opened = open_report(paired(tmp_path))
    page = opened.page
    page.evaluate("foretrace.view.t1 = 160_000, window.dispatchEvent(new Event('resize'))")
    opened.settle()
    assert opened.problems == []
    cell = opened.cell(0, "forward", 7)
    _, height = page.evaluate("foretrace.view.lanes[0]")
    x, upper, lower = cell["left"] + 4, cell["y"] - 4, cell["y"] - 9 + height * 0.6
    assert opened.pixel(x, upper) == [0x2F, 0x68, 0xC4]
    assert opened.pixel(x, lower) == [0xEE, 0x96, 0x36]
    page.mouse.move(x, lower)
    words = page.inner_text("#tip")
    for said in ("as a pair", "micro-batch 7", "micro-batch 3", "16 turns"):
        assert said in words
    for y, batch in ((upper, 7), (lower, 3)):
        page.mouse.click(x, y)
        assert page.evaluate("foretrace.view.follow.microbatch") == batch
    page.keyboard.press("Escape")
    page.keyboard.press("0")
    opened.settle()
    cell = opened.cell(0, "backward", 3)
    page.mouse.move(cell["left"] + 5, cell["y"])
    assert page.inner_text("#tip").startswith("Backward")


SPANS = """foretrace.view.slots.map(({run, row}) => {
  const [a, b] = foretrace.laneRange(run, row, 0);
  return [...run.start.slice(a, b), ...run.end.slice(a, b), ...run.kind.slice(a, b)];
})"""
"""Everything on the compute lanes of the rows on the screen."""


def test_what_a_large_page_does_not_begin_with_comes_after_its_first_picture(
    open_report: Any, report_of: Any, fsdp_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = open_report(fsdp_run)
    monkeypatch.setattr("foretrace.traces.pack.LARGE", 10)
    report_of.cache_clear()
    parted = open_report(fsdp_run)
    report_of.cache_clear()
    assert 'id="later"' not in whole.path.read_text()
    assert 'id="later"' in parted.path.read_text()
    parted.page.wait_for_selector("body[data-whole]")
    seen = []
    for opened in (whole, parted):
        steps = []
        for step in "012":
            opened.page.select_option("#steps select", step)
            opened.settle()
            steps.append(opened.page.evaluate(SPANS))
        seen.append(steps)
        assert opened.problems == []
    assert seen[0] == seen[1]
    assert all(len(row) > 30 for steps in seen for rows in steps for row in rows)


@pytest.mark.parametrize("width", [1400, 390])
def test_two_runs_are_drawn_row_by_row(
    open_report: Any, pipeline_run: Run, recorded_pipeline_run: Run, width: int
) -> None:
    opened = open_report(pipeline_run, recorded_pipeline_run, width=width)
    assert opened.problems == []
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert opened.page.evaluate(overflow) <= 0
    captions = opened.page.evaluate(
        "[...document.querySelectorAll('caption')].map(one => one.getBoundingClientRect().right)"
    )
    assert captions
    assert max(captions) <= width
    slots = opened.page.evaluate("foretrace.view.slots.map(slot => [slot.rank, slot.run.key])")
    assert slots == [[rank, key] for rank in (0, 4, 8, 12) for key in "ab"]
    assert opened.page.locator("#waterfall .fall").count() > 2
    assert opened.page.locator("#findings .of").all_inner_texts() == ["simulated:", "recorded:"]
    assert opened.page.locator("#critical .line").count() == 2
    before = opened.page.evaluate("document.querySelector('#overlay').toDataURL()")
    opened.page.click("#path")
    opened.settle()
    assert opened.page.evaluate("document.querySelector('#overlay').toDataURL()") != before
    assert "recorded" in opened.page.inner_text("#differences")


def test_rows_add_up_to_the_step(pipeline: Any) -> None:
    shares = pipeline.page.evaluate(
        "foretrace.view.slots.map(({run, row}) => { const [low, high] = foretrace.laneRange(run, row, 0);"
        "let sum = 0; for (let i = low; i < high; i++) sum += run.end[i] - run.start[i];"
        "return sum / run.steps[run.step].rows[row].window_ns; })"
    )
    assert shares == pytest.approx([1] * 4)


def test_cells_have_the_colour_of_their_kind(pipeline: Any) -> None:
    cell = pipeline.cell(1, "backward", 3)
    assert pipeline.pixel(cell["left"] + 8, cell["y"]) == [0xEE, 0x96, 0x36]


def test_print_is_light_and_without_controls(pipeline: Any) -> None:
    pipeline.page.click("#theme")
    pipeline.page.emulate_media(media="print")
    pipeline.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert pipeline.page.evaluate("document.documentElement.dataset.theme") == "light"
    for control in ("#theme", ".search", ".controls", "#path"):
        assert pipeline.page.locator(control).is_hidden(), control
    pipeline.page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert pipeline.page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_paper_shows_the_whole_width_and_the_critical_path(pipeline: Any) -> None:
    page = pipeline.page
    page.click("#path")
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 1047, "height": 700})
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#overlay").is_hidden()
    for canvas in ("#schedule", "#memory"):
        inner, outer = (page.locator(one).bounding_box()["width"] for one in (canvas, "main"))
        assert outer - 4 <= inner <= outer
        assert page.evaluate(f"document.querySelector('{canvas}').width") == 2950  # 1180 × 2.5 dots
    seen = page.evaluate(
        "() => { const c = document.querySelector('#schedule'); const d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; const s = new Set();"
        "for (let i = 0; i < d.length; i += 4) s.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);"
        "return [...s]; }"
    )
    assert 0xB42318 in seen  # drawn on the schedule itself: paper has one layer
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    page.locator("#overlay").wait_for(state="visible")  # a resized page is drawn in its next frame


def test_theme_button_switches(pipeline: Any) -> None:
    pipeline.page.click("#theme")
    assert pipeline.page.evaluate("document.documentElement.dataset.theme") == "dark"
    pipeline.settle()
    assert pipeline.problems == []


def test_names_from_a_run_stay_text(open_report: Any, tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    columns: dict[str, object] = {
        "rank": [0, 0, 0], "category": ["step", "compute", "collective"], "kind": ["step", evil, evil],
        "name": [evil] * 3, "stream": ["step", "compute", evil], "start_ns": [0, 0, 6_000_000],
        "duration_ns": [9_000_000, 4_000_000, 1_000_000], "axis": ["", "", evil], "step": [0] * 3,
    }  # fmt: skip
    info = RunInfo(
        origin="recorded", world_size=1, name=evil, warnings=(evil,), model={"name": evil, evil: evil}
    )
    opened = open_report(open_run(write_run(tmp_path / "run", info, timeline(columns))))
    opened.page.locator("#schedule").scroll_into_view_if_needed()
    box = opened.page.locator("#schedule").bounding_box()
    for share in (0.2, 0.7):
        opened.page.mouse.move(box["x"] + box["width"] * share, box["y"] + 40)
    assert evil in opened.page.inner_text("h1")
    assert opened.page.locator("img").count() == 0
    assert opened.problems == []
