"""Programs that start the training: what they run is acted out, and nothing is trained for real."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import RankTables, read_rank, read_rehearsal, rehearsal_folder

TRAIN = """
import os, sys, torch, torch.distributed as dist

assert (sys.argv[1:], os.environ["RANK"], os.environ["WORLD_SIZE"]) == (["--lr", "3"], "1", "16"), sys.argv
dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    optimizer.step()
print("trained", os.environ.get("OF_PARENT"), __name__)
"""

PARENT = """
import os, subprocess, sys
{before}
{start}
print("after", os.environ.get("OF_PARENT"), sys.argv, __name__)
"""

RUN = '["torchrun", "--nproc-per-node", "8", "FOLDER/train.py", "--lr", "3"]'
MODULE = '[sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "-m", "train", "--lr", "3"]'
PLAIN = '[sys.executable, "FOLDER/train.py", "--lr", "3"]'
ENV = '{**os.environ, "OF_PARENT": "1"}'
STARTS = {
    "run": f"assert subprocess.run({RUN}, env={ENV}, check=True).returncode == 0",
    "module": f"subprocess.check_call({MODULE}, env={ENV}, cwd='FOLDER')",
    "popen": f"p = subprocess.Popen({PLAIN}, env={ENV}); assert p.wait() == 0 == p.poll()",
    "system": 'os.environ["OF_PARENT"] = "1"; assert os.system("torchrun FOLDER/train.py --lr 3") == 0',
    "shell": 'os.environ["OF_PARENT"] = "1"; subprocess.call("torchrun FOLDER/train.py --lr 3", shell=True)',
    "assigned": "assert os.system('OF_PARENT=1 torchrun FOLDER/train.py --lr 3') == 0",
    "env": f"subprocess.check_call(['env', 'OF_PARENT=1', *{RUN}])",
    "in_folder": "assert os.system('cd FOLDER && OF_PARENT=1 torchrun train.py --lr 3') == 0",
    "in_shell": "subprocess.check_call(['bash', '-c', 'OF_PARENT=1 torchrun FOLDER/train.py --lr 3'])",
    "become": f'os.environ["OF_PARENT"] = "1"; os.execvp("torchrun", {RUN})',
}
"""Ways to start a training in another process."""


def _acted(folder: Path, command: tuple[str, ...], steps: int = 1) -> tuple[RankTables, list[str], str]:
    """Return what rank 1 of 16 does, the notes, and what was printed."""
    rehearse(Asked(command=command, world_size=16, ranks=(1,), warmup=0, steps=steps), folder / "run")
    tables = rehearsal_folder(folder / "run")
    printed = (tables / "rank-00001" / "output.log").read_text()
    return read_rank(tables, 1), list(read_rehearsal(tables).notes), printed


def _written(folder: Path, start: str, before: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(TRAIN)
    text = PARENT.format(start=start, before=before).replace("FOLDER", str(folder))
    (folder / "parent.py").write_text(text)
    return folder / "parent.py"


@pytest.mark.parametrize("how", STARTS)
def test_what_a_program_starts_is_acted_out_as_it_is_alone(tmp_path: Path, how: str) -> None:
    """Events, works and messages are the same; the parent goes on behind it, if it did not become it."""
    parent = _written(tmp_path / "in", STARTS[how])
    alone, none, _ = _acted(tmp_path / "alone", (str(parent.parent / "train.py"), "--lr", "3"), steps=9)
    acted, notes, printed = _acted(tmp_path / "acted", (str(parent),), steps=9)
    assert acted.events.equals(alone.events)
    assert acted.works.equals(alone.works)
    assert acted.messages.equals(alone.messages)
    starter = "torchrun" if how not in {"module", "popen"} else Path(sys.executable).name
    script = "train" if how == "module" else "train.py"
    said = f"parent.py:4 starts {starter} on {script}, which is run in its place"
    assert [note for note in notes if note not in none] == [said]
    assert "trained 1 __main__" in printed
    after = f"after {'1' if how in {'system', 'shell'} else None} ['{parent}'] __main__"
    assert (after in printed) == (how != "become")


@pytest.mark.parametrize("named", [("LOCAL_RANK", "RANK"), ("RANK",), ("LOCAL_RANK",)])
def test_other_programs_are_started_and_other_ranks_are_not_run(
    tmp_path: Path, named: tuple[str, ...]
) -> None:
    """A launcher by hand starts every rank of the node: of those only one is this one."""
    before = (
        "assert subprocess.run([sys.executable, '-c', 'print(7)'], capture_output=True).stdout == b'7\\n'"
    )
    start = "\n".join(
        [
            "children = [",
            f"    subprocess.Popen({PLAIN}, env={{**os.environ, **dict.fromkeys({named}, str(r))}})",
            "    for r in range(8)",
            "]",
            "assert [child.wait() for child in children] == [0] * 8",
        ]
    )
    parent = _written(tmp_path / "in", start, before)
    _, _, printed = _acted(tmp_path, (str(parent),), steps=9)
    assert printed.count("trained") == 1


@pytest.mark.parametrize("flag", ["--rank={}", "--local_rank={}", "--local-rank {}"])
def test_a_rank_may_be_told_by_an_argument_and_its_output_go_to_a_file(tmp_path: Path, flag: str) -> None:
    """As of launchers that count the GPUs of a node, where all but the first write a log of their own."""
    start = "\n".join(
        [
            "for r in range(8):",
            f"    rank = '{flag}'.format(r).split()",
            "    out = None if r == 0 else open(f'GPU_{r}.log', 'w')",
            "    child = subprocess.Popen([sys.executable, 'FOLDER/train.py', *rank], stdout=out)",
            "    assert child.wait() == 0",
        ]
    )
    parent = _written(tmp_path / "in", start, f"os.chdir({str(tmp_path)!r})")
    train = parent.with_name("train.py")
    train.write_text(train.read_text().replace('(["--lr", "3"], ', f"({flag.format(1).split()}, "))
    _, _, printed = _acted(tmp_path, (str(parent),), steps=9)
    assert printed.count("trained") == 1


def test_a_training_that_fails_is_said_at_its_own_line(tmp_path: Path) -> None:
    """Not as the status with which the program that started it ends."""
    parent = _written(tmp_path / "in", "sys.exit(subprocess.run(['torchrun', 'FOLDER/bad.py']).returncode)")
    parent.with_name("bad.py").write_text("import os\nraise ValueError('no such model')\n")
    with pytest.raises(RehearsalError, match=r"bad\.py:2: ValueError: no such model"):
        _acted(tmp_path, (str(parent),))


def test_a_launcher_of_which_nobody_knows_what_it_starts_is_refused(tmp_path: Path) -> None:
    parent = _written(tmp_path / "in", "subprocess.run(['torchrun', '--nproc-per-node', '8', '/bin/true'])")
    with pytest.raises(RehearsalError, match=r"parent\.py:4 starts torchrun --nproc-per-node, and it is not"):
        _acted(tmp_path, (str(parent),))


def test_a_launcher_among_other_commands_is_refused(tmp_path: Path) -> None:
    """Nothing says whether the training needs what the other commands do."""
    parent = _written(tmp_path / "in", "os.system('export A=1; torchrun FOLDER/train.py')")
    with pytest.raises(
        RehearsalError, match=r"starts torchrun .*train\.py among other commands, and it is not"
    ):
        _acted(tmp_path, (str(parent),))


@pytest.mark.parametrize(
    "start",
    [
        "subprocess.check_call([sys.executable, '-m', 'pip', 'install', '-q', 'thing'])",
        "subprocess.check_output('cd / && pip3 -q install thing', shell=True)",
        "os.system('sudo -E apt-get install -y thing')",
    ],
)
def test_a_program_that_installs_packages_is_refused(tmp_path: Path, start: str) -> None:
    """It is not started, and the line says what to do."""
    said = r"parent\.py:4 starts .* thing: a rehearsal installs nothing; install what the script needs before"
    with pytest.raises(RehearsalError, match=said):
        _acted(tmp_path, (str(_written(tmp_path / "in", start)),))


@pytest.mark.parametrize("start", ["'pip', '--version'", "'echo', 'pip', 'install', 'x'"])
def test_a_program_that_installs_nothing_is_started(tmp_path: Path, start: str) -> None:
    """A script that needs what is not here ends in a line that says so."""
    parent = _written(tmp_path / "in", "subprocess.check_call(['nvidia-smi'])", f"subprocess.run([{start}])")
    with pytest.raises(RehearsalError, match=r"parent\.py:4.*nvidia-smi is not here: leave out what asks it"):
        _acted(tmp_path, (str(parent),))


def test_no_program_is_different_where_nothing_is_rehearsed() -> None:
    assert subprocess.Popen.__init__.__module__ == "subprocess"


LAUNCHES = {
    "command": f"run.main({RUN}[1:])",
    "file": f"run.main({RUN}[3:])",
    "path": f"run.main(['--run-path', *{RUN}[3:]])",
    "module": "sys.path.insert(0, 'FOLDER'); run.main(['--nnodes=2', '-m', 'train', '--lr', '3'])",
}
"""Ways to call torch's launcher, as commands of libraries do, in the process of the command itself."""


