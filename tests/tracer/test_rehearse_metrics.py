"""Metrics are computed without looking at values: a rehearsal has none of large batches, nor of a model."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked

pytest.importorskip("torch")

VALIDATING = """
import torch

def _binary_stat_scores_tensor_validation(preds, target, multidim_average="global", ignore_index=None):
    if torch.any((unique := torch.unique(target)) > 1):
        raise RuntimeError(f"values in target: {unique}")

def scores(preds, target):
    _binary_stat_scores_tensor_validation(preds, target)
    return ((preds > 0.5) == target).sum()
"""
"""As torchmetrics 1.9 has it: the name of the module and of the function, and what that does."""

SCRIPT = """
import torch
import torch.distributed as dist
from torchmetrics.functional.classification.stat_scores import scores

dist.init_process_group("nccl")
model = torch.nn.Linear(8, 1, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    found = model(torch.ones(4, 8, device="cuda")).sigmoid()
    scores(found, (found > 0.5).long())
    found.sum().backward()
    optimizer.step()
"""


def test_a_metric_does_not_ask_for_the_values_of_a_batch(tmp_path: Path) -> None:
    """And what is left out is said."""
    package = tmp_path / "torchmetrics" / "functional" / "classification"
    package.mkdir(parents=True)
    (package / "stat_scores.py").write_text(VALIDATING)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,)), tmp_path / "run")
    assert [note for note in found.notes if note.startswith("torchmetrics checks no values")]
