"""What a rehearsed script does to files that were there before it: nothing."""

from pathlib import Path

import pytest

from tests.rehearsals import rehearse
from tracer.rehearse.rehearsing import Asked

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
    assert "written to, but for a copy" in said[0]


def test_what_a_script_has_made_is_its_own(tmp_path: Path) -> None:
    """In a new folder it keeps one checkpoint of three, and nothing is said."""
    folder = tmp_path / "training"
    folder.mkdir()
    found = rehearse(
        Asked(command=(str(SCRIPT), str(folder)), world_size=1, warmup=0, steps=9), tmp_path / "r"
    )
    names = {path.name for path in folder.iterdir()}
    assert names == {"checkpoint-2", "latest", "log.txt", "new.txt", "best.json"}
    assert (folder / "new.txt").read_text() == (folder / "best.json").read_text() == "2"
    assert not [note for note in found.notes if "from before the rehearsal" in note]
