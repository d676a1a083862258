"""An optimizer none of whose parameters has a gradient changes nothing, and a rehearsal says so."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.tape.steps import STALE

pytest.importorskip("torch")

WIDTH = 8

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("{name}",))
model = nn.Sequential(nn.Linear({width}, {width}, bias=False)).cuda()
frozen = nn.Parameter(torch.ones(3, device="cuda"), requires_grad=False)
{before}
{replace}
{after}
for _ in range(3):
    loss = model(torch.randn(4, {width}, device="cuda")).sum()
    {step}
    optimizer.zero_grad()
"""
MADE = "optimizer = torch.optim.{kind}([*model.parameters(), frozen])"
REPLACED = {
    "dp": "fully_shard(model, mesh=mesh)",
    "tp": 'parallelize_module(model, mesh, {"0": ColwiseParallel()})',
}
STEP, CLOSURE = "loss.backward(); optimizer.step()", "optimizer.step(lambda: (loss.backward(), loss)[1])"


def _said(folder: Path, name: str, *, early: bool, kind: str = "AdamW", step: str = STEP) -> list[str]:
    """Return the notes that begin as the one looked for."""
    made = MADE.format(kind=kind)
    script = folder / "train.py"
    before, after = (made, "") if early else ("", made)
    text = SCRIPT.format(
        name=name, width=WIDTH, before=before, replace=REPLACED.get(name, ""), after=after, step=step
    )
    script.write_text(text)
    found = rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,), samples=0), folder / "run")
    return [note for note in found.notes if note.startswith(f"{kind} steps")]


@pytest.mark.parametrize("name", REPLACED)
def test_an_optimizer_of_parameters_that_were_replaced_is_said(tmp_path: Path, name: str) -> None:
    """Of both ways to put others in their place; the one that is frozen has none anyway."""
    assert _said(tmp_path, name, early=True) == [STALE.format(name="AdamW", n=WIDTH**2 + 3)]


@pytest.mark.parametrize("name", [*REPLACED, "plain"])
def test_one_that_is_made_afterwards_is_not(tmp_path: Path, name: str) -> None:
    assert _said(tmp_path, name, early=False) == []


def test_gradients_of_a_closure_count(tmp_path: Path) -> None:
    """They come while the optimizer steps."""
    assert _said(tmp_path, "plain", early=False, kind="SGD", step=CLOSURE) == []
