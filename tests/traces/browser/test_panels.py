"""All ranks, links and memory beside the schedule: what they show, and that they follow it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.simulator.predicted import simulate

from foretrace.simulator.config import job_from
from foretrace.traces.run import Run

SETTINGS = {"cluster": "dgx-h100", "seq_len": 2048}


def slow_link() -> Run:
    layout = {"model": "llama3-8b", "gpus": 8, "tp": 2, "pp": 2, "global_batch": 8}
    job = job_from({**SETTINGS, **layout, "link_changes": "3:near:0.25@20ms"})
    return simulate(job, engine="contended").run


def test_the_frame_in_the_overview_follows_the_window(open_report: Any, many_ranks_run: Run) -> None:
    opened = open_report(many_ranks_run)
    frame, overview = (opened.page.locator(one) for one in ("#overview-window", "#overview"))
    left, plot = opened.page.evaluate("[foretrace.view.left, foretrace.view.plot]")
    origin = overview.bounding_box()["x"] + left
    assert frame.bounding_box()["width"] == pytest.approx(plot, abs=3)
    before = opened.page.evaluate("document.querySelector('#overview').toDataURL()")
    opened.page.keyboard.press("w")
    opened.page.keyboard.press("d")
    opened.settle()
    t0, t1, far = opened.page.evaluate("[foretrace.view.t0, foretrace.view.t1, foretrace.view.far]")
    box = frame.bounding_box()
    assert box["x"] == pytest.approx(origin + t0 / far * plot, abs=3)
    assert box["x"] + box["width"] == pytest.approx(origin + t1 / far * plot, abs=3)
    assert opened.page.evaluate("document.querySelector('#overview').toDataURL()") == before


def test_a_link_says_how_full_it_is_and_what_is_left_of_it(open_report: Any) -> None:
    opened = open_report(slow_link())
    page = opened.page
    page.locator("#links").scroll_into_view_if_needed()
    narrow = page.evaluate(
        "foretrace.runs()[0].links.groups.flatMap(group => group.narrow.map(part => group.names[part.row]))"
    )
    assert sorted(narrow) == ["rank 3 in", "rank 3 out"]
    box = page.locator("#links").bounding_box()
    said = set()
    for y in range(int(box["y"]) + 30, int(box["y"] + box["height"]), 3):
        page.mouse.move(box["x"] + box["width"] * 0.6, y)
        if page.locator("#tip").is_visible():
            said.add(page.inner_text("#tip"))
    assert any("rank 3 in" in words and "25.0 %" in words for words in said)
    assert any("rank 4 in" in words and "25.0 %" not in words for words in said)
    page.mouse.move(2, 2)
    assert page.locator("#tip").is_hidden()
    assert opened.problems == []


def test_memory_names_the_limit_over_its_curves(open_report: Any, pipeline_run: Run) -> None:
    opened = open_report(pipeline_run)
    peaks = opened.page.locator("#peaks tbody tr")
    assert peaks.count() == 4
    assert opened.page.get_attribute("#memory", "aria-label") == (
        "Memory over time against the limit of the device"
    )
    before = opened.page.evaluate("document.querySelector('#memory').toDataURL()")
    opened.page.keyboard.press("w")
    opened.settle()
    assert opened.page.evaluate("document.querySelector('#memory').toDataURL()") != before


def test_what_holds_memory_has_one_colour_whatever_is_largest(open_report: Any, pipeline_run: Run) -> None:
    page = open_report(pipeline_run).page
    columns = """() => [...document.querySelectorAll('#peaks thead th')].slice(5).map(
        head => [head.innerText.trim(), head.querySelector('.swatch').style.background])"""
    before = page.evaluate(columns)
    assert [name for name, _ in before] == ["parameters", "activations"]
    page.evaluate("foretrace.runs()[0].memory_peaks.forEach(peak => peak.parts.reverse())")
    for _ in ("dark", "light"):  # a change of theme draws the table again
        page.click("#theme")
    after = page.evaluate(columns)
    assert after == before[::-1]
    assert len(set(dict(after).values())) == 2
