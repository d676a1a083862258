"""Reports in a real browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.browsing import Browser, Shown, started

from foretrace.traces.report.html import write_report
from foretrace.traces.run import Run

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
def browser() -> Iterator[Browser]:
    with started() as found:
        yield found


class Opened(Shown):
    """A report in the browser."""

    def __init__(self, browser: Browser, path: Path, width: int = 1400, theme: str = "light") -> None:
        super().__init__(browser, f"file://{path}?theme={theme}", width, height=1000)
        self.page.wait_for_selector("body[data-ready]", timeout=20_000)
        self.path = path

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


@pytest.fixture(scope="module")
def report_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes the report of runs, once."""

    @cache
    def written(*runs: Run) -> Path:
        path = tmp_path_factory.mktemp("report") / "report.html"
        write_report(path, *runs)
        return path

    return written


@pytest.fixture
def open_report(browser: Browser, report_of: Callable[..., Path]) -> Iterator[Callable[..., Opened]]:
    """Opens the report of runs, as often as a test wants one; all are left when it ends."""
    pages: list[Opened] = []

    def opened(*runs: Run, width: int = 1400, theme: str = "light") -> Opened:
        pages.append(Opened(browser, report_of(*runs), width, theme))
        return pages[-1]

    yield opened
    for one in pages:
        one.leave()


@pytest.fixture
def pipeline(open_report: Callable[..., Opened], pipeline_run: Run) -> Opened:
    return open_report(pipeline_run)
