"""How long data moved in a recorded run, beside what the links of the catalogue say.

The transfer of a communication is its shortest duration over ranks, that of the last to arrive, so that no
waiting is in it. Several sizes of one kind tell latency from bandwidth; one size gives a factor on whichever
of the two it is mostly made of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from foretrace.simulator.errors import SimulationError
from foretrace.simulator.network.cost import Network
from foretrace.simulator.recorded.calibration import OTHERS, Factor
from foretrace.simulator.recorded.least_squares import Floats, fit_factors, median_error
from foretrace.traces.analysis.collectives import in_averaged_steps
from foretrace.traces.columns import int64, is_one_of, labels
from foretrace.traces.run import Run

APART: Final = 4.0
"""Ratio of the largest to the smallest size from which on latency and bandwidth are told apart."""

EXPECTED: Final = (3.0, 3.0)
MISFIT: Final = 0.1
"""By what factor latency and wire time may be off, and how far off single transfers are that both explain.
Conventions: nearly nothing is expected, and a single transfer varies by 10 %."""

LEAST: Final = 1 / 3
"""Factor below which a part is not alone to blame for a short transfer: the other is shorter, too."""

P2P: Final = ("send", "recv")


class Communication(NamedTuple):
    """Factors on communication, and what the run cannot say about it."""

    factors: dict[str, Factor]
    not_identified: list[str]


@dataclass(frozen=True, slots=True)
class _Seen:
    """Transfers of one kind over one link: by size, predicted latency and wire time, measured times, in s."""

    sizes: list[int]
    latency_s: list[float]
    wire_s: list[float]
    measured_s: list[Floats]


def network_factors(run: Run, network: Network, world_size: int, steps: Sequence[int]) -> Communication:
    """Return the factors with which communication takes as long as it did in *steps* of *run*."""
    seen = _seen(run, network, world_size, steps)
    factors: dict[str, Factor] = {}
    said: list[str] = []
    for (link, kind), one in sorted(seen.items()):
        found, reason = _fitted(one)
        factors |= {f"{link}.{kind}.{part}": factor for part, factor in found.items()}
        if reason:
            said.append(f"{kind}, {link}: {reason}")
    for link in ("near", "far"):
        own = [factors[name] for name in factors if name.startswith(f"{link}.") and name.endswith(".wire")]
        if own:
            factors[f"{link}.{OTHERS}.wire"] = _pooled(own)
        elif not any(name.startswith(f"{link}.") for name in factors):
            said.append(f"links {_where(link)}: no communication over them in the run; the catalogue is used")
    return Communication(factors, said)


def _where(link: str) -> str:
    return "inside of a node" if link == "near" else "between nodes"


def _pooled(own: Sequence[Factor]) -> Factor:
    """Return a factor for kinds that were not seen: the geometric mean of those that were."""
    logs = np.log([factor.value for factor in own])
    # A single kind tells nothing of how kinds differ: its own error stands for that.
    spread = float(logs.std(ddof=1)) if len(own) > 1 else own[0].error / own[0].value
    value = float(np.exp(logs.mean()))
    return Factor(value, value * spread)


def _fitted(one: _Seen) -> tuple[dict[str, Factor], str]:
    """Return the factors of one kind over one link, and why there are not two if there are not."""
    design = np.array([one.latency_s, one.wire_s]).T
    measured = np.array([np.median(times) for times in one.measured_s])
    # An empty message has no ratio: it counts as one byte.
    if max(one.sizes) >= APART * max(min(one.sizes), 1):
        repeated = _repeated(one.measured_s)
        found = fit_factors(design, repeated, EXPECTED, misfit=MISFIT, power=2.0)
        # Told apart only if both errors leave something: half of the factor at most.
        if (found.errors <= found.values / 2).all():
            pairs = zip(("latency", "wire"), found.values, found.errors, strict=True)
            return {part: Factor(float(value), float(error)) for part, value, error in pairs}, ""
        why = "sizes differ, but their times do not follow a line"
    else:
        why = "one size only"
    largest = int(np.argmax(one.sizes))
    latency_s, wire_s = one.latency_s[largest], one.wire_s[largest]
    part, known, other = (
        ("wire", wire_s, latency_s) if wire_s >= latency_s else ("latency", latency_s, wire_s)
    )
    times = one.measured_s[largest]
    value = (float(measured[largest]) - other) / known
    # A single time has no spread that is known: taken as all of it.
    spread = median_error(times) / float(measured[largest]) if len(times) > 1 else 1.0
    if value < LEAST:  # what is kept alone would take nearly as long as all of it took
        both = float(measured[largest]) / (known + other)
        factor = Factor(both, both * spread)
        return {"latency": factor, "wire": factor}, f"{why}, so that latency and bandwidth have one factor"
    error = spread * float(measured[largest]) / known
    kept = "latency" if part == "wire" else "wire"
    return {
        part: Factor(value, error)
    }, f"{why}, so that latency and bandwidth are not told apart; {kept} is kept"


def _repeated(measured_s: Sequence[Floats]) -> Floats:
    """Return the times of all sizes as they would be in five repetitions: between their quartiles."""
    shares = np.linspace(0.25, 0.75, 5)
    return np.array([[float(np.quantile(times, share)) for times in measured_s] for share in shares])


def _seen(run: Run, network: Network, world_size: int, steps: Sequence[int]) -> dict[tuple[str, str], _Seen]:
    """Return the transfers of *run* by link and kind."""
    table = in_averaged_steps(run)
    # Of a communication that one rank alone has seen nobody knows how long it waited.
    seen = int64(table, "n_seen") >= (1 if run.info.representatives else 2)  # one may stand for all
    whole = seen & (int64(table, "size_bytes") > 0)
    table = table.take(np.flatnonzero(whole & np.isin(int64(table, "step"), list(steps))))
    members = {group.id: group.ranks for group in run.info.groups}
    groups: dict[tuple[str, str], dict[int, tuple[tuple[int, ...], list[float]]]] = defaultdict(dict)
    for kind, size, group, took in _rows(table):
        # A transfer has two ends; the group may be larger.
        ranks = members.get(group, tuple(range(run.info.world_size)))[: 2 if kind == "p2p" else None]
        if len(ranks) < 2 or max(ranks) >= world_size:
            continue
        link = "near" if network.shape(ranks).n_domains == 1 else "far"
        groups[link, kind].setdefault(size, (ranks, []))[1].append(took)
    found: dict[tuple[str, str], _Seen] = {}
    for (link, kind), sizes in groups.items():
        one = _Seen([], [], [], [])
        for size, (ranks, times) in sorted(sizes.items()):
            try:
                cost = network.p2p(size, *ranks) if kind == "p2p" else network.collective(kind, size, ranks)
            except SimulationError:  # a kind that is not modelled
                continue
            one.sizes.append(size)
            one.latency_s.append(cost.latency_ns / 1e9)
            one.wire_s.append(cost.wire_ns / 1e9)
            one.measured_s.append(np.array(times))
        if one.sizes:
            found[link, kind] = one
    return found


def _rows(table: pa.Table) -> list[tuple[str, int, int, float]]:
    """Return kind, size, group and transfer time in s of every row that took time; a transfer is ``p2p``."""
    kinds, names = labels(table, "kind")
    is_p2p = is_one_of(table, "kind", P2P)
    columns = (int64(table, name).tolist() for name in ("size_bytes", "group", "transfer_ns"))
    return [
        ("p2p" if p2p else names[kind], size, group, ns / 1e9)
        for kind, p2p, size, group, ns in zip(kinds.tolist(), is_p2p.tolist(), *columns, strict=True)
        if ns > 0
    ]
