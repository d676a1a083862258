"""The file of a script, run as Python runs the file that it is given."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType


def run_file(path: str) -> None:
    """Run the script in *path* as ``__main__``.

    As for ``python path``, ``__file__`` and the names of files in tracebacks are absolute, and
    ``sys.argv[0]`` stays what it is. ``runpy.run_path`` gives all of them the path as it is given.

    Raises:
        FileNotFoundError: there is no such file.
    """
    found = str(Path(path).absolute())
    code = compile(Path(found).read_bytes(), found, "exec", dont_inherit=True)
    module = ModuleType("__main__")
    module.__file__ = found
    module.__dict__["__cached__"] = None
    sys.modules["__main__"] = module
    exec(code, module.__dict__)
