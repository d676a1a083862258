"""What a script sees of its process is what it sees unrecorded, less what docs/recording.md lists."""

import json
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.processes import TIMEOUT_S, Runner

from foretrace.traces.store import open_run

ROOT = Path(__file__).parents[2]

LISTING = """
import json, os, signal, sys

mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
if "torch" in sys.argv:
    import torch.distributed
dispositions = {int(number): str(signal.getsignal(number)) for number in signal.valid_signals()}
main = sys.modules["__main__"]
seen = {
    "path": sys.path,
    "modules": {name: getattr(one, "__file__", None) for name, one in [*sys.modules.items()]},
    "argv": [sys.argv, sys.orig_argv, sys.executable, sys.prefix],
    "folder": os.getcwd(),
    "main": [str(type(main.__loader__)), getattr(main, "__file__", None), str(main.__spec__)[:30]],
    "environment": dict(os.environ),
    "signals": [sorted(map(int, mask)), dispositions],
    "groups": [os.getpgrp() == os.getpgid(os.getppid()), os.getsid(0) == os.getsid(os.getppid())],
    "flags": str(sys.flags),
}
with open(f"seen-{os.environ.get('RANK', 0)}", "w") as file:
    json.dump(seen, file)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return a Python without foretrace, and another one beside which the wheel is installed.

    Both find what else there is (torch, click, pyarrow) where this Python does, by a file of paths.
    """
    build = pytest.importorskip("hatchling.build")
    wheels, pythons = tmp_path_factory.mktemp("wheel"), []
    here = Path.cwd()
    os.chdir(ROOT)
    try:
        wheel = build.build_wheel(str(wheels))
    finally:
        os.chdir(here)
    others = [entry for entry in sys.path if entry.endswith("site-packages")]
    for name in ("without", "with"):
        folder = tmp_path_factory.mktemp(name)
        venv.create(folder, symlinks=True)
        (site,) = folder.glob("lib/python3*/site-packages")
        (site / "others.pth").write_text("\n".join(others))  # whose own files of paths are not read
        if name == "with":
            with zipfile.ZipFile(wheels / wheel) as unpacked:
                unpacked.extractall(site)
        pythons.append(str(folder / "bin" / "python"))
    return pythons[0], pythons[1]


