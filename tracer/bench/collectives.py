"""Times collectives, links and ranks of a world; this process is one of its ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final

from foretrace.traces.analysis.collectives import bus_factor

KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")

WARM_UP: Final = 2
"""Calls before those that count: buffers are allocated, connections made."""

SLOW: Final = 1.5
"""Time over the median above which a link or rank is slow. On a machine of its own links of one kind
differ by a few percent; a link at half its width, as a retrained lane or a missing rail has it, by 2."""

LINK_BYTES: Final = 8 << 20
"""Message by which links are compared: large enough for bandwidth to rule."""

PROBE: Final = 512
"""Side of the matrix product by which ranks are compared."""


def measure(sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    """Return the times of all collectives at *sizes* of the whole array, of links, and of ranks.

    Args:
        sizes: bytes, as nccl-tests counts them.
        repeats: calls of each; the median counts, of links and ranks the best: what is slow is never fast.
    """
    import torch.distributed as dist

    rows = [_collective(kind, size, repeats) for kind in KINDS for size in sizes]
    links = [link for distance in _distances(dist.get_world_size()) for link in _links(distance, repeats)]
    ranks = _gathered({"host": _host(), "probe_s": _probe_s(repeats)})
    found = {
        "collectives": rows,
        "links": links,
        "ranks": [{"rank": i, **row} for i, row in enumerate(ranks)],
    }
    _flag(found["links"], "time_s")
    _flag(found["ranks"], "probe_s")
    return found


def _collective(kind: str, size_bytes: int, repeats: int) -> dict[str, Any]:
    """Return one row: the slowest rank's median, as nccl-tests counts."""
    import torch.distributed as dist

    n = dist.get_world_size()
    run, counted = _operation(kind, size_bytes, n)
    times = _gathered(median(_times(run, repeats)))
    time_s = max(times)
    return {
        "kind": kind,
        "size_bytes": counted,
        "time_s": time_s,
        "busbw_bytes_per_s": counted / time_s * bus_factor(kind, n),
    }


def _operation(kind: str, size_bytes: int, n: int) -> tuple[Callable[[], Any], int]:
    """Return what does one collective, and the bytes of its whole array: a multiple of the ranks."""
    import torch
    import torch.distributed as dist

    part = max(size_bytes // 4 // n, 1)
    whole, piece = torch.zeros(part * n, device=_device()), torch.zeros(part, device=_device())
    other = torch.zeros_like(whole)
    runs: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, piece),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(piece, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    return runs[kind], 4 * part * n


def _distances(n: int) -> list[int]:
    """Return how far apart the ranks are whose links are timed: neighbours, and powers of two."""
    return [1 << i for i in range(n.bit_length()) if 1 << i < n]


def _links(distance: int, repeats: int) -> list[dict[str, Any]]:
    """Return the time of every rank's message to the one *distance* further, all sent at once."""
    import torch
    import torch.distributed as dist

    rank, n = dist.get_rank(), dist.get_world_size()
    sent, received = (torch.zeros(LINK_BYTES // 4, device=_device()) for _ in range(2))

    def exchange() -> None:
        transfers = [
            dist.P2POp(dist.isend, sent, (rank + distance) % n),
            dist.P2POp(dist.irecv, received, (rank - distance) % n),
        ]
        works = [op.op(op.tensor, op.peer) for op in transfers] if sent.device.type == "cpu" else []
        for work in works or dist.batch_isend_irecv(transfers):
            work.wait()

    times = _gathered(min(_times(exchange, repeats)))
    return [
        {
            "receiver": receiver,
            "sender": (receiver - distance) % n,
            "distance": distance,
            "time_s": time_s,
            "bytes_per_s": LINK_BYTES / time_s,
        }
        for receiver, time_s in enumerate(times)
    ]


def _probe_s(repeats: int) -> float:
    """Return the time of a matrix product on this rank."""
    import torch

    a = torch.ones(PROBE, PROBE, device=_device())
    return min(_times(lambda: a @ a, max(repeats, 9), together=False))


def _times(run: Callable[[], Any], repeats: int, *, together: bool = True) -> list[float]:
    """Return the time of each call of *run*, begun by all ranks at once if *together*."""
    import torch
    import torch.distributed as dist

    found = []
    through = torch.cuda.synchronize if _device().type == "cuda" else lambda: None
    for _ in range(WARM_UP + repeats):
        if together:
            dist.barrier()
        through()
        began = time.perf_counter()
        run()
        through()
        found.append(time.perf_counter() - began)
    return found[WARM_UP:]


def _flag(rows: list[dict[str, Any]], column: str) -> None:
    """Mark every row that takes much longer than the middle one of its kind."""
    by_kind: dict[Any, list[float]] = {}
    for row in rows:
        by_kind.setdefault(row.get("distance"), []).append(row[column])
    for row in rows:
        row["is_slow"] = row[column] > SLOW * median(by_kind[row.get("distance")])


def _gathered(value: Any) -> list[Any]:
    """Return *value* of every rank."""
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _host() -> str:
    import socket

    return socket.gethostname()


def _device() -> Any:
    import torch
    import torch.distributed as dist

    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