@pytest.mark.parametrize("how", LAUNCHES)
def test_what_torchs_launcher_is_called_on_is_acted_out_as_it_is_alone(tmp_path: Path, how: str) -> None:
    """As TRL's and Accelerate's commands do: not one process is started."""
    parent = _written(tmp_path / "in", LAUNCHES[how], "from torch.distributed import run")
    alone, _, _ = _acted(tmp_path / "alone", (str(parent.parent / "train.py"), "--lr", "3"), steps=9)
    acted, notes, printed = _acted(tmp_path / "acted", (str(parent),), steps=9)
    assert acted.events.equals(alone.events)
    assert acted.messages.equals(alone.messages)
    assert printed.count("trained None __main__") == 1
    assert f"after None ['{parent}'] __main__" in printed
    starter = {"path": "run_script_path once per GPU", "module": "torchrun on train"}
    said = f"parent.py:4 starts {starter.get(how, 'torchrun on train.py')}, which is run in its place"
    assert said in notes


def test_a_function_that_torchs_launcher_is_called_on_is_called_once(tmp_path: Path) -> None:
    """As a notebook starts one: with its arguments, told who it is; what it returns is its rank's."""
    before = "\n".join(
        [
            "from torch.distributed.launcher.api import LaunchConfig, elastic_launch",
            "def train(a, b): runpy.run_path('FOLDER/train.py', run_name='__main__'); return a + b",
            "import runpy; sys.argv = ['train.py', '--lr', '3']",
            "config = LaunchConfig(min_nodes=2, max_nodes=2, nproc_per_node=8)",
        ]
    )
    start = "assert elastic_launch(config, train)(3, 4) == {1: 7}; sys.argv = ['FOLDER/parent.py']"
    _, notes, printed = _acted(tmp_path, (str(_written(tmp_path / "in", start, before)),), steps=9)
    assert printed.count("trained None __main__") == 1
    assert "parent.py:7 starts train once per GPU, which is run in its place" in notes


