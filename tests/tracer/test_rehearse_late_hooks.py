"""Hooks of DDP that begin after some steps: what the kept step sends, and whether that is said."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.world.reducer import LATER
from foretrace.traces.rehearsal import Rehearsal, read_rank, rehearsal_folder

pytest.importorskip("torch")

WIDTH, START, N_RANKS = 32, 3, 4
SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
model = DistributedDataParallel(torch.nn.Linear({width}, {width}, bias=False).cuda())
if sys.argv[1] == "power":
    state = power.PowerSGDState(None, start_powerSGD_iter={start}, min_compression_rate=1)
    model.register_comm_hook(state, power.powerSGD_hook)
elif sys.argv[1] == "local":
    group, _ = dist.new_subgroups(2)
    state = local.PostLocalSGDState(None, group, start_localSGD_iter={start})
    model.register_comm_hook(state, local.post_localSGD_hook)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(8):
    model(torch.randn(4, {width}, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
NAMES = {"power": "start_powerSGD_iter", "local": "start_localSGD_iter", "none": ""}


def _rehearsed(folder: Path, way: str, warmup: int, steps: int = 1) -> Rehearsal:
    script = folder / "hooked.py"
    script.write_text(SCRIPT.format(width=WIDTH, start=START))
    asked = Asked(
        command=(str(script), way), world_size=N_RANKS, ranks=(0,), samples=0, warmup=warmup, steps=steps
    )
    return rehearse(asked, folder / "run")


def _sent(folder: Path) -> set[tuple[str, int]]:
    """Kind and bytes of what the kept steps send."""
    found = read_rank(rehearsal_folder(folder / "run"), 0)
    messages = found.messages.to_pylist()
    events = (messages[event["item"]] for event in found.events.to_pylist() if event["what"] == 1)
    return {(message["kind"], message["size_bytes"]) for message in events}


@pytest.mark.parametrize("way", NAMES)
@pytest.mark.parametrize(
    ("warmup", "steps", "is_before"),
    [(1, 1, True), (START - 1, 1, True), (START - 1, 2, False), (START, 1, False)],
)
def test_a_hook_that_begins_after_the_kept_steps_is_said(
    tmp_path: Path, way: str, warmup: int, steps: int, is_before: bool
) -> None:
    """No note where one of the kept steps is such a step, nor of hooks that begin at once."""
    note = LATER.format(name=NAMES[way], start=START)
    assert (note in _rehearsed(tmp_path, way, warmup, steps).notes) == (is_before and way != "none")


def test_what_the_note_advises_shows_what_the_hook_sends(tmp_path: Path) -> None:
    """Whole gradients before, two vectors as long as a side of the matrix from then on."""
    _rehearsed(tmp_path, "power", START - 1)
    assert _sent(tmp_path) == {("all_reduce", 4 * WIDTH * WIDTH)}
    _rehearsed(tmp_path, "power", START)
    assert ("all_reduce", 4 * WIDTH * WIDTH) not in _sent(tmp_path)
    assert ("all_reduce", 4 * WIDTH) in _sent(tmp_path)
