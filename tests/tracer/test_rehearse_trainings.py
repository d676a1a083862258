"""Several trainings in one script: each has its steps, and leaves nothing behind for the next."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from tests.rehearsals import in_steps, rehearse

from foretrace.tracer.rehearse.cli import steps_words
from foretrace.tracer.rehearse.data.trainings import BEFORE, FIRST, NEXT
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import Rehearsal, read_rank, rehearsal_folder

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


UNLIKE = Path(__file__).parent / "unlike_trainings.py"
SETTINGS = ("sharding", "reshard_after_forward", "input_shape", "forwards_per_step")


def _kept(folder: Path, of_ddp: int, of_fsdp2: int, warmup: int) -> Rehearsal:
    command = (str(UNLIKE), str(of_ddp), str(of_fsdp2))
    return rehearse(Asked(command=command, world_size=2, ranks=(0,), samples=0, warmup=warmup), folder)


def test_a_later_training_is_described_as_if_it_were_the_only_one(tmp_path: Path) -> None:
    """Its model, how that is sharded, and its memory, are those of a script that has no other."""
    alone = _kept(tmp_path / "alone", 0, 3, 1)
    later = _kept(tmp_path / "later", 3, 3, 4)
    assert later.model == alone.model
    assert in_steps(later.memory) == in_steps(alone.memory)
    for name in SETTINGS:
        assert later.job.get(name) == alone.job.get(name)
    said = BEFORE.format(name="Large", n_params=4 * (128 + 1) * 128, other="Small", n_others=65 * 64)
    assert set(later.notes) - set(alone.notes) == {said}
    assert steps_words(later) == "step 4 of the script, training Large"


@pytest.mark.parametrize(("of_ddp", "kept"), [(3, "Small"), (2, "Small"), (1, "Large")])
def test_where_one_training_follows_another_that_is_said(tmp_path: Path, of_ddp: int, kept: str) -> None:
    """By default the second step is kept, of the first training or, where that has one, of the next."""
    found = _kept(tmp_path, of_ddp, 3, 1)
    assert found.model is not None
    assert found.model["name"] == kept
    assert (NEXT.format(next=3) in found.notes) == (of_ddp == 2)
    assert (FIRST.format(step=1, next=2) in found.notes) == (of_ddp == 1)
    assert (found.job["sharding"] == "fsdp") == (kept == "Large")


TEACHER = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
teacher = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 16)).cuda()
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 16).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    rows = torch.randn(4, 8, device="cuda")
    with torch.no_grad():
        wanted = teacher(rows)
    (model(rows) - wanted).pow(2).mean().backward()
    optimizer.step()
"""


def test_the_model_that_trains_is_described_not_one_that_teaches_it(tmp_path: Path) -> None:
    """Also where the teacher is called first, which trains in no step."""
    (tmp_path / "train.py").write_text(TEACHER)
    asked = Asked(command=(str(tmp_path / "train.py"),), world_size=2, ranks=(0,), samples=0)
    found = rehearse(asked, tmp_path / "run")
    assert found.model is not None
    assert (found.model["name"], found.model["n_params"]) == ("Linear", 16 * 9)
    assert found.job["sharding"] == "ddp"
    assert not any(note.startswith(BEFORE.partition(":")[0]) for note in found.notes)
