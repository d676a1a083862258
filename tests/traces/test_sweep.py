"""The page of many layouts: every row is on it, the best and the front are right, names stay text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.browsing import Browser, Shown, started

from foretrace.traces.errors import ReportError
from foretrace.traces.report.html import sweep_html, write_sweep

EVIL = "</script><img src=x onerror=alert(1)>"
LIMIT = 80e9


def row(tp: int, memory: float, rate: float, **more: Any) -> dict[str, Any]:
    found = {"tp": tp, "pp": 2, "peak_memory_bytes": memory, "tokens_per_s_per_gpu": rate, "mfu": rate / 4e3}
    return found | {"memory_limit_bytes": LIMIT, "recompute": "none", "step_time_s": 1e3 / rate} | more


ROWS = [
    row(1, 90e9, 1500),  # the fastest, too large
    row(2, 70e9, 1200),
    row(4, 40e9, 1100, recompute="full"),
    row(8, 45e9, 900),
    row(8, 20e9, 800, name=EVIL, cluster=EVIL),
]


def contents(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="meta">(.*?)</script>', text, re.DOTALL)
    assert found
    document: dict[str, Any] = json.loads(found[1])
    return document


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 4]), st.floats(1e6, 1e12), st.floats(1, 1e6)), min_size=1, max_size=9
    )
)
def test_every_layout_is_on_the_page_and_fits_if_it_does(rows: list[tuple[int, float, float]]) -> None:
    page = contents(sweep_html([row(*one) for one in rows], title="t"))
    assert [
        (one["tp"], one["peak_memory_bytes"], one["tokens_per_s_per_gpu"]) for one in page["layouts"]
    ] == rows
    assert [one["fits"] for one in page["layouts"]] == [memory <= LIMIT for _, memory, _ in rows]
    varies = len({tp for tp, _, _ in rows}) > 1
    assert page["settings"] == (["tp"] if varies else [])
    assert ("tp" in page["same"]) is not varies


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "no layout"),
        ([row(1, 0, 5)], "peak_memory_bytes=0"),
        ([row(1, 5, float("nan"))], "tokens_per_s_per_gpu=nan"),
        ([{"tp": 1}], "a number above zero"),
        ([row(1, 1, 1)] * 20_001, "20,001 layouts"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(rows: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ReportError, match=re.escape(said)):
        sweep_html(rows, title="t")


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="cannot write"):
        write_sweep(tmp_path, ROWS, title="t")
    assert write_sweep(tmp_path / "new" / "s.html", ROWS, title="t").stat().st_size < 100_000
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["s.html"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started() as found:
        yield found


@pytest.mark.parametrize(("width", "theme"), [(1300, "light"), (390, "dark")])
def test_the_page_answers_the_pointer_and_asks_for_nothing(
    browser: Browser, tmp_path: Path, width: int, theme: str
) -> None:
    path = write_sweep(tmp_path / "s.html", ROWS, title=EVIL, notes=[EVIL])
    shown = Shown(browser, f"file://{path}?theme={theme}", width)
    page = shown.page
    page.wait_for_selector("body[data-ready]")
    assert page.inner_text("h1") == page.inner_text("#notes li") == EVIL
    assert "5 layouts, 4 of them fit" in page.inner_text("#subtitle")
    assert page.inner_text("#headline b >> nth=0").startswith("TP 2 ")
    assert page.locator("#layouts tbody tr").count() == 5
    assert page.inner_text("#layouts tbody tr >> nth=4").split()[-1] == "no"
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) <= 0
    x, y = page.evaluate("foretrace.place(foretrace.layouts[2])")
    box = page.locator("#points").bounding_box()
    page.mouse.move(box["x"] + x, box["y"] + y)
    assert "1,100" in page.inner_text("#tip")
    assert "40.0 GB" in page.inner_text("#tip")
    page.mouse.click(box["x"] + x, box["y"] + y)
    assert "full" in page.inner_text("#layouts tr.marked")
    page.click("#key button >> nth=0")  # hides TP 1
    assert page.locator("#layouts tbody tr").count() == 4
    page.select_option("#upwards", "step_time_s")
    page.select_option("#coloured", "recompute")
    assert page.locator("#key button").count() == 2
    assert shown.problems == []
    assert all(url.startswith(("file:", "data:")) for url in shown.requests)
    shown.leave()


@pytest.mark.parametrize("least", [500, 3900, 3999])
def test_layouts_that_differ_little_are_told_apart(browser: Browser, tmp_path: Path, least: float) -> None:
    rows = [row(tp, tp * 8e9, rate) for tp, rate in ((1, 4000), (2, (4000 + least) / 2), (4, least))]
    path = write_sweep(tmp_path / "s.html", rows, title="close", notes=[])
    shown = Shown(browser, f"file://{path}", 1300)
    page = shown.page
    page.wait_for_selector("body[data-ready]")
    heights = [y for _, y in page.evaluate("foretrace.layouts.map(foretrace.place)")]
    tall = page.locator("#points").bounding_box()["height"]
    assert max(heights) - min(heights) > tall / 3
    shown.leave()


@pytest.mark.parametrize("width", [390, 1300])
@pytest.mark.parametrize("up", ["tokens_per_s_per_gpu", "step_time_s"])
def test_the_label_of_the_best_stands_at_its_point_and_covers_no_other(
    browser: Browser, tmp_path: Path, up: str, width: int
) -> None:
    rows = [row(tp, 78e9 - 3e9 * i, 1200 - 9 * i) for i, tp in enumerate((2, 4, 2, 4, 1, 2, 4))]
    path = write_sweep(tmp_path / "s.html", rows, title="close", notes=[])
    shown = Shown(browser, f"file://{path}", width)
    page = shown.page
    page.wait_for_selector("body[data-ready]")
    page.select_option("#upwards", up)
    places = page.evaluate("foretrace.layouts.map(foretrace.place)")
    label = page.evaluate("foretrace.label()")
    height = label["height"]
    assert [label["x"], label["y"]] == places[0]
    assert label["left"] <= label["x"] <= label["left"] + label["width"]
    assert 0 < min(abs(label["top"] - label["y"]), abs(label["top"] + height - label["y"])) < 20
    assert not [y for x, y in places if label["top"] <= y <= label["top"] + height]
    box = page.locator("#points").bounding_box()
    assert label["top"] >= 20
    assert label["top"] + height <= box["height"]
    shown.leave()
