"""A script for GPUs runs on processors, and communicates what a rehearsal of it says."""

import sys
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner
from tests.processes import Runner, free_port
from tests.rehearsals import rehearse

from foretrace.simulator.rehearsed.run import simulate_rehearsal
from foretrace.topologies.catalog import load_cluster
from foretrace.tracer.cli import record
from foretrace.tracer.on_cpu import SAID
from foretrace.tracer.process import ON_CPU
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.analysis.windows import windows
from foretrace.traces.join import join_spans
from foretrace.traces.store import open_run

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("on_cpu")

SCRIPT = Path(__file__).parent / "for_gpus.py"

STARTED: Final[dict[str, tuple[str, ...]]] = {
    "spawned": (),
    "fsdp2": ("-m", "torch.distributed.run", "--nproc-per-node", "gpu", "--master-port", "{port}"),
}
"""How ``foretrace record`` starts them: the launcher, too, counts GPUs that do not exist."""


def recorded(folder: Path, how: str) -> Any:
    """Return the run of the script on two GPUs that do not exist, and what the script said.

    One that spawns its ranks is started by ``foretrace record --on-cpu 2``, and so is the launcher of one;
    ranks of the third have the environment that it gives, and no launcher.
    """
    path = folder / "real"
    if how in STARTED:
        command = [sys.executable, "-m", "foretrace", "record", "--on-cpu", "2", "-o", str(path), "--"]
        command += [sys.executable, *STARTED[how], str(SCRIPT), how]
        (done,) = Runner.launch(command, fresh=path, FOR_GPUS_PORT=free_port())
        assert done.returncode == 0, done.stderr
        output = done.stdout
    else:
        env = Runner.env(path) | {ON_CPU: "2"}
        ended = Runner.run([sys.executable, str(SCRIPT), how], env)
        assert ended.status == (0, 0), ended.errors
        output = ended.output
    return open_run(path), [line.split() for line in output.splitlines() if "." in line]


@pytest.mark.parametrize("how", ["fsdp1", "fsdp2", "spawned"])
def test_what_a_script_for_gpus_sends_is_what_its_rehearsal_says(how: str, tmp_path: Path) -> None:
    real, said = recorded(tmp_path, how)
    assert real.warnings == (f"rank 0-1: {SAID}",)
    by_step = [one for one in said if one[-1] == "0"]  # no memory of a GPU is in use
    assert len(by_step) == 2 * 4
    assert len({one[0] for one in by_step}) == 4  # ranks have the same average, of each step another

    asked = Asked(command=(str(SCRIPT), how), world_size=2, ranks=(0, 1), warmup=2, local_world_size=2)
    rehearse(asked, tmp_path / "said")
    told = simulate_rehearsal(tmp_path / "said", lambda n: load_cluster("dgx-h100", n)).run
    found = join_spans(told, windows(told)[0].step, real, 2).communicated
    assert found is not None
    assert found.ranks == (0, 1)
    assert found.differences == ()
    assert sum(found.a.values()) > 2


def test_a_gpu_that_is_not_there_is_refused_as_by_cuda(tmp_path: Path) -> None:
    env = Runner.env(tmp_path / "real") | {ON_CPU: "2"}
    ended = Runner.run([sys.executable, str(SCRIPT), "ordinal"], env, 1)
    assert all(ended.status)
    assert "CUDA error: invalid device ordinal" in ended.errors


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_no_gpus_at_all_is_a_mistake(number: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(record, ["--on-cpu", number, "-o", str(tmp_path / "run"), "--", "true"])
    assert result.exit_code == 2
    assert not (tmp_path / "run").exists()
