"""Several trainings in one script: each has its steps, and leaves nothing behind for the next."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.rehearsals import rehearse
from tracer.rehearse.rehearsing import Asked
from traces.rehearsal import read_rank, rehearsal_folder

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "trainings.py"
TRAININGS, STEPS = 3, 3
ALL = tuple(range(TRAININGS * STEPS))


def rehearsed(folder: Path, *how: str) -> tuple[list[int], Counter[int], dict[int, int]]:
    """Return what was allocated around each training; of each step its events, and its peak memory."""
    asked = Asked(command=(str(SCRIPT), *how), world_size=2, ranks=(0,), warmup=0, steps=99)
    assert rehearse(asked, folder).job["steps"] == len(ALL)  # as many as there are, not as were asked for
    tables = read_rank(rehearsal_folder(folder), 0)
    said = (rehearsal_folder(folder) / "rank-00000" / "output.log").read_text().splitlines()
    places, n_events, peaks = tables.places.to_pylist(), Counter[int](), Counter[int]()
    for event in tables.events.to_pylist():
        step = places[event["place"]]["step"]
        n_events[step] += 1
        peaks[step] = max(peaks[step], event["allocated_bytes"])
    return [int(line.split()[1]) for line in said if line.startswith("allocated")], n_events, dict(peaks)


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_a_training_that_is_over_leaves_no_memory_behind(how: str, tmp_path: Path) -> None:
    """Nor does a real one over gloo. So the last step of each has the peak of the first's."""
    allocated, n_events, peaks = rehearsed(tmp_path / "run", how)
    assert allocated == [0] * (TRAININGS + 1)
    assert tuple(n_events) == ALL
    last = ALL[STEPS - 1 :: STEPS]
    assert len({peaks[step] for step in last}) == 1
    assert len({n_events[step] for step in last}) == 1


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_steps_end_where_the_optimizer_of_a_training_before_is_kept(how: str, tmp_path: Path) -> None:
    """Its states and parameters stay, as many bytes for each training."""
    allocated, n_events, peaks = rehearsed(tmp_path / "run", how, "keep")
    assert tuple(n_events) == ALL
    grown = {after - before for before, after in pairwise(allocated)}
    assert len(grown) == 1
    assert peaks[ALL[-1]] == peaks[STEPS - 1] + 2 * grown.pop() > peaks[STEPS - 1]
