"""What a GPU and its share of a node draw while a step runs, the energy of tokens, and what that emits.

A GPU is in one of four states at a time, each with a draw as a share of the limit of its board; the shares of
the step say how long it is in which. What is assumed has a range, and ranges add up as if all of it were at
the same end at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from foretrace.simulator.errors import ConfigError
from foretrace.topologies.units import format_energy, format_mass, format_power, parse_grid
from foretrace.traces.report.format import format_share

KWH_J: Final = 3.6e6
"""Joules of a kilowatt-hour."""

FIGURES: Final = ("kwh_per_step", "kwh_per_1b_tokens", "kg_co2e_per_1b_tokens")
"""Energies of a simulated step that have a range."""


class Range(NamedTuple):
    """A figure, and where it lies if everything that is assumed is at one end."""

    low: float
    likely: float
    high: float

    def times(self, factor: float) -> Range:
        """Return the range of *factor* times the figure."""
        return Range(*(factor * value for value in self))

    def plus(self, other: Range) -> Range:
        """Return the range of the sum."""
        return Range(*(a + b for a, b in zip(self, other, strict=True)))

    def widened(self, low: float, high: float) -> Range:
        """Return the range of the figure times an independent factor from *low* to *high*, around 1."""
        # Independent factors: their spreads in logarithms add as squares.
        down = math.hypot(math.log(self.low / self.likely), math.log(low))
        up = math.hypot(math.log(self.high / self.likely), math.log(high))
        return Range(self.likely * math.exp(-down), self.likely, self.likely * math.exp(up))


DRAWS: Final[Mapping[str, Range]] = MappingProxyType(
    {
        "products": Range(0.8, 1.0, 1.0),
        "memory": Range(0.4, 0.5, 0.6),
        "transfers": Range(0.2, 0.5, 0.75),
        "waits": Range(0.17, 0.2, 0.5),
    }
)
"""Share of the limit of its board that a GPU draws, by what it does.

