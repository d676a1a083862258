"""Ranks that choose no GPU have their models on the first of the node, which NCCL refuses: that is said."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.world.world import SHARED, UNLESS

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "shared_gpu.py"
OF_OWN = (
    *("set", "mesh", "visible", "named", "gloo", "set, made", "set, plain", "set, sent"),
    *("made, moved", "gloo, made", "beside", "inside", "inside, made"),
)
OF_ALL = ("none", "moved", "first", "made", "plain", "context", "default", "empty", "sent")


TORCHRUN = {"rank": "LOCAL_RANK", "unless": ""}
TASKS = {
    "srun": {"rank": "SLURM_LOCALID", "unless": UNLESS},
    "mpirun": {"rank": "OMPI_COMM_WORLD_LOCAL_RANK", "unless": UNLESS},
    "mpiexec": {"rank": "OMPI_COMM_WORLD_LOCAL_RANK", "unless": UNLESS},
}


def _is_said(
    folder: Path, way: str, *before: str, rank: int = 3, n_local: int = 4, told: dict[str, str] = TORCHRUN
) -> bool:
    asked = Asked(
        command=(*before, str(SCRIPT), way), world_size=4, ranks=(rank,), warmup=1, steps=1,
        local_world_size=n_local,
    )  # fmt: skip
    notes = rehearse(asked, folder).notes
    is_said = SHARED.format(call="all_reduce", **told) in notes
    assert sum("are on GPU 0" in note for note in notes) == is_said
    return is_said


@pytest.mark.parametrize("way", OF_ALL)
def test_a_gpu_that_no_rank_chooses_is_shared_by_all(tmp_path: Path, way: str) -> None:
    assert _is_said(tmp_path, way)


@pytest.mark.parametrize("way", OF_OWN)
def test_a_gpu_that_each_rank_chooses_is_its_own(tmp_path: Path, way: str) -> None:
    """So is one that gloo lets ranks share, through the host."""
    assert not _is_said(tmp_path, way)


@pytest.mark.parametrize("way", ["none", "made"])
@pytest.mark.parametrize(("rank", "n_local"), [(0, 4), (3, 1)])
def test_the_first_gpu_of_a_node_is_that_of_its_first_rank(
    tmp_path: Path, way: str, rank: int, n_local: int
) -> None:
    assert not _is_said(tmp_path, way, rank=rank, n_local=n_local)


@pytest.mark.parametrize("way", ["none", "made", "sent", "named"])
@pytest.mark.parametrize("launcher", TASKS)
def test_tasks_of_slurm_and_mpi_may_see_one_gpu_each(tmp_path: Path, launcher: str, way: str) -> None:
    """What shows them one is not part of the script: both are said."""
    found = _is_said(tmp_path, way, launcher, "python", told=TASKS[launcher])
    assert found == (way in OF_ALL)


def test_tasks_that_are_shown_one_gpu_each_share_none(tmp_path: Path) -> None:
    assert not _is_said(tmp_path, "none", "env", "CUDA_VISIBLE_DEVICES=0", "srun", "python")


def test_ranks_of_one_torchrun_per_task_see_all_gpus(tmp_path: Path) -> None:
    """A task per node, which has all of its GPUs."""
    assert _is_said(tmp_path, "none", "srun", "torchrun")
