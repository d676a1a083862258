"""Steps that are not alike: what a step that warms up does, and those that are kept do not, is said."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.session import EVALUATES
from foretrace.tracer.rehearse.tape.steps import SMALLER, UNLIKE

pytest.importorskip("torch")

EVERY, N_GENERATED = 3, 12

SCRIPT = f"""
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(8):
    rows = torch.randn(4, 64, device="cuda", requires_grad=True)
    if step % {EVERY} == 0:
        with torch.no_grad():
            for _ in range({N_GENERATED}):
                model(rows)
    model(rows).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


RATIO = (3 + N_GENERATED) / 3
"""What the first step has over others: three products each, and what it generates."""


@pytest.mark.parametrize(
    ("warmup", "steps", "said"),
    [
        (0, 1, ""),
        (1, 1, UNLIKE.format(step=0, ratio=RATIO, what="FLOPs", kept="step 1")),
        (1, 2, UNLIKE.format(step=0, ratio=RATIO, what="FLOPs", kept="each of steps 1 to 2")),
        (1, 3, UNLIKE.format(step=0, ratio=RATIO, what="FLOPs", kept="each of steps 1 to 3")),
        (3, 1, UNLIKE.format(step=0, ratio=RATIO, what="FLOPs", kept="step 3")),
    ],
)
def test_a_step_before_that_did_more_is_said(tmp_path: Path, warmup: int, steps: int, said: str) -> None:
    """It generates before every third step: in the first step that counts, behind a step in none."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = rehearse(
        Asked(command=(str(script),), world_size=1, warmup=warmup, steps=steps), tmp_path / "run"
    )
    assert [note for note in found.notes if note.startswith("steps are not alike")] == (
        [said] if said else []
    )
    assert (EVALUATES in found.notes) == (warmup + steps > EVERY)


def test_many_small_operations_count_too(tmp_path: Path) -> None:
    """Tokens that are generated one by one have few FLOPs, and launch as much as a batch each."""
    script = tmp_path / "train.py"
    one_by_one = SCRIPT.replace("model(rows)\n    model", "model(rows[:1])\n    model")
    script.write_text(one_by_one.replace(f"range({N_GENERATED})", f"range({N_GENERATED - 1})"))
    found = rehearse(Asked(command=(str(script),), world_size=1), tmp_path / "run")
    (said,) = [note for note in found.notes if note.startswith("steps are not alike")]
    assert "times the operations of step 1" in said


BATCHES = """
import torch
from torch.utils.data import DataLoader

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    for rows in DataLoader(torch.randn({rows}, 64), batch_size=32):
        model(rows.cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("rows", "said"), [(64, []), (32 + 3, [SMALLER]), (32 + 31, [])])
def test_the_rest_of_an_epoch_is_told_from_other_work(tmp_path: Path, rows: int, said: list[str]) -> None:
    """Its last batch holds what is left of the data."""
    script = tmp_path / "train.py"
    script.write_text(BATCHES.format(rows=rows))
    found = rehearse(Asked(command=(str(script),), world_size=1), tmp_path / "run")
    assert [note for note in found.notes if note.startswith(("steps are not alike", "step 1 has"))] == [
        one.format(kept=1, rows=rows - 32, step=0, before=32, next=2) for one in said
    ]
