"""Arguments of a ``DataLoader`` mean the same by position and by name."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import RankTables, read_rank, rehearsal_folder

pytest.importorskip("torch")

SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

rows = TensorDataset(torch.ones(32, 64 * 1024))
model = torch.nn.Linear(64 * 1024, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (batch,) in DataLoader({arguments}):
    model(batch.cuda(non_blocking=True)).sum().backward()
    optimizer.step()
"""


def _rehearsed(folder: Path, arguments: str) -> RankTables:
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT.format(arguments=arguments))
    rehearse(Asked(command=(str(script),), world_size=1), folder / "run")
    return read_rank(rehearsal_folder(folder / "run"), 0)


def test_a_loader_is_told_of_pinned_memory_by_position_or_by_name(tmp_path: Path) -> None:
    """The host does not wait for copies from pinned memory, but for those from other memory it does."""
    by_name = _rehearsed(tmp_path / "name", "rows, batch_size=8, num_workers=2, pin_memory=True")
    position = _rehearsed(tmp_path / "position", "rows, 8, False, None, None, 2, None, True")
    pageable = _rehearsed(tmp_path / "pageable", "rows, 8, False, None, None, 2")
    assert position == by_name
    assert pageable.events.num_rows > by_name.events.num_rows
