"""Ranks that choose no GPU have their models on the first of the node, which NCCL refuses: that is said."""

from pathlib import Path

import pytest

from tests.rehearsals import rehearse
from tracer.rehearse.gpu.ordinals import SENT, SHARED
from tracer.rehearse.rehearsing import Asked

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "shared_gpu.py"
OF_OWN = (
    *("set", "mesh", "visible", "named", "gloo", "set, made", "set, plain", "set, sent"),
    *("made, moved", "gloo, made", "beside", "inside", "inside, made"),
)
OF_ALL = ("none", "moved", "first", "made", "plain", "context", "default", "empty")


def _is_said(folder: Path, way: str, *before: str, rank: int = 3, n_local: int = 4) -> bool:
    asked = Asked(
        command=(*before, str(SCRIPT), way), world_size=4, ranks=(rank,), warmup=1, steps=1,
        local_world_size=n_local,
    )  # fmt: skip
    notes = rehearse(asked, folder).notes
    assert (SENT in notes) == (way == "sent")
    return SHARED in notes


@pytest.mark.parametrize("way", OF_ALL)
def test_a_gpu_that_no_rank_chooses_is_shared_by_all(tmp_path: Path, way: str) -> None:
    assert _is_said(tmp_path, way)


@pytest.mark.parametrize("way", OF_OWN)
def test_a_gpu_that_each_rank_chooses_is_its_own(tmp_path: Path, way: str) -> None:
    """So is one that gloo lets ranks share, through the host."""
    assert not _is_said(tmp_path, way)


def test_a_tensor_that_is_sent_from_the_first_gpu_by_all_is_said_beside_a_model_that_is_not(
    tmp_path: Path,
) -> None:
    assert not _is_said(tmp_path, "sent")


@pytest.mark.parametrize("way", ["none", "made"])
@pytest.mark.parametrize(("rank", "n_local"), [(0, 4), (3, 1)])
def test_the_first_gpu_of_a_node_is_that_of_its_first_rank(
    tmp_path: Path, way: str, rank: int, n_local: int
) -> None:
    assert not _is_said(tmp_path, way, rank=rank, n_local=n_local)
