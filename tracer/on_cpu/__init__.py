"""Runs a script that was written for GPUs on the processors of this machine: ``foretrace record --on-cpu N``.

Unlike a rehearsal it computes: tensors are real, and every rank is a process. The script is told that each
machine has N GPUs; what it puts on them stays in main memory, and what NCCL would send goes over gloo. So its
recording shows what it communicates, for a rehearsal of it to be compared with. Its times are those of the
processors.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.process import n_pretended_gpus

SAID: Final = (
    "the script was told of GPUs that do not exist (--on-cpu): these are times of processors and of gloo"
)
"""Warning in every recording of such a run."""


def tell(warn: Callable[[str], None]) -> None:
    """Have a recording of this process *warn* that its times are not those of GPUs, if that is so."""
    if n_pretended_gpus():
        warn(SAID)


def install(module: Any) -> None:
    """Replace GPUs in this process, which has just loaded *module*: PyTorch's C++, and later PyTorch."""
    if module.__name__ == internals.C_OF_TORCH:
        from foretrace.tracer.rehearse.device.installing import fit_out

        fit_out(module, n_pretended_gpus(), _say).note(is_on=False)
        return
    importlib.import_module(internals.DYNAMO)  # first: it needs an unchanged torch
    from foretrace.tracer.on_cpu import replacing

    internals.count_by_driver()
    internals.make_generators()
    replacing.follow_autocast(module)
    replacing.replace_devices(module)
    replacing.replace_groups()
    replacing.replace_wrappers(module)


def _say(words: str) -> None:
    sys.stderr.write(f"foretrace: {words}\n")
