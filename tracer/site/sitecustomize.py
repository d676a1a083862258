"""Found by Python first on its path in every process that ``foretrace record`` starts.

Leaves the process as it would be without this folder: the folder goes from the path, and the
``sitecustomize`` that it hides is imported in place of this one. What stays is a finder. By it a recording
begins if and when the process joins its process group or steps an optimizer, and how its children end is
noted if it can start any. A process that imports neither torch nor subprocess loads nothing else of ours.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would be one more module
_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))  # noqa: PTH120


def _attach(module: object) -> None:
    """Have the process record itself; *module* holds ``init_process_group``."""
    try:
        from foretrace.tracer.record import attach

        attach(module)
    except Exception as error:  # the training goes on without a recording
        sys.stderr.write(f"foretrace: not recording: {error}\n")


def _take_for_gpus(module: object) -> None:
    """Have the process take processors for GPUs; *module* is torch, or its part in C++, just imported."""
    try:
        from foretrace.tracer.on_cpu import install

        install(module)
    except Exception as error:
        sys.stderr.write(f"foretrace: --on-cpu does not work here: {error}\n")
        raise SystemExit(2) from error


def _watch_children() -> None:
    """Have it noted how children of this process end that record themselves."""
    try:
        from foretrace.tracer.ended import watch

        watch(os.environ["FORETRACE_RUN"])
    except Exception as error:
        sys.stderr.write(f"foretrace: how processes end is not noted: {error}\n")


class _Finder:
    """Finds this very foretrace for the process, also where it is not installed, and waits for torch."""

    STARTING = frozenset({"subprocess", "multiprocessing.popen_fork"})
    """Modules by which a process starts others; the first takes ``os.waitpid`` when it is imported."""

    def __init__(self) -> None:
        self.expected = {"torch.distributed.distributed_c10d": _attach}
        if os.environ.get("FORETRACE_ON_CPU"):
            self.expected["torch"] = _take_for_gpus
        self.is_watching = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """Find ``foretrace``; have us told of what is expected when it is loaded; know nothing of others."""
        try:
            return self._found(name)
        except BaseException as error:  # Ctrl-C: what is shown is as without us
            raise error.with_traceback(None)  # noqa: B904

    # Python leaves frames of this file out of the traceback of a failed import, and so ours.
    find_spec.__code__ = find_spec.__code__.replace(co_filename="<frozen importlib._bootstrap_external>")

    def _found(self, name: str) -> object:
        if name == "foretrace":
            from importlib.machinery import PathFinder

            return PathFinder.find_spec(name, [_PARENT])
        if name in self.STARTING and not self.is_watching:
            self.is_watching = True
            _watch_children()
        if name == "torch" and name in self.expected:
            from foretrace.tracer.internals import C_OF_TORCH

            self.expected[C_OF_TORCH] = self.expected[name]
        if name in self.expected:
            tell = self.expected.pop(name)
            try:
                from foretrace.tracer.importing import Expectation
            except Exception as error:
                sys.stderr.write(f"foretrace: not recording: {error}\n")
                return None
            return Expectation(name, tell).find_spec(name)
        return None


if __name__ == "sitecustomize":
    if os.environ.get("FORETRACE_RUN"):
        sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]  # its true types are one more module
    sys.path[:] = [entry for entry in sys.path if entry != _HERE]
    sys.path_importer_cache.pop(_HERE, None)
    sys.modules.pop(__name__, None)
    __import__(__name__)  # raises what Python expects where there is no other
