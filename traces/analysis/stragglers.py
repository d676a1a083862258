"""Who makes whom wait: the ranks that arrive last at collectives, and what that costs the others."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from foretrace.traces.analysis.collectives import in_averaged_steps
from foretrace.traces.columns import distinct, factorized, int64, labels
from foretrace.traces.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """One rank as a cause of waiting, along one axis."""

    rank: int  # which arrives last
    axis: str  # axis of the communication
    n_last: int  # communications at which it was the last to arrive
    n_joined: int  # communications of that axis that it took part in as the last or not, of all ranks
    n_others: int  # most ranks that wait for it at once
    n_steps: int  # steps in which it was the last at least once
    caused_ns: int  # waiting of all other members for it, added up
    longest_ns: int  # longest time between the first arrival and its own
    worst_kind: str  # kind of communication at which it caused most

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)


def stragglers(run: Run) -> list[Straggler]:
    """Return the ranks that others wait for, those that cause most waiting first.

    Only communication of which at least two members are in the run counts: one rank alone waits for nobody
    that can be named. So does only what is in the steps that averages are over.
    """
    table = in_averaged_steps(run)
    table = table.take(np.flatnonzero(int64(table, "n_seen") > 1))
    rank, caused = int64(table, "last_rank"), int64(table, "waiting_ns")
    skew = int64(table, "last_arrival_ns") - int64(table, "first_arrival_ns")
    step, members = int64(table, "step"), int64(table, "n_ranks")
    axes, axis_names = labels(table, "axis")
    kinds, kind_names = labels(table, "kind")
    n_joined, key, found = np.bincount(axes), factorized(axes, rank), []
    order = np.argsort(key, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(key[order])) + 1) if len(order) else ():
        by_kind = np.bincount(kinds[rows], weights=caused[rows].astype(np.float64))
        found.append(
            Straggler(
                rank=int(rank[rows[0]]),
                axis=axis_names[axes[rows[0]]],
                n_last=len(rows),
                n_joined=int(n_joined[axes[rows[0]]]),
                n_others=int(members[rows].max()) - 1,
                n_steps=len(distinct(step[rows])),
                caused_ns=int(caused[rows].sum()),
                longest_ns=int(skew[rows].max()),
                worst_kind=kind_names[int(by_kind.argmax())],
            )
        )
    return sorted(found, key=lambda one: -one.caused_ns)
