"""What scripts do to keep their states: collect those of shards, read what they saved, share memory."""

from pathlib import Path

import pytest

from tests.tracer import keeping_states
from tracer.rehearse.errors import RehearsalError
from tracer.rehearse.rehearsing import Asked, rehearse
from traces.rehearsal import RankTables, read_rank, rehearsal_folder

pytest.importorskip("torch")


def _rehearsed(folder: Path, how: str, ranks: tuple[int, ...]) -> tuple[list[str], list[RankTables]]:
    """Return what the first of *ranks* printed, and what each of them did."""
    command = (str(keeping_states.__file__), how, str(folder))
    rehearse(Asked(command=command, world_size=2, ranks=ranks, warmup=0, steps=2), folder / "run")
    tables = rehearsal_folder(folder / "run")
    said = (tables / f"rank-{ranks[0]:05d}" / "output.log").read_text().splitlines()
    return said, [read_rank(tables, rank) for rank in ranks]


def test_states_of_parameters_in_other_shards_are_collected(tmp_path: Path) -> None:
    """All ranks gather both moments of the whole flat parameter, though some parameters are in one shard."""
    said, tables = _rehearsed(tmp_path, "collected", (0, 1))
    assert said[-1] == "['0.bias', '0.weight', '1.bias', '1.weight']"
    size = sum((keeping_states.WIDTH * keeping_states.WIDTH + keeping_states.WIDTH, keeping_states.WIDTH + 1))
    size += size % 2  # of two shards of one size
    for table in tables:
        messages, places = table.messages.to_pylist(), table.places.to_pylist()
        found = [
            messages[event["item"]]["kind"]
            for event in table.events.to_pylist()
            if event["what"] == 1
            and places[event["place"]]["step"] == 1
            and messages[event["item"]]["size_bytes"] == 4 * size
        ]
        assert found.count("all_gather") == 1 + 2  # the parameters, and both moments after the step before


def test_what_a_script_has_saved_itself_cannot_be_read(tmp_path: Path) -> None:
    """Nothing was written, and that is said, not that there is no such file."""
    with pytest.raises(RehearsalError, match=r"state\.pt, which it has saved itself"):
        _rehearsed(tmp_path, "read", (0,))


def test_memory_that_processes_share_is_memory(tmp_path: Path) -> None:
    """Tensors and modules of the host go there and stay what they are."""
    said, _ = _rehearsed(tmp_path, "shared", (0,))
    assert said[-1] == "1"
