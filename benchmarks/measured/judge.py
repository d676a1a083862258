"""How far predicted steps are off, whether the right layout is chosen, and what one measured run is worth."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

from foretrace.simulator import table as product_table
from foretrace.simulator.memory.remedies import NOT_POSSIBLE
from foretrace.simulator.recorded.one_time import RATIOS, SPREADS, Curve, Factors, Spreads, fit, fit_together
from foretrace.simulator.validate.runs import Step as Timed
from foretrace.simulator.validate.runs import run_rows as timed_rows
from foretrace.simulator.validate.scores import Failed, Scored, Validation, spreads
from foretrace.topologies.catalog import load_device
from measured.jobs import size_class, size_names, step_columns
from measured.machines import Machines
from measured.table import Row, read_table

COLUMNS: Final = ("id", "model", "hardware", "world_size", "tp", "pp", "dp", "seq_len", "step_time_s")

COMPLETE: Final = ("A", "A-")
"""Levels of rows that say everything, or all but what their notes state."""

OF_LAYOUT: Final = (
    *("virtual_pp", "sp", "sharding", "shard_group", "micro_batch", "recompute", "framework"),
    *("flash_attention",),
)
"""Columns of a layout beside its degrees."""

_LAYOUT: Final = ("pp", "dp", "cp", "tp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A row that was simulated.

    Attributes:
        scored: predicted and measured time of the step, in s.
        level: how completely the row is described, its ``spec_level``.
        stress: flagged by its table as outside of what layouts are meant for.
        slow: flagged by its table as measured while something unknown held it up.
        device: the GPU, in the words of the catalogue.
        size: class of the number of GPUs.
        machine: hardware and interconnect, as the table has them.
        cluster: that, whose it is, and the software and precision that ran on it.
        release: when it was measured or of which version, as the table has it.
        choice: what a person who looks for a layout cannot change: model, machine, GPUs and batch.
        layout: what they can change; runs that agree in it too are repetitions.
        assumed: settings that the row does not give, in words.
        curve: the time over how slow communication is.
    """

    scored: Scored
    level: str
    stress: bool
    slow: bool
    device: str
    size: str
    machine: str
    cluster: tuple[str, ...]
    release: str
    choice: tuple[str, ...]
    layout: tuple[str, ...]
    assumed: tuple[str, ...]
    curve: Curve


def run_rows(
    rows: Sequence[Row],
    workers: int,
    tell: Callable[[int], None] = lambda _: None,
    folder: Path | None = None,
) -> list[Step | Failed]:
    """Return what became of each of *rows*, in their order.

    Args:
        rows: rows of a published table of steps.
        workers: processes to use; one of them for a small table.
        tell: told how many more rows are done.
        folder: where files of machines are written; a folder that goes again if left out.
    """
    with TemporaryDirectory() as other:
        translated, failed = translate(rows, folder or Path(other))
        found = timed_rows(list(translated.values()), workers, tell, RATIOS)
    done = dict(zip(translated, found, strict=True))
    return [
        failed[at] if at in failed else _step(row, one) if isinstance(one := done[at], Timed) else one
        for at, row in enumerate(rows)
    ]


def translate(rows: Sequence[Row], folder: Path) -> tuple[dict[int, product_table.Row], dict[int, Failed]]:
    """Return *rows* in the columns of ``foretrace validate steps`` by position, and those that cannot be.

    Args:
        rows: rows of a published table of steps.
        folder: where files of machines are written.
    """
    machines = Machines(folder)
    found: dict[int, product_table.Row] = {}
    failed: dict[int, Failed] = {}
    for at, row in enumerate(rows):
        try:
            cells = {
                **step_columns(row, machines),
                "id": row.id,
                "family": family(row),
                "counts": counts(row),
            }
            found[at] = product_table.Row({name: str(cell) for name, cell in cells.items()}, at + 1)
        except NOT_POSSIBLE as error:
            failed[at] = Failed(id=row.id, family=family(row), reason=str(error))
    return found, failed


def family(row: Row) -> str:
    """Return source, model, GPU and precision of *row*: rows that say the same thing."""
    return " · ".join(row.text(name, "?") for name in ("source_group", "model", "hardware", "precision"))


