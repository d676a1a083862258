"""What a rehearsed script does to files that were there before it: nothing."""

from array import array
from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.world.late import Made, clear
from foretrace.traces.rehearsal import rehearsal_folder

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "keeping.py"


def _contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_files_from_before_stay_as_they_are(tmp_path: Path) -> None:
    """A folder of a real training, whose checkpoints the script would remove, and whose files replace."""
    folder = tmp_path / "training"
    for name in ("checkpoint-500/model.bin", "checkpoint-1/model.bin", "log.txt", "best.json", "changed.bin"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"real {name}\n")
    (folder / "latest").symlink_to("checkpoint-500")
    before = _contents(folder)
    found = rehearse(
        Asked(command=(str(SCRIPT), str(folder)), world_size=1, warmup=0, steps=3), tmp_path / "r"
    )
    after = _contents(folder)
    assert before.items() <= after.items()
    assert str((folder / "latest").readlink()) == "checkpoint-500"
    said = [note for note in found.notes if "from before the rehearsal" in note]
    assert len(said) == 1
    assert "would have been removed or renamed" in said[0]
    assert "written to (a copy was)" in said[0]


def test_what_a_script_has_made_is_its_own(tmp_path: Path) -> None:
    """In a new folder it keeps one checkpoint of three; in the end no folder is left, nor a link to one."""
    folder = tmp_path / "training"
    folder.mkdir()
    found = rehearse(
        Asked(command=(str(SCRIPT), str(folder)), world_size=1, warmup=0, steps=9), tmp_path / "r"
    )
    log = rehearsal_folder(tmp_path / "r") / "rank-00000" / "output.log"
    assert log.read_text().split() == ["best.json", "checkpoint-2", "latest", "log.txt", "new.txt", "2"]
    assert {path.name for path in folder.iterdir()} == {"best.json", "log.txt", "new.txt"}
    assert not [note for note in found.notes if "from before the rehearsal" in note]


REPLACES = """
import os, sys
from pathlib import Path

import torch

folder = Path(sys.argv[1])
for name in ("a", "b"):
    (folder / name).write_text(f"new {name}")
os.remove(folder / "a")
(folder / "a").write_text("newer a")
(folder / "c").write_text("new c")
os.remove(folder / "lock")
os.close(os.open(folder / "lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
print(*((folder / name).read_text() for name in ("a", "b", "c")), sep=", ")
model = torch.nn.Linear(2, 2)
model(torch.ones(1, 2)).sum().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
"""


def test_a_script_reads_back_what_it_has_written(tmp_path: Path) -> None:
    """Also to a file that it has removed in between; a lock that it has removed it can take."""
    folder, script = tmp_path / "training", tmp_path / "train.py"
    folder.mkdir()
    for name in ("a", "b", "c", "lock"):
        (folder / name).write_text(f"real {name}")
    before = _contents(folder)
    script.write_text(REPLACES)
    rehearse(Asked(command=(str(script), str(folder)), world_size=1, warmup=0), tmp_path / "r")
    log = rehearsal_folder(tmp_path / "r") / "rank-00000" / "output.log"
    assert log.read_text().splitlines()[0] == "newer a, new b, new c"
    assert _contents(folder) == before


RULES = """
import os, sys
from pathlib import Path

import torch
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.world import files

files.COPIED_BYTES = 8
folder = Path(sys.argv[1])


def raises(error, do):
    try:
        do()
    except error:
        return True
    return False


assert raises(FileExistsError, lambda: open(folder / "real", "x"))
os.remove(folder / "real")
with open(folder / "real", "x") as file:
    file.write("made anew")
assert (folder / "real").read_text() == "made anew"
if len(sys.argv) > 2:
    open(folder / "large", sys.argv[2])
with open(folder / "large", "w") as file:
    file.write("new")
assert (folder / "large").read_text() == "new"
with open(folder / "small", "a") as file:
    file.write("!")
os.rename(folder / "small", folder / "moved")
assert (folder / "moved").read_text() == "small!"
(folder / "own").write_text("own")
os.replace(folder / "own", folder / "target")
assert (folder / "target").read_text() == "own" and not (folder / "own").exists()
torch.save({}, folder / "before.pt")
try:
    torch.load(folder / "before.pt")
except Exception as error:  # it is looked at, and is no file of torch's
    assert not isinstance(error, RehearsalError), error
assert raises(FileNotFoundError, lambda: torch.load(folder / "never.pt"))
model = torch.nn.Linear(2, 2)
model(torch.ones(1, 2)).sum().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
"""


