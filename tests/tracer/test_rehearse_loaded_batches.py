"""Batches of a loader are memory of a script that never speaks of a GPU, as those that it makes itself."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked

pytest.importorskip("torch")

ROWS, WIDTH = 512, 256
BATCH_BYTES, WEIGHT_BYTES = ROWS * WIDTH * 4, WIDTH * WIDTH * 4

SCRIPT = """
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 3 * {rows}
    def __getitem__(self, place):
        return {row}

dist.init_process_group("gloo")
model = torch.nn.Linear({width}, {width}, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in {batches}:
    model(batch{moved}).sum().backward()
    optimizer.step()
    del batch
    optimizer.zero_grad()
"""
OWN = f"(torch.ones({ROWS}, {WIDTH}) for _ in range(3))"
LOADED = f"DataLoader(Rows(), batch_size={ROWS})"


def _peak_bytes(folder: Path, batches: str, row: str = "None", moved: str = "") -> int:
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT.format(rows=ROWS, width=WIDTH, batches=batches, row=row, moved=moved))
    asked = Asked(command=(str(script),), world_size=2, ranks=(0,), warmup=1, steps=1)
    return int(rehearse(asked, folder / "run").memory["0"]["peak_bytes"])


@pytest.mark.parametrize("row", [f"torch.ones({WIDTH})", f"np.ones({WIDTH}, np.float32)"])
@pytest.mark.parametrize("moved", ["", '.to("cpu")'])
def test_a_batch_that_is_loaded_takes_what_one_that_is_made_takes(
    tmp_path: Path, row: str, moved: str
) -> None:
    """Batch and product at the end of the forward, or batch, weight and both gradients in the backward."""
    own = _peak_bytes(tmp_path / "own", OWN)
    assert own >= 2 * BATCH_BYTES + WEIGHT_BYTES
    assert _peak_bytes(tmp_path / "loaded", LOADED, row, moved) == own
