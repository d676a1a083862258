"""Sites that train apart and meet every so many steps, over a link that is slow: outer steps.

Each site trains its own replicas. After ``outer_every`` steps sites average how far their parameters have
come since they last met, the outer gradients, and an outer optimizer takes a step along them. In fragments,
each part of the model has its own step to meet at; with overlap, training goes on for some steps while a
fragment is on its way. References: DiLoCo, Douillard et al. 2023, arXiv:2311.08105; Streaming DiLoCo,
Douillard et al. 2025, arXiv:2501.18512, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from foretrace.simulator.builder.gradients import DataParallel
from foretrace.simulator.builder.groups import Groups
from foretrace.simulator.builder.step import job_groups
from foretrace.simulator.builder.templates import units_of_ranks
from foretrace.simulator.job import Job
from foretrace.simulator.network.cost import Network, job_network
from foretrace.simulator.network.nccl import choice
from foretrace.simulator.workload.ops import DTYPE_BYTES
from foretrace.topologies.units import format_bandwidth, format_bytes, format_time
from foretrace.traces.report.format import format_share

UPDATE_BYTES: Final = 24
"""Bytes per parameter that an outer step moves in memory, in fp32: it reads the parameter, the one that sites
last agreed on and the momentum, and writes all three (SGD with Nesterov momentum, arXiv:2311.08105)."""

WANTED: Final = 0.95
"""Share of the rate without any exchange that a link is wanted to leave: that of the tables in
arXiv:2501.18512."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """How sites meet, in times of one site.

    Attributes:
        every: steps from one meeting to the next, for each fragment.
        fragments: parts of the model that meet at different steps.
        overlap: steps that go on while a fragment is on its way; a part of one is what is left of a backward.
        latency_s: time of the exchange of a fragment, whatever its size.
        wire_s: time that its bytes take.
        update_s: time of the outer optimizer, for all fragments.
    """

    every: int
    step_s: float
    wire_s: float
    fragments: int = 1
    overlap: float = 0.0
    latency_s: float = 0.0
    update_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """Time that training waits from one meeting to the next.

        A fragment is waited for as long as it outlasts its overlap; where fragments come faster than they are
        sent, the link itself sets the pace.
        """
        exchange_s = self.latency_s + self.wire_s
        late_s = self.fragments * max(0.0, exchange_s - self.overlap * self.step_s)
        queued_s = self.fragments * self.wire_s - self.every * self.step_s
        return max(late_s, queued_s) + self.update_s

    @property
    def utilisation(self) -> float:
        """Share of the time in which training goes on."""
        steps_s = self.every * self.step_s
        return steps_s / (steps_s + self.exposed_s)

    def slower(self, utilisation: float) -> float | None:
        """Return how many times as long bytes may take for *utilisation*; None: latency alone forbids it.

        Over the bandwidth of the link, this is what it may be slower by. inf if nothing is sent.
        """
        if not self.wire_s:
            return float("inf")
        steps_s = self.every * self.step_s
        allowed_s = steps_s * (1 / utilisation - 1) - self.update_s
        late_s = allowed_s / self.fragments + self.overlap * self.step_s - self.latency_s
        queued_s = (allowed_s + steps_s) / self.fragments
        found_s = min(late_s, queued_s) if allowed_s >= 0 else 0.0
        return found_s / self.wire_s if found_s > 0 else None


def ring_bytes(size_bytes: float, n_sites: int) -> float:
    """Return what one site sends, and receives, of outer gradients of *size_bytes* in all.

    >>> ring_bytes(8, 2), ring_bytes(8, 4)
    (8.0, 12.0)
    """
    return 2 * (n_sites - 1) / n_sites * size_bytes


def out_of_nodes_bytes_per_s(job: Job) -> float:
    """Return what all NICs of one site of *job* send together."""
    cluster = job.cluster
    per_node = cluster.nics_per_node * cluster.nic.bandwidth_bytes_per_s if cluster.nic else 0.0
    return cluster.fabric_spec.group_nodes * per_node


def meeting(job: Job, step_s: float) -> Meeting:
    """Return how the sites of *job* meet if a step of one of them takes *step_s*.

    Every rank exchanges its part of one copy of the parameters with those of the same number on other sites;
    where a site has several copies, its ranks gather what the others have exchanged.
    """
    site = job.of_one_site
    data_parallel, inside = DataParallel(site, job_groups(site)), job_network(site)
    n_params, pp = max(
        (data_parallel.exchanged_params(own), pp) for pp, own in enumerate(units_of_ranks(site))
    )
    n_ranks = site.layout.world_size
    first = pp * (n_ranks // site.layout.pp)
    per_site = job.cluster.n_gpus // job.n_sites
    placement = [k * per_site + gpu for k in range(job.n_sites) for gpu in list(inside.placement)[:n_ranks]]
    across = Network(job.cluster, placement, choice(job.nccl_algo, job.nccl_proto))
    part = -(-n_params * job.outer_bits // 8 // job.outer_fragments)
    sent = across.collective("all_reduce", part, [k * n_ranks + first for k in range(job.n_sites)])
    gathered_s = 0.0
    if not site.shards.parameters and (group := job_groups(site).of("dp", first)):
        size = n_params * len(group.ranks) * DTYPE_BYTES[site.precision] // job.outer_fragments
        found = inside.collective("all_gather", size, group.ranks)
        gathered_s = (found.latency_ns + found.wire_ns) / 1e9
    device = site.cluster.device
    streamed_bytes_per_s = device.memory_bytes_per_s * device.memory_bound_fraction
    return Meeting(
        every=job.outer_every,
        fragments=job.outer_fragments,
        overlap=job.outer_overlap,
        step_s=step_s,
        latency_s=sent.latency_ns / 1e9 + gathered_s,
        wire_s=sent.wire_ns / 1e9,
        update_s=n_params * UPDATE_BYTES / streamed_bytes_per_s,
    )


def apart(job: Job, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of all sites of *job* out of those of one, with what meeting takes."""
    met, n_sites = meeting(job, summary["step_time_s"]), job.n_sites
    share = 1 / (summary["average_step_time_s"] + met.exposed_s / job.outer_every)
    rate = share * summary["average_step_time_s"]
    factors = {"tokens_per_s": rate * n_sites, "tokens_per_s_per_gpu": rate, "mfu": rate}
    likely = {
        name: [factors[name] * end for end in value] if name in factors else value
        for name, value in summary["intervals"].items()
    }
    site = job.of_one_site
    data_parallel = DataParallel(site, job_groups(site))
    size = sum(map(data_parallel.trained_params, units_of_ranks(site))) * job.outer_bits / 8
    outer = {
        "sites": n_sites,
        "every": job.outer_every,
        "fragments": job.outer_fragments,
        "overlap": job.outer_overlap,
        "bits": job.outer_bits,
        "bytes_per_site": ring_bytes(size, n_sites),
        "bytes_fewer": job.outer_every * 8 * DTYPE_BYTES[data_parallel.reduced_dtype] / job.outer_bits,
        "exchange_s": met.fragments * (met.latency_s + met.wire_s),
        "exposed_s": met.exposed_s,
        "utilisation": met.utilisation,
        "link_bytes_per_s": job.cluster.fabric_spec.group_bytes_per_s,
        **_needed(job, met, n_sites),
    }
    return {
        **summary,
        **{name: summary[name] * factor for name, factor in factors.items()},
        "average_step_time_s": 1 / share,
        "intervals": likely,
        "outer": outer,
        "rests_on": [*words(outer), *summary["rests_on"]],
    }


