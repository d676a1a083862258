"""Memory over time as a snapshot of PyTorch's allocator, which https://pytorch.org/memory_viz opens.

A run knows how much memory each category has, and not which tensors. So each growth of a category is one
allocation here, named by the category, and what shrinks is let go: the youngest allocation of just that size,
else the youngest ones, of which the rest is allocated again.
"""

from __future__ import annotations

import pickle
from itertools import count
from typing import Any, BinaryIO, Final

from foretrace.traces.analysis.memory import Curve, curves
from foretrace.traces.errors import RunError
from foretrace.traces.info import rank_list
from foretrace.traces.run import Run

_FIRST_ADDRESS: Final = 0x7F0000000000  # where allocations begin: any address of a GPU; none is used twice


def write_snapshot(run: Run, ranks: tuple[int, ...], file: BinaryIO) -> None:
    """Write the pickle that ``torch.cuda.memory._snapshot`` would give: a rank is the device of its number.

    Raises RunError: the run has no memory over time of these ranks.
    """
    devices = {rank: _Device(rank) for rank in ranks}
    sources = {rank: run.source(rank) for rank in ranks}
    found = {curve.rank: curve for curve in curves(run, sorted(set(sources.values())))}
    if not found:
        raise RunError(f"{run.path} has no memory over time of rank {rank_list(ranks)}")
    for rank, source in sources.items():
        if source in found:
            _tell(found[source], devices[rank])
    snapshot = {
        "segments": [segment for device in devices.values() for segment in device.segments()],
        # The place in this list is the device's number; the viewer offers those that have events.
        "device_traces": [devices[at].events if at in devices else [] for at in range(max(ranks) + 1)],
        "allocator_settings": {},
    }
    pickle.dump(snapshot, file, protocol=4)


def _tell(curve: Curve, device: _Device) -> None:
    """Tell *device* of all that *curve* holds: by category, where these make up the total."""
    parts = dict(curve.categories)
    # As of a recorded GPU: what is reserved is no part of what is allocated.
    if not parts or any(sum(parts.values(), start=-curve.total_bytes)):
        parts = {"total": curve.total_bytes}
    for at, t_ns in enumerate(curve.t_ns.tolist()):
        for name, held in parts.items():
            device.becomes(name, int(held[at]), t_ns)


class _Device:
    """The allocations of one rank.

    Args:
        rank: the rank, and the device of the snapshot.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._address = count(_FIRST_ADDRESS)
        self._held: dict[str, list[tuple[int, int]]] = {}
        self.events: list[dict[str, Any]] = []  # what was allocated and let go, in turn

    def becomes(self, name: str, n_bytes: int, t_ns: int) -> None:
        """Let the category *name* have *n_bytes* from *t_ns* on."""
        held = self._held.setdefault(name, [])
        change = max(n_bytes, 0) - sum(size for _, size in held)
        while change < 0:
            same = [at for at, (_, size) in enumerate(held) if size == -change]
            address, size = held.pop(same[-1] if same else -1)
            change += size
            for action in ("free_requested", "free_completed", "segment_free"):
                self._tell(action, address, size, name, t_ns)
        if change:
            address = next(self._address)
            self._address = count(address + change)
            held.append((address, change))
            for action in ("segment_alloc", "alloc"):
                self._tell(action, address, change, name, t_ns)

    def segments(self) -> list[dict[str, Any]]:
        """Return what is held at the end, each allocation in a segment of its own."""
        return [
            self._segment(name, address, size) for name, held in self._held.items() for address, size in held
        ]

    def _segment(self, name: str, address: int, size: int) -> dict[str, Any]:
        place = {"address": address, "frames": _frames(name)}
        return place | {
            "device": self._rank,
            "total_size": size,
            "allocated_size": size,
            "active_size": size,
            "requested_size": size,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "blocks": [place | {"size": size, "requested_size": size, "state": "active_allocated"}],
        }

    def _tell(self, action: str, address: int, size: int, name: str, t_ns: int) -> None:
        self.events.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": 0,
                "time_us": t_ns // 1000,
                "frames": _frames(name),
            }
        )


def _frames(name: str) -> list[dict[str, Any]]:
    return [{"name": name, "filename": "foretrace", "line": 0}]
