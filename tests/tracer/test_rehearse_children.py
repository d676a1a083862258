"""Scripts that start a process per rank themselves, and modules that are told by name where to go."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse
from tests.tracer.started_by_hand import PLACES, STEPS, WIDTH

from foretrace.tracer.errors import RecordError
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import WHAT, RankTables, Rehearsal, read_rank, rehearsal_folder

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "started_by_hand.py"
WEIGHT_BYTES, BIAS_BYTES = WIDTH * WIDTH * 4, WIDTH * 4


def _rehearsed(
    folder: Path, way: str, n_told: int = 0, *, world_size: int = 4, n_local: int = 4, rank: int = 0
) -> tuple[Rehearsal, RankTables, str]:
    """Rehearse the *way* of a script that is told *n_told* ranks; return what it did, and what it printed."""
    asked = Asked(
        command=(str(SCRIPT), way, str(n_told)), world_size=world_size, ranks=(rank,), warmup=1, steps=1,
        local_world_size=n_local,
    )  # fmt: skip
    found = rehearse(asked, folder / "run")
    tables = rehearsal_folder(folder / "run")
    printed = (tables / f"rank-{rank:05d}" / "output.log").read_text()
    return found, read_rank(tables, rank), printed


@pytest.mark.parametrize("way", PLACES)
def test_a_module_goes_where_it_is_told_by_name(tmp_path: Path, way: str) -> None:
    """``module.to(device=...)`` is ``module.to(...)``: all parameters on the device, and no copies back."""
    plain, expected, _ = _rehearsed(tmp_path / "plain", "plain")
    found, tables, _ = _rehearsed(tmp_path / way, way)
    assert found.memory["0"] == plain.memory["0"]
    assert found.memory["0"]["bytes"]["parameters"] == 2 * (WEIGHT_BYTES + 512)
    assert tables.works.equals(expected.works)


@pytest.mark.parametrize("rank", [0, 3])
def test_the_process_of_this_rank_is_run_in_place(tmp_path: Path, rank: int) -> None:
    """Of four that are started one by one: it sums each of its parameters; a helper really runs."""
    _, tables, printed = _rehearsed(tmp_path, "started", 4, rank=rank)
    messages = tables.messages.to_pylist()
    sent = [messages[e["item"]] for e in tables.events.to_pylist() if WHAT[e["what"]] == "communication"]
    assert [m["kind"] for m in sent] == ["all_reduce"] * 4
    assert sorted(m["size_bytes"] for m in sent) == [BIAS_BYTES] * 2 + [WEIGHT_BYTES] * 2
    assert printed.splitlines()[0] == "helper 42"


@pytest.mark.parametrize("way", ["started", "spawned", "named", "behind"])
def test_processes_are_counted_on_a_node_or_over_the_world(tmp_path: Path, way: str) -> None:
    """A script that is told of all ranks starts as many; the last is rank 7."""
    found, tables, _ = _rehearsed(tmp_path, way, 8, world_size=8, n_local=8, rank=7)
    assert tables.messages.num_rows == 2
    assert not any("takes itself for rank" in note for note in found.notes)


def test_a_script_may_wait_for_processes_that_it_spawns(tmp_path: Path) -> None:
    """Told by position not to join them, it does so itself."""
    asked = Asked(command=(str(SCRIPT), "beside", "4"), world_size=4, ranks=(0,), warmup=0, steps=9)
    assert rehearse(asked, tmp_path / "run").job["steps"] == STEPS


def test_processes_that_are_spawned_again_make_groups_of_their_own(tmp_path: Path) -> None:
    asked = Asked(command=(str(SCRIPT), "again", "4"), world_size=4, ranks=(3,), warmup=0, steps=9)
    assert rehearse(asked, tmp_path / "run").job["steps"] == 2 * STEPS


@pytest.mark.parametrize("how", ["fork", "forkserver", "spawn"])
def test_a_process_that_trains_by_itself_ends_in_a_line(tmp_path: Path, how: str) -> None:
    """A pool waited for ever for one that had ended with the rehearsal of its steps."""
    with pytest.raises(
        RecordError, match=r"started_by_hand\.py:\d+: a process that the script starts trains"
    ):
        _rehearsed(tmp_path, how, 1)


@pytest.mark.parametrize("way", ["started", "spawned"])
def test_a_group_that_is_not_the_world_is_refused(tmp_path: Path, way: str) -> None:
    """A script that starts a process per GPU of one node trains on these alone."""
    with pytest.raises(
        RecordError, match="a group of 4 ranks is not the world of 8: rehearse with --world-size 4,"
    ):
        _rehearsed(tmp_path, way, 4, world_size=8)


def test_a_rank_hears_what_another_one_has_told(tmp_path: Path) -> None:
    """Rank 0 tells a width that rank 3 needs: both do the same. Alone, rank 3 is told nothing."""
    asked = Asked(command=(str(SCRIPT), "told"), world_size=4, warmup=1, steps=1, local_world_size=4)
    found = rehearse(asked, tmp_path / "both")
    messages = read_rank(rehearsal_folder(tmp_path / "both"), 0).messages.to_pylist()
    assert sorted(m["size_bytes"] for m in messages) == [2 * BIAS_BYTES, 2 * WEIGHT_BYTES]
    assert any(said.startswith("rank 3 does the same as rank 0") for said in found.checked)
    with pytest.raises(RecordError, match=r"hears objects: told what it has itself, \[None\]"):
        _rehearsed(tmp_path, "told", rank=3)


@pytest.mark.parametrize(
    ("way", "number", "rank"), [("spawned", 8, 7), ("chosen", 7, 0), ("chosen", 4, 0), ("accelerated", 7, 0)]
)
def test_a_gpu_that_a_node_has_not_ends_the_rehearsal_as_a_real_run(
    tmp_path: Path, way: str, number: int, rank: int
) -> None:
    """Whether a tensor goes there, or it is chosen; a node may have as many."""
    with pytest.raises(RecordError, match="invalid device ordinal"):
        _rehearsed(tmp_path / "four", way, number, world_size=8, rank=rank)
    _rehearsed(tmp_path / "eight", way, number, world_size=8, rank=rank, n_local=8)


def test_what_a_rank_says_of_itself_outlives_it(tmp_path: Path) -> None:
    """Rank 3 does what rank 0 does, as it takes itself for rank 0: that is said all the same."""
    asked = Asked(command=(str(SCRIPT), "astray"), world_size=4, warmup=1, steps=1, local_world_size=4)
    found = rehearse(asked, tmp_path)
    assert found.ranks == (0,)
    assert any("takes itself for rank 0 where rank 3 is rehearsed" in note for note in found.notes)


def test_a_loader_without_a_batch_is_said(tmp_path: Path) -> None:
    """Of 12 rows each of 4 ranks has 3, which is no batch of 8: nothing is trained, and that is why."""
    with pytest.raises(RecordError, match="no batch: 3 rows are left for this rank, and less than a batch"):
        _rehearsed(tmp_path, "loaded", 12)
    _, tables, _ = _rehearsed(tmp_path / "enough", "loaded", 64)
    assert tables.works.num_rows