def across(job: Job, groups: Groups, network: Network, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return what copies of shards on several sites exchange (HSDP), and the link that it needs, if they do.

    Every unit is summed on its own, as FSDP does, and nothing is taken to hide that: a step without it takes
    what is left, but at least what is not exposed data parallelism.
    """
    spec, group = job.cluster.fabric_spec, groups.of("dp.copies", 0)
    if spec.kind != "two-site" or group is None:
        return {}
    per_site = spec.group_nodes * job.cluster.gpus_per_node
    n_sites = len({network.placement[rank] // per_site for rank in group.ranks})
    if n_sites == 1:
        return {}
    data_parallel = DataParallel(job, groups)
    units = units_of_ranks(job)
    trained = sum(map(data_parallel.trained_params, units))
    owned, n_units = max((data_parallel.owned_params(own), len(own)) for own in units)
    size = DTYPE_BYTES[data_parallel.reduced_dtype]
    each = data_parallel.reduces(is_last=False) and not job.profile.copies_once
    times = job.n_microbatches if each else 1
    sent = network.collective("all_reduce", owned * size, group.ranks)
    wire_s, latency_s = times * sent.wire_ns / 1e9, times * n_units * sent.latency_ns / 1e9
    step_s, exposed = summary["step_time_s"], summary["exposed_by_axis"].get("dp", 0.0)
    left_s = max(step_s - wire_s - latency_s, step_s * (1 - exposed))
    met = Meeting(every=1, step_s=left_s, wire_s=wire_s, latency_s=latency_s)
    return {
        "sites": n_sites,
        "sums_per_step": times,
        "bytes_per_site": times * ring_bytes(trained * size, n_sites),
        "exchange_s": met.latency_s + met.wire_s,
        "link_bytes_per_s": spec.group_bytes_per_s,
        **_needed(job, met, n_sites),
    }


def across_words(found: Mapping[str, Any]) -> list[str]:
    """Return what ``across`` has found, as a sentence; none if nothing."""
    if not found:
        return []
    times = found["sums_per_step"]
    how = "once a step" if times == 1 else f"in each of {times} micro-batches (--set copies_once=true: once)"
    sent = f"{format_bytes(found['bytes_per_site'])} a step, in {format_time(found['exchange_s'])}"
    return [
        f"copies of shards on {found['sites']} sites are summed {how}: each sends {sent}",
        _of_link(found),
    ]


def _needed(job: Job, met: Meeting, n_sites: int) -> dict[str, float | None]:
    """Return the links from which *n_sites* beat one, and keep the rate, None where none would do."""
    # a wider link is no faster than all NICs behind it
    filled = min(job.cluster.fabric_spec.group_bytes_per_s, out_of_nodes_bytes_per_s(job))
    return {
        name: None if (slower := met.slower(target)) is None else filled / slower
        for name, target in (("pays_from_bytes_per_s", 1 / n_sites), ("full_from_bytes_per_s", WANTED))
    }


def _of_link(found: Mapping[str, Any]) -> str:
    """Return what the link between sites is, and has to be, as a sentence."""
    pays, full = (
        "no link" if found[name] is None else format_bandwidth(found[name])
        for name in ("pays_from_bytes_per_s", "full_from_bytes_per_s")
    )
    kept = f"{format_share(WANTED, '.0f')} of the rate from {full} on"
    link = format_bandwidth(found["link_bytes_per_s"])
    return f"the link, {link} out of a site: all sites beat one from {pays} on, and keep {kept}"


def words(outer: Mapping[str, Any]) -> list[str]:
    """Return what is said of sites that meet, and of the link between them, as sentences."""
    meets = (
        f"every {outer['every']} steps each sends {format_bytes(outer['bytes_per_site'])}, "
        f"{outer['bytes_fewer']:,.0f} times less than gradients of every step, in "
        f"{format_time(outer['exchange_s'])}, and waits {format_time(outer['exposed_s'])}"
    )
    return [f"times are of one of {outer['sites']} sites, rates of all; {meets}", _of_link(outer)]