def counts(row: Row) -> bool:
    """Return whether *row* counts in the score: complete, and flagged as nothing."""
    flags = row.text("check_flags")
    return row.text("spec_level", "A") in COMPLETE and "stress" not in flags and "slow mode" not in flags


def _step(row: Row, found: Timed) -> Step:
    flags = row.text("check_flags")
    machine = f"{row.text('hardware')}; {row.text('interconnect', 'not stated')}"
    choice = ("source_group", "model", "layers", "hardware", "interconnect", "world_size", "global_batch")
    return Step(
        scored=found.scored,
        level=row.text("spec_level", "A"),
        stress="stress" in flags,
        slow="slow mode" in flags,
        device=found.device,
        size=size_class(row),
        machine=machine,
        cluster=(row.text("source_group"), machine, row.text("framework"), row.text("precision")),
        release=row.text("date"),
        choice=tuple(row.text(name) for name in (*choice, "seq_len", "precision", "task")),
        layout=tuple(row.text(name) for name in (*_LAYOUT, *OF_LAYOUT)),
        assumed=found.assumed,
        curve=found.curve,
    )


def validate_steps(
    table: str | Path,
    *,
    calibrate: bool = False,
    workers: int = 2,
    tell: Callable[[int, int], None] = lambda *_: None,
) -> Validation:
    """Return the step time of every row of a published *table*, predicted and measured, in s.

    The rows of the validation, and so its score, are those that count. Everything else is scored beside it,
    in ``extra``. Rows that cannot be simulated are failures.

    Args:
        table: CSV or Parquet.
        calibrate: also fit two factors per cluster on one of its rows, and score the others; and the same for
            every machine, every model on a machine, and every release of its software.
        workers: processes.
        tell: told how many rows more are done, and of how many.

    Raises:
        TableError: the table cannot be read or lacks a column.
    """
    rows = read_table(table, COLUMNS)
    found = run_rows(rows, workers, lambda done: tell(done, len(rows)))
    steps = [one for one in found if isinstance(one, Step)]
    main = [step for step in steps if is_main(step)]
    extra = {"rows": len(rows), **sections(steps), **choices(main)}
    if calibrate:
        extra |= calibrated(main)
    return Validation(
        kind="steps",
        table=str(table),
        unit="s",
        rows=[step.scored for step in main],
        failures=[one for one in found if isinstance(one, Failed)],
        extra=extra,
    )


# Scores of steps by what they are.


def is_main(step: Step) -> bool:
    """Return whether *step* counts in the score."""
    return step.level in COMPLETE and not step.stress and not step.slow


def score(steps: Iterable[Step]) -> float | None:
    """Return the mean over families of the median error; None without rows."""
    medians = [found.median_error for found in spreads((step.scored for step in steps), "family")]
    return fmean(medians) if medians else None


def sections(steps: Sequence[Step]) -> dict[str, Any]:
    """Return the scores of *steps* by what they are, and what had to be assumed."""
    main = [step for step in steps if is_main(step)]
    by_size = score_by(main, lambda step: step.size)
    clean = [step for step in steps if not step.stress and not step.slow]
    devices = sorted({step.device for step in main})
    return {
        "score_by_gpu": score_by(main, lambda step: step.device),
        "score_by_size": {name: by_size[name] for name in size_names() if name in by_size},
        "score_by_class_and_gpu": score_by(main, lambda step: f"{step.scored.group} · {step.device}"),
        "score_by_level": score_by(clean, lambda step: step.level),
        "incomplete_score": score(step for step in clean if step.level not in COMPLETE),
        "stress_score": score(step for step in steps if step.stress),
        "stress_rows": sum(step.stress for step in steps),
        "with_slow_score": score(step for step in steps if step.level in COMPLETE and not step.stress),
        "slow_rows": sum(step.slow for step in steps),
        "assumed": dict(Counter(words for step in steps for words in step.assumed).most_common()),
        "errors": errors(
            (step.scored, step.cluster[0], step.device, _elsewhere(step, devices)) for step in main
        ),
    }


def score_by(steps: Iterable[Step], key: Callable[[Step], str]) -> dict[str, float]:
    """Return the score of each set of *steps* that agree in *key*, by name."""
    found: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        found[key(step)].append(step)
    return {name: value for name, same in sorted(found.items()) if (value := score(same)) is not None}


