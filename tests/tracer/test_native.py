"""Compiled hooks: found again, done without where they cannot be, and the same spans as those in Python."""

import json
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from foretrace.tracer.native import build, compiler
from foretrace.tracer.operators import RECORDED
from foretrace.traces.store import open_run

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
    return str(process_of(path, ranks, **env).stdout)


def process_of(path: Path, ranks: Any, **env: str) -> Any:
    """Record a training of one process, by a block in it; return that process when it has ended well."""
    (result,) = ranks.launch([sys.executable, "-W", "ignore", "-c", TRAIN, str(path)], fresh=path, **env)
    assert result.returncode == 0, result.stderr
    return result


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


def test_every_operator_has_a_compiled_kernel() -> None:
    text = (build.SOURCES / "kernels.hpp").read_text()
    rules = text[text.index("RULES{{") : text.index("}};")]
    named = {line.split('"')[1]: line.split('"')[3] for line in rules.splitlines() if '"' in line}
    assert named == {name: operator.kind for name, operator in RECORDED.items()}


def test_what_does_not_fit_is_done_without(tmp_path: Path, ranks: Any, compiled: Path) -> None:
    """A library of another torch is no module, and a training with it is recorded by Python."""
    cache = tmp_path / "cache" / "foretrace"
    cache.mkdir(parents=True)
    (cache / compiled.name).write_bytes(b"\x7fELF of something else")
    said = trained(tmp_path / "run", ranks, XDG_CACHE_HOME=str(cache.parent), **{build.SWITCH: "1"})
    assert said.split()[1] == "False"
    assert open_run(tmp_path / "run").warnings == ()


def test_a_training_that_cannot_look_for_hooks_is_recorded(tmp_path: Path, ranks: Any) -> None:
    """The name of its cache is longer than those of files."""
    assert trained(tmp_path / "run", ranks, XDG_CACHE_HOME="/" + "x" * 300).split()[1] == "False"
    assert open_run(tmp_path / "run").warnings == ()


def test_a_block_in_a_script_compiles_nothing_and_says_what_does(
    tmp_path: Path, ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training would stand still for it."""
    monkeypatch.setenv(build.SWITCH, "1")
    cache = tmp_path / "cache"
    env = {"XDG_CACHE_HOME": str(cache), "CXX": sys.executable}
    result = process_of(tmp_path / "run", ranks, **env)
    assert result.stdout.split()[1] == "False"
    assert not cache.exists()
    wanted = build.is_wanted() and all(compiler.tools())
    assert result.stderr.count("'foretrace record -- true' compiles those in C++") == int(wanted)
    assert "foretrace" not in process_of(tmp_path / "again", ranks, **env, **{build.SWITCH: "0"}).stderr


def test_the_ring_tells_calls_of_both_in_one_order(tmp_path: Path, ranks: Any, compiled: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RING)
    env = {**ranks.env(tmp_path / "run"), build.SWITCH: "1"}
    result = ranks.run([sys.executable, str(script)], env)
    assert result.status == (0, 0), result.errors
    for line in result.output.splitlines():
        assert json.loads(line) == [["all_reduce", 0], ["send", 0], ["all_reduce", 1], ["barrier", 2]]


RING = """
import json, os
from pathlib import Path
import torch, torch.distributed as dist
from foretrace.traces.pending import read_issued

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

        def raising(*call, error=error):
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
