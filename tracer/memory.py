"""Memory over time: what the CUDA allocator holds, or the resident set of a process without a GPU.

The allocator has one counter of its peak, and that belongs to the script, which may reset it; if we did, it
would read something else. So the peak within a step is known if it is above that of all steps since the last
reset, or if the script resets the counter in each; otherwise it is at most as high as theirs.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from foretrace.tracer import internals
from foretrace.tracer.clock import now_ns
from foretrace.tracer.guarded import Guards, Replacements, between
from foretrace.traces.replacing import replacing_by_name
from foretrace.traces.sealed import named, write_file
from foretrace.traces.timeline import MEMORY

MOST_SAMPLES: Final = 20_000  # samples that are kept: 2 MB

_STATM: Final = Path("/proc/self/statm")
"""What the kernel says of the memory of a process, in pages. Kept open: to open it takes most of the time."""

STATM_BYTES: Final = 256  # more than its seven numbers take

UNKNOWN: Final = -1

PEAKS: Final = ("peak", "peak_at_most")  # categories of what was reached within a step


class Counters(NamedTuple):
    """What an allocator counts, in bytes: held now, the most since a reset, and all that it ever gave."""

    current: int
    peak: int
    given: int


class Peak:
    """The most that is held at once, as far as the counters of an allocator tell."""

    def __init__(self) -> None:
        self._begun: Counters | None = None
        self._least = self._most = UNKNOWN
        self._is_lost = False

    def begin(self, now: Counters) -> None:
        """A stretch begins, and none ends."""
        self._begun = now

    def look(self, now: Counters) -> None:
        """A stretch ends, and the next begins."""
        # A peak above that of the beginning was reached in this stretch. Any other lies between what was held
        # at its ends and what was held plus all that was given since.
        if (before := self._begun) is not None and now.peak > before.peak:
            least = most = now.peak
        else:
            held, given = (
                (now.current, math.inf) if before is None else (before.current, now.given - before.given)
            )
            least, most = max(held, now.current), int(min(now.peak, held + given))
        if before is not None and (now.peak < before.peak or now.given < before.given):
            self._is_lost = True  # reset unseen
        self._least, self._most = max(self._least, least), max(self._most, most)
        self.begin(now)

    def taken(self) -> tuple[int, int]:
        """Return the most since this was last called and what it was at most; -1 is unknown."""
        least, most, is_lost = self._least, self._most, self._is_lost
        self._least, self._most, self._is_lost = UNKNOWN, UNKNOWN, False
        return UNKNOWN if is_lost or least < most else most, UNKNOWN if is_lost else most


class PeakHook(Replacements):
    """The functions by which a script resets counters of an allocator: what they were is noted before."""

    def __init__(self, memory: MemoryLog, guards: Guards) -> None:
        super().__init__()
        before, after = (
            guards.guarded("memory", functools.partial(memory.look, note))
            for note in (memory.peak.look, memory.peak.begin)
        )
        for owner, name in internals.counter_resets():
            self.replace(owner, name, between(lambda *_, **__: before(), lambda _: after()))


class MemoryLog:
    """Samples of one rank, kept in memory: one or two numbers per step, of a long training per several."""

    def __init__(self) -> None:
        self._samples: list[tuple[int, str, int]] = []
        self._n_calls = 0
        self._every = 1
        self.peak, self._since_ns = Peak(), now_ns()
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
            with suppress(RuntimeError, KeyError):  # an allocator of somebody else keeps no figures
                for category, value in self.look(self.peak.look).items():
                    self._samples.append((now, category, value))
                for category, value in zip(PEAKS, self.peak.taken(), strict=True):
                    self._samples.append((self._since_ns, category, value))
                self._since_ns = now
        elif self._statm >= 0:
            pages = int(os.pread(self._statm, STATM_BYTES, 0).split()[1])
            self._samples.append((now, "total", pages * self._page_bytes))

    def look(self, note: Callable[[Counters], None]) -> dict[str, int]:
        """Return what the allocator holds, by category, and tell *note* what it counts."""
        import torch

        stats = torch.cuda.memory_stats_as_nested_dict()  # a tenth of memory_allocated()
        if not stats:  # no GPU was used yet
            return {}
        held = stats["allocated_bytes"]["all"]
        note(Counters(held["current"], held["peak"], held["allocated"]))
        return {"total": held["current"], "reserved": stats["reserved_bytes"]["all"]["current"]}

    def _thin(self) -> None:
        """Leave every second sample out, now and from now on."""
        # Samples of one moment stay together, or go together.
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

    def write(self, path: Path, rank: int, run_ns: Callable[[int], int], of: str) -> None:
        """Write the samples of one rank, *of* which run they are, beside its sidecar, all of them or none."""
        write_samples(path / "ranks" / f"rank-{rank:05d}.memory.arrow", self.table(rank, run_ns), of)


def write_samples(target: Path, table: pa.Table, of: str) -> None:
    """Write *table*, of the columns ``MEMORY``, to *target*, all of it or, raising OSError, nothing.

    *of* which run it is stands in the file, if it is known.
    """
    with replacing_by_name(target) as made:
        write_file(made, named(MEMORY, of), [table])