def test_copies_obey_the_rules_of_files(tmp_path: Path) -> None:
    """Exclusive creation, renaming, and loading of what was there before."""
    folder, script = tmp_path / "training", tmp_path / "train.py"
    folder.mkdir()
    for name in ("real", "large", "small", "target", "before.pt"):
        (folder / name).write_text(name if name != "large" else name * 2)
    before = _contents(folder)
    script.write_text(RULES)
    rehearse(Asked(command=(str(script), str(folder)), world_size=1, warmup=0), tmp_path / "r")
    assert _contents(folder) == before | {"moved": "small!"}


@pytest.mark.parametrize("mode", ["a", "r+"])
def test_a_large_file_is_not_copied_for_a_part_of_it(tmp_path: Path, mode: str) -> None:
    """The script ends with a line, and the file stays."""
    folder, script = tmp_path / "training", tmp_path / "train.py"
    folder.mkdir()
    (folder / "large").write_text("large" * 2)
    (folder / "real").touch()
    script.write_text(RULES)
    with pytest.raises(RehearsalError, match="large for writing, but it is larger than"):
        rehearse(Asked(command=(str(script), str(folder), mode), world_size=1, warmup=0), tmp_path / "r")
    assert (folder / "large").read_text() == "large" * 2


MAPPED = """
import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
header = torch.from_file(sys.argv[1], False, 4, dtype=torch.int32)
assert header[0] == 20240520, "magic number mismatch"
n_rows = int(header[1])
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    loss = model(torch.randn(n_rows, 4).cuda())
    print(loss.shape[0])
    loss.sum().backward()
    optimizer.step()
"""


def test_numbers_of_a_file_that_is_mapped_into_memory_are_read(tmp_path: Path) -> None:
    """As the headers of files of tokens, by which scripts know them and their lengths."""
    data, script = tmp_path / "tokens.bin", tmp_path / "train.py"
    data.write_bytes(array("i", [20240520, 13, 0, 0]).tobytes())
    script.write_text(MAPPED)
    rehearse(Asked(command=(str(script), str(data)), world_size=2, ranks=(0,)), tmp_path / "r")
    log = rehearsal_folder(tmp_path / "r") / "rank-00000" / "output.log"
    assert log.read_text().split() == ["13", "13"]


LATE = Path(__file__).parent / "late.py"


def test_what_is_made_after_the_first_step_goes(tmp_path: Path) -> None:
    """Other ranks do not meet it, and neither does a second rehearsal; data made before stay."""
    folder = tmp_path / "training"
    (folder / "all").mkdir(parents=True)
    (folder / "all" / "real.json").write_text("real")
    asked = Asked(command=(str(LATE), str(folder)), world_size=2, ranks=(0, 1), warmup=0, steps=4)
    for _ in range(2):
        found = rehearse(asked, tmp_path / "r")
        assert _contents(folder).keys() == {"data/tokens.json", "log.txt", "all/real.json", "all/state.json"}
        assert {path.name for path in folder.iterdir()} == {"data", "log.txt", "all"}
        assert [note for note in found.notes if "made after the first step, and removed: " in note]


def test_what_one_rank_makes_late_the_others_do_not_see(tmp_path: Path) -> None:
    """Unless they make it too; what was made early all see, and it stays."""
    late, early, common, single = (str(tmp_path / name) for name in ("late", "early", "common", "single"))
    one, other = Made(tmp_path, lambda: True, 1), Made(tmp_path, lambda: True, 2)
    for at in (late, early, common):
        Path(at).mkdir()
    Path(single).touch()
    for at in (late, common, single):
        one.note(at)
    Made(tmp_path, lambda: False, 1).note(early)
    other.note(common)
    for inside in (f"{late}/a", f"{late}/a/b"):
        one.note(inside)
    assert [other.hides(at) for at in (late, f"{late}/a", early, common)] == [True, True, False, False]
    assert not other.hides(single)
    assert not any(one.hides(at) for at in (late, early, common))
    one.clear()
    assert [Path(at).exists() for at in (late, early, common, single)] == [False, True, True, True]
    clear(tmp_path)
    assert [Path(at).exists() for at in (early, common)] == [True, False]
