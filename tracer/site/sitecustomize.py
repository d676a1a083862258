"""Found by Python first on its path in every process that ``foretrace record`` starts.

Does what the ``sitecustomize`` behind it would have done, and arranges for a recording to begin if and when
the process calls ``torch.distributed.init_process_group``, and for notes of how its children end. A process
that never imports torch or starts others pays nothing.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).resolve().parent


def _attach(module: ModuleType) -> None:
    """Have the process record itself; *module* holds ``init_process_group``."""
    try:
        from foretrace.tracer.attach import attach

        attach(module)
    except Exception as error:  # the training goes on without a recording
        sys.stderr.write(f"foretrace: not recording: {error}\n")


def _take_for_gpus(module: ModuleType) -> None:
    """Have the process take processors for GPUs; *module* is torch, just imported."""
    try:
        from foretrace.tracer.on_cpu import install

        install(module)
    except Exception as error:
        sys.stderr.write(f"foretrace: --on-cpu does not work with torch {module.__version__}: {error!r}\n")
        raise SystemExit(2) from error


def _expect_torch() -> None:
    from foretrace.tracer.ended import watch
    from foretrace.tracer.importing import Expectation

    watch(os.environ["FORETRACE_RUN"])
    Expectation("torch.distributed.distributed_c10d", _attach)
    if os.environ.get("FORETRACE_ON_CPU"):
        Expectation("torch", _take_for_gpus)


def _run_next() -> None:
    """Run the ``sitecustomize`` that this one hides, if there is one."""
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("FORETRACE_RUN"):
    _expect_torch()
_run_next()