# What ranges are made of: how far off each row is, and why it may be.


def errors(rows: Iterable[tuple[Scored, str, str, Sequence[float]]]) -> list[dict[str, Any]]:
    """Return what ``benchmarks/intervals.py`` takes of *rows*, as plain JSON types.

    Args:
        rows: each with who measured it, its GPU, and the ``ln(measured / predicted)`` that it would have with
            the clocks of other GPUs, as it were if its own had never been measured.
    """
    return [
        {
            "source": source,
            "device": device,
            "family": row.family,
            "wider": ["experts"] if row.group == "MoE" else [],
            "off": -row.log_ratio,
            "elsewhere": list(elsewhere),
        }
        for row, source, device, elsewhere in rows
    ]


def _elsewhere(step: Step, devices: Iterable[str]) -> list[float]:
    """Return ``ln(measured / predicted)`` of *step* with the clock of each of *devices* but its own."""
    own = _clock(step.device)
    return [
        math.log(step.scored.measured / step.curve.at(compute=own / _clock(other)))
        for other in devices
        if other != step.device
    ]


@cache
def _clock(device: str) -> float:
    """Return the clock of *device* while it trains, as a share of that in a short burst."""
    found = load_device(device)
    return found.sustained_clock_fraction * found.training_clock_fraction


# Whether predictions choose the right layout.


