"""The runs below a folder, for a server: what there is, and each as a page that is sent in parts."""

from __future__ import annotations

import html
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import numpy as np

from foretrace.traces.analysis.metrics import summarize, typical_step
from foretrace.traces.analysis.windows import windows
from foretrace.traces.errors import RunError, TraceError, reason
from foretrace.traces.info import RunInfo, read_info
from foretrace.traces.pack import Pack
from foretrace.traces.reader import open_whole
from foretrace.traces.report.document import Window, document, findings_document, outlier, overview_document
from foretrace.traces.report.format import format_share, format_time, number
from foretrace.traces.report.html import filled, served_page
from foretrace.traces.report.words import layout_words, title
from foretrace.traces.run import Run
from foretrace.traces.serving.server import JSON, Answer, Query, Route, document_answer, page
from foretrace.traces.timeline import MEMORY

MOST_DEEP: Final = 4  # folders below the one that is served in which runs are looked for
MOST_RUNS: Final = 500  # runs that the list shows

WHOLE_SPANS: Final = 400_000
"""Spans up to which a page gets a run at once; of a longer one it gets a step and some ranks."""

WINDOW_CELLS: Final = 250_000  # cells that a part of a long run holds: 6 MB, and more rows than a screen has

SUMMED_BYTES: Final = 20_000_000
"""Spans on disk up to which the list works out the figures of a run that does not say them itself."""

MOST_HISTORY: Final = 40  # runs that the chart of a run's page can show
MOST_HISTORY_STEPS: Final = 5_000  # steps of a run on that chart
KEPT: Final = 4  # runs that stay open


Build = Callable[[Run, Run | None, Query], Answer]  # works out an answer to a query about one run or two


