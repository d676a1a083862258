"""Reports in a real browser.

Needs playwright and a Chromium on the PATH; without them the tests here are skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foretrace.traces.report.html import write_report
from foretrace.traces.run import Run

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

PIXEL = """([x, y]) => {
  const canvas = document.querySelector('#schedule'), box = canvas.getBoundingClientRect();
  return [...canvas.getContext('2d').getImageData(x - box.left, y - box.top, 1, 1).data].slice(0, 3);
}"""
"""The colour of the schedule at a point of the page."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium on the PATH")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=chromium, args=ARGS)
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

    def pixel(self, x: float, y: float) -> list[int]:
        """Return red, green and blue of the schedule at a point of the page."""
        found: list[int] = self.page.evaluate(PIXEL, [x, y])
        return found


@pytest.fixture
def open_report(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Opens the report of runs, as often as a test wants one; all are closed when it ends."""
    pages: list[Opened] = []

    def opened(*runs: Run, width: int = 1400, theme: str = "light") -> Opened:
        pages.append(Opened(browser, tmp_path / f"{len(pages)}.html", runs, width, theme))
        return pages[-1]

    yield opened
    for one in pages:
        one.page.close()


@pytest.fixture
def pipeline(open_report: Callable[..., Opened], pipeline_run: Run) -> Opened:
    return open_report(pipeline_run)
