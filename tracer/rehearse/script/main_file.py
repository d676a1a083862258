"""The start of a script, in a process that has loaded torch, as of a process that has not."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType


def begin(words: Sequence[str], *, is_module: bool) -> None:
    """Let arguments, path and modules be those of a process that a launcher starts.

    What the folder of the script has is imported from there, also if something of that name is loaded.

    Args:
        words: script and arguments.
        is_module: whether the script is the name of a module.
    """
    sys.argv = [*words]
    sys.modules.pop("__mp_main__", None)
    sys.orig_argv = [sys.executable, "-u", *(["-m"] if is_module else []), *words]
    if sys.flags.safe_path:
        return
    first = str(Path.cwd() if is_module else Path(words[0]).resolve().parent)
    sys.path.insert(0, first)
    kept = {"foretrace", "torch", *sys.builtin_module_names}
    for name in {one.partition(".")[0] for one in sys.modules} - kept:
        own = PathFinder.find_spec(name, [first])
        if (
            own is None
            or own.origin is None
            or own.origin == getattr(sys.modules.get(name), "__file__", None)
        ):
            continue
        for one in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
            del sys.modules[one]


def run_file(path: str) -> None:
    """Run the script in *path* as ``__main__``.

    As for ``python path``, ``__file__`` and the names of files in tracebacks are absolute, and
    ``sys.argv[0]`` stays what it is. ``runpy.run_path`` gives all of them the path as it is given.

    Raises:
        FileNotFoundError: there is no such file.
    """
    found = os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118 - which leaves ./ in it
    code = compile(Path(found).read_bytes(), found, "exec", dont_inherit=True)
    module = ModuleType("__main__")
    module.__file__, module.__loader__ = found, SourceFileLoader("__main__", found)
    module.__dict__["__cached__"] = None
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    exec(code, module.__dict__)