@dataclass(slots=True)
class Runs:
    """The runs below *root*."""

    root: Path  # the folder; nothing outside it is read
    _open: dict[Path, tuple[int, Run]] = field(default_factory=dict)
    _documents: dict[tuple[Any, ...], Answer] = field(default_factory=dict)
    _building: dict[tuple[Any, ...], threading.Lock] = field(default_factory=dict)
    _headlines: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    _steps: dict[tuple[str, int], dict[str, Any] | None] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.root = self.root.resolve()
        if not self.root.is_dir():
            raise RunError(f"{self.root} is not a folder of runs")

    def routes(self) -> dict[str, Route]:
        """Return the pages, by path."""
        return {
            "/": lambda _: page(self.listing()),
            "/run": self._page,
            "/document": lambda query: self._kept("document", query, self._built),
            "/overview": lambda query: self._kept("overview", query, _overview_of),
            "/findings": lambda query: self._kept(
                "findings", query, lambda run, *_: document_answer(findings_document(run))
            ),
            "/history": lambda _: Answer(json.dumps({"runs": self.history()}).encode("utf-8"), JSON),
        }

    def path_of(self, name: str) -> Path:
        """Return the run that *name*, a path below the root, names.

        Raises RunError: it lies elsewhere, or is no run.
        """
        path = (self.root / name.replace("\0", "")).resolve()
        if "\0" in name or not path.is_relative_to(self.root) or not _is_run(path):
            raise RunError(f"no run {name!r} here")
        for one in path.rglob("*"):
            if one.is_symlink() and not one.resolve().is_relative_to(self.root):
                raise RunError(f"{name}: {one.relative_to(path)} leads out of the folder that is served")
        return path

    def found(self) -> Iterator[Path]:
        """Yield the runs, those changed last first."""
        runs = [path for path in _below(self.root, MOST_DEEP) if path.is_relative_to(self.root)]
        yield from sorted(runs, key=_changed, reverse=True)[:MOST_RUNS]

    def run(self, name: str) -> Run:
        """Return an open run; one that is still being written is opened anew when it has grown."""
        path = self.path_of(name)
        with self._lock:
            changed, known = _changed(path), self._open.pop(path, None)
            opened = known[1] if known and known[0] == changed else open_whole(str(path), partial=True)
            self._open[path] = (changed, opened)
            while len(self._open) > KEPT:
                del self._open[next(iter(self._open))]
            return opened

    def figures(self, name: str, info: RunInfo) -> list[str]:
        """Return step time, computing share and MFU of a run, worked out once while it is the same."""
        key = (name, _changed(self.path_of(name)))
        if key not in self._headlines:
            self._headlines[key] = _figures(self, name, info)
        return self._headlines[key]

    def listing(self) -> str:
        """Return the page that lists the runs with their headlines."""
        rows = "\n".join(_row(self, path) for path in self.found())
        return filled(
            (), "runs.html", title="", mode="", root=html.escape(str(self.root)), rows=rows or _NOTHING
        )

    def history(self) -> list[dict[str, Any]]:
        """Return how long each step of each run took, of those changed last; large ones are left out."""
        found = []
        for path in islice(self.found(), MOST_HISTORY):
            name = str(path.relative_to(self.root))
            key = (name, _changed(path))
            if key not in self._steps:
                try:
                    self._steps[key] = self._steps_of(name)
                except (OSError, TraceError):
                    self._steps[key] = None
            if (known := self._steps[key]) is not None:
                found.append(known)
        return found

    def _steps_of(self, name: str) -> dict[str, Any] | None:
        """Return the steps of a run; None where adding them up would take long."""
        if sum(part.stat().st_size for part in (self.root / name / "spans").glob("*")) > SUMMED_BYTES:
            return None
        run = open_whole(str(self.path_of(name)), partial=True)
        times: dict[int, int] = {}
        for window in windows(run):
            times[window.step] = max(times.get(window.step, 0), window.duration_ns)
        about = {
            "name": name,
            "origin": run.info.origin,
            "model": str((run.info.model or {}).get("name", "")),
        }
        steps = sorted(times)[:MOST_HISTORY_STEPS]
        return about | {
            "steps": steps,
            "times_ns": [times[step] for step in steps],
            "median_ns": float(np.median(list(times.values()))),
        }

    def _page(self, query: Query) -> Answer:
        path = self.path_of(query.get("run", ""))
        return page(served_page(f"{path.name} - foretrace", "run"))

    def _kept(self, what: str, query: Query, build: Build) -> Answer:
        """Return the answer to *query*, worked out once for as long as the run does not change.

        Who asks for the same waits for it; everything else is answered meanwhile.
        """
        try:
            names = [query[name] for name in ("run", "other") if name in query] or [""]
            stamps = tuple((name, _changed(self.path_of(name))) for name in names)
            key = (what, stamps, query.get("pick"), query.get("step"))
            with self._lock:
                alone = self._building.setdefault(key, threading.Lock())
            with query.holding(alone):
                answer: Answer | None = self._documents.get(key)
                if answer is None:
                    other = self.run(names[1]) if len(names) > 1 else None
                    answer = build(self.run(names[0]), other, query)
                    self._keep(key, answer)
                return answer
        except TraceError as error:
            return document_answer({"error": str(error)})

    def _keep(self, key: tuple[Any, ...], answer: Answer) -> None:
        """Remember an answer, and forget the oldest ones."""
        with self._lock:
            self._documents[key] = answer
            for known in (self._documents, self._building):
                while len(known) > 4 * KEPT:
                    del known[next(iter(known))]

    def _built(self, run: Run, other: Run | None, query: Query) -> Answer:
        pack = Pack()
        window = None
        if other is None and run.n_stored > WHOLE_SPANS:
            step = _whole(query, "step", typical_step(run)[0])
            pick = _whole(query, "pick", outlier(run).get("pick", 0))
            window = Window(pick=pick, step=step, most_cells=WINDOW_CELLS)
        contents = document(run, other, pack, window=window)
        return document_answer({**contents, "columns": pack.columns}, pack.raw())