``products``: lasting ones run into the limit, 696 W of the 700 of an H100 (Vercellino et al. 2026,
arXiv:2604.07345), which is what ``sustained_clock_fraction`` comes from; operands change that by up to 40 %
(Gregersen et al. 2024, arXiv:2409.18324), and by half of it among those that occur: our reading. ``memory``:
what is bound by memory takes as long at half the limit (Patel et al. 2023, arXiv:2311.18677); a
tenth of the limit to both sides is our choice. ``transfers``: 20, 50 and 75 % where three models reduce
gradients on A100s (Patel et al. 2023, arXiv:2308.12908). ``waits``: with a process and no work, 122 of
700 W (H100) and 80 of 400 W (A100) (Vadari 2026, arXiv:2605.23918); a kernel that polls for its peers draws
no more than one that transfers."""

IDLE: Final = Range(0.1, 0.1, 0.2)
"""Share of its limit that a board draws without a process: 72.5 of the 700 W of an H100 (arXiv:2604.07345);
at most what is likely where a process waits: of other boards nobody knows."""

MEMORY_BOUND: Final = Range(0.3, 0.15, 0.0)
"""Share of its computing in which a GPU is bound by memory where nothing tells, in the order of what it
draws: 0.02 to 0.24 in the simulated trainings of benchmarks/tables/energy.csv."""

HOST: Final = Range(0.28, 0.64, 1.0)
"""Share that the rest of a node draws of the most that it can, by its data sheet: from 1.28 of 4.6 kW, a node
of 8 idle H100 at 1.86 kW (Newkirk et al. 2025, arXiv:2506.14551) less 72.5 W for each GPU (arXiv:2604.07345),
to all of it; the middle is what is likely. Processors have little to do in training, fans much."""

HOST_OVER_LIMIT: Final = Range(0.39, 0.79, 1.03)
"""What the rest of a node draws at most, over the limits of its GPUs, where its file has no ``node_power``:
the least, the median and the most of what the machines of the catalogue have that have one."""

MOST_PUE: Final = 3.0
"""Most that a building may take, times what its machines draw: our choice, against slips such as 154 %."""

GRID_G_PER_KWH: Final = 458.0
"""World average of 2025 in g of CO2 equivalent per kWh (Ember, Global Electricity Review 2026)."""

BUILDING: Final = "1.09 (Google, all sites, 2025) to 1.54 (average of the Uptime survey, 2025)"
"""Power usage effectiveness of buildings."""


class Nodes(NamedTuple):
    """The nodes that a job has, which are powered as a whole; of a rack of trays, the trays.

    Attributes:
        n_nodes: how many they are.
        n_gpus: GPUs in them with a rank.
        n_idle: GPUs in them without one.
    """

    n_nodes: int
    n_gpus: int
    n_idle: int = 0


def nodes_of(machine: Mapping[str, Any], n_gpus: int, ranks_per_node: int | None = None) -> Nodes:
    """Return the nodes of *machine* that a job of *n_gpus* has; where it does not say their size, of 8 GPUs.

    Args:
        machine: as ``Cluster.describe`` returns it.
        n_gpus: GPUs with a rank.
        ranks_per_node: on a node that is full; None: one on each of its GPUs.

    >>> nodes_of({"gpus_per_node": 8}, 8, 4), nodes_of({"gpus_per_node": 72, "gpus_per_tray": 4}, 6)
    (Nodes(n_nodes=2, n_gpus=8, n_idle=8), Nodes(n_nodes=2, n_gpus=6, n_idle=2))
    """
    full, tray = machine.get("gpus_per_node"), machine.get("gpus_per_tray") or machine.get("gpus_per_node")
    per_node = ranks_per_node or full or 8
    whole, rest = divmod(n_gpus, per_node)
    # Trays with a rank, of full nodes and of the last one: each is powered as a whole.
    n_nodes = whole * -(-per_node // (tray or per_node)) + -(-rest // (tray or per_node))
    return Nodes(n_nodes, n_gpus, n_nodes * tray - n_gpus if tray else 0)


class Power(NamedTuple):
    """What is drawn for one GPU with a rank, in W.

    Attributes:
        gpu: by its board.
        host: by its share of the rest of its nodes: processors, memory, NICs, fans, losses of power supplies,
            and boards of GPUs without a rank.
        rests_on: what that is taken from, in words.
    """

    gpu: Range
    host: Range
    rests_on: tuple[str, ...] = ()

    @property
    def total(self) -> Range:
        """Both together, at the plug of the node."""
        return self.gpu.plus(self.host)


def doing(shares: Mapping[str, float], memory_bound: float) -> dict[str, float]:
    """Return the share of a step in each of ``DRAWS``; they add up to 1.

    Args:
        shares: of the step by state, as ``traces.analysis.metrics.summarize`` returns them.
        memory_bound: share of the computing that memory decides.

    >>> doing({"compute": 0.5, "exposed:dp": 0.25, "bubble": 0.25}, 0.5)
    {'products': 0.25, 'memory': 0.25, 'transfers': 0.25, 'waits': 0.25}
    """
    compute = shares.get("compute", 0.0)
    transfers = sum(share for state, share in shares.items() if state.startswith("exposed:"))
    return {
        "products": compute * (1 - memory_bound),
        "memory": compute * memory_bound,
        "transfers": transfers,
        # Sums of shares may be a hair above 1.
        "waits": max(0.0, 1 - compute - transfers),
    }


def power(
    machine: Mapping[str, Any],
    shares: Mapping[str, float],
    memory_bound: float | None = None,
    nodes: Nodes | None = None,
) -> Power | None:
    """Return what is drawn for one GPU of *machine* on average over a step; None if its limit is not known.

    Args:
        machine: as ``Cluster.describe`` returns it.
        shares: of the step by state; nothing at all is a GPU that waits.
        memory_bound: share of the computing that memory decides; None: nobody knows.
        nodes: those of the job; None: full ones.
    """
    limit_w = machine.get("power_limit_w_per_gpu")
    if not limit_w:
        return None
    bound = MEMORY_BOUND if memory_bound is None else Range(memory_bound, memory_bound, memory_bound)
    # Each end has its own share that is bound by memory, so that all that is assumed is at the same end.
    drawn = (
        sum(share * DRAWS[what][end] for what, share in doing(shares, bound[end]).items()) for end in range(3)
    )
    most_w = machine.get("host_power_w_per_gpu")
    host = (
        Range(*(share * part * limit_w for share, part in zip(HOST, HOST_OVER_LIMIT, strict=True)))
        if most_w is None
        else HOST.times(most_w)
    )
    notes = _rests_on(machine, limit_w, most_w, memory_bound)
    if nodes is not None and nodes.n_idle:
        idle = nodes.n_idle / nodes.n_gpus
        # For each rank that many idle GPUs: they share its host, and draw their own idle power.
        host = host.times(1 + idle).plus(IDLE.times(idle * limit_w))
        notes.append(
            f"whole nodes are powered, {nodes.n_nodes:,} of {(nodes.n_gpus + nodes.n_idle) // nodes.n_nodes} "
            f"GPUs: the {nodes.n_idle:,} without a rank draw a tenth of their limit each, at most a fifth"
        )
    return Power(Range(*drawn).times(limit_w), host, tuple(notes))


def _rests_on(
    machine: Mapping[str, Any], limit_w: float, most_w: float | None, memory_bound: float | None
) -> list[str]:
    """Return what the power of a GPU is taken from, in words."""
    name = machine.get("name", "its machine")
    share = (
        f", {format_share(MEMORY_BOUND.likely, '.0f')} of its computing (assumed),"
        if memory_bound is None
        else ""
    )
    board = (
        f"power: a GPU at its limit of {format_power(limit_w)} in products, at half of it where memory "
        f"decides{share} or data moves, at a fifth where it waits"
    )
    if most_w is None:
        least, _, most = HOST_OVER_LIMIT
        rest = (
            f"the rest of a node assumed, as {name} has no node_power: elsewhere it draws at most {least} to "
        )
        return [board, f"{rest}{most} times as much as the GPUs"]
    return [board, f"the rest of a node between a quarter (idle) and all of {format_power(most_w)} per GPU"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """Where the power comes from.

    Attributes:
        pue: power of the building over that of its machines; None: nobody said, and the building is left out.
        grid_g_per_kwh: CO2 equivalent of a kWh; None: nobody said, and it is the world's average.
    """

    pue: float | None = None
    grid_g_per_kwh: float | None = None

    def __post_init__(self) -> None:
        if self.pue is not None and not 1 <= self.pue <= MOST_PUE:
            raise ConfigError(
                f"pue = {self.pue:g}: from 1, what machines draw alone, to {MOST_PUE:g}, e.g. 1.2"
            )

    @property
    def kg_per_kwh(self) -> float:
        """CO2 equivalent of a kWh in kg."""
        # g to kg.
        return (GRID_G_PER_KWH if self.grid_g_per_kwh is None else self.grid_g_per_kwh) / 1000

    @property
    def rests_on(self) -> list[str]:
        """What nobody said and is assumed, in words."""
        notes = (
            [] if self.pue else [f"the building is left out, as are switches: its PUE is {BUILDING}, --pue"]
        )
        if self.grid_g_per_kwh is None:
            notes.append(
                f"{GRID_G_PER_KWH:g} gCO2e/kWh, the world's average of 2025 (Ember); --grid '400 gCO2/kWh'"
            )
        return notes


def supply(pue: float | None, grid: str | None) -> Supply:
    """Return where the power comes from, as flags say it. Raises ConfigError or UnitError."""
    return Supply(pue=pue, grid_g_per_kwh=None if grid is None else parse_grid(grid))


def energy_kwh(watts: Range, seconds: float, given: Supply) -> Range:
    """Return the energy of *seconds* at *watts*, with what the building adds.

    >>> energy_kwh(Range(500, 1000, 2000), 3600, Supply(pue=1.5)).likely
    1.5
    """
    return watts.times(seconds / KWH_J * (given.pue or 1.0))


def of_step(
    machine: Mapping[str, Any] | None, summary: Mapping[str, Any], given: Supply, *, n_gpus: int
) -> dict[str, Any] | None:
    """Return the energy of a simulated step as plain JSON types; None if a limit is not known.

    In what an average step takes longer, to save or to meet other sites, GPUs wait.

    Args:
        machine: as ``Cluster.describe`` returns it.
        summary: figures of the step.
        given: where the power comes from.
        n_gpus: GPUs of the job, on one of its sites if they are apart.
    """
    step_s, rate = summary.get("average_step_time_s", summary["step_time_s"]), summary["tokens_per_s"]
    # Of an average step the part that is an ordinary one; the rest of it GPUs wait.
    steps = min(summary["step_time_s"] / step_s, 1.0)
    shares = {state: steps * share for state, share in summary["shares"].items()}
    nodes = nodes_of(machine or {}, n_gpus, summary.get("ranks_per_node"))
    drawn = power(machine or {}, shares, summary.get("memory_bound_share"), nodes)
    if drawn is None:
        return None
    n_sites = summary.get("outer", {}).get("sites", 1)
    kwh = energy_kwh(drawn.total, step_s * n_gpus * n_sites, given).likely
    figures = {"kwh_per_step": kwh}
    if rate:
        # Energy of a step over its tokens, times a billion of them.
        each = kwh * 1e9 / (rate * step_s)
        figures |= {"kwh_per_1b_tokens": each, "kg_co2e_per_1b_tokens": each * given.kg_per_kwh}
    found = {
        "w_per_gpu": drawn.total.likely,
        "w_per_gpu_interval": [drawn.total.low, drawn.total.high],
        "board_w": drawn.gpu.likely,
        "board_w_interval": [drawn.gpu.low, drawn.gpu.high],
        "gpus_without_rank": nodes.n_idle * n_sites,
        "pue": given.pue or 1.0,
        "g_co2e_per_kwh": given.kg_per_kwh * 1000,
        **figures,
        "rests_on": [*drawn.rests_on, *given.rests_on],
    }
    return over_times(found, summary.get("intervals", {}).get("step_time_s"), summary["step_time_s"])


def over_times(found: Mapping[str, Any], likely: Sequence[float] | None, step_s: float) -> dict[str, Any]:
    """Return *found* of ``of_step`` with ranges of energy that cover a step whose time lies in a range.

    Args:
        found: energy of a step.
        likely: least and most time of that step; None: as predicted.
        step_s: its predicted time.
    """
    ends = Range(found["w_per_gpu_interval"][0], found["w_per_gpu"], found["w_per_gpu_interval"][1])
    if likely is not None:
        ends = ends.widened(*(end / step_s for end in likely))
    shares = [ends.low / ends.likely, ends.high / ends.likely]
    ranges = {
        f"{name}_interval": [found[name] * share for share in shares] for name in FIGURES if name in found
    }
    return {**found, **ranges}


def unknown(name: str, *, is_old: bool = False) -> str:
    """Return the line for a machine whose power nobody knows; *is_old*: an earlier version wrote its run."""
    if is_old:
        return (
            f"the run does not say the power limit of the GPUs of {name}, as an earlier foretrace wrote it: "
            "simulate the job again"
        )
    return f"no power limit is known of the GPUs of {name}: power_limit in the file of its device"


def line(found: Mapping[str, Any]) -> str:
    """Return what is said of the energy of tokens, or of a step where there are none, for people."""
    what, name = ("per 1B tokens", "kwh_per_1b_tokens")
    if name not in found:
        what, name = "per step", "kwh_per_step"
    low, high = map(format_energy, found[f"{name}_interval"])
    emitted = format_mass(found[name] * found["g_co2e_per_kwh"] / 1000)
    idle = found["gpus_without_rank"]
    return (
        f"{format_energy(found[name])} {what} ({low} to {high}), {emitted} of CO2; "
        f"{format_power(found['w_per_gpu'])} per GPU, {format_power(found['board_w'])} of it its board"
        + (f"; GPUs without a rank are counted: {idle:,}" if idle else "")
    )
