"""Which code asks a tensor for its device: torch needs the CPU, a script the device of a real run."""
# ruff: noqa: SLF001 - a file of torch is named by its module, which is private

from __future__ import annotations

from pathlib import Path
from types import FrameType

from foretrace.tracer.rehearse.gpu import listed


class Askers:
    """Distinguishes the code of torch and of this package from that of scripts and libraries."""

    def __init__(self) -> None:
        import torch

        self._roots = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
        self._passing_on = {torch.utils._device.__file__, listed.__file__, torch.optim.swa_utils.__file__}
        self._known: dict[str, bool] = {}

    def is_torch(self, frame: FrameType) -> bool:
        """Return whether *frame* runs code that needs the device on which tensors really are."""
        name = frame.f_code.co_filename
        found = self._known.get(name)
        if found is None:
            if name in self._passing_on and frame.f_back is not None:  # as ``with torch.device(...)`` does
                return self.is_torch(frame.f_back)
            found = self._known[name] = name.startswith(self._roots)
        return found
