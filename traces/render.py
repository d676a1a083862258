"""Shows analyses and comparisons of runs to a person."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from foretrace.traces.analysis import metrics
from foretrace.traces.analysis.critical_path import GAP, CriticalPath, critical_path
from foretrace.traces.analysis.diagnosis import Diagnosis
from foretrace.traces.analysis.findings import LEAST_SHARE, Finding
from foretrace.traces.analysis.gaps import causes, gaps_on_path
from foretrace.traces.batch import batch_in
from foretrace.traces.compare import Comparison, Pair
from foretrace.traces.console import stdout
from foretrace.traces.info import rank_list
from foretrace.traces.report.format import format_left_out, format_share, format_si, format_time
from foretrace.traces.report.tables import NAMESPACES, tables
from foretrace.traces.run import Run

SHOWN_RANKS: Final = 16  # most ranks with a row of their own; more are shown as one row per pipeline stage

SHOWN_SHARE: Final = 0.0005
"""Least share that has a column: what is less on every rank would be printed as 0.0 %."""

LEAST_PART: Final = 0.005  # share of the critical path that is printed as 1 % at least

NO_BREAK: Final = "\N{NO-BREAK SPACE}"

SHOWN_KINDS: Final = 5  # parts of the critical path that a person reads
SHOWN_FINDINGS: Final = 6  # findings that a person reads; all are in the JSON


def percents(shares: Sequence[float]) -> list[str]:
    """Return shares that add up to 1 as percentages with one decimal that add up to 100.0.

    What is missing to 1, below what one decimal shows, is given to the largest remainders.

    >>> percents([1 / 3, 1 / 3, 1 / 3])
    ['33.4', '33.3', '33.3']
    """
    tenths = [int(share * 1000) for share in shares]
    left = 1000 - sum(tenths)
    order = sorted(range(len(shares)), key=lambda i: tenths[i] - shares[i] * 1000)
    for turn in range(left):
        tenths[order[turn % len(order)]] += 1
    return [f"{value / 10:.1f}" for value in tenths]


def show_analysis(run: Run, summary: Mapping[str, Any]) -> None:
    """Print the headline of a run, and a table whose rows add up to 100 %."""
    console = stdout()
    console.print(f"[bold]{escape(summary['name'] or run.path)}[/]  {_what(summary)}", soft_wrap=True)
    for line in run.info.audited().get("audit", {}).get("lines", ()):
        console.print(line, markup=False, soft_wrap=True)
    if run.is_timeless:
        console.print(_counts(summary))
        show_warnings(console, run.warnings)
        return
    console.print(_steps(summary), soft_wrap=True)
    if "batch" in (run.info.job or {}):
        console.print(batch_in(run.info.job or {}).words, markup=False, soft_wrap=True)
    console.print(
        f"exposed communication [bold]{format_share(summary['exposed_comm_fraction'])}[/]   "
        f"bubble [bold]{format_share(summary['bubble_fraction'])}[/]   "
        f"waiting for ranks [bold]{format_share(summary['waiting_fraction'])}[/]"
    )
    console.print(_shares_table(run, metrics.averaged_rows(run), summary["shares"]))
    for what, text in summary["assumed"].items():
        console.print(f"{what} {text}", style="dim", markup=False, soft_wrap=True)
    if n_bounds := summary["n_bounds"]:
        console.print(
            f"{n_bounds:,} communications ended at an unknown time within their spans: they are in no share "
            "and in no bandwidth",
            soft_wrap=True,
        )
    show_warnings(console, run.warnings)


def show_critical_path(run: Run) -> None:
    """Print what the longest chain of the typical step is made of, and what its largest part could save."""
    if run.is_timeless:
        return
    path = critical_path(run, metrics.typical_step(run)[0])
    kinds = path.by_kind()
    shown = [(kind, ns / path.length_ns) for kind, ns in list(kinds.items())[:SHOWN_KINDS]]
    gap = _gap(run, path)
    parts = ", ".join(
        f"{gap if kind == GAP else f'{kind} ' + format_share(share, '.0f')}"
        for kind, share in shown
        if share > LEAST_PART
    )
    largest = next((kind for kind in kinds if kind != GAP), "")
    saved = 1 - path.scaled_ns({largest: 0.5}) / path.length_ns
    most = format_share(saved, ".0f")
    asked = f"; {largest} in half the time saves at most {most} of the step" if largest else ""
    console = stdout()
    text = _wrapped(f"critical path: {parts}{asked}", console.width)
    console.print(text, style="dim", markup=False, soft_wrap=True)


def _wrapped(text: str, columns: int) -> str:
    """Return *text* in lines of at most *columns*; no number is parted from its percent sign.

    >>> print(_wrapped("forward 17 %, backward 40 %", 11))
    forward
    17 %,
    backward
    40 %
    """
    joined = text.replace(" %", NO_BREAK + "%")
    return textwrap.fill(joined, columns, break_on_hyphens=False).replace(NO_BREAK, " ")


def _gap(run: Run, path: CriticalPath) -> str:
    """Return how much of the path nothing runs in, and why as far as the trace knows."""
    total = path.by_kind().get(GAP, 0)
    told = [
        f"{causes()[cause].short if cause in causes() else cause} {format_share(ns / path.length_ns, '.0f')}"
        for cause, ns in gaps_on_path(run, path).items()
        if ns > LEAST_PART * path.length_ns
    ]
    why = f" ({', '.join(told)})" if told else ""
    return f"nothing runs {format_share(total / path.length_ns, '.0f')}{why}"


def show_tables(run: Run, n_rows: int, limit_bytes_per_s: float | None) -> None:
    """Print the largest kernels, collectives and copies of a trace of a device, and how it was launched."""
    console = stdout()
    for shown in tables(run, n_rows, limit_bytes_per_s):
        table = _table(*shown.head)
        for row in shown.rows:
            table.add_row(*(escape(cell) for cell in row))
        if shown.rows:
            console.print(table)
        if shown.note:
            console.print(shown.note, style="dim", markup=False, soft_wrap=True)


def show_diagnosis(found: Diagnosis) -> None:
    """Print why a job hangs, or what ended it."""
    console = stdout()
    if not found and found.ranks:
        console.print(f"rank {rank_list(one.rank for one in found.ranks)}: no rank is known to be behind")
    for label, text in found.lines[:SHOWN_FINDINGS]:
        console.print(f"[red]{label}[/] {escape(text)}", soft_wrap=True)


def _counts(summary: Mapping[str, Any]) -> Table:
    """Return what was called how often, of a run without times."""
    table = _table("called", "times", "bytes", "FLOPs")
    for row in summary["kinds"]:
        name = escape(f"{row['category']} {row['kind']} {row['axis']}".strip())
        size, flops = (format_si(row[key], "") if row[key] else "" for key in ("size_bytes", "flops"))
        table.add_row(name, f"{row['count']:,}", size, flops)
    return table


def show_findings(run: Run, found: Sequence[Finding]) -> None:
    """Print what the run loses, the dearest first."""
    console = stdout()
    if not found and not run.is_timeless:
        console.print(
            f"no finding: nothing that is known costs {format_share(LEAST_SHARE)} of a step or more",
            style="dim",
        )
    for one in found[:SHOWN_FINDINGS]:
        money = "" if one.usd_per_hour is None else f", ${one.usd_per_hour:,.2f} an hour"
        console.print(f"- {one.text}{money}", soft_wrap=True, markup=False)
        if one.advice:
            console.print(f"  {one.advice}", style="dim", soft_wrap=True, markup=False)


def _what(summary: Mapping[str, Any]) -> str:
    """Return where a run is from and how large it is."""
    stored = summary["n_ranks_stored"]
    folded = f", {stored} stored" if stored != summary["world_size"] else ""
    return f"{summary['origin']}, {summary['world_size']} ranks{folded}, {summary['n_spans']:,} spans"


def _steps(summary: Mapping[str, Any]) -> str:
    """Return the line about step times, and one about what is in no step."""
    if not summary["has_steps"]:
        return (
            f"window [bold]{format_time(summary['step_time_s'])}[/], from first to last: nothing marks steps"
        )
    said = f"step time [bold]{format_time(summary['step_time_s'])}[/]"
    averaged = [step["step_time_s"] for step in summary["steps"] if step["averaged"]]
    if len(averaged) > 1:
        said += f", median of {len(averaged)} ({format_time(min(averaged))} to {format_time(max(averaged))})"
    took_s = {step["step"]: step["step_time_s"] for step in summary["steps"]}
    whys = {step["step"]: step["why_not"] for step in summary["steps"] if not step["averaged"]}
    for why, steps in metrics.grouped(whys).items():
        took = format_time(max(took_s[step] for step in steps))
        said += (
            f"; step {steps[0]} {why} ({took}) and is left out"
            if len(steps) == 1
            else f"; steps {rank_list(steps)} {metrics.in_plural(why)} (up to {took}) and are left out"
        )
    return "\n".join(filter(None, (said, format_left_out(summary["left_out"]))))


def _shares_table(run: Run, rows: Sequence[metrics.Breakdown], mean: Mapping[str, float]) -> Table:
    """Return one row per rank, or per pipeline stage where there are many, and the mean."""
    shown = [state for state in mean if any(row.shares[state] >= SHOWN_SHARE for row in rows)]
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="dim")
    table.add_column("ranks", no_wrap=True)
    for state in shown:
        table.add_column(escape(state.replace(":", " ")), justify="right", min_width=len("exposed"))
    table.add_column("sum, %", justify="right", style="dim", min_width=len("100.0"))
    table.add_column("hidden comm", justify="right", style="dim", min_width=len("hidden"))
    for name, members in [*_groups(run, rows), ("mean", rows)]:
        shares = metrics.mean_over_ranks(members, [row.shares for row in members])
        hidden = [{"": sum(row.hidden_ns.values()) / row.window_ns} for row in members]
        cells = percents([shares[state] for state in shown])
        total = f"{sum(map(float, cells)):.1f}"
        table.add_row(
            name,
            *cells,
            total,
            f"{metrics.mean_over_ranks(members, hidden)[''] * 100:.1f}",
            style="bold" if name == "mean" else "",
        )
    if len(run.stored_ranks) > SHOWN_RANKS:
        for name, pick in (("least of any rank", min), ("most of any rank", max)):
            cells = [f"{pick(row.shares[state] for row in rows) * 100:.1f}" for state in shown]
            table.add_row(name, *cells, "", "", style="dim")
    return table


def _groups(run: Run, rows: Sequence[metrics.Breakdown]) -> list[tuple[str, list[metrics.Breakdown]]]:
    """Return the rows of the table with their names: ranks if they are few, else pipeline stages."""
    layout = run.info.layout
    few = len(run.stored_ranks) <= SHOWN_RANKS
    groups: dict[str, list[metrics.Breakdown]] = {}
    for row in rows:
        stage = "" if layout is None or layout.pp == 1 else f"stage {layout.coord(row.rank).pp}"
        others = f" ×{row.represents}" if row.represents > 1 else ""
        name = f"rank {row.rank}{others}{stage and f', {stage}'}" if few else stage or "all ranks"
        groups.setdefault(name, []).append(row)
    return list(groups.items())


def _compared(step_ns: int, origin: str, name: str, step: int, phases: Sequence[Mapping[str, Any]]) -> str:
    """Return one line on a run that is compared."""
    said = f"[bold]{format_time(step_ns / 1e9)}[/]  {origin}: {escape(name)}, step {step}"
    return "; ".join(filter(None, (said, format_left_out(phases))))


def show_comparison(found: Comparison) -> None:
    """Print the two step times, the causes of their difference, and how single spans compare."""
    console, told = stdout(), found.to_dict()
    if found.warned:
        console.print(found.warned, style="yellow", markup=False, soft_wrap=True)
    a = _compared(found.a_step_ns, found.a_origin, found.a_name, found.a_step, found.a_left_out)
    b = _compared(found.b_step_ns, found.b_origin, found.b_name, found.b_step, found.b_left_out)
    console.print(
        f"a  {a}{_rate(told['a'])}\nb  {b}{_rate(told['b'])}\n{_ratios(found)}",
        soft_wrap=True,
    )
    scale = 1.0 if found.scale is None else found.scale
    as_much = "" if scale == 1 else f" in {scale:.3g} steps"
    table = _table("cause, on the mean rank", "a", f"b{as_much}", "b - a", "of b")
    for cause in found.details:
        if cause.a_ns or cause.b_ns:
            table.add_row(
                escape(cause.name.replace(":", " ")), *_beside(cause.a_ns, cause.b_ns, scale, found.b_step_ns)
            )
    table.add_row("step", *_beside(found.a_step_ns, found.b_step_ns, scale, found.b_step_ns), style="bold")
    console.print(table)
    both = found.spans.communicated
    if both is not None and (said := both.words()):
        console.print(escape(said), style="" if both.differences else "dim", soft_wrap=True)
    if found.kernels:
        console.print(_kinds(found))
    if found.operators:
        console.print(_operators(found))
        if not _are_told(found):
            console.print("by module, operator and shape with ingest --explain of both", style="dim")
    elif found.kernels:
        console.print(
            "operators are not compared: one of the two does not say its own (ingest --explain)", style="dim"
        )
    _show_joined(console, found.spans.to_dict(), of_traces=bool(found.kernels))
    show_warnings(console, found.warnings)


SHOWN_OPERATORS: Final = 12


def _are_told(found: Comparison) -> bool:
    """Whether both traces say their operators; else their kernels stand in for them."""
    return any(pair.operator.module or pair.operator.shapes for pair in found.operators)


def _operators(found: Comparison) -> Table:
    """Return the operators of two traces that differ most; what only one of them has is summed up last."""
    joined = [pair for pair in found.operators if pair.joined_by]
    alone = [pair for pair in found.operators if not pair.joined_by]
    what = "operator, on the device" if _are_told(found) else "kernel, by its name"
    table = _table(what, "calls", "a", "b", "b - a", "b / a")
    for pair in joined[:SHOWN_OPERATORS]:
        module = "/".join(pair.operator.module.split("/")[-2:])
        name = NAMESPACES.sub("", pair.operator.name)
        words = " ".join(part for part in (name, pair.operator.shapes, module) if part)
        table.add_row(escape(words[:LONGEST_OPERATOR]), _calls(pair), *_took(pair.a_s, pair.b_s))
    rest = joined[SHOWN_OPERATORS:]
    only = [pair for pair in alone if pair.a_calls], [pair for pair in alone if pair.b_calls]
    for said, pairs in ((f"{len(rest)} more", rest), ("only in a", only[0]), ("only in b", only[1])):
        if pairs:
            calls = f"{sum(pair.a_calls + pair.b_calls * (pair.a_calls == 0) for pair in pairs):.4g}"
            names = ", ".join(
                dict.fromkeys(NAMESPACES.sub("", pair.operator.name)[:30] for pair in pairs[:3])
            )
            sums = (sum(pair.a_s for pair in pairs), sum(pair.b_s for pair in pairs))
            label = said if pairs is rest else f"{said}: {names}"[:LONGEST_OPERATOR]
            table.add_row(escape(label), calls, *_took(*sums))
    return table


def _kinds(found: Comparison) -> Table:
    """Return the kinds of kernels of two traces."""
    table = _table("kernels, by their names", "calls", "a", "b", "b - a", "b / a")
    for pair in found.kernels:
        table.add_row(pair.operator.name, _calls(pair), *_took(pair.a_s, pair.b_s))
    return table


def _calls(pair: Pair) -> str:
    """Return how often both call it, once where that is as often."""
    return f"{pair.a_calls:.4g}" + (f", {pair.b_calls:.4g}" if pair.a_calls != pair.b_calls else "")


def _took(a_s: float, b_s: float) -> tuple[str, str, str, str]:
    """Return two times, their difference and their ratio, for a table."""
    ratio = f"{b_s / a_s:.2f}" if a_s and b_s else ""
    return format_time(a_s), format_time(b_s), format_time(b_s - a_s), ratio


LONGEST_OPERATOR: Final = 80


def _rate(side: Mapping[str, Any]) -> str:
    """Return how fast a step is, where that is known."""
    if side["per_step"] is None:
        return ""
    rate = side["per_s_per_gpu"]
    return (
        f"; {rate:,.0f} {side['unit']}/s per rank"
        if rate >= 100
        else f"; {rate:.3g} {side['unit']}/s per rank"
    )


def _ratios(found: Comparison) -> str:
    """Return the ratio of the step times and, where their work differs, who is faster at the same work."""
    said = f"a / b  [bold]{found.ratio:.3f}[/]"
    if not (faster := found.faster()):
        return said
    return f"{said} a step, [bold]{found.ratio_per_work:.3f}[/] for the same work: {faster}"


def _beside(a_ns: int, b_ns: int, scale: float, step_ns: int) -> Iterator[str]:
    """Yield times of *a* and *b*, that of *b* for as much work, their difference, and its share of *b*."""
    theirs = b_ns * scale
    yield from (format_time(ns / 1e9) for ns in (a_ns, theirs, theirs - a_ns))
    yield format_share((theirs - a_ns) / (step_ns * scale), "+.1f")


def _show_joined(console: Console, spans: Mapping[str, Any], *, of_traces: bool) -> None:
    """Print how many spans were joined, and how their durations compare by kind.

    Kernels of traces have a table of their own: *of_traces* communication alone is left.
    """
    listed = [kind for kind in spans["kinds"] if kind["axis"] or not of_traces]
    if of_traces and not listed:
        return
    unjoined = f"{spans['a_unjoined']:,} spans only in a, {spans['b_unjoined']:,} only in b"
    console.print(f"{spans['n_joined']:,} pieces of work joined; {unjoined}", style="dim")
    kinds = _table("joined work", "n", "a", "b", "median a / b")
    for kind in listed:
        ratio = "" if kind["median_ratio"] is None else f"{kind['median_ratio']:.3f}"
        times = (format_time(kind[f"{side}_total_s"]) for side in "ab")
        name = escape(f"{kind['kind']} {kind['axis']}".strip())
        kinds.add_row(name, f"{kind['n_joined']:,}", *times, ratio)
    if listed:
        console.print(kinds)


def _table(first: str, *others: str) -> Table:
    """Return an empty table whose first column is text and whose others are numbers."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table


def show_warnings(console: Console, warnings: Sequence[str]) -> None:
    """Print what to know before trusting the figures."""
    for warning in warnings:
        console.print(f"[yellow]![/] {escape(warning)}", soft_wrap=True)
