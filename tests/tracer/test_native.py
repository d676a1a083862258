"""Compiled hooks: found again, done without where they cannot be, and the same spans as those in Python."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT
from tracer.native import build
from tracer.operators import OPERATORS
from traces.store import open_run

GIL_DISABLED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

TRAIN = """
import sys
import torch
import foretrace

torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with foretrace.record(sys.argv[1]) as recording:
    for _ in range(4):
        loss = model(torch.ones(4, 8)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print(loss.item(), recording.session.native is not None)
"""


def trained(path: Path, ranks: Any, **env: str) -> str:
    """Record a training of one process; return what it prints."""
    (result,) = ranks.launch([sys.executable, "-W", "ignore", "-c", TRAIN, str(path)], fresh=path, **env)
    assert result.returncode == 0, result.stderr
    return str(result.stdout)


def spans(path: Path) -> Counter[tuple[Any, ...]]:
    """Return what was recorded, without times, and without pieces of glue, which depend on them."""
    columns = ("category", "kind", "name", "step", "layer", "axis", "sequence", "size_bytes", "dtype")
    rows = open_run(path).spans().to_pylist()
    return Counter(tuple(row[name] for name in columns) for row in rows if row["name"] != "Sequential")


def test_both_kinds_of_hooks_record_the_same(tmp_path: Path, ranks: Any, compiled: Path) -> None:
    said = [trained(tmp_path / way, ranks, **{build.SWITCH: way}) for way in ("0", "1")]
    assert [line.split()[1] for line in said] == ["False", "True"]
    assert said[0].split()[0] == said[1].split()[0]
    assert spans(tmp_path / "0") == spans(tmp_path / "1")


def test_every_collective_has_a_compiled_kernel() -> None:
    text = (build.SOURCES / "kernels.hpp").read_text()
    rules = text[text.index("RULES{{") : text.index("}};")]
    named = {line.split('"')[1]: line.split('"')[3] for line in rules.splitlines() if '"' in line}
    assert named == {name: operator.kind for name, operator in OPERATORS.items() if operator.peer < 0}


def test_what_does_not_fit_is_done_without(tmp_path: Path, ranks: Any, compiled: Path) -> None:
    """A library of another torch is no module, and a training with it is recorded by Python."""
    cache = tmp_path / "cache" / "foretrace"
    cache.mkdir(parents=True)
    (cache / compiled.name).write_bytes(b"\x7fELF of something else")
    said = trained(tmp_path / "run", ranks, XDG_CACHE_HOME=str(cache.parent), **{build.SWITCH: "1"})
    assert said.split()[1] == "False"
    assert open_run(tmp_path / "run").warnings == ()


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
    other = failing.rename(tmp_path / "another")
    monkeypatch.setenv("CXX", str(other))
    assert build.ensure(anew.append) is None
    assert len(anew) == 2


@pytest.mark.parametrize("cache", ["/proc/nothing-can-be-made-here", "/" + "x" * 300, "/dev/null"])
def test_a_cache_that_cannot_be_used_is_told_in_a_line(
    anew: list[str], monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert build.ensure(anew.append) is None
    assert len(anew) == 1
    assert anew[0].startswith("hooks not compiled, those in Python do: ")
    assert build.load() is None or build.NAME in sys.modules


def test_a_training_that_cannot_look_for_hooks_is_recorded(tmp_path: Path, ranks: Any) -> None:
    """The name of its cache is longer than those of files."""
    assert trained(tmp_path / "run", ranks, XDG_CACHE_HOME="/" + "x" * 300).split()[1] == "False"
    assert open_run(tmp_path / "run").warnings == ()


def test_a_block_in_a_script_compiles_nothing(tmp_path: Path, ranks: Any) -> None:
    """The training would stand still for it."""
    cache = tmp_path / "cache"
    said = trained(tmp_path / "run", ranks, XDG_CACHE_HOME=str(cache), **{build.SWITCH: "1"})
    assert said.split()[1] == "False"
    assert not cache.exists()


def test_a_user_without_a_home_goes_without(anew: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: Path("~nobody-of-this-name").expanduser()))
    assert build.ensure(anew.append) is None
    assert anew == []


def compile_by(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let *script*, written to *folder*, be the compiler of this test."""
    compiler = folder / "c++"
    compiler.write_text(script)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


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
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_end_while_compiling_leaves_nothing(
    anew: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, status: int
) -> None:
    """Neither what the compiler has started, nor a part of a library, nor a run."""
    compile_by(ENDLESS_COMPILER.format(pid=tmp_path / "pid"), tmp_path, monkeypatch)
    command = [sys.executable, "-m", "foretrace", "record", "-o", str(tmp_path / "run"), "--", "true"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        until = time.monotonic() + 60
        while not (tmp_path / "pid").exists() and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(process.pid, number)
        assert process.wait(60) == status
    assert {path.suffix for path in (tmp_path / "foretrace").iterdir()} == {".lock"}
    assert not (tmp_path / "run").exists()
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


def test_the_ring_tells_calls_of_both_in_one_order(tmp_path: Path, ranks: Any, compiled: Path) -> None:
    """Transfers are noted by Python, collectives by C++."""
    script = tmp_path / "train.py"
    script.write_text(RING)
    env = {**ranks.env(tmp_path / "run"), build.SWITCH: "1"}
    result = ranks.run([sys.executable, str(script)], env)
    assert result.status == (0, 0), result.errors
    for line in result.output.splitlines():
        assert json.loads(line) == [["all_reduce", 0], ["send", 0], ["all_reduce", 1], ["barrier", 2]]


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

RING = """
import json, os
from pathlib import Path
import torch, torch.distributed as dist
from traces.pending import read_issued

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(4))
dist.send(torch.ones(3), 1) if rank == 0 else dist.recv(torch.ones(3), 0)
dist.all_reduce(torch.ones(4))
dist.barrier()
if rank == 0:
    rows = read_issued(Path(os.environ["FORETRACE_RUN"]))[0]
    print(json.dumps([[row["kind"], row["sequence"]] for row in rows]))
dist.destroy_process_group()
"""


def test_what_interrupts_our_code_reaches_the_training(tmp_path: Path, ranks: Any, compiled: Path) -> None:
    """Ctrl-C, or the exit that a handler of signals asks for, while C++ has asked Python something."""
    assert said_by(INTERRUPTED, tmp_path / "run", ranks) == "KeyboardInterrupt SystemExit\n"


def test_a_work_that_nobody_can_wait_for_is_not_kept(tmp_path: Path, ranks: Any, compiled: Path) -> None:
    """Nor are its tensors, by which a long training would run out of memory."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    assert int(said_by(DROPPED, tmp_path / "run", ranks, **env)) <= 128


def said_by(script: str, path: Path, ranks: Any, **env: str) -> str:
    """Run *script* with compiled hooks; return what it prints."""
    command = [sys.executable, "-W", "ignore", "-c", script, str(path)]
    (result,) = ranks.launch(command, fresh=path, **{build.SWITCH: "1", **env})
    assert result.returncode == 0, result.stderr
    return str(result.stdout)


INTERRUPTED = """
import sys
import torch
import foretrace

said = []
with foretrace.record(sys.argv[1]) as recording:
    for error in (KeyboardInterrupt, SystemExit):
        recording.session.native.switch(set())

        def raising(error=error):
            raise error

        recording.session.native.begin = raising
        try:
            torch.nn.Linear(2, 2)(torch.ones(1, 2))
            for _ in range(10):
                pass
        except BaseException as caught:
            said.append(type(caught).__name__)
print(*said)
"""

DROPPED = """
import sys
import torch, torch.distributed as dist
import foretrace

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with foretrace.record(sys.argv[1]) as recording:
    for _ in range(1000):
        dist.reduce_scatter_tensor(torch.ones(2), torch.ones(2), async_op=True)
    dist.barrier()
    print(recording.session.native.module.n_waitable())
dist.destroy_process_group()
"""
