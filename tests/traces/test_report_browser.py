"""The page in a real browser: draws, answers the pointer, loads nothing, runs nothing that a run says.

Needs playwright and a Chromium on the PATH; without them these tests are skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from traces.info import RunInfo
from traces.report.html import write_report
from traces.run import Run
from traces.store import open_run, write_run
from traces.timeline import timeline

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")

ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]

CELL = """([slot, kind, batch]) => {
  const {view, kinds, laneRange, toX, rowTop} = window.foretrace;
  const {run, row} = view.slots[slot];
  const [low, high] = laneRange(run, row, 0);
  const ours = [...Array(high - low).keys()].map(k => k + low)
    .filter(i => kinds()[run.kind[i]].id === kind && run.microbatch[i] === batch);
  const box = document.querySelector('#schedule').getBoundingClientRect();
  const [first, last] = [ours[0], ours[ours.length - 1]];
  return {x: box.left + toX((run.start[first] + run.end[last]) / 2), left: box.left + toX(run.start[first]),
          y: box.top + rowTop(slot) + 12, ns: run.end[last] - run.start[first]};
}"""
"""Finds one pass on the page: slot, kind, micro-batch to the middle of its cell."""

TRANSFER = """([slot, nth]) => {
  const {view, laneRange, toX, rowTop} = window.foretrace;
  const {run, row} = view.slots[slot];
  const i = laneRange(run, row, 1)[0] + nth;
  const box = document.querySelector('#schedule').getBoundingClientRect();
  return {x: box.left + toX((run.start[i] + run.end[i]) / 2),
          y: box.top + rowTop(slot) + view.lanes[1][0] + 3, sequence: run.sequence[i]};
}"""
"""Finds the n-th transfer in the first lane of communication."""

PIXEL = """([x, y]) => {
  const canvas = document.querySelector('#schedule'), box = canvas.getBoundingClientRect();
  return [...canvas.getContext('2d').getImageData(x - box.left, y - box.top, 1, 1).data].slice(0, 3);
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield found
        found.close()


class Opened:
    """A report in the browser, with what went wrong in it."""

    def __init__(
        self, browser: Any, path: Path, runs: tuple[Run, ...], width: int = 1400, theme: str = "light"
    ) -> None:
        write_report(path, *runs)
        self.page = browser.new_page(viewport={"width": width, "height": 1000})
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", self._refuse)
        self.page.goto(f"file://{path}?theme={theme}")
        self.page.wait_for_selector("body[data-ready]", timeout=20_000)
        self.path = path

    def _refuse(self, dialog: Any) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def cell(self, slot: int, kind: str, batch: int) -> dict[str, float]:
        self.page.locator("#schedule").scroll_into_view_if_needed()
        found: dict[str, float] = self.page.evaluate(CELL, [slot, kind, batch])
        return found

    def settle(self) -> None:
        self.page.evaluate(
            "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )


@pytest.fixture
def pipeline(browser: Any, tmp_path: Path, pipeline_run: Run) -> Iterator[Opened]:
    opened = Opened(browser, tmp_path / "r.html", (pipeline_run,))
    yield opened
    opened.page.close()


NAMES = ("pipeline_run", "many_ranks_run", "fsdp_run")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("screen", [(1400, "light"), (390, "dark")])
def test_page_draws_without_errors_or_requests(
    browser: Any, tmp_path: Path, request: pytest.FixtureRequest, name: str, screen: tuple[int, str]
) -> None:
    width, theme = screen
    opened = Opened(browser, tmp_path / "r.html", (request.getfixturevalue(name),), width, theme)
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
    opened.page.close()


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


def test_a_pair_is_one_cell_in_two_halves_until_its_turns_can_be_seen(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, tmp_path / "r.html", (paired(tmp_path),))
    page = opened.page
    page.evaluate("foretrace.view.t1 = 160_000, window.dispatchEvent(new Event('resize'))")
    opened.settle()
    assert opened.problems == []
    cell = opened.cell(0, "forward", 7)
    _, height = page.evaluate("foretrace.view.lanes[0]")
    x, upper, lower = cell["left"] + 4, cell["y"] - 4, cell["y"] - 9 + height * 0.6
    assert page.evaluate(PIXEL, [x, upper]) == [0x2F, 0x68, 0xC4]
    assert page.evaluate(PIXEL, [x, lower]) == [0xEE, 0x96, 0x36]
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
    page.close()


SPANS = """foretrace.view.slots.map(({run, row}) => {
  const [a, b] = foretrace.laneRange(run, row, 0);
  return [...run.start.slice(a, b), ...run.end.slice(a, b), ...run.kind.slice(a, b)];
})"""
"""Everything on the compute lanes of the rows on the screen."""


def test_what_a_large_page_does_not_begin_with_comes_after_its_first_picture(
    browser: Any, tmp_path: Path, fsdp_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Opened(browser, tmp_path / "w.html", (fsdp_run,))
    monkeypatch.setattr("traces.pack.LARGE", 10)
    parted = Opened(browser, tmp_path / "p.html", (fsdp_run,))
    assert 'id="later"' not in (tmp_path / "w.html").read_text()
    assert 'id="later"' in (tmp_path / "p.html").read_text()
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
        opened.page.close()
    assert seen[0] == seen[1]
    assert all(len(row) > 30 for steps in seen for rows in steps for row in rows)


@pytest.mark.parametrize("width", [1400, 390])
def test_two_runs_are_drawn_row_by_row(
    browser: Any, tmp_path: Path, pipeline_run: Run, recorded_pipeline_run: Run, width: int
) -> None:
    opened = Opened(browser, tmp_path / "r.html", (pipeline_run, recorded_pipeline_run), width)
    assert opened.problems == []
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert opened.page.evaluate(overflow) <= 0
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
    opened.page.close()


def test_rows_add_up_to_the_step(pipeline: Opened) -> None:
    shares = pipeline.page.evaluate(
        "foretrace.view.slots.map(({run, row}) => { const [low, high] = foretrace.laneRange(run, row, 0);"
        "let sum = 0; for (let i = low; i < high; i++) sum += run.end[i] - run.start[i];"
        "return sum / run.steps[run.step].rows[row].window_ns; })"
    )
    assert shares == pytest.approx([1] * 4)


def test_hover_says_what_is_there(pipeline: Opened) -> None:
    cell = pipeline.cell(2, "forward", 5)
    pipeline.page.mouse.move(cell["x"], cell["y"])
    tip = pipeline.page.inner_text("#tip")
    assert "Forward · Stage 2" in tip
    assert "micro-batch\t5" in tip
    assert "layers\t8 to 11" in tip
    assert f"{cell['ns'] / 1e6:.3f} ms" in tip
    assert "TP exposed within" in tip


def test_cells_have_the_colour_of_their_kind(pipeline: Opened) -> None:
    cell = pipeline.cell(1, "backward", 3)
    assert pipeline.page.evaluate(PIXEL, [cell["left"] + 8, cell["y"]]) == [0xEE, 0x96, 0x36]


def test_zoom_keeps_the_time_under_the_pointer(pipeline: Opened) -> None:
    cell = pipeline.cell(0, "backward", 4)
    pipeline.page.mouse.move(cell["x"], cell["y"])
    box = pipeline.page.locator("#schedule").bounding_box()
    before = pipeline.page.evaluate("x => foretrace.toTime(x)", cell["x"] - box["x"])
    pipeline.page.mouse.wheel(0, -300)
    pipeline.settle()
    after = pipeline.page.evaluate("x => foretrace.toTime(x)", cell["x"] - box["x"])
    width = pipeline.page.evaluate("foretrace.view.t1 - foretrace.view.t0")
    assert width < 0.7 * pipeline.page.evaluate("foretrace.view.far")
    assert after == pytest.approx(before, abs=width / 1000)


def test_zooming_in_shows_layers(pipeline: Opened) -> None:
    for _ in range(3):
        cell = pipeline.cell(0, "backward", 4)
        pipeline.page.mouse.move(cell["x"], cell["y"])
        pipeline.page.mouse.wheel(0, -300)
        pipeline.settle()
    cell = pipeline.cell(0, "backward", 4)
    pipeline.page.mouse.move(cell["left"] + 5, cell["y"])
    assert "layer\t0" in pipeline.page.inner_text("#tip")


def test_keys_move_and_reset_the_window(pipeline: Opened) -> None:
    def window() -> tuple[float, float]:
        pipeline.settle()
        found = pipeline.page.evaluate("[foretrace.view.t0, foretrace.view.t1]")
        return found[0], found[1]

    whole = window()
    pipeline.page.keyboard.press("w")
    zoomed = window()
    assert zoomed[1] - zoomed[0] < whole[1] - whole[0]
    pipeline.page.keyboard.press("d")
    assert window()[0] > zoomed[0]
    pipeline.page.keyboard.press("a")
    assert window() == pytest.approx(zoomed)
    pipeline.page.keyboard.press("0")
    assert window() == whole


def test_click_follows_a_microbatch_and_escape_lets_go(pipeline: Opened) -> None:
    cell = pipeline.cell(3, "forward", 6)
    pipeline.page.mouse.click(cell["x"], cell["y"])
    assert pipeline.page.evaluate("foretrace.view.follow.microbatch") == 6
    other = pipeline.cell(1, "backward", 3)
    pipeline.settle()
    assert pipeline.page.evaluate(PIXEL, [other["left"] + 8, other["y"]]) != [0xEE, 0x96, 0x36]
    pipeline.page.keyboard.press("Escape")
    assert pipeline.page.evaluate("foretrace.view.follow") is None


def test_click_on_a_transfer_marks_it_on_every_rank(browser: Any, tmp_path: Path, fsdp_run: Run) -> None:
    opened = Opened(browser, tmp_path / "r.html", (fsdp_run,))
    opened.page.locator("#schedule").scroll_into_view_if_needed()
    place = opened.page.evaluate(TRANSFER, [1, 2])
    opened.page.mouse.move(place["x"], place["y"])
    assert "all gather · DP · Rank 1" in opened.page.inner_text("#tip")
    opened.page.mouse.click(place["x"], place["y"])
    met = opened.page.evaluate(
        "foretrace.meeting().map(({slot, first}) => [slot.rank, slot.run.sequence[first]])"
    )
    assert met == [[rank, place["sequence"]] for rank in range(4)]
    opened.page.close()


def test_shift_drag_measures(pipeline: Opened) -> None:
    cell = pipeline.cell(0, "backward", 1)
    pipeline.page.keyboard.down("Shift")
    pipeline.page.mouse.move(cell["x"], cell["y"])
    pipeline.page.mouse.down()
    pipeline.page.mouse.move(cell["x"] + 100, cell["y"])
    pipeline.page.mouse.up()
    pipeline.page.keyboard.up("Shift")
    low, high = pipeline.page.evaluate("foretrace.view.measure")
    per_pixel = pipeline.page.evaluate("(foretrace.view.t1 - foretrace.view.t0) / foretrace.view.plot")
    assert high - low == pytest.approx(100 * per_pixel, rel=0.01)


def test_legend_hides_a_kind(pipeline: Opened) -> None:
    cell = pipeline.cell(1, "backward", 3)
    button = pipeline.page.locator("#legend button", has_text="Backward").first
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    pipeline.settle()
    cell = pipeline.cell(1, "backward", 3)
    assert pipeline.page.evaluate(PIXEL, [cell["left"] + 8, cell["y"]]) == [255, 255, 255]


def test_the_critical_path_is_drawn_and_taken_away(pipeline: Opened) -> None:
    painted = (
        "() => { const c = document.querySelector('#overlay'); if (c.hidden) return 0;"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; let n = 0;"
        "for (let i = 3; i < d.length; i += 4) n += d[i] > 200; return n; }"
    )
    assert pipeline.page.evaluate(painted) == 0
    pipeline.page.keyboard.press("c")
    pipeline.settle()
    assert pipeline.page.evaluate(painted) > 1000
    assert pipeline.page.get_attribute("#path", "aria-pressed") == "true"
    assert "Critical path" in pipeline.page.inner_text("#critical")
    pipeline.page.click("#path")
    pipeline.settle()
    assert pipeline.page.evaluate(painted) == 0


def test_search_finds_spans_and_goes_from_one_to_the_next(pipeline: Opened) -> None:
    pipeline.page.keyboard.press("/")
    pipeline.page.keyboard.type("reduce scatter dp")
    n_found = pipeline.page.evaluate("foretrace.search.hits.length")
    known = pipeline.page.evaluate(
        "foretrace.view.slots.reduce((n, {run, row}) => { for (let l = 1; l < run.lanes.length; l++) {"
        "const [low, high] = foretrace.laneRange(run, row, l);"
        "if (run.lanes[l].axis === 'dp') n += high - low; } return n; }, 0)"
    )
    assert n_found == known > 0
    assert f"{n_found} spans" in pipeline.page.inner_text("#found")
    far = pipeline.page.evaluate("foretrace.view.far")
    pipeline.page.keyboard.press("Enter")
    pipeline.settle()
    assert pipeline.page.evaluate("foretrace.view.t1 - foretrace.view.t0") < far
    assert pipeline.page.inner_text("#found").startswith(f"1 of {n_found}")
    pipeline.page.fill("#search", "no such thing")
    assert pipeline.page.inner_text("#found") == "no span on these rows is called that"
    pipeline.page.keyboard.press("Escape")
    assert pipeline.page.evaluate("foretrace.search.hits.length") == 0


def test_ranks_can_be_picked(browser: Any, tmp_path: Path, many_ranks_run: Run) -> None:
    opened = Opened(browser, tmp_path / "r.html", (many_ranks_run,))
    before = opened.page.evaluate("foretrace.view.slots.map(slot => slot.rank)")
    opened.page.select_option("#picker select", "3")
    shown = opened.page.evaluate("foretrace.view.slots.map(slot => slot.rank)")
    assert shown != before
    assert shown == opened.page.evaluate("foretrace.meta().picks[3]")
    assert opened.problems == []
    opened.page.close()


def test_print_is_light_and_without_controls(pipeline: Opened) -> None:
    pipeline.page.click("#theme")
    pipeline.page.emulate_media(media="print")
    pipeline.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert pipeline.page.evaluate("document.documentElement.dataset.theme") == "light"
    for control in ("#theme", ".search", ".controls", "#path"):
        assert pipeline.page.locator(control).is_hidden(), control
    pipeline.page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert pipeline.page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_paper_shows_the_whole_width_and_the_critical_path(pipeline: Opened, tmp_path: Path) -> None:
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
    assert page.locator("#overlay").is_visible()


def test_theme_button_switches(pipeline: Opened) -> None:
    pipeline.page.click("#theme")
    assert pipeline.page.evaluate("document.documentElement.dataset.theme") == "dark"
    pipeline.settle()
    assert pipeline.problems == []


def test_a_click_in_the_overview_shows_that_pipeline(
    browser: Any, tmp_path: Path, many_ranks_run: Run
) -> None:
    opened = Opened(browser, tmp_path / "r.html", (many_ranks_run,))
    box = opened.page.locator("#overview").bounding_box()
    opened.page.mouse.click(box["x"] + 400, box["y"] + 26 + 8.5 / 64 * 192)  # the ninth line: dp 1, stage 0
    shown = opened.page.evaluate("foretrace.view.slots.map(slot => [slot.rank, slot.row])")
    assert shown == [[2, 0], [18, 1], [34, 2], [50, 3]]
    opened.page.close()


def test_a_step_can_be_chosen(browser: Any, tmp_path: Path, fsdp_run: Run) -> None:
    opened = Opened(browser, tmp_path / "r.html", (fsdp_run,))
    opened.page.select_option("#steps select", "3")
    assert opened.page.evaluate("foretrace.runs()[0].step") == 3
    assert opened.problems == []
    opened.page.close()


def test_names_from_a_run_stay_text(browser: Any, tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    columns: dict[str, object] = {
        "rank": [0, 0, 0], "category": ["step", "compute", "collective"], "kind": ["step", evil, evil],
        "name": [evil] * 3, "stream": ["step", "compute", evil], "start_ns": [0, 0, 6_000_000],
        "duration_ns": [9_000_000, 4_000_000, 1_000_000], "axis": ["", "", evil], "step": [0] * 3,
    }  # fmt: skip
    info = RunInfo(
        origin="recorded", world_size=1, name=evil, warnings=(evil,), model={"name": evil, evil: evil}
    )
    opened = Opened(
        browser, tmp_path / "r.html", (open_run(write_run(tmp_path / "run", info, timeline(columns))),)
    )
    opened.page.locator("#schedule").scroll_into_view_if_needed()
    box = opened.page.locator("#schedule").bounding_box()
    for share in (0.2, 0.7):
        opened.page.mouse.move(box["x"] + box["width"] * share, box["y"] + 40)
    assert evil in opened.page.inner_text("h1")
    assert opened.page.locator("img").count() == 0
    assert opened.problems == []
    opened.page.close()
