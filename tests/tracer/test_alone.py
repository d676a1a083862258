"""Processes that nobody has told whether they are ranks of one training or trainings of their own."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.processes import Process, Runner, ended, split_off

from foretrace.tracer.process import RANKS, WORLD_SIZES, is_one_of_many, is_told_world, own_name
from foretrace.tracer.run_directory import attempt, beside
from foretrace.traces.run import Run
from foretrace.traces.store import open_run

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed import destroy_process_group, init_process_group
import foretrace

path, meeting, rank, *ways = sys.argv[1:]

def trained(n_steps):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(n_steps):
        model(torch.ones(2, 4)).sum().backward()
        if dist.is_initialized():
            dist.all_reduce(model.weight.grad)
        optimizer.step()

def main():
    for number, way in enumerate(ways):
        if way.startswith("joined"):
            store = f"file://{meeting}-{number}"
            init_process_group("gloo", init_method=store, rank=int(rank), world_size=2)
        trained(int(way[-1]))
        if way.startswith("joined"):
            destroy_process_group()

if path:
    with foretrace.record(path) as recording:
        main()
    print(recording.path.name)
else:
    main()
"""


TOLD = {
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mpiexec": ("PMI_SIZE", "PMI_RANK"),
}
"""How launchers say the number of processes and that of each; nothing of it is meant for torch."""


def ran(folder: Path, *ways: str, n_paths: int = 1) -> list[str]:
    """Run the script as two processes of srun; return what each has printed."""
    pytest.importorskip("torch")
    plain = {k: v for k, v in Runner.env().items() if k not in {*WORLD_SIZES, *RANKS}}
    plain |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]

    def start() -> list[Process]:
        return [
            split_off(
                [*command, str(folder / f"run{rank % n_paths}"), str(folder / "meeting"), str(rank), *ways],
                plain | dict(zip(TOLD["srun"], ("2", str(rank)), strict=True)),
            )
            for rank in range(2)
        ]

    done = ended(start, folder, timeout_s=120)
    assert [one.returncode for one in done] == [0, 0], done
    return [one.stdout.strip() for one in done]


def steps(run: Run, rank: int = 0) -> int:
    """Return how many steps of *rank* there are."""
    return sum(row["category"] == "step" for row in run.spans([rank]).to_pylist())


def test_ranks_that_meet_in_the_block_are_one_run(tmp_path: Path) -> None:
    """Nothing tells torch of them before: they are recorded from their meeting on, as ranks."""
    assert ran(tmp_path, "joined 3") == ["run0", "run0"]
    assert sorted(path.name for path in tmp_path.glob("run*")) == ["run0"]
    run = open_run(tmp_path / "run0")
    assert run.info.finished
    assert [steps(run, rank) for rank in (0, 1)] == [3, 3]
    assert sorted(row["rank"] for row in run.spans().to_pylist() if row["kind"] == "all_reduce") == [
        *(0, 0, 0),
        *(1, 1, 1),
    ]


def test_trainings_that_never_meet_are_runs_of_their_own(tmp_path: Path) -> None:
    """Each has the directory that it asked for, or, if both asked for one, one beside it."""
    assert ran(tmp_path, "alone 3", n_paths=2) == ["run0", "run1"]
    for number in (0, 1):
        run = open_run(tmp_path / f"run{number}")
        assert (run.info.world_size, run.info.finished, steps(run)) == (1, True, 3)
    assert len(list(tmp_path.glob("run*"))) == 2


def test_trainings_with_one_directory_are_all_kept(tmp_path: Path) -> None:
    names = ran(tmp_path, "alone 3")
    assert len(set(names)) == 2
    assert "run0" in names
    assert set(names) < {"run0", "run0-task0", "run0-task1"}
    for name in names:
        run = open_run(tmp_path / name)
        assert (run.info.world_size, run.info.finished, steps(run)) == (1, True, 3)


def test_what_was_done_before_the_meeting_is_kept_beside(tmp_path: Path) -> None:
    assert ran(tmp_path, "alone 2", "joined 3") == ["run0", "run0"]
    run = open_run(tmp_path / "run0")
    assert [steps(run, rank) for rank in (0, 1)] == [3, 3]
    assert [path.name for path in beside(tmp_path / "run0")] == ["run0-task0", "run0-task1"]
    for path in beside(tmp_path / "run0"):
        assert steps(open_run(path)) == 2


