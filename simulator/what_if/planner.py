"""The what-if page: settings in, figures and a picture out, by the same simulator as the command line."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Final
from urllib.parse import parse_qsl

from foretrace.door import as_table, counted, parse
from foretrace.simulator.builder.stages import job_plan
from foretrace.simulator.config import job_from
from foretrace.simulator.engine import why_not_compiled
from foretrace.simulator.errors import JobError
from foretrace.simulator.framework import framework_names
from foretrace.simulator.job import PRECISIONS, RECOMPUTES, Job
from foretrace.simulator.memory.remedies import NOT_POSSIBLE
from foretrace.simulator.models.hf import model_from_config
from foretrace.simulator.models.model import Model
from foretrace.simulator.models.sources import names as model_names
from foretrace.simulator.price import usd_per_1b_tokens
from foretrace.simulator.schedules import SCHEDULES
from foretrace.simulator.search.best import Search
from foretrace.simulator.search.found import best_of
from foretrace.simulator.search.space import Space
from foretrace.simulator.sharding import SHARDINGS
from foretrace.simulator.simulate import Simulation, simulate
from foretrace.simulator.summary import host_words, job_name
from foretrace.simulator.what_if.fitting import values_of, ways_out, ways_to_fit
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.catalog import names as cluster_names
from foretrace.traces.pack import Pack
from foretrace.traces.report.document import document
from foretrace.traces.report.format import format_share, format_si
from foretrace.traces.report.html import served_page
from foretrace.traces.report.words import figure, headline, subtitle
from foretrace.traces.run import Run
from foretrace.traces.serving.server import JSON, Answer, Query, Route, document_answer, page

# What the what-if page says of a plan: its figures, against a pinned one, and what makes it fit.

SHOWN_REMEDIES: Final = 6

LOWER_IS_BETTER: Final = (
    *("Step time", "Pipeline bubble", "Exposed communication", "Waiting for other ranks"),
    *("Peak memory", "Cost"),
)
"""Figures that are better when they are smaller."""


SUMMARY_KEYS: Final = ("step_time_s", "tokens_per_s", "mfu", "bubble_fraction", "peak_memory_bytes", "fits")
"""Figures that the page passes on as numbers, as ``simulate --json`` prints them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One answer.

    *run*: the same as a run, with what was worked out of it. *price*: price of a GPU-hour, in USD; None if
    not known.
    """

    job: Job
    simulation: Simulation
    run: Run
    price: float | None


def words_of(planned: Planned, pinned: Planned | None) -> dict[str, Any]:
    """Return the figures of a plan as the page takes them, beside those of a pinned one."""
    before = {} if pinned is None else {one["name"]: (one, value) for one, value in _figures_of(pinned)}
    cards = []
    for one, value in _figures_of(planned):
        cards.append(one if one["name"] not in before else _against(one, value, *before[one["name"]]))
    layout = planned.job.layout
    return {
        "title": job_name(planned.job),
        "subtitle": subtitle(planned.run),
        "headline": cards,
        "warnings": [text for text in planned.simulation.info.warnings if not _is_about_memory(text)],
        "dp": layout.dp,
        "n_microbatches": planned.job.n_microbatches,
        "misfit": _misfit(planned),
        "summary": {key: planned.simulation.summary[key] for key in SUMMARY_KEYS},
    }


def _figures_of(planned: Planned) -> list[tuple[dict[str, str], float | None]]:
    """Return the figures of one plan, each with its number."""
    summary = planned.simulation.summary
    numbers = {
        "Step time": summary["step_time_s"],
        "Computing": summary["shares"]["compute"],
        "Pipeline bubble": summary["bubble_fraction"],
        "Exposed communication": summary["exposed_comm_fraction"],
        "Waiting for other ranks": summary["waiting_fraction"],
        "Peak memory": summary["peak_memory_bytes"],
        "Throughput per GPU": summary["tokens_per_s_per_gpu"],
        "MFU": summary["mfu"],
    }
    found: list[tuple[dict[str, str], float | None]] = [
        (one, numbers.get(one["name"])) for one in headline(planned.run, summary)
    ]
    if planned.price is not None:
        per_billion = usd_per_1b_tokens(planned.price, summary["tokens_per_s_per_gpu"])
        note = f"per billion tokens at ${planned.price:g} per GPU-hour"
        found.append((figure("Cost", f"${per_billion:,.0f}", note), per_billion))
    return found


def _against(
    one: dict[str, str], value: float | None, before: dict[str, str], value_before: float | None
) -> dict[str, str]:
    """Return a figure with what it was in the pinned plan."""
    # Zero has no ratio: only what it was is said.
    if not value or not value_before:
        return {**one, "was": f"A {before['value']}"}
    change = value / value_before - 1
    better = (change < 0) == (one["name"] in LOWER_IS_BETTER)
    sign = format_share(change, "+.1f").replace("-", "−")
    return {
        **one,
        "was": f"A {before['value']}, {'no change' if abs(change) < 5e-4 else sign}",
        "tone": "" if abs(change) < 5e-4 else "good" if better else "bad",
    }


def _misfit(planned: Planned) -> dict[str, Any] | None:
    """Return by how much a plan does not fit into memory, and changes with which it would."""
    job, summary = planned.job, planned.simulation.summary
    if summary["fits"]:
        return None
    peak, limit = summary["peak_memory_bytes"], summary["memory_limit_bytes"]
    text = f"does not fit: {format_si(peak, 'B')} needed, {format_si(limit, 'B')} there"
    return {
        "text": text if peak > limit else host_words(job, summary["host_memory_bytes"]),
        "remedies": [
            {"change": way.change, "peak": format_si(way.peak_bytes, "B"), "settings": way.settings}
            for way in ways_to_fit(job)[:SHOWN_REMEDIES]
        ],
    }


def _is_about_memory(text: str) -> bool:
    return "not fit" in text or text.startswith(("would fit", "no single setting"))


NUMBERS: Final = (
    *("gpus", "tp", "pp", "cp", "ep", "expert_tp"),
    *("virtual_stages", "global_batch", "micro_batch", "seq_len"),
)
"""Settings that are whole numbers; an empty one is left to its default."""

NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "model": tuple(model_names()),
    "cluster": tuple(cluster_names()),
    "schedule": tuple(SCHEDULES),
    "sharding": tuple(SHARDINGS),
    "recompute": RECOMPUTES,
    "precision": PRECISIONS,
    "framework": framework_names(),
}
"""Settings that are one of a list: names alone, so that a request cannot make the server read a file."""

FRAMEWORK: Final = str(next(field.default for field in fields(Job) if field.name == "framework"))
"""Whose conventions hold unless somebody chooses, in all verbs."""

DEFAULTS: Final[Mapping[str, str]] = {
    "model": "llama3-70b", "cluster": "dgx-h100", "gpus": "64", "tp": "8", "pp": "4", "cp": "1", "ep": "1",
    "expert_tp": "", "framework": FRAMEWORK, "schedule": "1f1b", "virtual_stages": "",
    "global_batch": "32", "micro_batch": "1", "seq_len": "4096",
    "sharding": "zero1", "recompute": "none", "precision": "bf16", "price": "", "config": "",
}  # fmt: skip
"""What the page shows first; ``config`` is the text of a model's ``config.json``, in place of its name."""

