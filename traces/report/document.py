"""What a report contains, as one JSON document; the page draws it and adds nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from foretrace.traces.analysis.activity import is_pipelined
from foretrace.traces.analysis.diagnosis import diagnose
from foretrace.traces.analysis.metrics import breakdown, step_times_ns, summarize
from foretrace.traces.compare import Comparison, compare
from foretrace.traces.errors import RunError
from foretrace.traces.join import rank_pairs
from foretrace.traces.pack import Pack
from foretrace.traces.report import words
from foretrace.traces.report.cells import COMPUTE_LANE
from foretrace.traces.report.compare import comparison, comparison_headline
from foretrace.traces.report.findings import MOST_FINDINGS, critical_entry, findings_entry, slowest
from foretrace.traces.report.kinds import Kinds, Labels, palette
from foretrace.traces.report.links import links_entry
from foretrace.traces.report.rows import MOST_ROWS, picks
from foretrace.traces.report.run import View, held_where, overview_entry, run_entry, view_of
from foretrace.traces.report.tables import tables
from foretrace.traces.run import Run

FORMAT: Final = 1  # version of the document, for programs that read a report
MOST_FINDINGS_OF_TWO: Final = 4  # findings of each of two runs: what makes the difference stands above them
KEYS: Final = ("a", "b")  # what the document calls its runs


TABLE_ROWS: Final = 20
"""Rows of each table of a report; ``foretrace analyze --rows`` shows as many as one asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The part of a large run that a server sends at once."""

    pick: int  # which of the groups of ranks that are shown together
    step: int  # which step
    most_cells: int  # that are sent


def document(
    run: Run,
    other: Run | None,
    pack: Pack,
    *,
    window: Window | None = None,
    names: Sequence[str] | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """Return the contents of a report; the arrays that belong to it are added to *pack*.

    Args:
        run: the run, or the first of two.
        other: the second run.
        pack: what the page gets besides the document.
        window: the part of one run to send, without the overview of all ranks; None: all that fits a page.
        names: what the page calls the runs; None: where they come from, or their own names.
        quick: leave out what takes longer than the schedule: all ranks, findings, critical path, links.

    Raises:
        RunError: a run has no step with a length.
    """
    runs = (run,) if other is None else (run, other)
    kinds, names = Kinds(runs), names or words.run_labels(runs)
    labels = Labels(kinds)
    groups, partner = _groups(runs)
    views = _views(runs, labels, groups, window)
    begins_with = groups[outlier(run).get("pick", 0) if other is None and not quick else 0]
    shown = _shown(views, names, kinds, pack, begins_with=begins_with, partner=partner)
    found = None if other is None else compare(run, other)
    return {
        "format": FORMAT,
        **(_words(run, kinds) if found is None else _words_of_two(runs, names, found, kinds)),
        "made": f"Made by foretrace {_version()} from {' and '.join(each.path for each in runs)}.",
        "legend_note": words.LEGEND_NOTE,
        "warnings": _warnings(views, found, window),
        "palette": palette(),
        "kinds": kinds.entries,
        "runs": shown,
        "picks": groups,
        "overview": None if quick or window else overview_entry(views[0], groups, labels, pack, shown[0]),
        **_explained(views, shown, kinds, pack, window=window, quick=quick),
        **({} if window is None else _of_window(run, window)),
        "memory_held": held_where(runs, names),
        "memory_limit_bytes": next(filter(None, map(words.memory_limit_bytes, runs)), None),
        "comparison": None if found is None else comparison(found, names, kinds, pack),
        "tables": [table._asdict() for each in runs for table in tables(each, TABLE_ROWS) if table.rows],
        "basis": [
            section for each, name in zip(runs, names, strict=True) for section in _basis(each, name, runs)
        ],
        "labels": labels.entries,
        "names": labels.names,
    }


def _views(
    runs: Sequence[Run], labels: Labels, groups: Sequence[Sequence[int]], window: Window | None
) -> list[View]:
    """Return the ranks of each run that are drawn, or the part of the only run in a *window*."""
    if window is not None:
        return [_view_of_window(runs[0], labels, groups, window)]
    return [view_of(each, labels, _by_importance(each, groups)) for each in runs]


def _shown(
    views: Sequence[View],
    names: Sequence[str],
    kinds: Kinds,
    pack: Pack,
    *,
    begins_with: Sequence[int],
    partner: Mapping[int, int] | None,
) -> list[dict[str, Any]]:
    """Return the schedule of each run; its first rows are the ranks *begins_with*, or their partners."""
    seen = (begins_with, begins_with if partner is None else list(partner.values()))
    shown = [
        run_entry(view, kinds, pack, key, label=name, first=first)
        for view, key, name, first in zip(views, KEYS, names, seen, strict=False)
    ]
    if partner is not None:
        shown[1]["row_of"] = _rows_by_partner(shown[1]["row_of"], partner)
    return shown


def _rows_by_partner(rows: Sequence[int], partner: Mapping[int, int]) -> list[int]:
    """Return the row of the second run beside each rank of the first; -1: none."""
    return [rows[partner[rank]] if rank in partner else -1 for rank in range(max(partner) + 1)]


def _explained(
    views: Sequence[View],
    shown: Sequence[dict[str, Any]],
    kinds: Kinds,
    pack: Pack,
    *,
    window: Window | None,
    quick: bool,
) -> dict[str, Any]:
    """Return what explains the runs: what they lose, and the rank that is slow; *shown* gets paths and links.

    A window is sent without what takes a while: ``overview_document`` and ``findings_document`` have it.
    """
    if quick:
        return {}
    found = outlier(views[0].run) if len(views) == 1 else {}
    if window is not None:
        return {"slowest": found["slowest"]} if found else {}
    findings: list[dict[str, Any]] = []
    for view, entry in zip(views, shown, strict=True):
        entry["critical"] = critical_entry(view, kinds, pack, entry["key"])
        entry["links"] = links_entry(view, pack, entry["key"])
        most = MOST_FINDINGS if len(views) == 1 else MOST_FINDINGS_OF_TWO
        findings += [one | {"run": entry["label"]} for one in findings_entry(view.run, most)]
    return {"findings": findings, **found}


def outlier(run: Run) -> dict[str, Any]:
    """Return the rank that is slower than its like, and the rows to begin with: those of its pipeline."""
    found = slowest(run)
    if found is None:
        return {}
    groups, _ = _groups((run,))
    own = [number for number, group in enumerate(groups) if found.rank in group]
    about = {"rank": found.rank, "text": found.sentence}
    return {"slowest": about, "pick": own[0] if own else 0}


def overview_document(run: Run, step: int, pack: Pack) -> dict[str, Any]:
    """Return all ranks in one step, for a page that has a window; pixels go to *pack*.

    Raises RunError: the run has no such step.
    """
    labels = Labels(Kinds((run,)))
    groups, _ = _groups((run,))
    if step not in step_times_ns(breakdown(run)):
        raise RunError(f"no step {step} in {run.path}")
    # Without rows: only the picture of all ranks is made of it.
    view = View(run=run, rows=(), steps=(step,), default_step=0, done={}, lanes=(COMPUTE_LANE,), omitted="")
    entry: dict[str, Any] = {"key": KEYS[0], "steps": [{}]}
    found = overview_entry(view, groups, labels, pack, entry)
    return {"overview": None if found is None else {**found, **entry["steps"][0]}}


def findings_document(run: Run) -> dict[str, Any]:
    """Return what the run loses, for a page that has a window: of many ranks it takes longer than they do."""
    return {"findings": findings_entry(run)}


def _view_of_window(run: Run, labels: Labels, groups: Sequence[Sequence[int]], window: Window) -> View:
    """Return the ranks and the step of *window*, and other ranks as far as they fit."""
    if not 0 <= window.pick < len(groups):
        raise RunError(f"pick {window.pick}: {run.path} has {len(groups)} groups of ranks")
    first = [groups[window.pick], *groups]
    return view_of(run, labels, _by_importance(run, first), step=window.step, most_cells=window.most_cells)


def _of_window(run: Run, window: Window) -> dict[str, Any]:
    """Return what a page has to know to ask for another window."""
    times = step_times_ns(breakdown(run))
    return {"windowed": True, "pick": window.pick, "all_steps": [list(item) for item in times.items()]}


def _groups(runs: Sequence[Run]) -> tuple[list[list[int]], dict[int, int] | None]:
    """Return the ranks that are shown together, by their number in the first run.

    The second value leads from a rank of the first run to the one it is compared with, where that is another.
    """
    if len(runs) > 1 and len({run.info.world_size for run in runs}) > 1:
        partner = dict(rank_pairs(*runs))
        return [list(partner)[:MOST_ROWS]], partner
    return picks(max(runs, key=lambda run: len(run.stored_ranks))), None


def _by_importance(run: Run, groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the stored ranks of *run*, those that are shown first at the front."""
    shown = [rank for group in groups for rank in group if rank in set(run.stored_ranks)]
    return list(dict.fromkeys([*shown, *run.stored_ranks]))