def test_a_program_that_torchs_launcher_is_called_on_and_nobody_knows_is_refused(tmp_path: Path) -> None:
    start = "run.main(['--no-python', '--nnodes=2', '/bin/true', 'a'])"
    parent = _written(tmp_path / "in", start, "from torch.distributed import run")
    with pytest.raises(RehearsalError, match=r"parent\.py:4 starts /bin/true a, and it is not clear"):
        _acted(tmp_path, (str(parent),))


def test_options_of_python_hide_no_training(tmp_path: Path) -> None:
    """``python -u train.py``, as launchers write it: a real training was started."""
    start = "subprocess.check_call([sys.executable, '-u', '-W', 'ignore', 'FOLDER/train.py', '--lr', '3'])"
    _, _, printed = _acted(tmp_path, (str(_written(tmp_path / "in", start)),), steps=9)
    assert printed.count("trained None __main__") == 1


def test_what_a_script_has_caught_before_it_ends_itself_is_said(tmp_path: Path) -> None:
    """As Hydra does, which prints what was raised and ends with 1; without an error its status is said."""
    start = (
        "try: raise ValueError('no such model')\n"
        "except Exception as error:\n    print(error)\n    sys.exit({})\nsys.exit(3)"
    )
    with pytest.raises(RehearsalError) as caught:
        _acted(tmp_path / "a", (str(_written(tmp_path / "in", start.format(1))),))
    assert "parent.py:4: ValueError: no such model" in str(caught.value)
    assert str(caught.value).endswith("the script caught that, and ended with 1")
    with pytest.raises(RehearsalError, match="the script ended with 3; its output"):
        _acted(tmp_path / "b", (str(_written(tmp_path / "in", "sys.exit(3)")),))


def test_the_last_words_of_a_script_that_ends_itself_are_said(tmp_path: Path) -> None:
    """As ``argparse`` has them, which writes what is wrong and ends with 2."""
    start = "import argparse\nargparse.ArgumentParser('a.py').parse_args(['--local-rank=0'])"
    with pytest.raises(
        RehearsalError, match=r"ended with 2 \(a\.py: error: unrecognized arguments: --local-rank=0\); its"
    ):
        _acted(tmp_path / "run", (str(_written(tmp_path / "in", start)),))
