"""Hooks are compiled once, by one, and where they cannot be nothing stands still for it."""

import fcntl
import os
import signal
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.processes import ROOT

from foretrace.tracer.native import build, compiler

GIL_DISABLED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

SLOW_COMPILER = """#!/bin/sh
echo run >> {log}
sleep 0.3
while [ "$1" != -o ]; do shift; done
echo hooks > "$2"
"""

ENDLESS_COMPILER = """#!/bin/bash
sleep 100 &
echo $! > {pid}.new
mv {pid}.new {pid}
wait
"""

ARGUMENTS_COMPILER = """#!/bin/sh
echo $# > {log}
for word; do :; done
echo "$word" >> {log}
while [ "$1" != -o ]; do shift; done
echo x > "$2"
"""
"""Writes down how many words it was given, and the last."""


@pytest.fixture
def anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nothing is compiled, and no GPU is seen; returns what is said."""
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(build.SWITCH, "1")
    monkeypatch.setattr(build, "GPUS", ())
    return []


def test_a_missing_compiler_is_told_once(anew: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.ensure(anew.append) is None
    assert len(anew) == 1
    assert anew[0].startswith("hooks not compiled, those in Python do: no C++ compiler here; ")
    assert build.ensure(anew.append) is None
    assert len(anew) == 1


@pytest.mark.parametrize(("switch", "is_wanted"), [(None, True), ("1", True), ("0", False)])
def test_compiled_hooks_are_the_default_and_can_be_refused(
    anew: list[str], monkeypatch: pytest.MonkeyPatch, switch: str | None, is_wanted: bool
) -> None:
    monkeypatch.delenv(build.SWITCH)
    if switch is not None:
        monkeypatch.setenv(build.SWITCH, switch)
    assert build.is_wanted() == (is_wanted and sys.platform == "linux" and not GIL_DISABLED)


def test_a_compiler_that_fails_is_told_in_a_line(
    anew: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failing = tmp_path / "c++"
    failing.write_text("#!/bin/sh\necho a.hpp:1: error: no such header >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    assert build.ensure(anew.append) is None
    assert len(anew) == 2
    assert anew[1].startswith("hooks not compiled, those in Python do: a.hpp:1: error: no such header; ")
    assert {path.suffix for path in (tmp_path / "foretrace").iterdir()} == {".lock", ".failed"}
    anew.clear()
    assert build.ensure(anew.append) is None  # is remembered: neither tried nor told again
    assert anew == []
    assert build.advice() == ""
    other = failing.rename(tmp_path / "another")
    monkeypatch.setenv("CXX", str(other))
    assert build.ensure(anew.append) is None
    assert len(anew) == 2


@pytest.mark.parametrize(
    "death",
    [
        "kill -9 $$",
        "kill -11 $$",
        "echo c++: fatal error: Killed signal terminated program cc1plus >&2; exit 1",
        "echo clang: error: unable to execute command: Killed >&2; exit 254",
        "sleep 60",
    ],
)
def test_a_compiler_that_was_killed_is_tried_again(
    anew: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, death: str
) -> None:
    """It has not said no: the machine had no memory for it, or no time."""
    killed = tmp_path / "c++"
    killed.write_text(f"#!/bin/sh\n{death}\n")
    killed.chmod(0o755)
    monkeypatch.setenv("CXX", str(killed))
    monkeypatch.setattr(compiler, "COMPILE_S", 0.5)
    for _ in range(2):
        anew.clear()
        assert build.ensure(anew.append) is None
        assert len(anew) == 2, anew
        assert anew[1].startswith("hooks not compiled, those in Python do: ")
        assert anew[1].endswith("; the next recording tries again")
        assert {path.suffix for path in (tmp_path / "foretrace").iterdir()} == {".lock"}
    killed.write_text(SLOW_COMPILER.format(log=tmp_path / "log"))
    assert build.ensure(anew.append) == build.library()


@pytest.mark.parametrize("cache", ["/proc/nothing-can-be-made-here", "/" + "x" * 300, "/dev/null"])
def test_a_cache_that_cannot_be_used_is_told_in_a_line(
    anew: list[str], monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert build.ensure(anew.append) is None
    assert len(anew) == 1
    assert anew[0].startswith("hooks not compiled, those in Python do: ")
    assert build.load() is None or build.NAME in sys.modules


def test_a_user_without_a_home_goes_without(anew: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: Path("~nobody-of-this-name").expanduser()))
    assert build.ensure(anew.append) is None
    assert anew == []
    assert build.advice() == ""


def compile_by(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let *script*, written to *folder*, be the compiler of this test."""
    made = folder / "c++"
    made.write_text(script)
    made.chmod(0o755)
    monkeypatch.setenv("CXX", str(made))


