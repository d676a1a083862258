"""Measures how well the clocks of a world agree, by the way in which a recording aligns its ranks."""

from __future__ import annotations

import socket
import time
from typing import Any, Final

from foretrace.tracer.clock import machine_id, now_ns, synchronise

COARSE_NS: Final = 100_000
"""Uncertainty from which on spans of two ranks are not to be ordered: a small collective takes less."""


def measure(pause_s: float) -> dict[str, Any]:
    """Return offset, uncertainty and drift of each rank's clock to that of rank 0.

    Every rank is measured as if it had a machine of its own. Ranks on one machine share a clock, so that
    what is measured of them is the error of the measurement itself.

    Args:
        pause_s: seconds between the two measurements whose difference is the drift.
    """
    import torch.distributed as dist

    first = _measured("first")
    time.sleep(pause_s)
    second = _measured("second")
    mine = {
        "host": socket.gethostname(),
        "machine": machine_id(),
        "offset_ns": second["offset_ns"],
        "uncertainty_ns": second["uncertainty_ns"],
        "drift_ppb": (second["offset_ns"] - first["offset_ns"]) * 1e9 / max(second["at"] - first["at"], 1),
        "drift_uncertainty_ppb": (first["uncertainty_ns"] + second["uncertainty_ns"])
        * 1e9
        / max(second["at"] - first["at"], 1),
    }
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    rows = []
    for rank, row in enumerate(found):
        shared = row.pop("machine") == machine_id()
        is_coarse = not shared and row["uncertainty_ns"] > COARSE_NS
        rows.append({"rank": rank, **row, "shares_clock": shared, "is_coarse": is_coarse})
    return {"ranks": rows}


def _measured(name: str) -> dict[str, int]:
    """Return offset and uncertainty of this rank's clock, measured now."""
    import torch.distributed as dist

    from foretrace.tracer import internals

    rank = dist.get_rank()
    store = dist.PrefixStore(f"foretrace-bench/{name}", internals.default_store())
    clock = synchronise(store, rank, dist.get_world_size(), machine=f"rank {rank}")
    return {"offset_ns": clock.offset_ns, "uncertainty_ns": clock.uncertainty_ns, "at": now_ns()}
