"""Files that a user names are written whole or not at all, and what cannot be replaced is not."""

from __future__ import annotations

import os
import re
import resource
import threading
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from foretrace.cli import main
from foretrace.traces import private
from foretrace.traces.errors import LeftoverWarning, RunError
from foretrace.traces.info import Process
from foretrace.traces.private import Processes, is_private
from foretrace.traces.replacing import (
    NEW,
    check_can_write,
    replacing,
    replacing_by_name,
    scratch_folder,
    take_place,
)
from foretrace.traces.run import Run
from foretrace.traces.writer import SpanWriter


def written(target: Path, text: str) -> None:
    with replacing(target) as file:
        file.write(text.encode())


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text("old")
    with replacing(target) as file:
        file.write(b"new")
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


def test_a_full_disk_is_said_of_the_file_that_has_no_room(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=re.escape(str(target))):
            written(target, "x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


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


def test_what_others_put_in_place_of_a_new_file_is_not_written_to(tmp_path: Path) -> None:
    """Who can write to its folder can take its name, and lead it to a file that only this user can write."""
    mine, target = tmp_path / "mine", tmp_path / "page.html"
    mine.write_text("kept")
    with replacing(target) as file:
        Path(file.name).unlink()
        Path(file.name).symlink_to(mine)
        file.write(b"new")
    assert mine.read_text() == "kept"


@pytest.mark.parametrize("between", [False, True])
def test_a_link_of_another_user_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, between: bool
) -> None:
    mine, target, theirs = tmp_path / "mine", tmp_path / "page.html", tmp_path / "theirs"
    mine.write_text("kept")
    target.symlink_to(theirs if between else mine)
    theirs.symlink_to(mine)
    _give_away(theirs if between else target, monkeypatch)
    with pytest.raises(PermissionError, match="a link of another user's"):
        written(target, "new")
    done = CliRunner().invoke(main, ["topology", "draw", "dgx-h100", "--gpus", "8", "-o", str(target)])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
    assert mine.read_text() == "kept"
    assert {*tmp_path.iterdir()} == {mine, target, theirs}


