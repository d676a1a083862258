"""The page answers the pointer, the keyboard and its controls."""

from __future__ import annotations

from typing import Any

import pytest

from foretrace.traces.run import Run

TRANSFER = """([slot, nth]) => {
  const {view, laneRange, toX, rowTop} = window.foretrace;
  const {run, row} = view.slots[slot];
  const i = laneRange(run, row, 1)[0] + nth;
  const box = document.querySelector('#schedule').getBoundingClientRect();
  return {x: box.left + toX((run.start[i] + run.end[i]) / 2),
          y: box.top + rowTop(slot) + view.lanes[1][0] + 3, sequence: run.sequence[i]};
}"""
"""Finds the n-th transfer in the first lane of communication."""


def test_hover_says_what_is_there(pipeline: Any) -> None:
    cell = pipeline.cell(2, "forward", 5)
    pipeline.page.mouse.move(cell["x"], cell["y"])
    tip = pipeline.page.inner_text("#tip")
    assert "Forward · Stage 2" in tip
    assert "micro-batch\t5" in tip
    assert "layers\t8 to 11" in tip
    assert f"{cell['ns'] / 1e6:.3f} ms" in tip
    assert "TP exposed within" in tip


def test_zoom_keeps_the_time_under_the_pointer(pipeline: Any) -> None:
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


def test_zooming_in_shows_layers(pipeline: Any) -> None:
    for _ in range(3):
        cell = pipeline.cell(0, "backward", 4)
        pipeline.page.mouse.move(cell["x"], cell["y"])
        pipeline.page.mouse.wheel(0, -300)
        pipeline.settle()
    cell = pipeline.cell(0, "backward", 4)
    pipeline.page.mouse.move(cell["left"] + 5, cell["y"])
    assert "layer\t0" in pipeline.page.inner_text("#tip")


def test_keys_move_and_reset_the_window(pipeline: Any) -> None:
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


def test_click_follows_a_microbatch_and_escape_lets_go(pipeline: Any) -> None:
    cell = pipeline.cell(3, "forward", 6)
    pipeline.page.mouse.click(cell["x"], cell["y"])
    assert pipeline.page.evaluate("foretrace.view.follow.microbatch") == 6
    other = pipeline.cell(1, "backward", 3)
    pipeline.settle()
    assert pipeline.pixel(other["left"] + 8, other["y"]) != [0xEE, 0x96, 0x36]
    pipeline.page.keyboard.press("Escape")
    assert pipeline.page.evaluate("foretrace.view.follow") is None


def test_click_on_a_transfer_marks_it_on_every_rank(open_report: Any, fsdp_run: Run) -> None:
    opened = open_report(fsdp_run)
    opened.page.locator("#schedule").scroll_into_view_if_needed()
    place = opened.page.evaluate(TRANSFER, [1, 2])
    opened.page.mouse.move(place["x"], place["y"])
    assert "all gather · DP · Rank 1" in opened.page.inner_text("#tip")
    opened.page.mouse.click(place["x"], place["y"])
    met = opened.page.evaluate(
        "foretrace.meeting().map(({slot, first}) => [slot.rank, slot.run.sequence[first]])"
    )
    assert met == [[rank, place["sequence"]] for rank in range(4)]


def test_shift_drag_measures(pipeline: Any) -> None:
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


def test_legend_hides_a_kind(pipeline: Any) -> None:
    cell = pipeline.cell(1, "backward", 3)
    button = pipeline.page.locator("#legend button", has_text="Backward").first
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    pipeline.settle()
    cell = pipeline.cell(1, "backward", 3)
    assert pipeline.pixel(cell["left"] + 8, cell["y"]) == [255, 255, 255]


def test_the_critical_path_is_drawn_and_taken_away(pipeline: Any) -> None:
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


def test_search_finds_spans_and_goes_from_one_to_the_next(pipeline: Any) -> None:
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


def test_ranks_can_be_picked(open_report: Any, many_ranks_run: Run) -> None:
    opened = open_report(many_ranks_run)
    before = opened.page.evaluate("foretrace.view.slots.map(slot => slot.rank)")
    opened.page.select_option("#picker select", "3")
    shown = opened.page.evaluate("foretrace.view.slots.map(slot => slot.rank)")
    assert shown != before
    assert shown == opened.page.evaluate("foretrace.meta().picks[3]")
    assert opened.problems == []


def test_a_click_in_the_overview_shows_that_pipeline(open_report: Any, many_ranks_run: Run) -> None:
    opened = open_report(many_ranks_run)
    box = opened.page.locator("#overview").bounding_box()
    opened.page.mouse.click(box["x"] + 400, box["y"] + 26 + 8.5 / 64 * 192)  # the ninth line: dp 1, stage 0
    shown = opened.page.evaluate("foretrace.view.slots.map(slot => [slot.rank, slot.row])")
    assert shown == [[2, 0], [18, 1], [34, 2], [50, 3]]


def test_a_step_can_be_chosen(open_report: Any, fsdp_run: Run) -> None:
    opened = open_report(fsdp_run)
    opened.page.select_option("#steps select", "3")
    assert opened.page.evaluate("foretrace.runs()[0].step") == 3
    assert opened.problems == []


def test_a_drag_takes_the_time_with_it(pipeline: Any) -> None:
    pipeline.page.keyboard.press("w")
    cell = pipeline.cell(0, "backward", 4)
    t0, t1, plot = pipeline.page.evaluate("[foretrace.view.t0, foretrace.view.t1, foretrace.view.plot]")
    pipeline.page.mouse.move(cell["x"], cell["y"])
    pipeline.page.mouse.down()
    pipeline.page.mouse.move(cell["x"] - 120, cell["y"], steps=4)
    pipeline.page.mouse.up()
    now = pipeline.page.evaluate("[foretrace.view.t0, foretrace.view.t1]")
    by = 120 / plot * (t1 - t0)
    assert now == pytest.approx([t0 + by, t1 + by], rel=1e-6)
    assert pipeline.page.evaluate("foretrace.view.follow") is None  # a drag is no click


PINCH = """gaps => {
  const canvas = document.querySelector('#schedule'), box = canvas.getBoundingClientRect();
  canvas.setPointerCapture = () => {};
  const middle = box.left + foretrace.view.left + foretrace.view.plot / 2;
  const send = (type, id, x) => canvas.dispatchEvent(new PointerEvent(type,
    {pointerId: id, pointerType: 'touch', clientX: x, clientY: box.top + 60, bubbles: true}));
  const at = foretrace.toTime(middle - box.left);
  [-1, 1].forEach(side => send('pointerdown', side + 2, middle + side * gaps[0] / 2));
  [-1, 1].forEach(side => send('pointermove', side + 2, middle + side * gaps[1] / 2));
  const found = [at, foretrace.toTime(middle - box.left), foretrace.view.t1 - foretrace.view.t0];
  [-1, 1].forEach(side => send('pointerup', side + 2, middle + side * gaps[1] / 2));
  return found;
}"""
"""Moves two fingers apart; the time between them before and after, and the width of the window."""


def test_two_fingers_zoom_about_the_time_between_them(open_report: Any, pipeline_run: Run) -> None:
    opened = open_report(pipeline_run, width=390)
    far = opened.page.evaluate("foretrace.view.far")
    before, after, width = opened.page.evaluate(PINCH, [80, 160])
    assert width == pytest.approx(far / 2, rel=0.01)
    assert after == pytest.approx(before, rel=0.01)
    assert opened.problems == []
