"""Starting a command and recording what it starts: exit status, environment, a user's mistakes."""

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.processes import Done, Runner

from foretrace.tracer.errors import LaunchError, RecordError
from foretrace.tracer.finish import finish, why_nothing
from foretrace.tracer.launch import SITE, environment, launch
from foretrace.tracer.pending import _mapped
from foretrace.tracer.process import RANKS, is_first
from foretrace.tracer.run_directory import CLAIM, claimed
from foretrace.traces.info import RunInfo
from foretrace.traces.store import open_run, write_info

ROOT = Path(__file__).parents[2]


def record(*words: str, cwd: Path, loads_torch: bool = False) -> Done:
    """Run ``foretrace record`` as a user does, in an empty folder."""
    (done,) = Runner.launch(recording(*words), cwd=cwd, fresh=cwd / "run", loads_torch=loads_torch)
    return done


def recording(*words: str) -> list[str]:
    """Return the command that begins with ``foretrace record``."""
    return [sys.executable, "-m", "foretrace", "record", *words]


@pytest.mark.parametrize(("code", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 15)", -15), ("", 0)])
def test_the_exit_status_is_that_of_the_command(tmp_path: Path, code: str, status: int) -> None:
    assert launch([sys.executable, "-c", f"import os, sys; {code}"], tmp_path / "run") == status
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [["no-such-program-xyz"], ["/etc/hostname"], []])
def test_a_command_that_cannot_start_is_one_error(tmp_path: Path, command: Sequence[str]) -> None:
    with pytest.raises(LaunchError):
        launch(command, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_is_one_line_and_status_2(tmp_path: Path) -> None:
    result = record("-o", "run", "--", "no-such-program-xyz", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: cannot start 'no-such-program-xyz'")
    assert result.stderr.count("\n") == 1


def test_what_is_there_is_never_recorded_over(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RecordError, match="has files in it"):
        launch([sys.executable, "-c", ""], tmp_path)
    with pytest.raises(RecordError, match="is a file"):
        launch([sys.executable, "-c", ""], tmp_path / "notes.txt")
    run = tmp_path / "run"
    (run / "spans").mkdir(parents=True)
    with pytest.raises(RecordError, match="holds a run already"):
        launch([sys.executable, "-c", ""], run)


def test_a_second_recording_into_a_directory_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    """Unless it is of another rank of the same job; a recorder that was killed is in nobody's way."""
    run = tmp_path / "run"
    with claimed(run, "job 1.0"), claimed(run, "job 1.0"):
        for job in ("job 1.1", "process 7 on here"):
            with (
                pytest.raises(
                    RecordError, match=re.escape(f"{run} is being recorded into by job 1.0: nothing")
                ),
                claimed(run, job),
            ):
                pass
        result = record("-o", "run", "--", "touch", "started", cwd=tmp_path)
        assert (result.returncode, result.stderr.count("\n")) == (2, 1)
        assert not (tmp_path / "started").exists()
    assert [*run.iterdir()] == []
    (run / CLAIM).write_text("process 8 on here, which was killed")
    with claimed(run, "process 7 on here"):
        pass


def test_no_link_is_written_through(tmp_path: Path) -> None:
    """Whoever made the empty directory may have put one there."""
    mine, run = tmp_path / "mine", tmp_path / "run"
    mine.write_text("mine")
    run.mkdir()
    (run / CLAIM).symlink_to(mine)
    with pytest.raises(RecordError, match="is a link"):
        launch([sys.executable, "-c", ""], run)
    with pytest.raises(OSError, match="symbolic links"):
        _mapped(run / CLAIM)
    assert mine.read_text() == "mine"


def test_ranks_that_come_and_go_at_once_share_a_directory(tmp_path: Path) -> None:
    def come(_: int) -> None:
        with claimed(tmp_path / "run", "job 1.0"):
            pass

    with ThreadPoolExecutor(8) as pool:
        assert len([*pool.map(come, range(200))]) == 200


def test_a_command_without_torch_is_said_to_have_recorded_nothing(tmp_path: Path) -> None:
    result = record("-o", "run", "--", sys.executable, "-c", "print('hello')", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "hello\n")
    assert "nothing recorded" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_death_before_the_first_span_is_told_by_the_last_calls(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(4))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    result = record("-o", "run", "--", sys.executable, "train.py", cwd=tmp_path, loads_torch=True)
    assert result.stderr == (
        "foretrace: no span was written in run: it ended too early; the last calls are known:\n"
        "failure rank 0 was killed (signal 9) after all_reduce 0 of world\n"
    )


def test_a_command_that_records_nothing_leaves_no_folder_that_was_not_there(tmp_path: Path) -> None:
    """Neither the run nor ``runs`` above it; a folder that somebody has made stays."""
    (tmp_path / "mine").mkdir()
    for words in ((), ("-o", "deep/er/run"), ("-o", "mine")):
        result = record(*words, "--", sys.executable, "-c", "", cwd=tmp_path)
        assert (result.returncode, "nothing recorded" in result.stderr) == (0, True)
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


def test_an_existing_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['SEEN'] = 'yes'\n")
    env = environment(tmp_path / "run", "run", {"PYTHONPATH": str(tmp_path)})
    assert env["PYTHONPATH"] == f"{SITE}{os.pathsep}{tmp_path}"
    code = "import os, sys; print(os.environ.get('SEEN'), {'torch', 'pyarrow'} & {*sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert result.stdout.split() == ["yes", "set()"]
    assert result.stderr == ""


def test_torchrun_is_recorded_without_editing_the_script(tmp_path: Path, config: Path, job: Any) -> None:
    script = str(ROOT / "examples" / "train_ddp.py")
    flags = ["--config", str(config), "--steps", "2", "--seq-len", "16"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = record("-o", "run", "--json", "--", *launcher, script, *flags, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert (said["run"], said["exit_status"], said["world_size"]) == ("run", 0, 2)
    assert said["step_time_s"] > 0
    assert result.stderr.count("loss") == 2  # the command's own output makes way for the JSON
    run = open_run(tmp_path / "run")
    assert run.stored_ranks == (0, 1)
    assert run.info.summary["n_spans"] == said["n_spans"]
    memory = run.memory()
    assert set(memory["rank"].to_pylist()) == {0, 1}
    assert min(memory["bytes"].to_pylist()) > 1e7


def test_a_script_that_fails_leaves_a_run_that_says_so(tmp_path: Path, ranks: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(3):\n"
        "    loss = model(torch.ones(2, 4)).sum()\n"
        "    loss.backward()\n"
        "    dist.all_reduce(model.weight.grad)\n"
        "    if step == 2: raise RuntimeError('the loss is not a number')\n"
        "    optimizer.step()\n"
    )
    result = ranks.run([sys.executable, str(script)], ranks.env(tmp_path / "run"))
    assert result.status == (1, 1)
    assert result.errors.count("RuntimeError: the loss is not a number") == 2
    run = open_run(tmp_path / "run")
    assert run.info.finished
    assert run.warnings == ("rank 0-1: the training ended with RuntimeError: the loss is not a number",)
    spans = run.spans().to_pylist()
    assert sum(row["kind"] == "all_reduce" for row in spans) == 2 * 3
    assert sum(row["category"] == "step" for row in spans) == 2 * 2


def test_a_rank_that_cannot_write_trains_on(tmp_path: Path, ranks: Any) -> None:
    (tmp_path / "run").write_text("in the way")
    code = "import torch.distributed as d; d.init_process_group('gloo'); d.barrier(); print('done')"
    result = ranks.run([sys.executable, "-c", code], ranks.env(tmp_path / "run"))
    assert result.status == (0, 0)
    assert result.output == "done\n" * 2
    assert result.errors.count("foretrace: not recording: ") == 2


def test_a_broken_memory_file_of_a_rank_does_not_hide_the_status(tmp_path: Path) -> None:
    script = "mkdir -p run/ranks; : > run/ranks/rank-00000.memory.arrow; exit 7"
    result = record("-o", "run", "--", "sh", "-c", script, cwd=tmp_path)
    assert result.returncode == 7, result.stderr
    assert "Traceback" not in result.stderr


def test_a_block_that_has_ended_begins_no_recording(tmp_path: Path, ranks: Any) -> None:
    """A process group that is joined after the ``with`` block is none of its business."""
    run = tmp_path / "run"
    script = (
        "import torch.distributed as dist, torch, foretrace\n"
        f"with foretrace.record({str(run)!r}):\n"
        "    pass\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "dist.destroy_process_group()\n"
    )
    done = ranks.run([sys.executable, "-c", script], ranks.env())
    assert done.status == (0, 0), done.errors
    assert not run.exists()


def test_why_a_process_was_not_recorded_is_said_again_at_the_end(tmp_path: Path) -> None:
    """What a process says at its beginning is far above the end of a training."""
    pytest.importorskip("torch")
    script = (
        "import torch.distributed as d\n"
        "d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)\n"
    )
    run = Path("runs", "run")
    result = record("-o", str(run), "--ranks", "7", "--", sys.executable, "-c", script, cwd=tmp_path)
    assert result.returncode == 0
    why = "ranks 7: none of them is in a world of 1; give some of 0 to 0"
    said = [line for line in result.stderr.splitlines() if line.startswith("foretrace: ")]
    assert said == [f"foretrace: not recording: {why}", f"foretrace: nothing recorded in {run}: {why}"]
    assert list(tmp_path.iterdir()) == []


RESTARTED = """
import os, subprocess, sys
import torch

if "TORCHELASTIC_RESTART_COUNT" not in os.environ:  # as torchrun does
    for count in ("0", "1"):
        subprocess.run([sys.executable, __file__], env={**os.environ, "TORCHELASTIC_RESTART_COUNT": count})
    sys.exit(3)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def test_what_was_started_again_is_told_beside_what_had_been(tmp_path: Path) -> None:
    """Also where the first attempt has left nothing, or another command has left such a directory."""
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(RESTARTED)
    (tmp_path / "run-restart10").mkdir()
    result = record("-o", "run", "--", sys.executable, "train.py", cwd=tmp_path)
    assert result.returncode == 3
    told = [line for line in result.stderr.splitlines() if "1 rank, " in line]
    assert [line.partition(":")[0] for line in told] == ["run", "run-restart1"]
    for path in ("run", "run-restart1"):
        info = open_run(tmp_path / path).info
        assert info.finished
        assert info.summary is not None


@pytest.mark.parametrize("room_bytes", [0, 20])
def test_a_disk_that_is_full_at_the_start_is_one_line_and_nothing_is_left(
    tmp_path: Path, room_bytes: int
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
    try:
        with pytest.raises(RecordError, match=r"cannot record into .*; nothing started$"):
            launch([sys.executable, "-c", "raise SystemExit(7)"], tmp_path / "new" / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_the_reason_given_for_an_empty_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    warnings = ("something else", "recording stopped: cannot write: No space left on device")
    write_info(run, RunInfo(origin="recorded", world_size=1, warnings=warnings), 0)
    assert finish(run) is None
    assert why_nothing(run) == warnings[1]


def test_a_machine_of_several_says_what_to_do_with_its_part(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = (
        "import torch, torch.distributed as d; d.init_process_group('gloo')\n"
        "d.all_reduce(torch.ones(1)); d.destroy_process_group()\n"
    )
    world = "env WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}".split()
    commands = [
        recording("-o", f"node{rank}", "--", *world, f"RANK={rank}", sys.executable, "-c", script)
        for rank in (0, 1)
    ]
    for rank, part in enumerate(Runner.launch(*commands, cwd=tmp_path, fresh=tmp_path)):
        assert part.returncode == 0, part.stderr
        assert f"node{rank}: 1 of 2 ranks, 1 spans" in part.stderr
        assert "\n1 of 1 collectives confirmed by c10d\n" in part.stderr  # of other machines nothing is said
        assert f"foretrace record --merge -o ALL node{rank} ..." in part.stderr
    merged = record("--merge", "-o", "all", "node0", "node1", cwd=tmp_path)
    assert merged.stderr.startswith("all: 2 ranks, 2 spans")


def test_one_of_the_recorders_of_all_ranks_speaks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    assert is_first()
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert not is_first()
    monkeypatch.setenv("RANK", "0")  # torchrun under srun: the number within the world counts
    assert is_first()