def _overview_of(run: Run, _: Run | None, query: Query) -> Answer:
    pack = Pack()
    contents = overview_document(run, _whole(query, "step", typical_step(run)[0]), pack)
    return document_answer({**contents, "columns": pack.columns}, pack.raw())


def _whole(query: Query, name: str, otherwise: int) -> int:
    """Return a whole number of the query. Raises RunError if it is none."""
    try:
        return int(query.get(name, otherwise))
    except ValueError:
        raise RunError(f"{name}={query[name]!r}: a whole number") from None


def _below(folder: Path, deep: int) -> Iterator[Path]:
    """Yield the runs in *folder* and below; links are not followed."""
    if _is_run(folder):
        yield folder
        return
    if deep:
        try:
            inner = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
        except OSError:  # a folder that may not be read holds nothing for us
            return
        for path in inner:
            if path.is_dir() and not path.is_symlink():
                yield from _below(path, deep - 1)


def _is_run(path: Path) -> bool:
    return (path / "run.json").is_file() or ((path / "ranks").is_dir() and (path / "spans").is_dir())


def _changed(path: Path) -> int:
    """Return when anything of a run was last written, in ns since 1970."""
    parts = (path, path / "run.json", path / "spans", *(path / "spans").glob("*.arrows"))
    return max(map(_written_ns, parts))


def _written_ns(path: Path) -> int:
    """Return when *path* was last written, 0 if it is gone: a rank that has finished deletes its stream."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _row(runs: Runs, path: Path) -> str:
    """Return the line of a run in the list."""
    name = str(path.relative_to(runs.root))
    try:
        info = _info(runs, name)
        run = Run(name, info, (), MEMORY.empty_table(), ())
        cells = [title(run), info.origin, _layout(run), *runs.figures(name, info)]
    except (OSError, TraceError) as error:
        cells = [f"cannot be read: {reason(error)}", "", "", "", "", ""]
    when = datetime.fromtimestamp(_changed(path) / 1e9, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
    link = f'<a href="/run?{html.escape(urlencode({"run": name}))}">{html.escape(name)}</a>'
    check = f'<input type="checkbox" name="run" value="{html.escape(name)}" aria-label="compare">'
    said = "".join(f"<td>{html.escape(cell)}</td>" for cell in (*cells, when))
    return f"<tr><td>{check}</td><th scope=row>{link}</th>{said}</tr>"


def _info(runs: Runs, name: str) -> RunInfo:
    """Return what is known of a run; while it is recorded, only the files of its ranks say it."""
    stored = runs.path_of(name) / "run.json"
    if not stored.is_file():
        return runs.run(name).info
    return read_info(stored, name)


def _layout(run: Run) -> str:
    """Return how a run was laid out, and how its pipeline was scheduled."""
    schedule = (run.info.job or {}).get("schedule")
    is_pipeline = run.info.layout is not None and run.info.layout.pp > 1
    return layout_words(run) + (f" · {schedule}" if is_pipeline and isinstance(schedule, str) else "")


def _figures(runs: Runs, name: str, info: RunInfo) -> list[str]:
    """Return the same as ``Runs.figures``, as far as they are known without long work."""
    summary: Mapping[str, Any] = info.summary
    size = sum(part.stat().st_size for part in (runs.root / name / "spans").glob("*"))
    if number(summary.get("step_time_s")) is None and size <= SUMMED_BYTES:
        summary = {**summarize(runs.run(name)), **{k: v for k, v in summary.items() if v is not None}}
    step_s, mfu = number(summary.get("step_time_s")), number(summary.get("mfu"))
    shares = summary.get("shares")
    busy = number(shares.get("compute")) if isinstance(shares, Mapping) else None
    return [
        "–" if step_s is None else format_time(step_s),
        "–" if busy is None else format_share(busy),
        "–" if mfu is None else format_share(mfu),
    ]


_NOTHING: Final = (
    "<tr><td></td><th>nothing here yet</th><td colspan=7>foretrace simulate … -o DIR/NAME, or "
    "foretrace record -o DIR/NAME, then load this page again</td></tr>"
)
