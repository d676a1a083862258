"""The what-if page: settings in, figures and a picture out, by the same simulator as the command line."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any, Final
from urllib.parse import parse_qsl

from foretrace.simulator.config import job_from
from foretrace.simulator.errors import JobError, SimulationError
from foretrace.simulator.job import PRECISIONS, RECOMPUTES, Job
from foretrace.simulator.models.sources import names as model_names
from foretrace.simulator.schedules import SCHEDULES
from foretrace.simulator.sharding import SHARDINGS
from foretrace.simulator.simulate import simulate
from foretrace.simulator.what_if.words import Planned, words_of
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.catalog import names as cluster_names
from foretrace.topologies.errors import TopologyError
from foretrace.traces.errors import TraceError
from foretrace.traces.pack import Pack
from foretrace.traces.report.document import document
from foretrace.traces.report.html import served_page
from foretrace.traces.serving.server import JSON, Answer, Route, document_answer, page

NUMBERS: Final = ("gpus", "tp", "pp", "cp", "ep", "virtual_stages", "global_batch", "micro_batch", "seq_len")
"""Settings that are whole numbers; an empty one is left to its default."""

NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "model": tuple(model_names()),
    "cluster": tuple(cluster_names()),
    "schedule": tuple(SCHEDULES),
    "sharding": tuple(SHARDINGS),
    "recompute": RECOMPUTES,
    "precision": PRECISIONS,
}
"""Settings that are one of a list: names alone, so that a request cannot make the server read a file."""

DEFAULTS: Final[Mapping[str, str]] = {
    "model": "llama3-70b", "cluster": "dgx-h100", "gpus": "64", "tp": "8", "pp": "4", "cp": "1", "ep": "1",
    "schedule": "1f1b", "virtual_stages": "", "global_batch": "32", "micro_batch": "1", "seq_len": "4096",
    "sharding": "zero1", "recompute": "none", "precision": "bf16", "price": "",
}  # fmt: skip
"""What the page shows first."""

MOST_WORK: Final = 20_000
"""Layers times micro-batches that are simulated for the page: half a million spans, seconds."""

MOST_GPUS: Final = 16_384
"""Largest machine of the page: its fabric is a graph that is built for every change."""

KEPT: Final = 16
"""Simulations and pictures that are kept."""


@dataclass(slots=True)
class Planner:
    """Answers the what-if page; remembers what it has worked out."""

    _planned: dict[tuple[tuple[str, str], ...], Planned] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def warm(self) -> None:
        """Work out what the page shows first, so that code is loaded and compiled before somebody waits."""
        self._figures({})

    def routes(self) -> dict[str, Route]:
        """Return the pages, by path."""
        return {
            "/plan": lambda _: page(served_page("What if - foretrace", "plan", CONTROLS)),
            "/plan/choices": lambda _: _json_answer(choices()),
            "/plan/figures": self._figures,
            "/plan/picture": self._picture,
        }

    def plan(self, settings: Mapping[str, str]) -> Planned:
        """Return what *settings*, texts by name as in an address, lead to.

        Raises:
            SimulationError, TopologyError, TraceError: they are not possible.
        """
        given = {**DEFAULTS, **{name: settings[name] for name in DEFAULTS if name in settings}}
        key = tuple(sorted(given.items()))
        if key not in self._planned:
            job = job_of(given)
            simulation = simulate(job, engine="compiled" if find_spec("numba") else "event")
            price = _price(given["price"], job)
            self._planned[key] = Planned(job=job, simulation=simulation, run=simulation.run, price=price)
            while len(self._planned) > KEPT:
                del self._planned[next(iter(self._planned))]
        return self._planned[key]

    def _figures(self, query: Mapping[str, str]) -> Answer:
        begun = time.perf_counter()
        try:
            with self._lock:
                planned, pinned = self._asked(query)
                words = words_of(planned, pinned)
        except (SimulationError, TopologyError, TraceError) as error:
            return _json_answer({"error": _one_line(error)})
        return _json_answer({**words, "took_ms": 1e3 * (time.perf_counter() - begun)})

    def _picture(self, query: Mapping[str, str]) -> Answer:
        pack = Pack()
        try:
            with self._lock:
                planned, pinned = self._asked(query)
                first, second = (planned.run, None) if pinned is None else (pinned.run, planned.run)
                names = None if pinned is None else ("A", "B")
                contents = document(first, second, pack, names=names, quick=True)
                contents |= words_of(planned, pinned)
        except (SimulationError, TopologyError, TraceError) as error:
            return document_answer({"error": _one_line(error)})
        return document_answer({**contents, "columns": pack.columns}, pack.raw())

    def _asked(self, query: Mapping[str, str]) -> tuple[Planned, Planned | None]:
        pinned = self.plan(dict(parse_qsl(query["a"], keep_blank_values=True))) if "a" in query else None
        return self.plan(query), pinned


def job_of(given: Mapping[str, str]) -> Job:
    """Return the job that texts describe, one per name in ``DEFAULTS``.

    Raises:
        SimulationError, TopologyError, TraceError: it is not possible, or too large for the page.
    """
    settings: dict[str, Any] = {}
    for name, known in NAMES.items():
        if given[name] not in known:
            raise JobError(f"{name}={given[name]!r}: one of {', '.join(known)}")
        settings[name] = given[name]
    for name in NUMBERS:
        if given[name]:
            settings[name] = _whole(name, given[name])
    if settings["gpus"] > MOST_GPUS:
        raise JobError(
            f"gpus={settings['gpus']}: the page plans up to {MOST_GPUS}; foretrace simulate takes more"
        )
    job = job_from(settings)
    if (work := job.n_microbatches * job.model.n_layers) > MOST_WORK:
        raise JobError(
            f"{job.n_microbatches} micro-batches of {job.model.n_layers} layers are {work:,} passes, and the "
            f"page draws {MOST_WORK:,}; a larger micro_batch, or foretrace simulate, which takes more"
        )
    return job


def choices() -> dict[str, Any]:
    """Return what the controls of the page offer, and their defaults."""
    return {
        "names": {name: list(known) for name, known in NAMES.items()},
        "prices": {name: price for name in NAMES["cluster"] if (price := _catalog_price(name)) is not None},
        "defaults": dict(DEFAULTS),
    }


def _whole(name: str, text: str) -> int:
    if not text.isdecimal() or not text.isascii() or not 0 < int(text) < 10**9:
        raise JobError(f"{name}={text!r}: a whole number of at least 1")
    return int(text)


def _price(text: str, job: Job) -> float | None:
    """Return the price that is given, else that of the machine."""
    if not text:
        return job.cluster.mean_price_usd_per_gpu_hour
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 <= price < 1e6:
        raise JobError(f"price={text!r}: USD per GPU-hour, e.g. 2.50")
    return price


@cache
def _catalog_price(name: str) -> float | None:
    return load_cluster(name).mean_price_usd_per_gpu_hour


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _json_answer(document: Mapping[str, Any]) -> Answer:
    return Answer(json.dumps(document, allow_nan=False).encode("utf-8"), JSON)


CONTROLS: Final = """<p class="help"><a href="/">all runs</a></p>
<section id="plan" aria-label="What to simulate">
  <div id="controls"></div>
  <p id="plan-line"><span id="took" class="help" role="status"></span>
    <button id="pin" type="button">pin as A</button>
    <button id="swap" type="button" hidden>swap A and B</button>
    <button id="unpin" type="button" hidden>let A go</button> <code id="command"></code></p>
  <p id="mistake" class="failed" role="alert" hidden></p>
  <div id="misfit" class="failed" role="alert" hidden></div>
</section>
"""
"""The controls above the figures; ``plan.js`` fills them."""
