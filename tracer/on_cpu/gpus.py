"""The GPUs that a script is told of: what ``torch.cuda`` and ``torch.accelerator`` say."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import importlib
from typing import Any, Final

from foretrace.tracer.on_cpu import accelerators, autocast, devices, streams
from foretrace.tracer.rehearse.gpu.meter import Meter


class _Nowhere:
    """Where waits of streams are recorded in a rehearsal: everything has been computed when it is issued."""

    def mark(self, stream: int | None = None) -> int:
        """Return a mark that nothing needs to wait for."""
        del stream
        return -1

    def note(self, *args: Any, **kwargs: Any) -> None:
        """Forget a wait."""

    def switch(self, stream: int) -> None:
        """Forget a stream."""


ALONE: Final = {"is_initialized": False}
"""Answers that differ from those of a rehearsal: recordings would describe a GPU that is initialized."""


class Gpus:
    """The GPUs of one process.

    Args:
        n_gpus: how many there are.

    Attributes:
        chosen: the number of the current one.
    """

    def __init__(self, n_gpus: int) -> None:
        self.n_gpus, self.chosen = n_gpus, 0

    def install(self, torch: Any) -> None:
        """Make *torch* tell of these GPUs."""
        meter, nowhere = Meter(lambda: 0), _Nowhere()
        devices.stand_in(streams.Streams(nowhere), meter)  # type: ignore[arg-type]  # what streams need of it
        for name, answer in ALONE.items():
            setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
        torch.cuda.device_count = torch.cuda._device_count_nvml = lambda: self.n_gpus
        torch.cuda.current_device = torch.accelerator.current_device_index = lambda: self.chosen
        torch.cuda.set_device = torch.accelerator.set_device_index = self.choose
        torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = self._exchange
        torch.cuda._initialized = False
        accelerators.tell_versions()
        accelerators.tell_generators()
        accelerators.tell_memory(meter)
        accelerators.tell_profilers()
        self._accelerator(torch)
        torch.backends.cudnn.is_available = lambda: True
        autocast.install(torch, devices.is_foreign)

    def choose(self, device: Any) -> None:
        """Make *device*, as ``torch.cuda.set_device`` takes it, the current one."""
        number = devices.number_of(device)
        if number is None:
            return
        if number >= self.n_gpus:
            raise RuntimeError(
                f"invalid device ordinal {number}: --on-cpu says that there are {self.n_gpus} GPUs"
            )
        if number >= 0:
            self.chosen = number

    def _exchange(self, device: int) -> int:
        before = self.chosen
        if device >= 0:
            self.choose(device)
        return before

    def _accelerator(self, torch: Any) -> None:
        """Tell scripts and libraries of the GPUs; torch's own code finds the processor."""
        importlib.import_module("torch.utils._device")

        accelerators.tell_accelerator()
