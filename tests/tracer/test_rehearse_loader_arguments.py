"""A ``DataLoader`` takes its arguments, and makes its batches, as in a real run."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.errors import RehearsalError
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


@pytest.mark.parametrize(
    ("name", "value"),
    {"persistent_workers": True, "prefetch_factor": 2, "num_workers": -1, "timeout": -1}.items(),
)
def test_arguments_that_torch_refuses_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    data = pytest.importorskip("torch.utils.data")
    with pytest.raises(ValueError, match=name) as real:
        data.DataLoader([1], **{name: value})
    with pytest.raises(RehearsalError, match=re.escape(str(real.value)[:60])):
        _rehearsed(tmp_path / "refused", f"rows, {name}={value!r}")


DRAWING = """
import json, random, sys
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

torch.manual_seed(5), random.seed(5), np.random.seed(5)
table = torch.randint(0, 7, (7, 4))


class Walks(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, at):
        row = torch.full((6,), at % 7)
        for place in range(1, 6):
            row[place] = table[row[place - 1], int(torch.randint(0, 4, (1,)))]
        return row + random.randrange(100) * 10 + int(np.random.randint(100)) * 1000


class Shuffled(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        rows = list(range(12))[worker.id :: worker.num_workers] if worker else [0]
        random.shuffle(rows)
        return iter(rows)


def begin(worker):
    random.seed(random.randrange(10) + get_worker_info().id + 7)


if __name__ == "__main__":
    said = []
    for kept in ({"dataset": Walks(), "shuffle": True}, {"dataset": Shuffled()}):
        for more in ({"num_workers": 1}, {"num_workers": 1, "worker_init_fn": begin}, {"num_workers": 0}):
            said.append([batch.tolist() for batch in DataLoader(batch_size=3, **kept, **more)])
        said.append([random.randrange(100), int(np.random.randint(100)), int(torch.randint(0, 100, (1,)))])
    said.append(get_worker_info())
    with open(sys.argv[1], "w") as file:
        json.dump(said, file)
    if torch.cuda.is_available():
        model = torch.nn.Linear(2, 2).cuda()
        model(torch.ones(1, 2).cuda()).sum().backward()
        torch.optim.SGD(model.parameters()).step()
"""


def test_a_worker_process_draws_numbers_of_its_own(tmp_path: Path, ranks: Any) -> None:
    """With one worker or none, a loader gives the same rows, and leaves the same to draw, as really run."""
    script, real, rehearsed = tmp_path / "train.py", tmp_path / "real.json", tmp_path / "rehearsed.json"
    script.write_text(DRAWING)
    done = ranks.run([sys.executable, str(script), str(real)], ranks.env(), 1)
    assert done.status == (0,), done.errors
    rehearse(Asked(command=(str(script), str(rehearsed)), world_size=1), tmp_path / "run")
    assert json.loads(rehearsed.read_text()) == json.loads(real.read_text())
