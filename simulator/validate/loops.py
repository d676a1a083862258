"""What a benchmark sees of a kernel: at full clock, after lasting load, or on the way to there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.workload.ops import Op
from foretrace.topologies.device import Device

BURST: Final = "burst"
"""How the notes of a row begin that was measured in short bursts."""

LASTING: Final = "sustained"
"""How the notes of a row begin that was measured when lasting load had settled."""

REPEATED: Final = ""
"""A kernel repeated without a pause, from a start at full clock: what a row means that says nothing."""

REPEATS: Final = 100
"""How often a benchmark runs a kernel.

MooreThreads/SimuMax 4dcaae5 (simu_tools/efficency_test): 100 products of which 75 count, 50 grouped ones, 30
passes of attention; other benchmarks repeat for tens of milliseconds.
"""


def load_of(notes: str) -> str:
    """Return which load the *notes* of a row speak of: ``BURST``, ``LASTING`` or ``REPEATED``."""
    return next((load for load in (BURST, LASTING) if notes.startswith(load)), REPEATED)


def model_of(device: Device, *, burst: bool) -> ComputeModel:
    """Return what computes on *device*, in a short *burst* or under lasting load."""
    if burst:
        device = replace(device, sustained_clock_fraction=1.0)
    return ComputeModel(device, min(device.peak_flops_per_s), training=False)


class Bench:
    """A benchmark of kernels on *device*, whose figures are those at its clock under lasting load."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._burst, self._lasting = (model_of(device, burst=burst) for burst in (True, False))

    @property
    def warnings(self) -> list[str]:
        """What of the device was not measured on it."""
        return [note for note in self._lasting.notes if note.startswith("warning")]

    def seen_s(self, ops: Sequence[Op], load: str) -> float:
        """Return the seconds that the benchmark sees *ops* take, one after another.

        Power is limited by what a GPU has drawn for some time: half of what lasting load costs is there
        after ``sustained_after_s`` of it. Repeated kernels run into that, ``REPEATS`` of them for
        ``L = REPEATS t``: ``t = t_burst + (t_lasting - t_burst) L / (L + sustained_after_s)``.

        Args:
            ops: what is measured.
            load: ``BURST``, ``LASTING`` or ``REPEATED``.
        """
        burst_s, lasting_s = (sum(map(model.op_s, ops)) for model in (self._burst, self._lasting))
        if load == BURST:
            return burst_s
        if load == LASTING or not lasting_s:
            return lasting_s
        loaded_s = REPEATS * lasting_s
        return burst_s + (lasting_s - burst_s) * loaded_s / (loaded_s + self.device.sustained_after_s)
