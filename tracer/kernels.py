"""The second depth: ``torch.profiler`` beside the recording, for some steps.

Each rank leaves a Kineto trace, ``kineto/rank-00000.json.gz`` in the run directory: kernels of every CUDA
stream, or the operators of a processor, with their shapes, and the host threads that issued them. ``finish``
turns them into a run of its own, ``kernels``, as ``foretrace ingest`` would.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from foretrace.tracer.window import Window
from foretrace.traces.replacing import replacing_by_name

KINETO: Final = "kineto"  # folder of the run directory that holds the traces
KERNELS: Final = "kernels"  # folder of the run directory that holds the run made of them

N_STEPS: Final = "foretrace_n_steps"
"""Key of such a trace, beside its events: steps from this number on had not ended when it was written."""

FIRST_STEPS: Final = range(2, 5)
"""Steps that are profiled unless others are asked for: behind the first ones, in which buckets are agreed on
and memory is allocated, and few, for an event takes 6 KB of memory until it is written."""


class KernelTrace:
    """Profiles steps of one rank: the first range of those that *has_step* chooses."""

    def __init__(self, path: Path, rank: int, has_step: Callable[[int], bool]) -> None:
        self._file = path / KINETO / f"rank-{rank:05d}.json.gz"
        self._has_step = has_step
        self._profiler: Any = None
        self._mark: Any = None
        self._is_running = self._is_done = False

    def at_step(self, step: int) -> None:
        """A step begins, on the thread of the training: prepare, start, go on, or stop."""
        self._unmark()
        is_wanted = self._has_step(step)
        if self._is_running and not is_wanted:
            self.close(step)
        if self._is_done or not (is_wanted or self._has_step(step + 1)):
            return
        if self._profiler is None:
            self._prepare()
        if is_wanted:
            if not self._is_running:
                self._start()
            self._mark_step(step)

    def close(self, n_steps: int) -> None:
        """Stop, and write what was seen; *n_steps* steps have ended, and what has begun since is none."""
        if self._profiler is None:
            return
        if not (has_run := self._is_running):  # prepared for a step that never came: torch wants both calls
            self._start()
        profiler, self._profiler, self._is_running, self._is_done = self._profiler, None, False, True
        self._unmark()
        profiler.add_metadata_json(N_STEPS, str(n_steps))
        profiler.stop_trace()
        if has_run:
            with replacing_by_name(self._file) as made:  # the end of its name tells torch to compress
                profiler.export_chrome_trace(str(made))

    def _prepare(self) -> None:
        """Do what takes long before the first event: on a GPU it takes seconds, which no step should have."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities, record_shapes=True)
        self._profiler.prepare_trace()

    def _start(self) -> None:
        self._profiler.start_trace()
        self._is_running = True

    def _mark_step(self, step: int) -> None:
        from torch.profiler import record_function

        self._mark = record_function(f"ProfilerStep#{step}")
        self._mark.__enter__()

    def _unmark(self) -> None:
        if self._mark is not None:
            mark, self._mark = self._mark, None
            mark.__exit__(None, None, None)


def kernel_trace(path: Path, rank: int, window: Window) -> KernelTrace:
    """Return what profiles the steps of *window*, the first few if it chooses none."""
    chosen = window.has_step if window.steps is not None else FIRST_STEPS.__contains__
    return KernelTrace(path, rank, chosen)
