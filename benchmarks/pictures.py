"""The pictures of reports in docs/pictures, drawn anew: each is a run that is simulated here, and its page.

    python benchmarks/pictures.py docs/pictures                  # all that is simulated
    python benchmarks/pictures.py docs/pictures links straggler
    python benchmarks/pictures.py docs/pictures compared         # after make demo: what that has recorded
    python benchmarks/pictures.py docs/pictures rehearsed-pipeline rehearsed-trainer rehearsed-accelerate

Needs playwright and Chromium; the last two also transformers and Accelerate. A picture is cut to whole
sections of its page, 1,400 pixels wide.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import sync_playwright

from foretrace.simulator.config import job_from
from foretrace.simulator.simulate import simulate
from foretrace.simulator.what_if.planner import Planner
from foretrace.traces.report.html import write_report
from foretrace.traces.serving.runs import Runs
from foretrace.traces.serving.server import Server
from foretrace.traces.store import open_run

EXAMPLES: Final = Path(__file__).parents[1] / "examples"
WIDTH: Final = 1400
MARGIN: Final = 12
ARGS: Final = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
LLAMA: Final = {"model": "llama3-70b", "cluster": "dgx-h100", "gpus": 512, "tp": 8, "pp": 4, "seq_len": 8192}
WHAT_IF: Final = "plan?schedule=zb-h1&a="


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture of a page.

    Attributes:
        page: makes the page in a folder and yields its address.
        bottom: the last thing of the page that is on it, as a CSS selector.
        top: the first; without it the page's begin.
        path: draw the critical path.
    """

    page: Callable[[Path], Any]
    bottom: str
    top: str = ""
    path: bool = False


def simulated(**settings: Any) -> Callable[[Path], Any]:
    """Return what makes the page of a job."""

    @contextmanager
    def page(folder: Path) -> Iterator[str]:
        engine = settings.pop("engine", "auto")
        run = simulate(job_from(settings), engine=engine).write(folder / "run")
        write_report(folder / "page.html", open_run(run))
        yield f"file://{folder}/page.html?theme=light"

    return page


def rehearsed(script: str) -> Callable[[Path], Any]:
    """Return what makes the page of an example of ``examples/rehearse``, rehearsed on 512 ranks."""

    @contextmanager
    def page(folder: Path) -> Iterator[str]:
        verb = [sys.executable, "-m", "foretrace", "rehearse", "--world-size", "512", "--cluster", "dgx-h100"]
        where = ["-o", str(folder / "run"), "--report", str(folder / "page.html")]
        subprocess.run([*verb, *where, "--", str(EXAMPLES / "rehearse" / script)], check=True)
        yield f"file://{folder}/page.html?theme=light"

    return page


def demo(folder: Path) -> Callable[[Path], Any]:
    """Return what makes the page of the demo's pipeline, simulated and recorded."""

    @contextmanager
    def page(_: Path) -> Iterator[str]:
        yield f"file://{(folder / 'pipeline-compared.html').resolve()}?theme=light"

    return page


@contextmanager
def planned(folder: Path) -> Iterator[str]:
    """Yield the address of the what-if page, with a second plan beside the first."""
    planner = Planner()
    planner.warm()
    with Server({**Runs(folder).routes(), **planner.routes()}) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.address + WHAT_IF
        server.shutdown()


PICTURES: Final = {
    "llama3-70b-512": Picture(page=simulated(**LLAMA, global_batch=1024), bottom="#schedule"),
    "straggler": Picture(
        page=simulated(**LLAMA, global_batch=256, stragglers="203:1.25"),
        top="#overview-section",
        bottom="#schedule",
        path=True,
    ),
    "dualpipe": Picture(
        page=simulated(
            model="deepseek-v2", cluster="dgx-h100", gpus=64, pp=8, ep=8, global_batch=160, seq_len=4096,
            schedule="dualpipe",
        ),
        top="#overview-section",
        bottom="#schedule",
    ),
    "links": Picture(
        page=simulated(
            model="llama3-8b", cluster="dgx-h100", gpus=16, tp=2, pp=4, global_batch=16, seq_len=4096,
            link_changes="3:near:0.25@150ms, 3:near:1@400ms", engine="contended",
        ),
        top="#schedule-title",
        bottom="#links",
        path=True,
    ),
    "what-if": Picture(page=planned, bottom="#schedule"),
    "rehearsed-pipeline": Picture(page=rehearsed("llama_pp_fsdp2.py"), bottom="#schedule"),
    "rehearsed-trainer": Picture(page=rehearsed("hf_trainer.py"), bottom="#schedule"),
    "rehearsed-accelerate": Picture(page=rehearsed("accelerate_fsdp.py"), bottom="#schedule"),
    "compared": Picture(page=demo(Path("demo")), bottom="#schedule"),
}  # fmt: skip


BY_NAME: Final = ("compared", "rehearsed")
"""How those begin that take a demo before, minutes, or other packages: they are drawn when asked for."""


def edge(page: Any, selector: str, side: str) -> float:
    """Return where *side* of what *selector* names is on *page*, pixels from its top."""
    box = page.evaluate(f"document.querySelector('{selector}').getBoundingClientRect().{side} + scrollY")
    return float(box)


def draw(browser: Any, picture: Picture, address: str, path: Path) -> None:
    """Write *picture* of the page at *address* to *path*."""
    page = browser.new_page(viewport={"width": WIDTH, "height": 1000})
    page.goto(address)
    for _ in range(2):  # the first time caches are filled
        page.reload()
        page.wait_for_selector("body[data-ready]", timeout=120_000)
        page.wait_for_timeout(2000)  # rows that are unpacked after the first view
    if picture.path:
        page.click("#path")
        page.mouse.move(2, 2)
        page.wait_for_timeout(500)
    first = max(0, edge(page, picture.top, "top") - MARGIN) if picture.top else 0
    last = edge(page, picture.bottom, "bottom") + 2
    page.set_viewport_size({"width": WIDTH, "height": int(last) + MARGIN})
    page.wait_for_timeout(500)
    page.screenshot(
        path=path, clip={"x": 0, "y": first, "width": WIDTH, "height": last - first}, full_page=True
    )
    page.close()


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("folder", type=Path)
    asked.add_argument("names", nargs="*", choices=[*PICTURES, []], default=[], metavar="NAME")
    given = asked.parse_args()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=ARGS)
        for name in given.names or [name for name in PICTURES if not name.startswith(BY_NAME)]:
            with tempfile.TemporaryDirectory() as folder, PICTURES[name].page(Path(folder)) as address:
                draw(browser, PICTURES[name], address, given.folder / f"{name}.png")
            print(given.folder / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
