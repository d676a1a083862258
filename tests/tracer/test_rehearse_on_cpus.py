"""A script that puts nothing on a GPU trains on CPUs: that is said beside times of GPUs."""

from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.rehearsals import LOADED, rehearse

from foretrace import cli
from foretrace.simulator.rehearsed.notes import ON_CPU as ON_OTHERS
from foretrace.simulator.rehearsed.run import simulate_rehearsal
from foretrace.topologies.catalog import load_cluster
from foretrace.tracer.rehearse import rehearsing
from foretrace.tracer.rehearse.cli import ON_CPU
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.world.world import STAGED
from foretrace.traces.rehearsal import Rehearsal

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "on_cpus.py"


def _rehearsed(folder: Path, *how: str, has_gpu: bool = True) -> Rehearsal:
    command = (str(SCRIPT), *how)
    return rehearse(Asked(command=command, world_size=2, ranks=(0,), samples=0, has_gpu=has_gpu), folder)


def _is_said(folder: Path, machine: str) -> bool:
    """Whether the times of the rehearsal in *folder* are said to be those of other devices."""
    said = simulate_rehearsal(folder, lambda n: load_cluster(machine, n)).info.warnings
    device = load_cluster(machine, 2).device.name
    return ON_OTHERS.format(device=device) in said


@pytest.mark.parametrize(
    ("how", "has_gpu", "on_cpu"),
    [
        (("gloo", "ddp", "cpu"), True, True),
        (("", "ddp", "cpu"), False, True),
        (("gloo", "ddp", "where"), False, True),
        (("gloo", "fsdp2", "cpu"), False, True),  # where torch finds no GPU either
        (("gloo", "ddp", "where"), True, False),
        (("nccl", "ddp", "where"), True, False),
        (("", "fsdp2", "cpu"), True, False),  # torch takes the GPU unasked
    ],
)
def test_times_of_gpus_are_called_so_where_the_script_is_on_cpus(
    tmp_path: Path, how: tuple[str, ...], *, has_gpu: bool, on_cpu: bool
) -> None:
    found = _rehearsed(tmp_path, *how, has_gpu=has_gpu)
    assert (found.job.get("device") == "cpu") == on_cpu
    assert _is_said(tmp_path, "dgx-h100") == on_cpu
    assert not _is_said(tmp_path, "localhost")


def test_fsdp2_without_a_mesh_is_on_gpus_also_over_gloo(tmp_path: Path) -> None:
    """Torch looks for one, not for the backend (``_init_default_fully_shard_mesh``)."""
    found = _rehearsed(tmp_path, "gloo", "fsdp2", "cpu")
    assert found.job.get("device") != "cpu"
    assert any(note.startswith(STAGED.partition("{")[0]) for note in found.notes)


@pytest.mark.parametrize(("device", "on_cpu"), [("cpu", True), ("where", False)])
def test_before_it_is_timed_it_is_said_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, *, on_cpu: bool
) -> None:
    monkeypatch.setattr(rehearsing, "rehearse", partial(rehearsing.rehearse, on=LOADED))
    run = ["--world-size", "2", "--ranks", "0", "-o", str(tmp_path / "run")]
    done = CliRunner().invoke(cli.main, ["rehearse", *run, "--", str(SCRIPT), "gloo", "ddp", device])
    assert done.exit_code == 0, done.output
    assert (ON_CPU in done.output) == on_cpu
