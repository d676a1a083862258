"""A first step that holds more than training does is not kept for being long, or is said to hold it."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.tape.steps import BESIDE, LONG_STEP
from foretrace.traces.rehearsal import Rehearsal

pytest.importorskip("torch")

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
model = nn.Linear(4, 4, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.ones(8, 4, device="cuda")
for step in range({steps}):
    if step == 0:
        {before}
    loss = model(rows).sum()
    for _ in range(1 if step else {operators}):
        loss = loss + 1
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
NOTHING = "pass"
EVALUATION = """
        with torch.no_grad():
            for _ in range(3):
                model(rows)
"""
SAMPLES = """
        for _ in range(3):
            model(rows)
"""


def _rehearsed(folder: Path, before: str, *, steps: int = 3, long: bool = True, warmup: int = 1) -> Rehearsal:
    script = folder / "train.py"
    n_operators = LONG_STEP + 1 if long else 1
    script.write_text(SCRIPT.format(before=before.strip(), steps=steps, operators=n_operators))
    return rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,), warmup=warmup), folder / "run")


def test_a_long_first_step_that_only_trains_is_kept(tmp_path: Path) -> None:
    found = _rehearsed(tmp_path, NOTHING)
    assert found.job["first_step"] == 0
    assert not any("train nothing" in note for note in found.notes)


@pytest.mark.parametrize("before", [EVALUATION, SAMPLES])
def test_a_long_first_step_with_passes_that_train_nothing_is_not_kept(before: str, tmp_path: Path) -> None:
    """The next is, which has none, so that there is nothing to say."""
    found = _rehearsed(tmp_path, before)
    assert found.job["first_step"] == 1
    assert not any("train nothing" in note or "without gradients" in note for note in found.notes)


@pytest.mark.parametrize("before", [EVALUATION, SAMPLES])
def test_a_first_step_that_is_asked_for_tells_its_passes_that_train_nothing(
    before: str, tmp_path: Path
) -> None:
    found = _rehearsed(tmp_path, before, long=False, warmup=0)
    assert found.job["first_step"] == 0
    assert f"{BESIDE.format(n=3)}; --warmup 1 keeps a step after it" in found.notes


def test_the_only_step_tells_them_without_advice(tmp_path: Path) -> None:
    """No other step could be kept."""
    assert BESIDE.format(n=3) in _rehearsed(tmp_path, EVALUATION, steps=1).notes