MOST_CONFIG_LETTERS: Final = 8_000
"""Letters of a ``config.json`` that an address may hold; without their lists even large ones have 2,000."""

SHOWN_WAYS: Final = 6
"""Changes that are offered beside a mistake."""

SEARCHED_S: Final = 0.7
"""Seconds of search behind each answer on the best layouts, so that the page shows how far it is."""

SHOWN_LAYOUTS: Final = 5
"""Layouts that the page lists while it searches."""

MOST_WORK: Final = 20_000
"""Layers times micro-batches that are simulated for the page: half a million spans, seconds."""

MOST_GPUS: Final = 16_384
"""Largest machine of the page: its fabric is a graph that is built for every change."""

KEPT: Final = 16
"""Simulations and pictures that are kept."""


_SEARCHED: Final = (
    *("tp", "pp", "cp", "ep", "expert_tp"),
    *("micro_batch", "schedule", "virtual_stages", "sharding", "recompute", "price"),
)
"""Settings that a search chooses, and the price, which it does not look at."""


class Searched:
    """A search as far as it has come: the same as that of ``foretrace search``, a slice of time at a time.

    Raises SimulationError, TopologyError, TraceError if they are not possible.
    """

    def __init__(self, key: tuple[tuple[str, str], ...], given: Mapping[str, str]) -> None:
        self.key = key
        # Only model and machine are wanted of it: the batch that was asked for may not divide over its
        # layout, one of a sequence per GPU does.
        job = job_of({**given, "global_batch": given["gpus"]})
        others = {"precision": job.precision, "framework": job.framework}
        batch = _whole("global_batch", given["global_batch"])
        space = Space(
            model=job.model, cluster=job.cluster, global_batch=batch, seq_len=job.seq_len, others=others
        )
        self._families = space.families()
        self._search = Search()
        self._is_filled = False

    def further(self) -> dict[str, Any]:
        """Search for ``SEARCHED_S``; return the best so far, what is left, and whether this was all."""
        search, until_s = self._search, time.monotonic() + SEARCHED_S
        while not self._is_filled and time.monotonic() < until_s:
            family = next(self._families, None)
            if family is None:
                self._is_filled = True
            else:
                search.add(family)
        while self._is_filled and search.goes_on(SHOWN_LAYOUTS) and time.monotonic() < until_s:
            search.look_closer()
        done = self._is_filled and not search.goes_on(SHOWN_LAYOUTS)
        # Until it is done, only layouts that were simulated whole.
        known = best_of(search.best if done else search.simulated(), SHOWN_LAYOUTS)
        limit = "" if known or not done else "none of them fits"
        return {
            "done": done,
            "words": limit or search.state().words(),
            "layouts": [{"step_time_s": one.cost / 1e9, "settings": _settings(one.job)} for one in known],
        }


