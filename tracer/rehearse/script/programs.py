"""Programs that are missing on a machine without a GPU, or that a rehearsal must not run.

Scripts start ``nvidia-smi`` for their logs, and install packages. Replacements of these programs come first
on ``PATH``, where shells and ``subprocess`` look for programs.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from foretrace.tracer.rehearse.script import nvidia_smi
from foretrace.tracer.rehearse.script.installers import Installers, put

PROGRAM: Final = "nvidia-smi"

ASKED: Final = (
    f"{PROGRAM} is not installed here: it answered for the GPUs of a node, with 0 for what a driver measures"
)
"""Note if a script has started it."""


class Programs:
    """Replaces programs for the script of one rank.

    Args:
        spec: of the rehearsal; ``folder`` is its folder.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._folder = Path(spec["folder"]) / f"programs-{spec['rank']:05d}"
        self._asked = self._folder / "asked"
        self._is_needed = spec["has_gpu"] and shutil.which(PROGRAM) is None
        self._n_gpus = spec["local_world_size"]
        self._installers = Installers(self._folder)

    def install(self) -> None:
        """Create the replacements and put them first on ``PATH``."""
        self._folder.mkdir(parents=True, exist_ok=True)  # it exists if the rank is run again
        if self._is_needed:
            own = Path(nvidia_smi.__file__).resolve()
            words = [sys.executable, "-I", str(own), str(self._asked), str(self._n_gpus)]
            put(self._folder / PROGRAM, words)
        self._installers.install()
        os.environ["PATH"] = f"{self._folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"

    def said(self) -> list[str]:
        """Return notes about programs that the script has started."""
        return [*([ASKED] if self._asked.exists() else []), *self._installers.said()]