def seen(command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> list[dict[str, Any]]:
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    files = sorted(cwd.glob("seen-*"))
    found = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return found


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29999", "listing.py")

COMMANDS: dict[str, Sequence[str]] = {
    "script": ("listing.py", "--depth", "x"),
    "module": ("-m", "listing", "a b"),
    "text": ("-c", LISTING, "1"),
    "path": ("-W", "ignore", "-u", "./listing.py"),
    "torch": ("listing.py", "torch"),
    "torchrun": TORCHRUN,
}


@pytest.mark.parametrize("how", COMMANDS)
def test_a_script_sees_the_same_process(installed: tuple[str, str], tmp_path: Path, how: str) -> None:
    """Also where foretrace is not installed beside the Python that runs it."""
    python, recorder = installed
    if "torch" in how:
        pytest.importorskip("torch")
    (tmp_path / "listing.py").write_text(LISTING)
    (tmp_path / "on_path").mkdir()
    (tmp_path / "on_path" / "sitecustomize.py").write_text("import json\n")
    record = [recorder, "-m", "foretrace", "record", "-o", "run", "--"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if how != "text":
        env["PYTHONPATH"] = "on_path"
    command = [python, *COMMANDS[how]]
    alone, recorded = (seen([*before, *command], tmp_path, env) for before in ((), record))
    assert len(alone) == len(recorded) == (2 if how == "torchrun" else 1)
    for one, other in zip(alone, recorded, strict=True):
        own = {name: other["environment"].pop(name) for name in ("FORETRACE_RUN", "FORETRACE_NAME")}
        assert own == {"FORETRACE_RUN": str(tmp_path / "run"), "FORETRACE_NAME": "run"}
        first, _, rest = other["environment"].pop("PYTHONPATH").partition(os.pathsep)
        assert rest == one["environment"].pop("PYTHONPATH", "")
        assert first == str(Path(recorder).parents[1] / first.partition(f"{Path(recorder).parents[1]}/")[2])
        ours = {name for name in other["modules"] if name.partition(".")[0] == "foretrace"}
        assert bool(ours) == (how == "torch")
        for name in ours:
            del other["modules"][name]
        for ranks in (one, other):  # differ between any two runs
            for name in (
                "TORCHELASTIC_RUN_ID",
                "TORCHELASTIC_ERROR_FILE",
                "RANK",
                "LOCAL_RANK",
                "MASTER_PORT",
            ):
                ranks["environment"].pop(name, None)
        assert other == one


TRAINS = """
import networkx  # of the folder of the script
import torch

LISTING
if not torch.cuda.is_available():  # not rehearsed
    raise SystemExit
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""

REHEARSED = ("module", "torchrun")


@pytest.mark.parametrize("how", REHEARSED)
def test_a_rehearsed_script_sees_the_process_that_a_launcher_starts(
    installed: tuple[str, str], tmp_path: Path, how: str
) -> None:
    """Path, folder, arguments, main module, environment, and where each module comes from; not signals."""
    pytest.importorskip("torch")
    _, python = installed
    (tmp_path / "listing.py").write_text(TRAINS.replace("LISTING", LISTING))
    (tmp_path / "networkx.py").touch()
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "OMP_NUM_THREADS"}}
    env["PYTHONPATH"] = "on_path"
    command = [python, *(TORCHRUN if how == "torchrun" else COMMANDS[how])]
    size = "2" if how == "torchrun" else "1"
    rehearse = [python, "-m", "foretrace", "rehearse", "--world-size", size, "--ranks-per-node", size]
    rehearse += ["--warmup", "0", "-o", "run", *(["--ranks", "0,1"] if how == "torchrun" else []), "--"]
    launched = command if how == "torchrun" else [python, "-m", "torch.distributed.run", *command[1:]]
    alone, said = (seen(words, tmp_path, env) for words in (launched, [*rehearse, *command]))
    assert len(alone) == len(said) == int(size)
    for one, other in zip(alone, said, strict=True):
        for ranks in (one, other):
            for name in [one for one in ranks["environment"] if one.startswith(("MASTER_", "TORCHELASTIC_"))]:
                del ranks["environment"][name]  # they tell of an agent and its store
            for name in ("signals", "groups"):
                ranks.pop(name)
        modules = other.pop("modules")
        own = {name: file for name, file in one.pop("modules").items() if name in modules}
        assert own == {name: modules[name] for name in own}
        assert own["networkx"] == str(tmp_path / "networkx.py")
        assert other == one


def test_a_script_that_fails_to_import_fails_where_it_is_rehearsed(tmp_path: Path) -> None:
    """The folder in which a launcher is started is not the one of the script."""
    pytest.importorskip("torch")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "helper.py").touch()
    (tmp_path / "scripts" / "train.py").write_text("import torch\nimport helper\n")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "scripts/train.py")
    rehearse = (sys.executable, "-m", "foretrace", "rehearse", "--world-size", "1", "-o", "run", "--")
    for before in ((), rehearse):
        (done,) = Runner.launch([*before, *torchrun], cwd=tmp_path, loads_torch=bool(before))
        assert done.returncode, done.stdout
        assert "train.py" in done.stderr
        assert "helper" in done.stderr


PROJECT = """
import sys, tracer, traces.mine, simulator, topologies, sitecustomize
import torch, torch.distributed as dist

assert [one.WHO for one in (tracer, traces.mine, simulator, topologies)] == ["mine"] * 4
assert sitecustomize.__file__ == sys.argv[1]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
import tracer, traces.mine, simulator, topologies
assert [one.WHO for one in (tracer, traces.mine, simulator, topologies)] == ["mine"] * 4
dist.destroy_process_group()
print("mine")
"""


def test_a_project_s_own_modules_bear_the_names_of_ours(tmp_path: Path) -> None:
    """Recorded and rehearsed alike."""
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(PROJECT)
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "__init__.py").touch()
    for name in ("tracer", "traces/mine", "simulator", "topologies", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("WHO = 'mine'\n")
    # Debian's Python has one of its own, and has imported it when a script begins.
    found = [sys.executable, "-c", "import sitecustomize; print(sitecustomize.__file__)"]
    (done,) = Runner.launch(found, cwd=tmp_path, loads_torch=True, PYTHONSAFEPATH="")
    command = ("train.py", done.stdout.strip())
    foretrace = (sys.executable, "-m", "foretrace")
    (done,) = Runner.launch(
        [*foretrace, "record", "-o", "run", "--", sys.executable, *command],
        cwd=tmp_path,
        fresh=tmp_path / "run",
        loads_torch=True,
        PYTHONSAFEPATH="",
    )
    assert (done.returncode, done.stdout) == (0, "mine\n"), done.stderr
    assert open_run(tmp_path / "run").stored_ranks == (0,)
    (done,) = Runner.launch(
        [*foretrace, "rehearse", "--world-size", "1", "-o", "rehearsal", "--", *command],
        cwd=tmp_path,
        loads_torch=True,
    )
    assert done.returncode == 0, done.stderr