def _settings(job: Job) -> dict[str, str]:
    """Return what a search has chosen as the controls take it."""
    layout = job.layout
    return {
        **{axis: str(getattr(layout, axis)) for axis in ("tp", "pp", "cp", "ep")},
        "expert_tp": str(layout.expert_tp or ""),
        "micro_batch": str(job.micro_batch),
        "schedule": job.schedule,
        "virtual_stages": str(job.virtual_stages or ""),
        "sharding": job.sharding,
        "recompute": job.recompute,
    }


def _given(query: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a query, with the defaults of those that it leaves out."""
    return {**DEFAULTS, **{name: query[name] for name in DEFAULTS if name in query}}


@dataclass(slots=True)
class Planner:
    """Answers the what-if page; remembers what it has worked out."""

    _planned: dict[tuple[tuple[str, str], ...], Planned] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _searched: Searched | None = None

    def warm(self) -> None:
        """Work out what the page shows first, so that code is loaded and compiled before somebody waits."""
        self._figures(Query({}))

    def routes(self) -> dict[str, Route]:
        """Return the pages, by path."""
        return {
            "/plan": lambda _: page(served_page("What if - foretrace", "plan")),
            "/plan/choices": lambda _: _json_answer(choices()),
            "/plan/figures": self._figures,
            "/plan/picture": self._picture,
            "/plan/best": self._best,
        }

    def plan(self, settings: Mapping[str, str], check: Callable[[], None] | None = None) -> Planned:
        """Return what *settings*, texts by name as in an address, lead to.

        *check*: called in between; it may raise to end the work. Raises SimulationError, TopologyError,
        TraceError if they are not possible.
        """
        given = _given(settings)
        key = tuple(sorted(given.items()))
        if key not in self._planned:
            job = job_of(given)
            tell = None if check is None else lambda _: check()
            simulation = simulate(job, tell, engine="event" if why_not_compiled() else "compiled")
            price = _price(given["price"], job)
            self._planned[key] = Planned(job=job, simulation=simulation, run=simulation.run, price=price)
            # The oldest one goes; a dict is in order of insertion.
            while len(self._planned) > KEPT:
                del self._planned[next(iter(self._planned))]
        return self._planned[key]

    def _figures(self, query: Query) -> Answer:
        begun = time.perf_counter()
        try:
            with query.holding(self._lock):
                planned, pinned = self._asked(query)
                words = words_of(planned, pinned)
        except NOT_POSSIBLE as error:
            # Outside of the lock: this simulates nothing.
            ways = ways_out(_given(query), str(error), NAMES, _check)
            return _json_answer({"error": _one_line(error), "ways": ways[:SHOWN_WAYS]})
        return _json_answer(
            {**words, "values": values_of(planned.job), "took_ms": 1e3 * (time.perf_counter() - begun)}
        )

    def _picture(self, query: Query) -> Answer:
        pack = Pack()
        try:
            with query.holding(self._lock):
                planned, pinned = self._asked(query)
                first, second = (planned.run, None) if pinned is None else (pinned.run, planned.run)
                names = None if pinned is None else ("A", "B")
                contents = document(first, second, pack, names=names, quick=True)
                contents |= words_of(planned, pinned)
        except NOT_POSSIBLE as error:
            return document_answer({"error": _one_line(error)})
        return document_answer({**contents, "columns": pack.columns}, pack.raw())

    def _best(self, query: Query) -> Answer:
        """Search a little further for the best layout of the model, machine and batch of *query*."""
        # What a search chooses itself must not tell searches apart.
        given = {**_given(query), **{name: DEFAULTS[name] for name in _SEARCHED}, "tp": "1", "pp": "1"}
        key = tuple(sorted(given.items()))
        try:
            with query.holding(self._lock):
                if self._searched is None or self._searched.key != key:
                    self._searched = Searched(key, given)
                return _json_answer(self._searched.further())
        except NOT_POSSIBLE as error:
            return _json_answer({"error": _one_line(error), "done": True})

    def _asked(self, query: Query) -> tuple[Planned, Planned | None]:
        pinned = dict(parse_qsl(query["a"], keep_blank_values=True)) if "a" in query else None
        first = None if pinned is None else self.plan(pinned, query.check)
        return self.plan(query, query.check), first


def job_of(given: Mapping[str, str]) -> Job:
    """Return the job that texts describe, one per name in ``DEFAULTS``.

    Raises SimulationError, TopologyError, TraceError if it is not possible, or too large for the page.
    """
    settings: dict[str, Any] = {}
    for name, known in NAMES.items():
        if given[name] not in known:
            raise JobError(f"{name}={given[name]!r}: one of {', '.join(known)}")
        settings[name] = given[name]
    for name in NUMBERS:
        if given[name] or name == "gpus":
            settings[name] = _whole(name, given[name])
    if settings["gpus"] > MOST_GPUS:
        raise JobError(
            f"gpus={settings['gpus']}: the page plans up to {MOST_GPUS}; foretrace simulate takes more"
        )
    model = None
    if given["config"]:
        # A file takes the place of the name.
        del settings["model"]
        model = _model(given["config"])
    job = job_from(settings, model=model)
    if (work := job.n_microbatches * job.model.n_layers) > MOST_WORK:
        raise JobError(
            f"{job.n_microbatches} micro-batches of {job.model.n_layers} layers are {work:,} passes, and the "
            f"page draws {MOST_WORK:,}; a larger micro_batch, or foretrace simulate, which takes more"
        )
    return job


def _check(given: Mapping[str, str]) -> None:
    """Raise, without simulating, what is wrong with settings."""
    job = job_of(given)
    job_plan(job)
    _price(given["price"], job)


def _model(text: str) -> Model:
    """Return the model of a ``config.json``."""
    if len(text) > MOST_CONFIG_LETTERS:
        raise JobError(
            f"config.json: {len(text):,} letters, the page takes {MOST_CONFIG_LETTERS:,}; "
            "simulate --model FILE takes more"
        )
    found = as_table(parse(text, "JSON", "config.json", JobError), "config.json", JobError)
    return model_from_config(found)


def choices() -> dict[str, Any]:
    """Return what the controls of the page offer, and their defaults."""
    return {
        "names": {name: list(known) for name, known in NAMES.items()},
        "prices": {name: price for name in NAMES["cluster"] if (price := _catalog_price(name)) is not None},
        "defaults": dict(DEFAULTS),
    }


def _whole(name: str, text: str) -> int:
    # Digits of other scripts are digits, too.
    if not text.isascii() or not 0 < counted(text) < 10**9:
        raise JobError(f"{name}={text!r}: a whole number of at least 1")
    return counted(text)


def _price(text: str, job: Job) -> float | None:
    """Return the price that is given, else that of the machine."""
    if not text:
        return job.cluster.mean_price_usd_per_gpu_hour
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    # This refuses a NaN, too.
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
