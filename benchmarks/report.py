"""How large a report is, how soon it is seen, how long a frame takes; the same through ``foretrace serve``.

    python benchmarks/report.py               # a file: 1 M spans over 512 ranks, no two alike
    python benchmarks/report.py --spans 10000000 --serve
    python benchmarks/report.py --plan        # the what-if page: a changed setting to its drawn schedule

Needs playwright and Chromium. Frames are drawn without a GPU, as on a build server. The timeline is made up:
groups of eight compute and meet in an all-reduce, every duration drawn anew, so that nothing compresses
because it repeats.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from playwright.sync_api import sync_playwright

from foretrace.simulator.what_if.planner import Planner
from foretrace.traces.info import RunInfo
from foretrace.traces.layout import Group, Layout
from foretrace.traces.report.html import write_report
from foretrace.traces.serving.runs import Runs
from foretrace.traces.serving.server import Server
from foretrace.traces.store import open_run, write_run
from foretrace.traces.timeline import timeline

N_RANKS, GROUP = 512, 8
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]

FRAMES = """async ([what, n]) => {
  const canvas = document.querySelector('#schedule'), box = canvas.getBoundingClientRect();
  const next = () => new Promise(done => requestAnimationFrame(done));
  const ask = {
    'zoom in': () => wheel(-60), 'zoom out': () => wheel(60),
    pan: i => document.body.dispatchEvent(new KeyboardEvent('keydown',
      {key: i % 20 < 10 ? 'a' : 'd', bubbles: true})),
  }[what];
  const wheel = deltaY => canvas.dispatchEvent(new WheelEvent('wheel', {deltaY,
    clientX: box.left + box.width * 0.55, clientY: box.top + 60, bubbles: true, cancelable: true}));
  const found = [];
  for (let i = 0, before = await next(); i < n; i++) {
    ask(i);
    const now = await next();
    found.push(now - before);
    before = now;
  }
  return found; }"""
"""Zooms or pans in n frames, one right after the other as a hand does; the time from each to the next, ms."""

MOST_WAIT_MS = 900_000
N_FRAMES = 60
MOST_FRAME_MS = 34
"""Two pictures of a screen at 60 Hz, 33.3 ms, as the browser's clock says them."""

CHANGES = (
    ("recompute", "full"),
    ("recompute", "none"),
    ("schedule", "gpipe"),
    ("schedule", "zb-h1"),
    ("sharding", "ddp"),
    ("precision", "fp16"),
    ("model", "llama3-8b"),
    ("schedule", "1f1b"),
    ("recompute", "selective"),
)
"""What is changed on the what-if page, one after the other."""


