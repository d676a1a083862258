"""How far constants carry that were found in rows of a table: each part of the rows predicted from the rest.

    python benchmarks/network_left_out.py collectives.csv

For every constant the value is taken that fits the other parts best (mean over families of the median of
``|ln(predicted / measured)|``), and the part that was left out is predicted with it. The figures of EFA are
each of one instance in the catalogue; here one figure is asked to do for all.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from statistics import fmean, median
from unittest.mock import patch

from measured import collectives as rows_of
from measured.machines import machine

from foretrace.simulator.network import algorithms as rates
from foretrace.simulator.validate.collectives import _network
from foretrace.simulator.validate.scores import Scored
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.link import LinkSpec
from foretrace.traces.report.format import format_share

STATED = (("A100 DGX", "dgx-a100-staged"),)
"""What rows show and do not say: docs/network-evidence.md has why."""


@dataclass(frozen=True, slots=True)
class Constant:
    """One constant, where it counts, how those rows fall into parts, and how it is set."""

    name: str
    values: Sequence[float]
    part: Callable[[Scored], str]
    setting: Callable[[float], AbstractContextManager[object]]


def words(row: Scored) -> list[str]:
    """Return source, hardware, operation and number of GPUs of a row."""
    return row.family.split(" · ")


def crowding(value: float) -> AbstractContextManager[object]:
    """Set what is left to a group of a network that others use."""

    def load(name: str) -> Cluster:
        cluster = load_cluster(name)
        return replace(cluster, fabric_spec=replace(cluster.fabric_spec, crowding=value))

    return patch.object(rows_of, "load_cluster", load)


def staged(value: float) -> AbstractContextManager[object]:
    """Set what a NIC that cannot reach GPUs carries each way, in GB/s."""
    return patch.object(rates, "STAGED_BYTES_PER_S", value * 1e9)


def efa(change: Callable[[LinkSpec, float], LinkSpec]) -> Callable[[float], AbstractContextManager[object]]:
    """Return how one figure of every EFA link is set."""

    def setting(value: float) -> AbstractContextManager[object]:
        def found(text: str, n_gpus: int, n_nodes: int, most_per_node: int) -> Cluster:
            cluster = machine(text, n_gpus, n_nodes, most_per_node)
            nic = cluster.nic
            return replace(cluster, nic=change(nic, value)) if nic and nic.kind == "efa" else cluster

        return patch.object(rows_of, "machine", found)

    return setting


def alone_on_efa(row: Scored) -> str:
    """Return the instance of a sweep over EFA without other jobs."""
    counts = row.group == "multi-node" and words(row)[0] != "hf-playbook"
    return next((name for name in ("p4de", "p5.48xlarge", "p6-b200") if counts and name in words(row)[1]), "")


def without_gpudirect(row: Scored) -> str:
    """Return the machine of an all-reduce over nodes whose NICs cannot reach GPUs."""
    hardware, kind = words(row)[1:3]
    counts = row.group == "multi-node" and kind == "all_reduce"
    starts = ("A100 DGX", "A100-SXM-80GB Jean Zay", "V100-SXM-32GB Jean Zay", "V100 x8 per node")
    return next((start for start in starts if counts and hardware.startswith(start)), "")


def launch(age: str) -> Callable[[float], AbstractContextManager[object]]:
    """Return how the time between launches of hosts of *age* is set."""
    return lambda value: patch.dict(rows_of.LAUNCH_US, {age: value})


def call(value: float) -> AbstractContextManager[object]:
    """Set what a call from Python adds."""
    return patch.object(rows_of, "CALL_US", value)


def many_nodes(row: Scored, by: int) -> str:
    """Return the operation or the GPUs of a row measured beside other jobs."""
    return (
        words(row)[by] if "EFA" in row.family and row.group == "multi-node" and "p5" not in row.family else ""
    )


def profiled(row: Scored, gpu: str) -> str:
    """Return the hardware of an all-reduce in a profile on one node with *gpu*."""
    counts = "devices used" in row.family and "all_reduce" in row.family and row.group == "single-node"
    return words(row)[1] if counts and gpu in row.family else ""


CONSTANTS = (
    Constant(
        "crowding, by operation", (0.3, 0.4, 0.45, 0.5, 0.55, 0.6), lambda r: many_nodes(r, 2), crowding
    ),
    Constant("crowding, by nodes", (0.3, 0.4, 0.45, 0.5, 0.55, 0.6), lambda r: many_nodes(r, 3), crowding),
    Constant(
        "latency of EFA",
        (14, 17, 20, 23, 27, 32, 38),
        alone_on_efa,
        efa(lambda nic, us: replace(nic, latency_s=us * 1e-6)),
    ),
    Constant(
        "efficiency of EFA",
        (0.78, 0.82, 0.86, 0.9, 0.95, 1.0),
        alone_on_efa,
        efa(lambda nic, share: replace(nic, efficiency=share)),
    ),
    Constant(
        "chunk of EFA",
        (0, 128, 256, 512, 1024, 2048),
        alone_on_efa,
        efa(lambda nic, kib: replace(nic, chunk_bytes=int(kib * 1024))),
    ),
    Constant("without GPUDirect", (5.6, 5.8, 6.0, 6.2, 6.4, 6.6, 6.8, 7.0, 7.4), without_gpudirect, staged),
    Constant("launch beside A100", (40, 50, 54, 58, 62), lambda r: profiled(r, "A100"), launch("older")),
    Constant("launch beside H100", (28, 32, 36, 38, 42), lambda r: profiled(r, "H100"), launch("newer")),
    Constant(
        "call from Python",
        (0, 10, 15, 20, 25, 30),
        lambda r: (
            words(r)[1]
            if words(r)[0] == "stas00"
            and "8 GPUs" in r.family
            and r.group == "single-node"
            and "A100" not in r.family
            else ""
        ),
        call,
    ),
)


def scored(path: str, constant: Constant, value: float) -> dict[str, dict[str, list[float]]]:
    """Return the errors of the rows that *constant* counts for, by part and family, if it is *value*."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    _network.cache_clear()  # its answers rest on the constant
    with constant.setting(value):
        for row in rows_of.score_collectives(path, STATED).rows:
            if part := constant.part(row):
                found[part][row.family].append(abs(row.log_ratio))
    return found


def score(parts: Iterator[dict[str, list[float]]]) -> float:
    """Return the mean over families of the median error."""
    return fmean(median(errors) for families in parts for errors in families.values())


def main(path: str) -> None:
    """Print, for each constant and part, the value that the rest asks for, and the part's error with it."""
    for constant in CONSTANTS:
        by_value = {value: scored(path, constant, value) for value in constant.values}
        parts = sorted(by_value[constant.values[0]])
        if len(parts) < 2:
            sys.stdout.write(f"{constant.name}: {len(parts)} part, nothing to leave out\n")
            continue
        best = min(by_value, key=lambda value: score(iter(by_value[value].values())))
        within = score(iter(by_value[best].values()))
        errors = []
        for part in parts:
            rest = {
                value: score(iter(found[other] for other in parts if other != part))
                for value, found in by_value.items()
            }
            value = min(rest, key=lambda value: rest[value])
            errors.append(score(iter([by_value[value][part]])))
            sys.stdout.write(f"  {part[:60]:62}{value:8g} {format_share(errors[-1]):>9}\n")
        sys.stdout.write(
            f"{constant.name}: {best:g} fits all, {format_share(within)} in sample, "
            f"{format_share(fmean(errors))} left out\n"
        )


if __name__ == "__main__":
    main(sys.argv[1])
