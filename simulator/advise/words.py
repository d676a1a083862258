"""What the ladder comes to, in sentences that carry their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from foretrace.simulator.advise.ladder import (
    SEARCHED,
    WAYS,
    Question,
    Rung,
    longest,
    preferred,
    simplest,
    tied,
)
from foretrace.simulator.job import Job
from foretrace.simulator.price import whose
from foretrace.simulator.search.describe import difference, seconds_by_cause
from foretrace.simulator.search.render import amount
from foretrace.simulator.workload.micro_batch import layer_blocks
from foretrace.topologies.units import format_bytes, format_capacity, format_time
from foretrace.traces.report.format import format_share

LEAST_CAUSE: Final = 1e-3
"""Least share of a step that is named as a cause."""


class Advice(NamedTuple):
    """A sentence and the numbers behind it."""

    text: str
    numbers: dict[str, Any]


def sentence(rung: Rung) -> Advice:
    """Return what is said of one rung."""
    if rung.job is None:
        return Advice(f"{rung.way.title}: not possible, {rung.note}", {})
    limit, peak = rung.job.cluster.device.memory_bytes, rung.fullest.peak_bytes
    numbers: dict[str, Any] = {"peak_memory_bytes": peak, "memory_limit_bytes": limit}
    if rung.summary is None:
        largest = rung.fullest.largest(2)
        numbers |= {"missing_bytes": peak - limit, "largest": dict(largest)}
        of = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
        return Advice(
            f"{_title(rung)} does not fit: {format_bytes(peak)} a GPU, {format_bytes(peak - limit)} more "
            f"than there is; most of it {of}",
            numbers,
        )
    among = f"the fastest of all {rung.n_candidates:,} layouts: " if rung.n_candidates else ""
    rate, found = rung.tokens_per_s, rung.summary["intervals"].get("tokens_per_s")
    tight = ", tightly," if rung.is_tight else ""
    between = f" ({found[0]:,.0f} to {found[1]:,.0f})" if found else ""
    numbers |= {"host_bytes": rung.host_bytes, "is_tight": rung.is_tight}
    numbers |= {name: rung.summary[name] for name in ("tokens_per_s", "step_time_s", "mfu", "shares")}
    return Advice(
        f"{among}{_title(rung)} fits{tight} with {format_bytes(peak)}: {rate:,.0f} tokens/s{between}, "
        f"{format_time(rung.summary['step_time_s'])} a step{_mfu(rung)}, micro-batch "
        f"{rung.job.micro_batch}{_exposed(rung.summary)}{_host(rung)}",
        numbers,
    )


def verdict(question: Question, rungs: Sequence[Rung]) -> Iterator[Advice]:
    """Yield what to do: what trains everything best, what it leaves, what the others cost."""
    fitting = [rung for rung in rungs if rung.fits]
    full = [rung for rung in fitting if rung.way.trains_all]
    if full:
        yield from _best(question, [one for one in full if not _is_again(one, full)])
    else:
        yield _short(question, rungs)
    adapters = [rung for rung in fitting if not rung.way.trains_all]
    if adapters:
        yield _adapters(preferred(adapters), simplest(full) if full else None)
    elif not fitting:
        yield _more(question)


def _is_again(rung: Rung, rungs: Sequence[Rung]) -> bool:
    """Whether *rung* is the best of all layouts, and one of the others has that job, too."""
    return rung.way is SEARCHED and any(one.job == rung.job for one in rungs if one is not rung)


def _best(question: Question, full: Sequence[Rung]) -> Iterator[Advice]:
    """Yield what to take of the rungs that train everything and fit, simplest first, and why."""
    best, by_rate = simplest(full), sorted(full, key=lambda rung: -rung.tokens_per_s)
    yield _take(best, by_rate)
    yield from _costs(question, best)
    yield _room(best)
    if best.job is not None and best.job.offload != "none":
        yield _more(question)
    roomy = next((rung for rung in by_rate if not rung.is_tight), None)
    if best.is_tight and roomy is not None:
        yield Advice(
            f"with room to spare: {_title(roomy)}, {_percent(best.tokens_per_s / roomy.tokens_per_s - 1)} "
            f"longer a step, leaves {format_bytes(-roomy.missing_bytes)}",
            {"way": roomy.way.key, "spare_bytes": -roomy.missing_bytes},
        )
    slower = [rung for rung in by_rate if rung not in tied(full)]
    if slower:
        loses = best.tokens_per_s / slower[0].tokens_per_s - 1
        causes = seconds_by_cause(best.summary or {}, slower[0].summary or {})
        yield Advice(
            f"{_title(slower[0])} takes {_percent(loses)} longer, {_why(best, slower[0])}, and leaves "
            f"{format_bytes(-slower[0].missing_bytes)}",
            {"way": slower[0].way.key, "longer": loses, "seconds_by_cause": causes},
        )


def _take(best: Rung, by_rate: Sequence[Rung]) -> Advice:
    """Say which to take, and what else is as fast as far as measurements tell."""
    fastest, close = by_rate[0], [rung for rung in tied(by_rate) if rung is not best]
    numbers = {
        "way": best.way.key,
        "micro_batch": best.job.micro_batch if best.job else None,
        "tokens_per_s": best.tokens_per_s,
        "tied": [rung.way.key for rung in close],
    }
    take = f"take {_title(best)}, micro-batch {numbers['micro_batch']}"
    if not close:
        return Advice(f"{take}: the fastest that trains all parameters", numbers)
    apart = format_share(difference().ratio - 1, ".0f")
    below = f"less than {apart} apart, measurements often turn the order round"
    if best is fastest:
        others = " and ".join(map(_title, close))
        return Advice(f"{take}: the fastest that trains all parameters; {others}: tied ({below})", numbers)
    gain = fastest.tokens_per_s / best.tokens_per_s - 1
    leaves = f", but leaves {format_bytes(-fastest.missing_bytes)}" if fastest.is_tight else ""
    why = "the simplest of those tied with the fastest" + ("" if best.is_tight else " that leave room")
    return Advice(
        f"{take}: {why}; {_title(fastest)} is predicted {_percent(gain)} faster{leaves} ({below})",
        numbers | {"fastest": fastest.way.key, "faster": gain},
    )


def _costs(question: Question, best: Rung) -> Iterator[Advice]:
    """Yield what the training costs, where the price of a GPU is known."""
    figures = question.figures(best) or {}
    usd, price = figures.get("usd_per_1b_tokens"), question.price_usd_per_gpu_hour
    if usd is None or price is None:
        return
    days = figures["days"]
    whole = f"; {question.tokens} tokens take {days:,.3g} days and ${amount(figures['usd'])}" if days else ""
    yield Advice(
        f"a billion tokens cost ${amount(usd)}{whole}, "
        f"{whose(question.cluster.name, price, given=question.is_price_given)}",
        {name: figures[name] for name in ("usd_per_1b_tokens", "days", "usd")},
    )


def _room(best: Rung) -> Advice:
    """Say what is left of a device, and how long sequences may get."""
    spare, slack, length = -best.missing_bytes, best.slack_bytes, longest(best)
    tight = f", less than the {format_bytes(slack)} that the allocator likes beside" if best.is_tight else ""
    return Advice(
        f"it leaves {format_bytes(spare)} a GPU{tight}; sequences of up to {length:,} tokens fit, "
        "one at a time",
        {"spare_bytes": spare, "slack_bytes": slack, "longest_sequence": length},
    )


def _short(question: Question, rungs: Sequence[Rung]) -> Advice:
    """Say how close training everything comes."""
    tried = [rung for rung in rungs if rung.way.trains_all and rung.job is not None]
    closest = min(tried, key=lambda rung: rung.missing_bytes)
    return Advice(
        f"nothing that trains all parameters fits on {question.cluster.n_gpus} GPUs: "
        f"{_title(closest)} comes closest and lacks {format_bytes(closest.missing_bytes)} a GPU",
        {"way": closest.way.key, "missing_bytes": closest.missing_bytes},
    )


def _adapters(rung: Rung, full: Rung | None) -> Advice:
    """Say what training adapters alone would bring."""
    job = rung.job
    share = trained_share(job) if job is not None else 0.0
    gain = rung.tokens_per_s / full.tokens_per_s if full else None
    than = f", {gain:.2g} times as fast" if gain else ""
    return Advice(
        f"{_title(rung)} would train {_percent(share, 2)} of the parameters with "
        f"{format_bytes(rung.fullest.peak_bytes)} a GPU{than}",
        {"way": rung.way.key, "trained_share": share, "times_as_fast": gain},
    )


def _more(question: Question) -> Advice:
    """Say how much it would take: the states of a full training over the memory of a device."""
    states = question.model.n_params * 18  # bf16 weights, fp32 gradients, weights and two moments
    device = question.cluster.device.memory_bytes
    return Advice(
        f"states of {question.model.n_params / 1e9:.3g} billion parameters are {format_bytes(states)}: "
        f"at least {-(-states // device)} GPUs of {format_capacity(device)} without offload, before any "
        "activation",
        {"state_bytes": states, "least_gpus": -(-states // device)},
    )


def _title(rung: Rung) -> str:
    """Return the name of a rung with what its job adds to it."""
    job = rung.job
    if job is None:
        return rung.way.title
    said = rung.way.title
    if rung.way is SEARCHED:
        degrees = job.layout.degrees
        cut = [axis for axis in ("tp", "cp", "pp", "ep") if degrees[axis] > 1]
        said = " × ".join(f"{axis.upper()} {degrees[axis]}" for axis in [*cut, "dp"] if degrees[axis] > 1)
        said += f" (expert TP {job.layout.etp})" if job.model.n_experts else ""
        said += f", {_SHARDED[job.sharding]}" if job.layout.dp * job.layout.cp > 1 else ""
        said += "" if job.recompute == "none" else f" + {job.recompute} recomputation"
        said += f" with {job.schedule}" if job.layout.pp > 1 else ""
    elif rung.way.key == "offload":
        said = said.replace("offload", f"offload of {'everything' if job.offload == 'all' else job.offload}")
    elif not rung.way.trains_all:
        said += {"ddp": " under DDP", "fsdp": " under FSDP"}[job.sharding]
        said += " + full recomputation" if job.recompute == "full" else ""
    return said


_SHARDED: Final = {way.key: way.title.split(" (")[0] for way in WAYS}
"""Names of what data-parallel ranks share out."""


def _host(rung: Rung) -> str:
    size_bytes = rung.host_bytes
    return f"; a node's memory has to hold {format_bytes(size_bytes)}" if size_bytes else ""


def _mfu(rung: Rung) -> str:
    """Return the MFU; it counts weight gradients, so that of frozen weights would say nothing."""
    return f", MFU {_percent(rung.summary['mfu'])}" if rung.summary and rung.way.trains_all else ""


def _percent(share: float, digits: int = 0) -> str:
    return format_share(share, f".{digits}f")


def _exposed(summary: dict[str, Any]) -> str:
    """Return the share of a step in which data moves and nobody computes, if it counts."""
    share = float(summary["exposed_comm_fraction"]) + float(summary["bubble_fraction"])
    return f", {_percent(share)} of it waits for communication" if share >= 0.03 else ""


def _why(best: Rung, other: Rung) -> str:
    """Return the largest two causes that *other* is slower by, those that count."""
    least_s = LEAST_CAUSE * float((best.summary or {})["step_time_s"])
    parts = sorted(
        seconds_by_cause(best.summary or {}, other.summary or {}).items(), key=lambda part: -part[1]
    )
    told = [(cause.replace(":", " "), seconds) for cause, seconds in parts[:2] if seconds > least_s]
    return ", ".join(f"{seconds:+.3g} s {cause}" for cause, seconds in told)


def trained_share(job: Job) -> float:
    """Return the parameters of adapters over those of the model; routed experts have none."""
    blocks = (block for layer in range(job.model.n_layers) for block in layer_blocks(job, layer))
    return sum(block.adapters for block in blocks) / job.model.n_params
