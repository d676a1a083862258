"""Scripts that install packages: a rehearsal says so, and changes nothing on the machine."""

import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.script.installers import SAID, Installers

pytest.importorskip("torch")

SCRIPT = """
import os, shlex, subprocess, sys

import torch

{starts}
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(2, 4).cuda()).sum().backward()
    optimizer.step()
"""

TOLD = "install -q --no-index --target {target} {wheel}"
STARTS = {
    "words": "subprocess.check_call([sys.executable, '-m', 'pip', *shlex.split({told!r})])",
    "name": "assert subprocess.run(['pip', *shlex.split({told!r})]).returncode == 0",
    "captured": "assert subprocess.check_output(['pip3', *shlex.split({told!r})], text=True) == ''",
    "shell": "subprocess.check_call(f'cd / && {{sys.executable}} -m pip {told}', shell=True)",
    "file": "subprocess.check_call(['sh', '-c', 'pip {told}'])",
    "system": "assert os.system(f'\"{{sys.executable}}\" -m pip {told}; exit 3') == 3 << 8",
    "popen": "assert os.popen('pip {told}').read() == ''",
    "inside": "import pip; assert pip.main(shlex.split({told!r})) == 0",
}
"""Ways to install a package."""


def _wheel(folder: Path) -> Path:
    """Return a package that pip installs without a network."""
    path, about = folder / "thing-1.0-py3-none-any.whl", "thing-1.0.dist-info"
    with ZipFile(path, "w") as file:
        file.writestr("thing.py", "")
        file.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    return path


def _rehearsed(folder: Path, starts: str) -> tuple[str, ...]:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(starts=starts))
    asked = Asked(command=(str(script),), world_size=1, warmup=0)
    return rehearse(asked, folder / "run").notes


@pytest.mark.parametrize("way", STARTS)
def test_a_script_that_installs_something_goes_on_as_if_it_had(tmp_path: Path, way: str) -> None:
    """Nothing is installed, and what was not run is said."""
    told = TOLD.format(target=tmp_path / "target", wheel=_wheel(tmp_path))
    notes = _rehearsed(tmp_path, STARTS[way].format(told=told))
    name = "pip3" if way == "captured" else "pip"
    assert SAID.format(command=f"{name} {told}") in notes
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    "starts",
    [
        "assert 'pip' in subprocess.check_output(['pip', '--version'], text=True)",
        "assert 'pip' in subprocess.check_output([sys.executable, '-m', 'pip', '--version'], text=True)",
        "assert subprocess.check_output('echo pip install', shell=True, text=True) == 'pip install\\n'",
        "assert subprocess.run(['pip', 'check', '--nonsense'], stderr=subprocess.DEVNULL).returncode == 2",
    ],
)
def test_what_changes_nothing_is_run(tmp_path: Path, starts: str) -> None:
    assert not any("which is not run" in note for note in _rehearsed(tmp_path, starts))


def test_installers_are_found_where_a_shell_finds_commands(tmp_path: Path) -> None:
    """However they are named, and nowhere else in a line."""
    found = Installers(tmp_path)
    found._made.update(("pip", "pip3", "apt-get"))
    pip, apt = str(tmp_path / "pip"), str(tmp_path / "apt-get")
    lines = {
        f"{sys.executable} -m pip install x": f"{pip} install x",
        "python3 -I -m pip install x && ls": f"{pip} install x && ls",
        "A=1 pip install x": f"A=1 {pip} install x",
        "ls; sudo -E apt-get install -y x": f"ls; {apt} install -y x",
        "if true; then /usr/bin/pip install x; fi": f"if true; then {pip} install x; fi",
        "echo pip install x": "echo pip install x",
        "python train.py --pip install": "python train.py --pip install",
        "./mypip install x": "./mypip install x",
    }
    assert {line: found.replaced(line) for line in lines} == lines
    assert found.replaced(["sudo", "apt-get", "install", "x"]) == [apt, "install", "x"]
    assert found.replaced([sys.executable, "-m", "pip", "install", "x"]) == [pip, "install", "x"]
    for others in ([sys.executable, "-m", "pipx"], ["ls"], [], b"pip install x"):
        assert found.replaced(others) == others
