"""Found by Python first on its path in every process that ``foretrace record`` starts.

Does what the ``sitecustomize`` behind it would have done, and arranges for a recording to begin if and when
the process calls ``torch.distributed.init_process_group``. A process that never does, such as a launcher,
imports nothing and pays nothing.
"""

import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).resolve().parent
_TARGET = "torch.distributed.distributed_c10d"


class _Wrapped(Loader):
    """Loads a module as its own loader does, then wraps what begins a process group."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        try:
            if importlib.util.find_spec("tracer") is None:
                sys.path.append(str(_HERE.parent.parent))  # run from a checkout
            from tracer.attach import attach

            attach(module)
        except Exception as error:  # the training goes on without a recording
            sys.stderr.write(f"foretrace: not recording: {error}\n")


class _Finder(MetaPathFinder):
    """Steps in once, when the module is imported that holds ``init_process_group``."""

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Wrapped(spec.loader)
        return spec


def _run_next() -> None:
    """Run the ``sitecustomize`` that this one hides, if there is one."""
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if os.environ.get("FORETRACE_RUN"):
    sys.meta_path.insert(0, _Finder())
_run_next()
