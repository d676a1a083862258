"""Passes with gradients that no backward follows train nothing: no rows, no FLOPs of MFU, and a note."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse, rows_and_tokens

from foretrace.simulator.rehearsed.notes import model_flops
from foretrace.tracer.rehearse.data.learning import NOW_AND_THEN, UNUSED
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import read_rank, rehearsal_folder

pytest.importorskip("torch")

ROWS, WIDTH, RANKS = 8, 4, 2

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
    def forward(self, rows):
        return {{"rows": self.layer(rows).unsqueeze(-1)}}

class Named(nn.Linear):
    def forward(self, *, rows):
        return super().forward(rows)

dist.init_process_group("nccl")
rows = lambda n: torch.ones(n, 4, device="cuda")
linear = lambda kind=nn.Linear: kind(4, 4, bias=False, device="cuda")
model = DistributedDataParallel({model})
other, optimizer = linear(), torch.optim.SGD(model.parameters(), lr=0.1)
second = torch.optim.SGD(other.parameters(), lr=0.1)
for step in range(4):
{step}
    {last}.step()
"""

PLAIN = """
    model(rows(8)).sum().backward()
"""
ACTS = """
    action = model(rows(24)).argmax()
    model(rows(8)).sum().backward()
"""
SAMPLES = """
    if step == 1:
        model(rows(24))
    model(rows(8)).sum().backward()
"""
TEACHER = """
    (model(rows(8)) - other(rows(24)).detach().mean()).sum().backward()
"""
BOTH = """
    (model(rows(8)) - model(rows(8))).sum().backward()
"""
WRITTEN = """
    found = model(rows(8))["rows"]
    found += 1
    found.sum().backward()
    model(rows(24))
"""
NAMED = """
    model(rows=rows(24)).argmax()
    model(rows=rows(8)).sum().backward()
"""
PROBES = """
    if step == 0:
        probe = linear()
        probe(rows(8))
    model(rows(8)).sum().backward()
    probe = linear() if step else None
    for _ in range(3 * bool(step)):
        probe(rows(8))
"""
DELAYED = """
    fake = other(rows(8))
    model(fake.detach()).sum().backward()
    optimizer.step()
    model(fake).sum().backward()
"""
DELAYED_SAMPLES = f"""
    if step == 1:
        other(rows(24))
{DELAYED}"""
PENALTY = """
    one = rows(8).requires_grad_()
    torch.autograd.grad(model(one).sum(), one)
    model(rows(8)).sum().backward()
"""


def _rehearsed(
    folder: Path, step: str, model: str = "linear()", warmup: int = 1
) -> tuple[int, float, set[str]]:
    """Return the rows of a rank, its FLOPs in products of one row, and the notes of passes."""
    script = folder / "train.py"
    last = "second" if DELAYED in step else "optimizer"
    script.write_text(SCRIPT.format(step=step.strip("\n"), model=model, last=last))
    asked = Asked(command=(str(script),), world_size=RANKS, ranks=(0,), warmup=warmup)
    found = rehearse(asked, folder / "run")
    flops = model_flops(found, {0: read_rank(rehearsal_folder(folder / "run"), 0)})
    notes = {note for note in found.notes if note.startswith(("passes with gradients", "step "))}
    return (rows_and_tokens(found)[0] or 0) // RANKS, flops / (2 * WIDTH**2 * RANKS), notes


@pytest.mark.parametrize(
    ("step", "model", "rows", "products"),
    [
        (ACTS, "linear()", ROWS, 2 * ROWS),
        (TEACHER, "linear()", ROWS, 2 * ROWS),
        (WRITTEN, "Views().cuda()", ROWS, 2 * ROWS),
        (NAMED, "linear(Named)", ROWS, 2 * ROWS),
    ],
)
def test_a_pass_that_no_backward_follows_trains_nothing(
    step: str, model: str, rows: int, products: int, tmp_path: Path
) -> None:
    """Whether it comes first or last, of the model or another one: its rows and FLOPs do not count."""
    assert _rehearsed(tmp_path, step, model) == (rows, products, {UNUSED})


def test_a_model_that_is_gone_leaves_its_number_to_no_other(tmp_path: Path) -> None:
    """A probe is dropped after the first step; passes of a new one are not those of the model."""
    assert _rehearsed(tmp_path, PROBES) == (ROWS, 2 * ROWS, {UNUSED})


@pytest.mark.parametrize(
    ("step", "rows", "products"),
    [
        (PLAIN, ROWS, 2 * ROWS),
        (BOTH, 2 * ROWS, 4 * ROWS),
        (DELAYED, 2 * ROWS, 7 * ROWS),
        (PENALTY, 2 * ROWS, 4 * ROWS),
    ],
)
def test_a_pass_that_a_backward_follows_trains(step: str, rows: int, products: int, tmp_path: Path) -> None:
    """Also one whose backward comes in the next step, or only for the gradients of its input.

    Of the generator: a product forward and one backward; of its critic two forward, two for weights, one for
    rows.
    """
    assert _rehearsed(tmp_path, step) == (rows, products, set())


def test_passes_that_come_after_the_optimizer_of_every_so_many_steps_are_said(tmp_path: Path) -> None:
    """The second step has the samples of the first, the third has none."""
    told = NOW_AND_THEN.format(kept=1, before=0, next=2)
    assert _rehearsed(tmp_path, SAMPLES)[2] == {UNUSED, told}
    (tmp_path / "again").mkdir()
    assert _rehearsed(tmp_path / "again", SAMPLES, warmup=2) == (ROWS, 2 * ROWS, set())


def test_samples_are_said_where_a_backward_comes_a_step_later(tmp_path: Path) -> None:
    """The generator's pass of the first step is open when its critic steps, but is no sample."""
    told = NOW_AND_THEN.format(kept=1, before=0, next=2)
    assert _rehearsed(tmp_path, DELAYED_SAMPLES)[2] == {UNUSED, told}
    (tmp_path / "again").mkdir()
    assert _rehearsed(tmp_path / "again", DELAYED_SAMPLES, warmup=2)[2] == set()


@pytest.mark.parametrize(
    "step", [PLAIN, ACTS, "    with torch.no_grad():\n        other(rows(24))\n" + PLAIN]
)
def test_passes_of_every_step_are_not_said_to_be_rare(step: str, tmp_path: Path) -> None:
    """Nor is the work that an optimizer does in its first step alone."""
    assert not {note for note in _rehearsed(tmp_path, step)[2] if "are rare" in note}
