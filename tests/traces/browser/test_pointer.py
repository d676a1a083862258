"""The page answers the pointer, the keyboard and its controls."""

from __future__ import annotations

import base64
import struct
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


def drag(opened: Any, start: tuple[float, float], end: tuple[float, float], key: str = "") -> None:
    mouse, keyboard = opened.page.mouse, opened.page.keyboard
    if key:
        keyboard.down(key)
    mouse.move(*start)
    mouse.down()
    mouse.move(*end, steps=3)
    mouse.up()
    if key:
        keyboard.up(key)


def panel(opened: Any) -> list[str]:
    """Return the lines of the docked panel, brought up to date."""
    opened.page.evaluate("foretrace.fillPanel()")
    lines: list[str] = opened.page.evaluate("document.querySelector('#selection').textContent").split("\n")
    return lines


def said(ns: float) -> str:
    return f"{ns / 1e6:.3f} ms" if ns >= 1e6 else f"{ns / 1e3:.3f} µs"


SUMS = """([times, first, last]) => {
  const {view, kinds, laneRange} = foretrace;
  const [from, to] = [...times].sort((a, b) => a - b);
  const found = {};
  for (const {run, row} of view.slots.slice(first, last + 1)) {
    const [low, high] = laneRange(run, row, 0);
    for (let i = low; i < high; i++) {
      const ns = Math.min(run.end[i], to) - Math.max(run.start[i], from);
      if (ns > 0) found[kinds()[run.kind[i]].label] = (found[kinds()[run.kind[i]].label] || 0) + ns;
    }
  }
  return found;
}"""


@pytest.mark.parametrize("way", ["shift", "button"])
def test_an_area_shows_its_sums(pipeline: Any, way: str) -> None:
    first, second = pipeline.cell(0, "backward", 1), pipeline.cell(1, "backward", 1)
    if way == "button":
        pipeline.page.click("#area")
        first, second = pipeline.cell(0, "backward", 1), pipeline.cell(1, "backward", 1)
    start, end = (first["x"], first["y"]), (first["x"] + 300, second["y"])
    drag(pipeline, start, end, "Shift" if way == "shift" else "")
    area = pipeline.page.evaluate("foretrace.view.area")
    assert area["rows"] == [0, 1]
    per_pixel = pipeline.page.evaluate("(foretrace.view.t1 - foretrace.view.t0) / foretrace.view.plot")
    assert area["times"][1] - area["times"][0] == pytest.approx(300 * per_pixel, rel=0.01)
    lines = panel(pipeline)
    assert lines[0].startswith("Selected: ")
    assert lines[0].endswith("Stage 0 + Stage 1")
    sums = pipeline.page.evaluate(SUMS, [area["times"], 0, 1])
    assert len(sums) > 2
    for kind, ns in sums.items():
        (line,) = [line for line in lines if line.startswith(f"  {kind}  ")]
        assert said(ns) in line
        assert f"{100 * ns / sum(sums.values()):.1f} %" in line
    pipeline.page.keyboard.press("Escape")
    assert panel(pipeline)[0].startswith("In view: 0 ns")
    assert panel(pipeline)[0].endswith(", sum of 4 rows")


def test_the_panel_follows_the_view_and_adds_up_to_it(pipeline: Any) -> None:
    for key in ("", "w", "d"):
        if key:
            pipeline.page.keyboard.press(key)
            pipeline.settle()
        t0, t1 = pipeline.page.evaluate("[foretrace.view.t0, foretrace.view.t1]")
        sums = pipeline.page.evaluate(SUMS, [[t0, t1], 0, 3])
        pipeline.page.wait_for_timeout(400)  # the panel waits until the view has come to rest
        lines = pipeline.page.evaluate("document.querySelector('#selection').textContent").split("\n")
        for kind, ns in sums.items():
            assert any(line.startswith(f"  {kind}  ") and said(ns) in line for line in lines)


def test_what_is_selected_can_be_copied(pipeline: Any) -> None:
    cell = pipeline.cell(2, "forward", 5)
    pipeline.page.mouse.click(cell["x"], cell["y"])
    lines = panel(pipeline)
    assert "Forward · Stage 2" in lines[0]
    assert any("micro-batch" in line and line.endswith("  5") for line in lines)
    pipeline.page.click("#copy")
    pipeline.page.wait_for_function("() => document.querySelector('#copied').textContent")
    assert pipeline.page.evaluate("getSelection().toString()").split("\n")[0] == lines[0]


