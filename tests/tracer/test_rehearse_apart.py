"""DDP around parts of a model: the layout is that of DDP, and parameters that nobody reduces are counted."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.world.reducer import APART, PARTLY
from foretrace.traces.rehearsal import WHAT, Rehearsal, read_rank, rehearsal_folder

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "parts.py"
BACKBONE, HEAD = 64 * 65, 8 * 65
PART = PARTLY.format(n=BACKBONE, n_all=BACKBONE + HEAD)
LEFT = APART.format(which=f"the other {HEAD:,}")
NOTHING = APART.format(which=f"all {BACKBONE + HEAD:,} parameters")
SAID = {
    **dict.fromkeys(("all", "each", "frozen", "hooks"), frozenset()),
    **dict.fromkeys(("backbone", "beside", "norm", "unsynced"), frozenset({PART, LEFT})),
    **dict.fromkeys(("hand", "flat", "averaged"), frozenset({PART})),
    "none": frozenset({NOTHING}),
}


def _rehearsed(folder: Path, way: str, world_size: int = 2) -> Rehearsal:
    return rehearse(Asked(command=(str(SCRIPT), way), world_size=world_size, ranks=(0,), samples=0), folder)


@pytest.mark.parametrize(("way", "said"), SAID.items())
def test_parameters_that_nobody_reduces_are_counted(tmp_path: Path, way: str, said: frozenset[str]) -> None:
    """Where something is sent that may be their gradients, or they themselves, nothing is claimed."""
    assert set(_rehearsed(tmp_path, way).notes) & {PART, LEFT, NOTHING} == said


@pytest.mark.parametrize("way", [way for way in SAID if way not in {"none", "hooks"}])
def test_ddp_around_parts_has_the_layout_of_ddp(tmp_path: Path, way: str) -> None:
    found = _rehearsed(tmp_path, way)
    assert found.layout is not None
    assert found.layout.degrees["dp"] == 2
    assert found.job["sharding"] == "ddp"


def test_one_rank_cannot_drift(tmp_path: Path) -> None:
    assert not set(_rehearsed(tmp_path, "none", world_size=1).notes) & {PART, LEFT, NOTHING}


@pytest.mark.parametrize(
    ("warmup", "steps", "is_said"), [(0, 1, True), (0, 2, False), (0, 3, False), (1, 1, False), (2, 1, True)]
)
def test_an_average_in_one_of_the_steps_that_are_kept_is_seen(
    tmp_path: Path, warmup: int, steps: int, is_said: bool
) -> None:
    """Local training that averages seldom: what is sent after the second step, before the third forward."""
    command = (str(SCRIPT), "seldom")
    asked = Asked(command=command, world_size=2, ranks=(0,), samples=0, warmup=warmup, steps=steps)
    assert (NOTHING in rehearse(asked, tmp_path).notes) == is_said


BUFFERS = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
model = torch.nn.Linear(4, 4)
for name in "abc":
    model.register_buffer(name, torch.zeros(150 << 18))
model.register_buffer("n", torch.zeros(1, dtype=torch.int64))
model = DistributedDataParallel(model.cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_buffers_are_sent_in_buckets_of_250_mib(tmp_path: Path) -> None:
    """Those of a type together until there is as much."""
    script = tmp_path / "train.py"
    script.write_text(BUFFERS)
    rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,), samples=0), tmp_path / "run")
    tables = read_rank(rehearsal_folder(tmp_path / "run"), 0)
    messages = tables.messages.to_pylist()
    sent = [
        messages[row["item"]] for row in tables.events.to_pylist() if WHAT[row["what"]] == "communication"
    ]
    sizes = [one["size_bytes"] for one in sent if one["kind"] == "broadcast"]
    assert sizes == [300 << 20, 150 << 20, 8]
