"""Pages in a real browser, one after the other in its tabs: to open a tab takes as long as to draw a page.

Needs playwright and a Chromium on the PATH; tests are skipped without them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

ARGS: Final = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
)

EMPTY: Final = "about:blank"


class Browser:
    """A browser, and the tabs of it that show nothing at present.

    Args:
        own: what playwright calls a browser.
    """

    def __init__(self, own: Any) -> None:
        self.own = own
        self.free: list[Any] = []


class Shown:
    """A page, with what went wrong in it and what it asked for.

    Args:
        browser: where it is shown.
        address: its address.
        width: of its window; and its *height*.
    """

    def __init__(self, browser: Browser, address: str, width: int, height: int = 900) -> None:
        size = {"width": width, "height": height}
        self._browser = browser
        if browser.free:
            self.page = browser.free.pop()
            self.page.set_viewport_size(size)
        else:
            self.page = browser.own.new_page(viewport=size)
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._heard = {
            "pageerror": lambda error: self.problems.append(str(error)),
            "console": lambda message: self.problems.append(message.text),
            "request": lambda request: self.requests.append(request.url),
            "dialog": self._refuse,
        }
        for event, hear in self._heard.items():
            self.page.on(event, hear)
        self.page.goto(address)

    def _refuse(self, dialog: Any) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def leave(self) -> None:
        """Leave the tab for another page, as if nothing had been shown or pressed in it."""
        for event, hear in self._heard.items():
            self.page.remove_listener(event, hear)
        self.page.emulate_media(media="null")
        self.page.goto(EMPTY)
        self.page.mouse.move(0, 0)
        self._browser.free.append(self.page)


@contextmanager
def started() -> Iterator[Browser]:
    """Start a browser, and end it."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium on the PATH")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=chromium, args=ARGS)
        yield Browser(found)
        found.close()