def _give_away(link: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have *link* belong to somebody else."""
    if os.getuid() == 0:
        os.lchown(link, 1, -1)
    else:  # who cannot give it away is somebody else
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)


def test_a_link_that_leads_to_itself_is_one_line(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.symlink_to(target)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        written(target, "new")


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


def test_whether_a_folder_can_be_written_is_known_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to("missing/there")
    monkeypatch.chdir(tmp_path / "folder")
    for target in ("", ".", tmp_path / "new" / "deep", tmp_path / "nowhere", tmp_path / "folder"):
        check_can_write(folder=Path(target))
    for target in ("/", "/proc/x", tmp_path / "file" / "x"):
        with pytest.raises(RunError, match="nothing was done"):
            check_can_write(folder=Path(target))
    assert {one.name for one in tmp_path.rglob("*")} == {"folder", "file", "nowhere"}


@pytest.mark.parametrize("target", ["folder", "/proc/x.html", "/"])
def test_what_can_be_no_file_is_known_before(target: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(RunError, match="cannot write"):
        check_can_write(tmp_path / target)


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    with replacing(target) as file, scratch_folder(target) as (scratch, _):
        fresh = Path(file.name)
        own, gone = f"-{os.getpid()}-", "-4194304-"  # above every pid
        dead = [tmp_path / one.name.replace(own, gone) for one in (fresh, scratch)]
        dead[0].write_text("half of it")
        (dead[1] / "spans").mkdir(parents=True)
        others = {
            tmp_path / fresh.name.replace("page", "other").replace(own, gone),
            tmp_path / fresh.name.replace(own, f"-{10**30}-"),
            tmp_path / ".page.html.mine.tmp",
        }
        for other in others:
            other.touch()
        with scratch_folder(target):
            assert not any(one.exists() for one in dead)
            assert fresh.exists()
            assert scratch.exists()
            assert scratch.stat().st_mode & 0o777 == 0o700
    assert {*tmp_path.iterdir()} == {target, *others}


@pytest.mark.parametrize("namespace", ["pid:[1]@own", "pid:[4026531836]@other", ""])
def test_what_another_machine_of_the_same_name_left_is_named(
    tmp_path: Path, namespace: str, pipeline_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One container or start of a machine cannot know which processes of another one live."""
    target = tmp_path / "page.html"
    monkeypatch.setattr(Process, "here", lambda: Process(host="node", namespace=namespace, pid=4194304))
    with replacing(target) as file:
        fresh = Path(file.name)
        monkeypatch.setattr(Process, "here", lambda: Process(host="node", namespace="pid:[1]@x", pid=1))
        with pytest.warns(LeftoverWarning, match=rf"{fresh.name} is written on node, which cannot"):
            written(target, "newer")
        with warnings.catch_warnings(action="error"):
            written(target, "newest")  # where warnings are errors, it is written all the same
        done = CliRunner().invoke(main, ["report", str(pipeline_run.path), "-o", str(target)])
        (warned,) = (line for line in done.output.splitlines() if line.startswith("warning: "))
        assert (done.exit_code, warned.startswith(f"warning: {fresh} is written on node,")) == (0, True)
        assert fresh.exists()


def test_one_start_of_a_machine_is_told_from_another() -> None:
    here = Process.here()
    assert here.namespace == Process.here().namespace
    assert here.namespace.startswith("pid:[")
    assert here.namespace.endswith(Path("/proc/sys/kernel/random/boot_id").read_text().strip())


def test_a_name_as_long_as_names_may_be_is_written(tmp_path: Path) -> None:
    target = tmp_path / ("\N{FIRE}" * 62)  # 248 bytes of 255
    check_can_write(target)
    written(target, "new")
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_what_others_could_change_is_not_private(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "open" / "own" / "library.so"
    file.parent.mkdir(parents=True, mode=0o700)
    file.touch(mode=0o600)
    assert is_private(file)
    linked = tmp_path / "linked"
    linked.symlink_to(tmp_path / "open")
    tmp_path.joinpath("open").chmod(mode)
    os.chown(tmp_path / "open", -1, 1) if os.getuid() == 0 else None
    whose = os.getuid() == 0 or mode == 0o777
    assert is_private(file) is not whose
    assert is_private(linked / "own" / "library.so") is not whose
    tmp_path.joinpath("open").chmod(0o1777)
    assert is_private(file)


def test_what_is_not_there_yet_is_private_where_only_this_user_can_make_it(tmp_path: Path) -> None:
    shared, link = tmp_path / "shared", tmp_path / "link"
    assert is_private(tmp_path / "new" / "library.so")
    shared.mkdir()
    shared.chmod(0o1777)
    link.symlink_to(shared / "library.so")
    assert not is_private(shared / "new" / "library.so")
    assert not is_private(link)


def test_each_link_on_the_way_counts(tmp_path: Path) -> None:
    """A link may lead to another, in a folder of which neither its name nor its end says anything."""
    (tmp_path / "mine").mkdir()
    shared, link = tmp_path / "shared", tmp_path / "link"
    shared.mkdir()
    (shared / "link").symlink_to(tmp_path / "mine")
    link.symlink_to(shared / "link")
    assert is_private(link / "library.so")
    shared.chmod(0o777)
    assert not is_private(link / "library.so")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Return a folder in which everybody can rename everything."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def test_what_is_written_goes_where_it_was_going_whoever_renames_the_folder(shared: Path) -> None:
    mine, moved = shared.parent / "mine", shared / "moved"
    mine.mkdir()
    (shared / "reports").mkdir()
    (mine / "page.html").write_text("kept")
    with replacing(shared / "reports" / "page.html") as file:
        (shared / "reports").rename(moved)
        (shared / "reports").symlink_to(mine)
        file.write(b"new")
    assert (moved / "page.html").read_text() == "new"
    assert [(one.name, one.read_text()) for one in mine.iterdir()] == [("page.html", "kept")]


def test_what_is_put_in_place_of_a_folder_in_which_a_run_is_made_is_left_alone(shared: Path) -> None:
    mine, target = shared.parent / "mine", shared / "run"
    for name in (NEW, "old", "theirs"):
        (mine / name).mkdir(parents=True)
        (mine / name / "notes.md").write_text("kept")
    with scratch_folder(target) as (scratch, place):
        (made,) = shared.iterdir()
        made.rename(shared / "moved")
        mine.rename(made)
        (scratch / NEW).mkdir()
        (scratch / NEW / "run.json").write_text("new")
        take_place(scratch, place, {"run.json"})
    assert (target / "run.json").read_text() == "new"
    assert [*(shared / "moved").iterdir()] == []
    assert {one.parent.name for one in made.glob("*/notes.md")} == {NEW, "old", "theirs"}


def test_what_others_can_have_named_as_a_leftover_is_only_named(shared: Path) -> None:
    target = shared / "page.html"
    with replacing(target) as file:
        name = Path(file.name).name
    mine = shared / name.replace(f"-{os.getpid()}-", "-4194304-")  # above every pid
    (mine / "notes").mkdir(parents=True)
    with pytest.warns(LeftoverWarning, match=re.escape(str(mine))):
        written(target, "new")
    assert {*shared.iterdir()} == {target, mine}
    assert (mine / "notes").is_dir()


def test_a_link_of_another_user_among_the_folders_is_followed_only_where_not_all_can_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, link = tmp_path / "mine", tmp_path / "theirs"
    mine.mkdir()
    link.symlink_to(mine)
    _give_away(link, monkeypatch)
    written(link / "page.html", "new")
    tmp_path.chmod(0o1777)
    with pytest.raises(PermissionError, match="a link of another user's"):
        written(link / "page.html", "newer")
    assert (mine / "page.html").read_text() == "new"


def test_spans_are_written_to_the_file_that_was_made_for_them(shared: Path) -> None:
    mine, stream = shared.parent / "mine", shared / "spans" / "rank-00000.arrows"
    mine.write_text("kept")
    writer = SpanWriter(shared, 0)
    stream.rename(shared / "moved")
    stream.symlink_to(mine)
    writer.append({"category": ["host"], "kind": ["wait"], "start_ns": [0], "duration_ns": [1]})
    assert mine.read_text() == "kept"
    assert (shared / "moved").stat().st_size


@pytest.mark.usefixtures("planted")
def test_processes_import_nothing_from_the_folder_they_are_started_in() -> None:
    before = dict(os.environ)
    with Processes(1) as pool:
        assert pool.submit(os.getppid).result() == os.getpid()
    assert dict(os.environ) == before


@pytest.mark.parametrize("n_renames", range(6))
def test_a_run_replaced_by_who_is_killed_loses_nothing(
    tmp_path: Path, n_renames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any of the renames: the old run is there or the new one, and the notes beside it are."""
    target, rename = tmp_path / "run", Path.rename
    target.mkdir()
    for name, text in {"run.json": "old", "memory.arrow": "old", "notes.md": "notes", "why": "why"}.items():
        (target / name).write_text(text)
    left: list[Path] = []

    def killed_later(path: Path, to: Path) -> Path:
        if len(left) == n_renames:
            raise KeyboardInterrupt
        left.append(path)
        return rename(path, to)

    scratch = scratch_folder(target)
    folder, _ = scratch.__enter__()  # never left: the process is killed
    (folder / NEW).mkdir()
    (folder / NEW / "run.json").write_text("new")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed_later)
        with suppress(KeyboardInterrupt):
            take_place(folder, target, {"run.json", "memory.arrow"})
    folder.rename(tmp_path / folder.name.replace(f"-{os.getpid()}-", "-4194304-"))  # of who is dead
    with scratch_folder(target):
        pass
    found = {path.name: path.read_text() for path in target.iterdir()}
    assert (found.pop("notes.md"), found.pop("why")) == ("notes", "why")
    assert found in ({"run.json": "old", "memory.arrow": "old"}, {"run.json": "new"})
    assert [*tmp_path.iterdir()] == [target]


def test_notes_made_since_are_kept_beside_those_of_a_run_that_was_being_replaced(tmp_path: Path) -> None:
    target = tmp_path / "run"
    target.mkdir()
    with scratch_folder(target) as (scratch, _):
        left = tmp_path / scratch.name.replace(f"-{os.getpid()}-", "-4194304-")
        (left / "theirs").mkdir(parents=True)
        (left / "theirs" / "notes.md").write_text("older")
        (target / "notes.md").write_text("newer")
    with scratch_folder(target):
        pass
    assert (target / "notes.md").read_text() == "newer"
    assert (left / "theirs" / "notes.md").read_text() == "older"


def test_where_no_folder_can_be_held_paths_are_gone_through_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on systems other than Linux: files are written, and what others can write to is not private."""
    monkeypatch.setattr(private, "CAN_HOLD", False)
    monkeypatch.delattr(os, "O_PATH")
    link = tmp_path / "link"
    link.symlink_to("made/file")
    with replacing(link) as file:
        file.write(b"whole")
    with replacing_by_name(tmp_path / "made" / "other") as made:
        made.write_bytes(b"whole")
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["file", "other"]
    assert is_private(tmp_path / "made")
    (tmp_path / "made").chmod(0o777)
    assert not is_private(tmp_path / "made" / "file")
