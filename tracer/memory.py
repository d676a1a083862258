"""Memory over time: what the CUDA allocator holds, or the resident set of a process without a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyarrow import ipc

from foretrace.tracer.clock import now_ns
from foretrace.traces.timeline import MEMORY

MOST_SAMPLES: Final = 20_000
"""Samples that are kept: 2 MB."""

_STATM: Final = Path("/proc/self/statm")
"""What the kernel says of the memory of a process, in pages. Kept open: to open it takes most of the time."""

STATM_BYTES: Final = 256
"""More than its seven numbers take."""


class MemoryLog:
    """Samples of one rank, kept in memory: one or two numbers per step, of a long training per several."""

    def __init__(self) -> None:
        self._samples: list[tuple[int, str, int]] = []
        self._n_calls = 0
        self._every = 1
        self._statm = os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC) if _STATM.exists() else -1
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def sample(self, *, on_cuda: bool) -> None:
        """Note what is held now, unless it is too soon."""
        self._n_calls += 1
        if self._n_calls % self._every:
            return
        if len(self._samples) >= MOST_SAMPLES:
            self._thin()
        now = now_ns()
        if on_cuda:
            import torch

            with suppress(RuntimeError, KeyError):  # an allocator of somebody else keeps no figures
                stats = torch.cuda.memory_stats_as_nested_dict()  # a tenth of memory_allocated()
                for category, name in (("total", "allocated_bytes"), ("reserved", "reserved_bytes")):
                    self._samples.append((now, category, stats[name]["all"]["current"]))
        elif self._statm >= 0:
            pages = int(os.pread(self._statm, STATM_BYTES, 0).split()[1])
            self._samples.append((now, "total", pages * self._page_bytes))

    def _thin(self) -> None:
        """Leave every second sample out, now and from now on."""
        moments = sorted({sample[0] for sample in self._samples})
        kept = set(moments[::2])
        self._samples = [sample for sample in self._samples if sample[0] in kept]
        self._every *= 2

    def table(self, rank: int, run_ns: Callable[[int], int]) -> pa.Table:
        """Return the samples as rows of ``traces.timeline.MEMORY``; *run_ns* maps own time to the run's."""
        times, categories, sizes = zip(*self._samples, strict=True) if self._samples else ((), (), ())
        columns = {
            "rank": [rank] * len(times),
            "t_ns": [run_ns(t) for t in times],
            "category": pa.array(categories, pa.string()).dictionary_encode(),
            "bytes": list(sizes),
        }
        return pa.table(columns).cast(MEMORY)

    def close(self) -> None:
        """Take no more samples."""
        statm, self._statm = self._statm, -1
        if statm >= 0:
            os.close(statm)

    def write(self, path: Path, rank: int, run_ns: Callable[[int], int]) -> None:
        """Write the samples of one rank beside its sidecar, all of them or none."""
        table = self.table(rank, run_ns)
        target = path / "ranks" / f"rank-{rank:05d}.memory.arrow"
        temporary = target.with_suffix(".arrow.tmp")
        with ipc.new_file(str(temporary), MEMORY) as writer:
            writer.write_table(table)
        temporary.replace(target)
