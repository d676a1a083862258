"""Files that a user names are written whole or not at all, and what cannot be replaced is not."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from foretrace.traces.errors import RunError
from foretrace.traces.replacing import check_can_write, replacing


def written(target: Path, text: str) -> None:
    with replacing(target) as fresh:
        fresh.write_text(text)


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text("old")
    with replacing(target) as fresh:
        fresh.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        written(target, "half of it \ud800")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_one_and_leads_to_the_new_file(tmp_path: Path, *, there: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    kept, target = tmp_path / "elsewhere" / "page.html", tmp_path / "link"
    if there:
        kept.write_text("old")
    target.symlink_to(kept)
    written(target, "new")
    assert target.is_symlink()
    assert kept.read_text() == "new"
    assert list(kept.parent.iterdir()) == [kept]


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    target, read = tmp_path / "pipe", list[str]()
    os.mkfifo(target)
    reader = threading.Thread(target=lambda: read.append(target.read_text()), daemon=True)
    reader.start()
    written(target, "new")
    reader.join(10)
    assert read == ["new"]
    assert target.is_fifo()
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    with pytest.raises(IsADirectoryError):
        written(target, "new")
    assert list(tmp_path.iterdir()) == [target]


def test_folders_on_the_way_are_made_and_a_file_among_them_is_named(tmp_path: Path) -> None:
    target = tmp_path / "new" / "newer" / "page.html"
    check_can_write(target)
    assert list(tmp_path.iterdir()) == []
    written(target, "text")
    check_can_write(target)
    assert target.read_text() == "text"
    for below in (target / "x.html", target / "deep" / "x.html"):
        with pytest.raises(RunError, match=r"x\.html: Not a directory; nothing was done"):
            check_can_write(below)
        with pytest.raises(NotADirectoryError):
            written(below, "text")
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("target", ["folder", "/proc/x.html"])
def test_what_can_be_no_file_is_known_before(target: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(RunError, match="cannot write"):
        check_can_write(tmp_path / target)
