"""Pipelines by hand, in the group of all ranks: their stages are found, and all of them rehearsed."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import Rehearsal

pytest.importorskip("torch")

SCRIPT = str(Path(__file__).parent / "handing_on.py")


def _rehearsed(folder: Path, way: str, world_size: int, ranks: tuple[int, ...] = ()) -> Rehearsal:
    return rehearse(Asked(command=(SCRIPT, way), world_size=world_size, ranks=ranks), folder)


def _stages(found: Rehearsal) -> list[tuple[int, ...]]:
    return [group.ranks for group in found.groups if group.axis == "pp"]


@pytest.mark.parametrize("world_size", [2, 5])
def test_stages_of_a_pipeline_by_hand_are_all_rehearsed(tmp_path: Path, world_size: int) -> None:
    """They name no group, and each of them has other neighbours."""
    found = _rehearsed(tmp_path, "line", world_size)
    everyone = tuple(range(world_size))
    assert (found.ranks, _stages(found)) == (everyone, [everyone])
    assert found.layout is not None
    assert found.layout.degrees["pp"] == world_size


@pytest.mark.parametrize("world_size", [4, 8])
def test_one_pipeline_of_several_stands_for_the_others(tmp_path: Path, world_size: int) -> None:
    """Stages of two pipelines take turns: the even ranks are rehearsed, and the last odd one is checked.

    Of two stages, each half a world from the other, neither can be told from a ring by its peer alone.
    """
    found, even = _rehearsed(tmp_path, "lines", world_size), tuple(range(0, world_size, 2))
    assert (found.ranks, _stages(found)) == (even, [even])
    assert found.representatives == tuple(rank // 2 * 2 for rank in range(world_size))


@pytest.mark.parametrize(("way", "world_size"), [("ring", 2), ("ring", 4), ("server", 4)])
def test_who_meets_in_a_ring_or_all_others_is_no_stage(tmp_path: Path, way: str, world_size: int) -> None:
    assert _stages(_rehearsed(tmp_path, way, world_size)) == []


def test_of_ranks_that_are_asked_for_none_is_added(tmp_path: Path) -> None:
    """A chain of which a part is not rehearsed is none; a whole one is."""
    part, whole = (
        _rehearsed(tmp_path / "a", "line", 3, (0, 1)),
        _rehearsed(tmp_path / "b", "line", 3, (0, 1, 2)),
    )
    assert (part.ranks, _stages(part)) == ((0, 1), [])
    assert _stages(whole) == [(0, 1, 2)]