def _words(run: Run, kinds: Kinds) -> dict[str, Any]:
    """Return the texts of a report about one run."""
    summary = summarize(run)
    by_stage = (
        is_pipelined(run) and run.info.layout is not None and len(run.stored_ranks) == run.info.layout.pp
    )
    return {
        "title": words.title(run),
        "subtitle": words.subtitle(run),
        "story": words.story(run, summary, kinds),
        "headline": words.headline(run, summary),
        "schedule_title": f"Schedule: one row per {'pipeline stage' if by_stage else 'rank'}",
    }


def _words_of_two(
    runs: Sequence[Run], names: Sequence[str], found: Comparison, kinds: Kinds
) -> dict[str, Any]:
    """Return the texts of a report about two runs."""
    return {
        "title": f"{words.title(runs[0])}: {names[0]} and {names[1]}",
        "subtitle": _subtitle_of_two(runs, names),
        "story": "",
        "headline": comparison_headline(found, names, kinds),
        "schedule_title": f"Schedule: every row twice, {names[0]} above, {names[1]} below",
    }


def _subtitle_of_two(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Return what two runs have in common, and what each has of its own."""
    # Without the first part, which says where a run comes from.
    said = [words.subtitle(run).partition(" · ")[2].split(" · ") for run in runs]
    both = [part for part in said[0] if part in said[1]]
    own = [
        f"{name}: {', '.join(part for part in parts if part not in both)}"
        for name, parts in zip(names, said, strict=True)
        if set(parts) - set(both)
    ]
    return " · ".join([*both, *own])


def _warnings(views: Sequence[View], found: Comparison | None, window: Window | None) -> list[str]:
    """Return what to know before trusting the page, said once."""
    said = [line for view in views for _, line in diagnose(view.run.path, view.run).lines]
    said += views[0].run.warnings if found is None else [found.warned, *found.warnings]
    return list(
        dict.fromkeys(
            [
                *filter(None, said),
                *(view.omitted for view in views if view.omitted and window is None),
            ]
        )
    )


def _basis(run: Run, name: str, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return what the figures of *run* rest on; of two runs, each section says whose it is."""
    ending = f" ({name})" if len(runs) > 1 else ""
    return [{**section, "title": section["title"] + ending} for section in words.basis(run)]


def _version() -> str:
    try:
        return version("foretrace")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "from a checkout"
