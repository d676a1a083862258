"""A rank that no other stands for is rehearsed with those that it waits for."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.rehearsals import rehearse

from foretrace.simulator.rehearsed.run import simulate_rehearsal
from foretrace.simulator.simulate import Simulation
from foretrace.topologies.catalog import load_cluster
from foretrace.tracer.rehearse.rehearsing import Asked

SCRIPT = Path(__file__).parent / "unlike_replicas.py"
RANKS = 6
"""Two stages of three ranks each; the last of each, 2 and 5, does more."""


def _rehearsed(folder: Path, ranks: tuple[int, ...] = ()) -> tuple[tuple[int, ...], Simulation, str]:
    """Return which ranks were rehearsed, what is predicted of them, and what was found of the sample."""
    found = rehearse(Asked(command=(str(SCRIPT),), world_size=RANKS, ranks=ranks), folder)
    simulation = simulate_rehearsal(folder, lambda n_gpus: load_cluster("dgx-h100", max(n_gpus, 8)))
    return found.ranks, simulation, " ".join(found.checked)


def test_the_pipeline_of_a_rank_that_stands_for_itself_is_rehearsed_with_it(tmp_path: Path) -> None:
    """No transfer is without its other side, and the step lasts as long as with all ranks rehearsed."""
    ranks, simulation, checked = _rehearsed(tmp_path / "auto")
    _, whole, _ = _rehearsed(tmp_path / "all", tuple(range(RANKS)))
    assert ranks == (0, 2, 3, 5)
    assert "rank 2 differs from rank 0, so it represents itself, with its pipeline (ranks 5)" in checked
    assert not [note for note in simulation.info.warnings if "not rehearsed" in note]
    assert simulation.info.summary["step_time_s"] == whole.info.summary["step_time_s"]