def test_a_question_mark_lists_the_keys(pipeline: Any) -> None:
    keys = pipeline.page.locator("#keys")
    assert keys.is_hidden()
    pipeline.page.keyboard.press("?")
    assert keys.is_visible()
    said = keys.inner_text()
    for key in ("wheel", "drag", "shift", "click", "0", "C", "/", "Esc", "?"):
        assert key in said
    t0 = pipeline.page.evaluate("foretrace.view.t1")
    pipeline.page.keyboard.press("w")  # for the list, not for the schedule
    assert pipeline.page.evaluate("foretrace.view.t1") == t0
    pipeline.page.keyboard.press("Escape")
    assert keys.is_hidden()
    pipeline.page.click("#help")
    pipeline.page.click("#keys button")
    assert keys.is_hidden()


def test_keys_zoom_about_the_pointer_and_the_tooltip_follows(pipeline: Any) -> None:
    cell = pipeline.cell(0, "backward", 4)
    pipeline.page.mouse.move(cell["x"] - 6, cell["y"])
    assert "Backward · Stage 0" in pipeline.page.inner_text("#tip")
    box = pipeline.page.locator("#schedule").bounding_box()
    at = "x => foretrace.toTime(x)"
    before = pipeline.page.evaluate(at, cell["x"] - 6 - box["x"])
    pipeline.page.keyboard.press("w")
    pipeline.settle()
    width = pipeline.page.evaluate("foretrace.view.t1 - foretrace.view.t0")
    assert pipeline.page.evaluate(at, cell["x"] - 6 - box["x"]) == pytest.approx(before, abs=width / 1000)
    for _ in range(3):  # another pass comes under the pointer, which rests
        pipeline.page.keyboard.press("d")
        pipeline.settle()
    here, said = pipeline.page.evaluate(
        "[foretrace.view.hover.first, document.querySelector('#tip').innerText]"
    )
    start = pipeline.page.evaluate("i => foretrace.view.slots[0].run.start[i]", here)
    assert f"{start / 1e6:.3f} ms →" in said
    assert pipeline.page.evaluate(at, cell["x"] - 6 - box["x"]) > before


def test_one_click_saves_a_picture_of_the_view(pipeline: Any) -> None:
    pipeline.page.keyboard.press("w")
    with pipeline.page.expect_download() as waiting:
        pipeline.page.click("#png")
    path = waiting.value.path()
    assert waiting.value.suggested_filename.endswith(".png")
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    ratio = pipeline.page.evaluate("devicePixelRatio")
    tall = pipeline.page.evaluate("document.querySelector('#schedule').height")
    assert width == pipeline.page.evaluate("foretrace.view.width") * ratio
    same = """async shot => {
      const image = new Image();
      image.src = 'data:image/png;base64,' + shot;
      await image.decode();
      const canvas = document.createElement('canvas');
      [canvas.width, canvas.height] = [image.width, image.height];
      const g = canvas.getContext('2d');
      g.drawImage(image, 0, 0);
      const shown = document.querySelector('#schedule');
      const a = g.getImageData(0, image.height - shown.height, shown.width, shown.height).data;
      const b = shown.getContext('2d').getImageData(0, 0, shown.width, shown.height).data;
      return a.every((value, i) => value === b[i]);
    }"""
    assert height > tall
    pipeline.page.mouse.move(2, 2)
    shot = base64.b64encode(content).decode()
    assert pipeline.page.evaluate(same, shot)


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


TOUCH = """async moves => {
  const canvas = document.querySelector('#schedule'), box = canvas.getBoundingClientRect();
  canvas.setPointerCapture = () => {};
  const send = (type, x) => canvas.dispatchEvent(new PointerEvent(type,
    {pointerId: 7, pointerType: 'touch', clientX: box.left + x, clientY: box.top + 60, bubbles: true}));
  send('pointerdown', moves[0]);
  moves.slice(1).forEach(x => send('pointermove', x));
  send('pointerup', moves.at(-1));
  return [foretrace.view.t0, foretrace.view.t1, foretrace.view.plot, getComputedStyle(canvas).touchAction];
}"""


def test_one_finger_pans_on_a_phone_and_a_tap_says_what_is_there(open_report: Any, pipeline_run: Run) -> None:
    opened = open_report(pipeline_run, width=390)
    opened.page.evaluate(PINCH, [80, 240])
    t0, t1 = opened.page.evaluate("[foretrace.view.t0, foretrace.view.t1]")
    left, right, plot, action = opened.page.evaluate(TOUCH, [250, 240, 200])
    assert [left, right] == pytest.approx([t + 50 / plot * (t1 - t0) for t in (t0, t1)], rel=1e-6)
    assert action == "pan-y"  # up and down moves the page
    opened.page.evaluate(TOUCH, [200])
    assert opened.page.locator("#tip").is_visible()
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert not panel(opened)[0].startswith("In view")


def test_a_wide_screen_is_used(open_report: Any, pipeline_run: Run) -> None:
    opened = open_report(pipeline_run, width=2560)
    assert opened.page.evaluate("foretrace.view.plot") > 0.8 * 2560