def test_a_process_without_a_launcher_that_joins_a_group_later(tmp_path: Path) -> None:
    """The block began as a world of one, whose directory is that of the group from there on."""
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(SCRIPT.replace("world_size=2", "world_size=1"))
    command = [sys.executable, "-W", "ignore", str(tmp_path / "train.py"), str(tmp_path / "run")]
    (done,) = Runner.launch([*command, str(tmp_path / "meeting"), "0", "alone 2", "joined 3"])
    assert done.returncode == 0, done.stderr
    kinds = [row["kind"] for row in open_run(tmp_path / "run").spans().to_pylist()]
    assert (kinds.count("step"), kinds.count("all_reduce")) == (3, 3)
    assert steps(open_run(tmp_path / "run-alone")) == 2


@pytest.mark.parametrize("is_block", [True, False])
def test_a_group_that_is_made_anew_is_a_run_of_its_own(tmp_path: Path, ranks: Any, is_block: bool) -> None:
    """Functions that the script has imported by name, before foretrace, are seen, too."""
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT.replace("int(rank)", "int(os.environ['RANK'])"))
    command = [sys.executable, "-W", "ignore", str(script), str(run) if is_block else ""]
    command += [str(tmp_path / "meeting"), "", "joined 2", "alone 1", "joined 4"]
    done = ranks.run(command, ranks.env(None if is_block else run))
    assert done.status == (0, 0), done.errors
    assert [path.name for path in beside(run)] == ["run-again1"]
    for path, n in ((run, 2), (tmp_path / "run-again1", 4)):
        assert open_run(path).info.finished
        assert [steps(open_run(path), rank) for rank in (0, 1)] == [n, n]


def test_a_command_of_several_trainings_is_told_of_each(tmp_path: Path) -> None:
    """One after the other without a launcher, or at once by one that tells torch nothing."""
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(SCRIPT)
    one = "python -W ignore train.py '' '' 0"
    at_once = " ".join(f"SLURM_STEP_NUM_TASKS=2 SLURM_PROCID={n} {one} 'alone 4' &" for n in range(2))
    for shell, n in ((f"{one} 'alone 2'; {one} 'alone 2'", 2), (f"{at_once} wait", 4)):
        output = f"run{n}"
        record = [sys.executable, "-m", "foretrace", "record", "-o", output, "--", "sh", "-c", shell]
        (done,) = Runner.launch(record, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        names = [output, *(path.name for path in beside(tmp_path / output))]
        assert len(names) == 2
        assert [steps(open_run(tmp_path / name)) for name in names] == [n - 1] * 2  # from the first on
        told = [line.partition(":")[0] for line in done.stderr.splitlines() if "1 rank, " in line]
        assert told == names


@pytest.mark.parametrize("launcher", TOLD)
def test_who_is_one_of_many_has_a_name_of_its_own(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever launcher has started them; none of these tells torch of a world."""
    for name in (*RANKS, *WORLD_SIZES):
        monkeypatch.delenv(name, raising=False)
    assert own_name() == ""
    for name, value in zip(TOLD[launcher], ("4", "3"), strict=True):
        monkeypatch.setenv(name, value)
    assert is_one_of_many()
    assert not is_told_world()
    assert own_name() == "task3"
    monkeypatch.setattr("multiprocessing.parent_process", object)
    assert own_name() == f"task3-process{os.getpid()}"


def test_runs_beside_another_are_told_from_those_of_somebody_else(tmp_path: Path) -> None:
    ours = (
        "-alone",
        "-process12",
        "-restart2",
        "-restart10",
        "-restart10-again1",
        "-task0",
        "-task10-process3",
    )
    for words in (*ours, "-mine", "2", "-task0-b", "-restart"):
        (tmp_path / f"a{words}").mkdir()
    found = beside(tmp_path / "a")
    assert {path.name.removeprefix("a") for path in found} == set(ours)
    restarts = [path for path in found if "restart" in path.name]
    assert [attempt(tmp_path / "a", path) for path in restarts] == [2, 10, 10]
