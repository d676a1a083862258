"""Runs a script that was written for GPUs on the processors of this machine: ``foretrace record --on-cpu N``.

Unlike a rehearsal it computes: tensors are real, and every rank is a process. The script is told that each
machine has N GPUs; what it puts on them stays in main memory, and what NCCL would send goes over gloo. So its
recording shows what it communicates, for a rehearsal of it to be compared with. Its times are those of the
processors.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, Final

from foretrace.tracer import internals

VARIABLE: Final = "FORETRACE_ON_CPU"  # environment variable with the number of GPUs that a script is told of

SAID: Final = (
    "the script was told of GPUs that do not exist (--on-cpu): these are times of processors and of gloo"
)
"""Warning in every recording of such a run."""


def n_gpus() -> int:
    """Return how many GPUs this process takes its processors for; 0: none."""
    return int(os.environ.get(VARIABLE) or 0)


def tell(warn: Callable[[str], None]) -> None:
    """Have a recording of this process *warn* that its times are not those of GPUs, if that is so."""
    if n_gpus():
        warn(SAID)


def install(module: Any) -> None:
    """Replace GPUs in this process, which has just imported torch, the *module*."""
    importlib.import_module(internals.DYNAMO)  # first: it needs an unchanged torch
    from foretrace.tracer.on_cpu import autocast
    from foretrace.tracer.on_cpu.devices import Gpus, is_foreign
    from foretrace.tracer.on_cpu.replacing import replace_devices, replace_groups, replace_wrappers

    Gpus(n_gpus()).install(module)
    autocast.install(module, is_foreign)
    replace_devices(module)
    replace_groups()
    replace_wrappers(module)
