"""One process that loads torch for several rehearsals: the same result, and there again when it is gone."""

import os
import signal
from pathlib import Path

import pytest

from tracer.rehearse.acting import Loaded
from tracer.rehearse.errors import RehearsalError
from tracer.rehearse.rehearsing import Asked, rehearse
from traces.rehearsal import RankTables, read_rank, rehearsal_folder

pytest.importorskip("torch")

TRAINS = """
import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""


def test_rehearsals_on_one_process_are_those_on_their_own(tmp_path: Path) -> None:
    """One after the other; after one that fails, and after the process has been killed."""
    script, broken = tmp_path / "train.py", tmp_path / "broken.py"
    script.write_text(TRAINS)
    broken.write_text("raise ValueError('so it is')")

    def rehearsed(name: str, on: Loaded | None) -> RankTables:
        rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,)), tmp_path / name, on=on)
        return read_rank(rehearsal_folder(tmp_path / name), 0)

    alone = rehearsed("alone", None)
    with Loaded() as loaded:
        assert rehearsed("first", loaded) == alone
        with pytest.raises(RehearsalError, match="so it is"):
            rehearse(Asked(command=(str(broken),), world_size=2), tmp_path / "broken", on=loaded)
        assert not (tmp_path / "broken").exists()
        assert rehearsed("second", loaded) == alone
        loaded.start()
        assert loaded._process is not None
        os.kill(loaded._process.pid, signal.SIGKILL)
        loaded._process.wait()
        assert rehearsed("third", loaded) == alone
