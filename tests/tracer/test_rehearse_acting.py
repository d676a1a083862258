"""One process that loads torch for several rehearsals: the same result, and there again when it is gone."""

import os
import signal
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tests import rehearsals

from foretrace.tracer.internals import OF_COMPILERS
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked, rehearse
from foretrace.tracer.rehearse.world.acting import Loaded, Troupe
from foretrace.traces.private import is_private
from foretrace.traces.rehearsal import RankTables, read_rank, rehearsal_folder
from foretrace.traces.replacing import scratch_folder

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
    """One after the other; after one that fails, alone or beside others; after a kill of the process."""
    script, broken = tmp_path / "train.py", tmp_path / "broken.py"
    script.write_text(TRAINS)
    broken.write_text("raise ValueError('so it is')")

    def rehearsed(name: str, on: Loaded) -> RankTables:
        rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,)), tmp_path / name, on=on)
        return read_rank(rehearsal_folder(tmp_path / name), 0)

    with Loaded() as loaded:
        alone = rehearsed("first", loaded)
        with pytest.raises(RehearsalError, match="so it is"):
            rehearse(Asked(command=(str(broken),), world_size=2), tmp_path / "broken", on=loaded)
        assert not (tmp_path / "broken").exists()
        assert rehearsed("second", loaded) == alone
        process = loaded._process
        with pytest.raises(RehearsalError, match="so it is"):
            rehearse(Asked(command=(str(broken),), world_size=2, ranks=(0,)), tmp_path / "broken", on=loaded)
        assert loaded._process is process is not None  # no other rank was under way
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert rehearsed("third", loaded) == alone


def test_what_takes_long_to_import_is_imported_for_the_ranks_after_the_first_that_needs_it(
    tmp_path: Path,
) -> None:
    compiles, looks = tmp_path / "compiles.py", tmp_path / "looks.py"
    compiles.write_text(
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).cuda()\n"
        "model.compile()\n"
        "model(torch.randn(4, 8, device='cuda')).sum().backward()\n"
        "torch.optim.SGD(model.parameters()).step()\n"
    )
    looks.write_text(f"import sys\nraise SystemExit(str({set(OF_COMPILERS)!r} - sys.modules.keys()))")
    rehearsals.rehearse(Asked(command=(str(compiles),), world_size=1, warmup=0), tmp_path / "run")
    with pytest.raises(RehearsalError, match=r"set\(\)"):
        rehearsals.rehearse(Asked(command=(str(looks),), world_size=1), tmp_path / "run")


def test_what_ranks_send_each_other_is_kept_where_nobody_else_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are pickles. What is made of them goes to where it was asked for, whoever else writes there."""
    script, shared = tmp_path / "train.py", tmp_path / "shared"
    script.write_text(TRAINS)
    shared.mkdir()
    shared.chmod(0o777)
    targets: list[Path] = []

    def noted(target: Path) -> AbstractContextManager[tuple[Path, Path]]:
        targets.append(target)
        return scratch_folder(target)

    monkeypatch.setattr("foretrace.tracer.rehearse.rehearsing.scratch_folder", noted)
    rehearsals.rehearse(Asked(command=(str(script),), world_size=2), shared / "run")
    assert read_rank(rehearsal_folder(shared / "run"), 0).events.num_rows
    assert [one.name for one in shared.iterdir()] == ["run"]
    sent, *made = targets
    assert (is_private(sent.parent), sent.name, made) == (True, "run", [shared / "run"])


def test_a_script_is_looked_for_where_one_is_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not in the folder in which the process of all ranks was started."""
    rehearsals.LOADED.start()
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAINS)
    rehearsals.rehearse(Asked(command=("train.py",), world_size=2, ranks=(0,)), tmp_path / "run")
    assert read_rank(rehearsal_folder(tmp_path / "run"), 0).events.num_rows


class _Dying(Loaded):
    """Runs no rank: the first one it is asked for ends with an *outcome*, the next ones are killed."""

    def __init__(self, folder: Path, outcome: str) -> None:
        super().__init__()
        self._folder, self._outcome, self.n_asked = folder, outcome, 0

    def start(self) -> None:
        """Start nothing."""

    def ask(self, spec: Mapping[str, Any]) -> None:
        """Write what the first rank ended with."""
        Path(spec["log"]).write_text("")
        self.n_asked += 1
        if self.n_asked == 1:
            (self._folder / f"outcome-{spec['rank']:05d}.json").write_text(self._outcome)

    def said(self) -> str:
        """Say that rank 0 was killed, unless it is the first time."""
        return f"ended 0 {0 if self.n_asked == 1 else -signal.SIGKILL}"


@pytest.mark.parametrize("outcome", ['{"unlike": ""}', '{"stated": []}'])
def test_a_rank_that_dies_the_second_time_has_no_result_of_the_first(tmp_path: Path, outcome: str) -> None:
    """It was run again, for all micro-batches or with other numbers, and was killed before it ended."""
    troupe = Troupe(
        {"world_size": 1, "repeats": True},
        tmp_path,
        lambda words: None,
        _Dying(tmp_path, outcome),
        adds=False,
    )
    if "stated" in outcome:
        assert troupe.act([0]) == {0: {"stated": []}}
    with pytest.raises(RehearsalError, match="rank 0 died of signal 9"):
        troupe.act([0])


def test_a_process_that_is_gone_when_it_is_asked_says_so() -> None:
    """As where the machine ran out of memory between two ranks."""
    with Loaded() as loaded:
        loaded.start()
        assert loaded._process is not None
        loaded._process.kill()
        loaded._process.wait()
        loaded.ask({"rank": 0})
        with pytest.raises(RehearsalError, match="died with status -9"):
            loaded.said()


SHAPED = """
import sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("nccl")
rank, last = dist.get_rank(), dist.get_world_size() - 1
if sys.argv[1] == "pp":
    init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "dp"))
if rank == last and sys.argv[2] == "fails":
    raise ValueError("the last one")
x = torch.ones(8 if rank < last or sys.argv[2] == "same" else 16, 8, device="cuda")
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(x).sum().backward()
dist.all_reduce(model.weight.grad)
optimizer.step()
"""


STANDS_FOR = {
    ("dp", "same"): (0, 0, 0, 0),
    ("dp", "differs"): (0, 0, 0, 3),
    ("dp", "fails"): (),
    ("pp", "differs"): (0, 0, 2, 2),
    ("pp", "fails"): (0, 0, 2, 2),
}
"""Of each script the rank that stands for each, none where it cannot be rehearsed."""


@pytest.mark.parametrize("words", STANDS_FOR)
@pytest.mark.parametrize("n_processors", [1, 2])
def test_the_last_rank_is_acted_out_beside_the_first_and_kept_where_it_is_needed(
    n_processors: int, words: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one processor it is not, and all is the same."""
    monkeypatch.setattr(os, "cpu_count", lambda: n_processors)
    script = tmp_path / "train.py"
    script.write_text(SHAPED)
    asked = Asked(command=(str(script), *words), world_size=4, warmup=0)
    if not STANDS_FOR[words]:
        with pytest.raises(RehearsalError, match=r"rank 3: .*the last one"):
            rehearsals.rehearse(asked, tmp_path / "run")
        return
    found = rehearsals.rehearse(asked, tmp_path / "run")
    assert found.representatives == STANDS_FOR[words]
    assert found.ranks == tuple(sorted({*STANDS_FOR[words]}))
    folders = sorted(one.name for one in rehearsal_folder(tmp_path / "run").glob("rank-*"))
    assert folders == [f"rank-{rank:05d}" for rank in found.ranks]