One = TypeVar("One")


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Return Kendall's tau-b of two orders of the same things; None if one of them is all ties.

    Reference: Kendall 1945, "The treatment of ties in ranking problems", Biometrika 33.

    >>> kendall_tau([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.3333333333333333
    """
    signs = [
        (_sign(p - q), _sign(m - n))
        for (p, m), (q, n) in combinations(zip(predicted, measured, strict=True), 2)
    ]
    agreeing = sum(one * other for one, other in signs)
    pairs = math.sqrt(sum(one * one for one, _ in signs) * sum(other * other for _, other in signs))
    return agreeing / pairs if pairs else None


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return by how much the layout that is predicted to be fastest is slower than the fastest, as a share.

    Of several that are predicted to be equally fast, the mean counts.

    >>> regret([1.0, 2.0], [15.0, 10.0])
    0.5
    """
    fastest = min(predicted)
    chosen = fmean(m for p, m in zip(predicted, measured, strict=True) if p == fastest)
    return chosen / min(measured) - 1


def quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """Return the value below which *share* of the weight of pairs ``(value, weight)`` lies.

    >>> quantile([(3.0, 1.0), (1.0, 1.0), (2.0, 2.0)], 0.5)
    2.0
    """
    ordered = sorted(weighted)
    left = share * sum(weight for _, weight in ordered)
    for value, weight in ordered:
        left -= weight
        if left <= 0:
            return value
    return ordered[-1][0]


def evenly(found: Sequence[One], n: int) -> list[One]:
    """Return *n* of *found*, or all if there are fewer: the middle of as many equal parts.

    >>> evenly(range(9), 3)
    [1, 4, 7]
    """
    n = min(n, len(found))
    return [found[int((at + 0.5) * len(found) / n)] for at in range(n)]


def _sign(difference: float) -> int:
    return (difference > 0) - (difference < 0)


LEAST_CHOICE: Final = 3
"""Fewest layouts in a group: below this there is not much to choose from."""


class Choice(NamedTuple):
    """One group of layouts.

    Attributes:
        source: who measured it.
        what: model, number of GPUs and batch, in words.
        layouts: number of layouts to choose from.
        tau: Kendall's tau of predicted and measured times; None if one of them is all ties.
        regret: by how much the layout that is predicted to be fastest is slower than the fastest, as a share.
        chosen: that layout, in words.
        fastest: the layout that was.
    """

    source: str
    what: str
    layouts: int
    tau: float | None
    regret: float
    chosen: str
    fastest: str


def groups(steps: Iterable[Step]) -> list[Choice]:
    """Return every group of at least ``LEAST_CHOICE`` layouts, by source, model, GPUs and batch.

    A layout that was measured several times, for example in several releases, counts once, with its medians.
    """
    found: dict[tuple[str, ...], dict[tuple[str, ...], list[Scored]]] = defaultdict(dict)
    for step in steps:
        found[step.choice].setdefault(step.layout, []).append(step.scored)
    large = {key: list(layouts.values()) for key, layouts in found.items() if len(layouts) >= LEAST_CHOICE}
    return [_choice(key, layouts) for key, layouts in sorted(large.items())]


def choices(steps: Iterable[Step]) -> dict[str, Any]:
    """Return how well layouts are ordered, in all groups, in those of each source, and in each.

    Kendall's tau and ``regret_mean`` are means over groups, ``regret_median`` is the median.
    """
    found = groups(steps)
    sources = {name: [one for one in found if one.source == name] for name in {one.source for one in found}}
    return {
        "choice_groups": len(found),
        **_summary(found),
        "choices_by_source": {
            name: {"groups": len(own), **_summary(own)} for name, own in sorted(sources.items())
        },
        "choices": [one._asdict() for one in found],
    }


def _choice(key: tuple[str, ...], layouts: Sequence[Sequence[Scored]]) -> Choice:
    predicted = [median(row.predicted for row in same) for same in layouts]
    measured = [median(row.measured for row in same) for same in layouts]
    source, model, n_layers, _, _, n_gpus, batch, *_ = key
    return Choice(
        source=source,
        what=f"{model}, {n_layers} layers, {n_gpus} GPUs, batch {batch}",
        layouts=len(layouts),
        tau=kendall_tau(predicted, measured),
        regret=regret(predicted, measured),
        chosen=layouts[predicted.index(min(predicted))][0].what,
        fastest=layouts[measured.index(min(measured))][0].what,
    )


def _summary(found: Sequence[Choice]) -> dict[str, float | None]:
    taus = [one.tau for one in found if one.tau is not None]
    regrets = [one.regret for one in found]
    return {
        "kendall_tau": fmean(taus) if taus else None,
        "regret_median": median(regrets) if regrets else None,
        "regret_mean": fmean(regrets) if regrets else None,
    }


# What one measured run is worth.


TURNS: Final = 6
"""Most runs of a model that take their turn as the one that was measured; the rest is predicted."""

CANDIDATES: Final = tuple(
    Spreads(*spreads, SPREADS.run) for spreads in product((0.022, 0.045, 0.09), (0.25, 0.5, 1.0))
)
"""Spreads among which those are chosen with which other runs of a model are predicted best."""


def _family(step: Step) -> tuple[str, str]:
    return step.machine, step.scored.family


READINGS: Final[Mapping[str, Callable[[Step], Hashable]]] = MappingProxyType(
    {
        "machine": lambda step: step.machine,
        "cluster": lambda step: step.cluster,
        "model": _family,
        "release": lambda step: (_family(step), step.release),
    }
)
"""What may be meant by the cluster of which one run is measured, from the widest to the narrowest.

A cluster is a machine with what runs on it: whose it is, its framework, its precision. The machine alone lets
one run in bf16 stand for runs in fp8 and of another framework. A model is one model on a machine; a release
one model with one version of the software, which is what a person has who times their own training.
"""


def calibrated(steps: Sequence[Step]) -> dict[str, Any]:
    """Return the scores of *steps* but one per cluster, after calibrating on that one; and by each reading.

    The one is the middle of the runs by predicted time: neither the smallest nor the largest of what is
    planned. Its label has no part in the choice. What it tells holds for its model and precision: other
    models of its cluster are predicted as before. A cluster with one run has nothing left to score.
    """
    found: dict[str, Any] = {}
    for reading, key in READINGS.items():
        groups = list(_by(steps, key).values())
        name = "calibrated" if reading == "cluster" else f"calibrated_{reading}"
        found[f"{name}_score"] = score(step for runs in groups for step in after(runs, middle(runs)))
        found[f"{name}_before"] = score(step for runs in groups for step in _but(runs, middle(runs)))
        if reading == "cluster":
            rest = [step for runs in groups for step in after(runs, middle(runs))]
            found["calibrated_score_by_class"] = score_by(rest, lambda step: step.scored.group)
            found["calibration"] = dict(map(_used, groups))
    return {**found, "calibration_check": checked(steps)}


def after(runs: Iterable[Step], one: Step) -> list[Step]:
    """Return *runs* but *one*, those of its model and precision with the factors that it tells."""
    factors = fit(one.curve, one.scored.measured)
    return [
        with_factors(step, factors) if _family(step) == _family(one) else step for step in _but(runs, one)
    ]


def after_some(runs: Sequence[Step], some: Sequence[Step]) -> list[Step]:
    """Return *runs* but *some*, those of a model and precision with the factors that its own of them tell."""
    found = [step for step in runs if not any(step is one for one in some)]
    for told in _by(some, _family).values():
        factors = fit_together([one.curve for one in told], [one.scored.measured for one in told])
        found = [with_factors(step, factors) if _family(step) == _family(told[0]) else step for step in found]
    return found


def middle(runs: Iterable[Step]) -> Step:
    """Return the middle of *runs* by predicted time."""
    ordered = _ordered(runs)
    return ordered[len(ordered) // 2]


def _used(runs: Sequence[Step]) -> tuple[str, dict[str, Any]]:
    """Return the name of a cluster, and on which of its *runs* it was calibrated with what outcome."""
    one = middle(runs)
    factors = fit(one.curve, one.scored.measured)
    return " · ".join(one.cluster), {"id": one.scored.id, "rows": len(runs) - 1, **factors._asdict()}


def checked(steps: Iterable[Step]) -> dict[str, Any]:
    """Return the score of models before and after calibrating on one run, whichever run that is.

    Each source in turn is taken to be unknown: the spreads are chosen on the others. Up to ``TURNS`` runs of
    each model, evenly over predicted times, take their turn as the one that was measured.
    """
    sources = _by(steps, lambda step: step.choice[0])
    before = {name: _turns(own, None) for name, own in sources.items()}
    then = {spreads: {name: _turns(own, spreads) for name, own in sources.items()} for spreads in CANDIDATES}
    chosen = {name: _best(then, [other for other in sources if other != name] or [name]) for name in sources}
    return {
        "before": _mean(before.values()),
        "after": _mean(then[spreads][name] for name, spreads in chosen.items()),
        "spreads": {name: spreads._asdict() for name, spreads in chosen.items()},
        "spreads_of_all": _best(then, sources)._asdict(),
    }


Medians = list[float]
"""Median error of each family that has two runs."""


def _turns(steps: Iterable[Step], spreads: Spreads | None) -> Medians:
    """Return the median error of each family over runs and turns; as it is predicted without *spreads*."""
    found = []
    for runs in _by(steps, _family).values():
        some = evenly(_ordered(runs), TURNS)
        errors = []
        for one in some if len(some) > 1 else ():
            factors = Factors(1.0, 1.0) if spreads is None else fit(one.curve, one.scored.measured, spreads)
            errors += [abs(with_factors(step, factors).scored.log_ratio) for step in _but(some, one)]
        found += [median(errors)] if errors else []
    return found


def _best(then: dict[Spreads, dict[str, Medians]], sources: Iterable[str]) -> Spreads:
    names = list(sources)
    return min(then, key=lambda spreads: _mean(then[spreads][name] for name in names) or 0.0)


def _mean(sources: Iterable[Medians]) -> float | None:
    """Return the mean over families of all *sources*; None if there is none."""
    medians = [one for own in sources for one in own]
    return fmean(medians) if medians else None


def _but(runs: Iterable[Step], one: Step) -> list[Step]:
    return [step for step in runs if step is not one]


def with_factors(step: Step, factors: Factors) -> Step:
    """Return *step* as it is predicted with *factors*."""
    predicted = step.curve.at(compute=factors.compute, communication=factors.communication)
    return replace(step, scored=replace(step.scored, predicted=predicted))


def _ordered(runs: Iterable[Step]) -> list[Step]:
    return sorted(runs, key=lambda step: (step.scored.predicted, step.scored.id))


def _by(steps: Iterable[Step], key: Callable[[Step], Any]) -> dict[Any, list[Step]]:
    found: dict[Any, list[Step]] = defaultdict(list)
    for step in steps:
        found[key(step)].append(step)
    return dict(sorted(found.items()))
