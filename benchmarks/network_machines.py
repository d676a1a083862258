"""How far off several nodes would be if rows said what names leave out: GPUDirect, and rings out of a node.

    python benchmarks/network_machines.py collectives.csv

For every name of hardware, NICs with and without GPUDirect and one to four rings are tried: one description
for all families of that name. Printed are the mean over families as named; with the description that fits
the labels best, which no rule over names can beat; with the one that the *other* families of a name ask for;
and if all names were exact but those that a description helps most.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import NamedTuple
from unittest.mock import patch

from measured import collectives as rows_of
from measured.machines import machine

from foretrace.simulator.validate.collectives import _network
from foretrace.topologies.cluster import Cluster
from foretrace.traces.report.format import format_share


class Description(NamedTuple):
    """What a name leaves out.

    Attributes:
        gpu_direct: whether NICs reach the memory of GPUs; as the catalogue says if None.
        rings_out: rings that leave a node, as many as the catalogue says if 0.
    """

    gpu_direct: bool | None = None
    rings_out: int = 0

    def __str__(self) -> str:
        direct = {None: "as named", True: "GPUDirect", False: "no GPUDirect"}[self.gpu_direct]
        return f"{direct}, {self.rings_out} rings" if self.rings_out else direct


AS_NAMED = Description()
TRIED = (AS_NAMED, *(Description(direct, rings) for direct in (True, False) for rings in (0, 1, 2, 4)))

Errors = Mapping[str, Mapping[str, float]]
"""Median error by name of hardware and family."""


def described(meant: Description, text: str, n_gpus: int, n_nodes: int, most: int) -> Cluster:
    """Return the machine that *text* names, with what is *meant* besides."""
    cluster = machine(text, n_gpus, n_nodes, most)
    if cluster.nic is None or meant.gpu_direct is None:
        return cluster
    return replace(
        cluster,
        nic=replace(cluster.nic, gpu_direct=meant.gpu_direct),
        rings_out=meant.rings_out or cluster.rings_out,
    )


def errors(path: str, meant: Description) -> Errors:
    """Return how far off the families of several nodes are if all machines are as *meant*."""
    _network.cache_clear()  # its answers rest on the description
    found: dict[str, list[float]] = defaultdict(list)
    with patch.object(rows_of, "machine", partial(described, meant)):
        for row in rows_of.score_collectives(path).rows:
            if row.group == "multi-node":
                found[row.family].append(abs(row.log_ratio))
    by_name: dict[str, dict[str, float]] = defaultdict(dict)
    for family, ratios in found.items():
        name = re.sub(r", \d+ devices used per node", "", family.split(" · ")[1])
        by_name[name][family] = median(ratios)
    return by_name


def best(by_meant: Mapping[Description, Errors], name: str, families: Sequence[str]) -> Description:
    """Return the description of *name* with which its *families* are met best; as named if there are none."""
    if not families:
        return AS_NAMED
    return min(by_meant, key=lambda meant: fmean(by_meant[meant][name][family] for family in families))


def main(path: str) -> None:
    """Print the errors of every name, and the scores of docs/network-evidence.md."""
    by_meant = {meant: errors(path, meant) for meant in TRIED}
    named, with_labels, from_others = [], [], []
    for name, found in sorted(by_meant[AS_NAMED].items()):
        meant = best(by_meant, name, list(found))
        others = [best(by_meant, name, [other for other in found if other != family]) for family in found]
        named.append(list(found.values()))
        with_labels.append([by_meant[meant][name][family] for family in found])
        pairs = zip(others, found, strict=True)
        from_others.append([by_meant[other][name][family] for other, family in pairs])
        sys.stdout.write(
            f"{name[:56]:58}{len(found):3d} families {format_share(fmean(named[-1])):>7} as named, "
            f"{format_share(fmean(with_labels[-1])):>7} at best ({meant}), "
            f"{format_share(fmean(from_others[-1])):>7} by the others\n"
        )
    n = sum(len(values) for values in named)
    for label, values in (("as named", named), ("at best", with_labels), ("by the others", from_others)):
        sys.stdout.write(f"all {n} families, {label}: {format_share(sum(map(sum, values)) / n)}\n")
    changed = [old for old, new in zip(named, with_labels, strict=True) if sum(old) > 2 * sum(new)]
    sys.stdout.write(
        "as named, were all names exact but those that gain half: "
        f"{format_share(sum(map(sum, changed)) / n)}\n"
    )


if __name__ == "__main__":
    main(sys.argv[1])