def spans_of(rank: int, n_ops: int, seed: int = 0) -> pa.Table:
    """Return the spans of one rank: *n_ops* of compute, an all-reduce after each, and the step."""
    draw = np.random.default_rng([seed, rank // GROUP])
    own_ns = draw.integers(40_000, 60_000, (GROUP, n_ops))
    moves_ns = draw.integers(9_000, 14_000, n_ops)
    ends = np.cumsum(own_ns.max(axis=0) + moves_ns)
    begins = np.concatenate([[0], ends[:-1]])
    computed = begins + own_ns[rank % GROUP]
    n = n_ops
    phase = (np.arange(n) // 64) % 2  # forward and backward of a micro-batch, 64 operations each
    columns: dict[str, object] = {
        "rank": np.full(2 * n + 1, rank, np.int32),
        "stream": ["compute"] * n + ["tp"] * n + ["step"],
        "category": ["compute"] * n + ["collective"] * n + ["step"],
        "kind": [("forward", "backward")[p] for p in phase] + ["all_reduce"] * n + ["step"],
        "name": ["mlp"] * n + ["mlp"] * n + ["step"],
        "start_ns": np.concatenate([begins, computed, [0]]),
        "duration_ns": np.concatenate([computed - begins, ends - computed, ends[-1:]]),
        "step": np.zeros(2 * n + 1, np.int32),
        "microbatch": np.concatenate([np.arange(n) // 128] * 2 + [[-1]]).astype(np.int32),
        "layer": np.concatenate([np.arange(n) % 64 // 2] * 2 + [[-1]]).astype(np.int32),
        "axis": [""] * n + ["tp"] * n + [""],
        "group": np.concatenate([np.full(n, -1), np.full(n, rank // GROUP), [-1]]).astype(np.int32),
        "sequence": np.concatenate([np.full(n, -1), np.arange(n), [-1]]),
        "size_bytes": np.concatenate([np.full(n, -1), np.full(n, 2**23), [-1]]),
    }
    return timeline(columns)


def made_up(folder: Path, n_spans: int) -> Path:
    """Write a run of about *n_spans* spans over 512 ranks and return its directory."""
    layout = Layout(tp=GROUP, dp=N_RANKS // GROUP)
    groups = tuple(
        Group(id=number, axis="tp", ranks=tuple(range(number * GROUP, (number + 1) * GROUP)))
        for number in range(N_RANKS // GROUP)
    )
    info = RunInfo(origin="recorded", world_size=N_RANKS, name="made up", layout=layout, groups=groups)
    n_ops = n_spans // (2 * N_RANKS)
    return write_run(folder / "run", info, (spans_of(rank, n_ops) for rank in range(N_RANKS)))


def looked_at(browser: Any, address: str) -> Iterator[tuple[str, str]]:
    """Yield what a person waits for on the page at *address*: name and value."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000}, bypass_csp=True)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    tools = page.context.new_cdp_session(page)
    tools.send("Performance.setTimeDomain", {"timeDomain": "threadTicks"})
    tools.send("Performance.enable")
    begun = time.perf_counter()
    page.goto(address, wait_until="commit")
    page.wait_for_selector("body[data-ready]", timeout=MOST_WAIT_MS)
    yield "first view, by the page's clock", f"{float(page.get_attribute('body', 'data-ready')) / 1e3:.2f} s"
    yield "first view, seen from outside", f"{time.perf_counter() - begun:.2f} s"
    page.wait_for_selector("body[data-whole]", timeout=MOST_WAIT_MS)
    yield "every row at hand", f"{time.perf_counter() - begun:.2f} s"
    used = {one["name"]: one["value"] for one in tools.send("Performance.getMetrics")["metrics"]}
    yield "processor time of the page's thread", f"{used['TaskDuration']:.2f} s"
    begun = time.perf_counter()
    page.wait_for_function("!foretrace.meta().windowed || foretrace.meta().overview", timeout=MOST_WAIT_MS)
    if page.evaluate("foretrace.meta().windowed"):
        yield "all ranks drawn after another", f"{time.perf_counter() - begun:.2f} s"
        page.wait_for_function("foretrace.meta().findings", timeout=MOST_WAIT_MS)
        yield "what the run loses after", f"{time.perf_counter() - begun:.2f} s"
    page.locator("#schedule").scroll_into_view_if_needed()
    for what in ("zoom in", "pan", "zoom out"):
        frames = page.evaluate(FRAMES, [what, N_FRAMES])
        late = sum(frame > MOST_FRAME_MS for frame in frames)
        typical = f"median {statistics.median(frames):.1f} ms, worst {max(frames):.1f} ms"
        yield f"frames, {what}", f"{typical}, {late} of {N_FRAMES} over {MOST_FRAME_MS} ms"
    if page.evaluate("Boolean(foretrace.meta().windowed)"):
        begun = time.perf_counter()
        page.select_option("#picker select", "40")
        page.wait_for_function("foretrace.view.pick === 40", timeout=MOST_WAIT_MS)
        yield "other rows", f"{time.perf_counter() - begun:.2f} s"
    yield "errors", str(len(problems))
    page.close()


def planned(browser: Any, address: str) -> Iterator[tuple[str, str]]:
    """Yield how long changes on the what-if page take: to the figures, and to the drawn schedule."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000}, bypass_csp=True)
    page.goto(f"{address}plan")
    page.wait_for_selector("body[data-ready]", timeout=120_000)
    for setting, value in CHANGES:
        before = page.evaluate("document.body.dataset.round")
        page.select_option(f"#plan-{setting}", value)
        page.wait_for_function("n => document.body.dataset.round !== n", arg=before, timeout=60_000)
        yield f"{setting}={value}", page.inner_text("#took")
    page.close()


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--spans", type=int, default=1_000_000)
    asked.add_argument("--serve", action="store_true", help="through the server instead of a file")
    asked.add_argument("--plan", action="store_true", help="the what-if page instead of a run")
    given = asked.parse_args()
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=ARGS)
        folder = Path(scratch)
        if not given.plan:
            run = made_up(folder, given.spans)
            opened = open_run(run)
            print(f"{sum(opened.spans([r], []).num_rows for r in opened.ranks):,} spans of {N_RANKS} ranks")
        if not (given.serve or given.plan):
            begun, used = time.perf_counter(), time.process_time()
            size = write_report(folder / "report.html", opened)["size_bytes"]
            took, work = time.perf_counter() - begun, time.process_time() - used
            print(f"  file: {size / 1e6:.1f} MB, made in {took:.1f} s ({work:.1f} s of processor time)")
            for name, value in looked_at(browser, f"file://{folder}/report.html"):
                print(f"  {name}: {value}")
            return
        planner = Planner()
        planner.warm()
        with Server({**Runs(folder).routes(), **planner.routes()}) as server:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            address = server.address
            found = planned(browser, address) if given.plan else looked_at(browser, f"{address}run?run=run")
            for name, value in found:
                print(f"  {name}: {value}")
            server.shutdown()


if __name__ == "__main__":
    main()
