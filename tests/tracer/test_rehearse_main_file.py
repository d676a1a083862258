"""A script that looks for its own files finds them as it does when Python runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked

pytest.importorskip("torch")

SCRIPT = """
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))
from beside import WIDTH

print(__file__, sys.argv, sys.modules["__main__"].__dict__ is globals(), __name__, __spec__)
if {trains}:
    import torch

    model = torch.nn.Linear(WIDTH, WIDTH).cuda()
    for _ in range(3):
        model(torch.randn(4, WIDTH, device="cuda")).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
"""

START = """
import subprocess

subprocess.run(["torchrun", "--nproc-per-node=2", "train.py", "a"], cwd={folder!r}, check=True)
"""


@pytest.mark.parametrize("is_started", [False, True], ids=["given", "started"])
def test_a_script_that_is_given_by_a_path_of_its_folder_is_told_the_whole_path(
    tmp_path: Path, is_started: bool
) -> None:
    """``__file__`` is absolute and ``sys.argv[0]`` as it was given, as Python has it: held against Python."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    (tmp_path / "beside.py").write_text("WIDTH = 8\n")
    (folder / "train.py").write_text(SCRIPT.format(trains=True))
    (folder / "say.py").write_text(SCRIPT.format(trains=False))
    (folder / "start.py").write_text(START.format(folder=str(folder)))
    named = (
        (f"{os.path.relpath(folder)}/start.py",)
        if is_started
        else (f"{os.path.relpath(folder)}/train.py", "a")
    )
    rehearse(Asked(command=named, world_size=2, ranks=(0,)), tmp_path / "run")
    said = (tmp_path / "run/rehearsal/rank-00000/output.log").read_text().splitlines()
    given, where = ("say.py", folder) if is_started else (named[0].replace("train.py", "say.py"), None)
    real = subprocess.run([sys.executable, given, "a"], cwd=where, check=True, capture_output=True, text=True)
    assert said[0] == real.stdout.strip().replace("say.py", "train.py")


def test_modules_that_python_loads_before_a_script_are_its_own(tmp_path: Path) -> None:
    """Frozen ones, as ``stat``, and ``encodings``; others that its folder has are a script's own."""
    names = ("stat", "site", "codecs", "encodings", "colorsys", "this")
    for name in names:
        (tmp_path / f"{name}.py").write_text("")
    asks = f"import {', '.join(names)}\nprint([one.__file__ for one in ({', '.join(names)})])\n"
    (tmp_path / "beside.py").write_text("WIDTH = 8\n")
    (tmp_path / "say.py").write_text(asks)
    script = tmp_path / "train.py"
    script.write_text(asks + SCRIPT.format(trains=True).replace(".parent.parent", ".parent"))
    rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,)), tmp_path / "run")
    said = (tmp_path / "run/rehearsal/rank-00000/output.log").read_text().splitlines()
    real = subprocess.run(
        [sys.executable, str(tmp_path / "say.py")], check=True, capture_output=True, text=True
    )
    assert said[0] == real.stdout.strip()


def test_a_command_that_says_where_modules_are_is_heard(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "beside.py").write_text("WIDTH = 8\n")
    script = tmp_path / "scripts" / "train.py"
    script.write_text(SCRIPT.format(trains=True).replace(".parent.parent", ""))
    command = ("env", f"PYTHONPATH={tmp_path / 'library'}", "torchrun", str(script))
    assert rehearse(Asked(command=command, world_size=2, ranks=(0,)), tmp_path / "run").job["steps"] == 1