def test_the_number_of_a_file_is_no_argument(
    anew: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A shell that knows numbers of one digit only takes 13 in ``13<&-`` for a word."""
    compile_by(ARGUMENTS_COMPILER.format(log=tmp_path / "log"), tmp_path, monkeypatch)
    with ExitStack() as opened:
        for _ in range(12):
            opened.enter_context(Path(os.devnull).open())
        library = build.ensure(anew.append)
    assert library is not None
    made, flag = (tmp_path / "log").read_text().split("\n")[:2]
    words = compiler.command("", build.SOURCES / "hooks.cpp", library)[1:]
    assert int(made) == len(words)
    assert flag == words[-1]


def test_of_several_that_come_at_once_one_compiles(
    anew: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compile_by(SLOW_COMPILER.format(log=tmp_path / "log"), tmp_path, monkeypatch)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(build.ensure, [anew.append] * 4))
    assert found == {build.library()}
    assert len(anew) == 1
    assert (tmp_path / "log").read_text() == "run\n"
    assert {path.suffix for path in (tmp_path / "foretrace").iterdir()} == {".lock", ".so"}


@pytest.mark.parametrize(
    ("rank", "said"), [("0", ["waiting for hooks that another recording compiles, once"]), ("3", [])]
)
def test_the_first_that_waits_for_another_tells_it(
    anew: list[str], monkeypatch: pytest.MonkeyPatch, rank: str, said: list[str]
) -> None:
    library = build.library()
    assert library is not None
    library.parent.mkdir()
    monkeypatch.setattr(build, "TOLD_S", 0)
    monkeypatch.setenv("SLURM_PROCID", rank)
    with library.with_suffix(".lock").open("w") as lock, ThreadPoolExecutor(1) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = pool.submit(build.ensure, anew.append)
        until = time.monotonic() + (60 if said else 0.3)
        while not anew and time.monotonic() < until:
            time.sleep(0.01)
        library.write_text("")
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert found.result() == library
    assert anew == said


@pytest.mark.skipif(any(path.exists() for path in build.GPUS), reason="nothing is compiled beside a GPU")
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_an_end_while_compiling_leaves_nothing(
    anew: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, status: int
) -> None:
    """Neither what the compiler has started, nor a part of a library, nor a run with something in it."""
    compile_by(ENDLESS_COMPILER.format(pid=tmp_path / "pid"), tmp_path, monkeypatch)
    command = [sys.executable, "-m", "foretrace", "record", "-o", str(tmp_path / "run"), "--", "true"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        until = time.monotonic() + 60
        while not (tmp_path / "pid").exists() and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(process.pid, number)
        assert process.wait(60) == status
    left = list((tmp_path / "foretrace").iterdir())
    assert {path.suffix for path in left if path.is_file()} == {".lock"}
    if number == signal.SIGKILL:  # nobody could tidy up: two folders
        assert [list(path.iterdir()) for path in (*left, tmp_path / "run") if path.is_dir()] == [[], []]
    else:
        assert not any(path.is_dir() for path in (*left, tmp_path / "run"))
    started = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    while started.exists() and started.read_text().split()[2] != "Z" and time.monotonic() < until:
        time.sleep(0.01)
    assert not started.exists() or started.read_text().split()[2] == "Z"


def test_a_new_build_deletes_those_not_used_for_long(
    anew: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last eight stay, and what may be in use: a new folder of a compiler, or lock, too."""
    compile_by(SLOW_COMPILER.format(log=tmp_path / "log"), tmp_path, monkeypatch)
    cache, now_s = tmp_path / "foretrace", time.time()
    cache.mkdir()

    def kept(name: str, age_h: float) -> Path:
        path = cache / name
        path.mkdir() if path.suffix == "" else path.write_text("")
        os.utime(path, (now_s - age_h * 3600,) * 2)
        return path

    builds = [kept(f"{build.NAME}-torch2.{n}.so", n + 2) for n in range(20)]
    locks = [kept(f"{build.NAME}-torch2.{n}.lock", n + 2) for n in range(20)]
    refused = kept(f"{build.NAME}-torch1.13.failed", 30)
    left, at_work = kept(f"{build.NAME}-left", 2), kept(f"{build.NAME}-at_work", 0.1)
    compiling, other = kept(f"{build.NAME}-torch3.0.lock", 0.1), kept("of-somebody.else", 1000)
    assert build.ensure(anew.append) == build.library()
    found = {path for path in cache.iterdir() if path.stem != str(getattr(build.library(), "stem", ""))}
    assert found == {*builds[:7], *locks[:7], at_work, compiling, other}
    assert not refused.exists()
    assert not left.exists()
    os.utime(builds[0], (0, 0))
    assert build.ensure(anew.append) == build.library()  # nothing is new: nothing is looked at
    assert builds[0].exists()


def test_a_build_that_is_used_is_young(anew: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is not the one to be deleted."""
    library = build.library()
    assert library is not None
    library.parent.mkdir()
    library.write_text("")
    os.utime(library, (0, 0))
    assert build.ensure(anew.append) == library
    assert time.time() - library.stat().st_mtime < build.SPARED_S


@pytest.mark.parametrize(("switch", "gpus"), [("0", ()), ("1", (Path("/"),))])
def test_nothing_is_compiled_where_it_is_of_no_use(
    anew: list[str], monkeypatch: pytest.MonkeyPatch, switch: str, gpus: tuple[Path, ...]
) -> None:
    monkeypatch.setenv(build.SWITCH, switch)
    monkeypatch.setattr(build, "GPUS", gpus)
    assert build.ensure(anew.append) is None
    assert build.load() is None or build.NAME in sys.modules
    assert anew == []
