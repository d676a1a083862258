"""Whatever goes wrong with a recording, the training goes on, to the same numbers, and is told once."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.processes import Done

import foretrace
from foretrace.tracer import session
from foretrace.tracer.guarded import Replacements, between
from foretrace.tracer.passes import Passes
from foretrace.traces.analysis.diagnosis import diagnose
from foretrace.traces.errors import RunError
from foretrace.traces.store import open_run

SCRIPT = """
import resource, sys, time
import torch
import torch.distributed as dist
import foretrace
from foretrace.tracer import memory, modules, pending, sink

def train(n=120):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(n):
        loss = model(torch.ones(4, 8)).square().sum()
        loss.backward()
        dist.all_reduce(model[0].weight.grad)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()

class Broken(Exception):
    pass

def broken(*args, **kwargs):
    raise Broken("a fault of ours")

HARD = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
BROKEN = {
    "broken hook": (modules.ModuleHook, "_met"),
    "broken writer": (sink, "table"),
    "broken memory": (memory.MemoryLog, "sample"),
    "broken sidecar": (pending.Pending, "update"),
}
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
plain = train()
for way in sys.argv[2:]:
    print("way", way, file=sys.stderr, flush=True)
    if way == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, HARD))
    else:
        owner, name = BROKEN[way]
        whole = getattr(owner, name)
        setattr(owner, name, broken)
    with foretrace.record(f"{sys.argv[1]}/{way}", flush_s=0.02):
        recorded = train()
        time.sleep(0.2)  # the writer has its turn, however fast the training was
    print(way, plain == recorded)
    if way == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (HARD, HARD))
    else:
        setattr(owner, name, whole)
"""

WAYS = {
    "full disk": "cannot write",
    "broken hook": "a fault of ours",
    "broken writer": "a fault of ours",
    "broken memory": "a fault of ours",
    "broken sidecar": "a fault of ours",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, ranks: Any) -> tuple[Path, Done]:
    """One process that trains and records in every way, one after the other."""
    folder = tmp_path_factory.mktemp("safety")
    script = tmp_path_factory.mktemp("script") / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", str(script), str(folder), *sorted(WAYS)]
    return folder, ranks.launch(command, fresh=folder)[0]


@pytest.mark.parametrize("way", sorted(WAYS))
def test_a_fault_of_the_recording_is_none_of_the_training(trained: tuple[Path, Done], way: str) -> None:
    folder, done = trained
    assert done.returncode == 0, done.stderr
    assert f"{way} True\n" in done.stdout
    errors = done.stderr.partition(f"way {way}\n")[2].partition("way ")[0]
    assert "Traceback" not in errors
    said = [line for line in errors.splitlines() if "foretrace" in line]
    assert len(said) <= 1
    assert WAYS[way] in " ".join([*said, *warnings(folder / way)])
    assert not diagnose(folder / way, None)  # what it had not written when it stopped waits for nobody


def warnings(path: Path) -> tuple[str, ...]:
    """Return what the run tells; nothing if it failed before its first batch."""
    try:
        return open_run(path).warnings
    except RunError:
        return ()


def test_a_batch_is_written_though_a_recording_takes_long_to_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine: what describes it is not there yet when the first batch would be due."""
    pytest.importorskip("torch")

    def late(*given: Any) -> Any:
        time.sleep(0.1)
        return Passes(*given)

    monkeypatch.setattr(session, "Passes", late)
    with foretrace.record(tmp_path / "run", flush_s=0.01):
        time.sleep(0.1)
    assert open_run(tmp_path / "run").warnings == ()


def test_functions_are_given_back_but_for_those_that_somebody_has_replaced_since() -> None:
    class Owner:
        @staticmethod
        def at_rest(x: int) -> int:
            return x

        def own(self, x: int) -> int:
            return x

        def wrapped_later(self, x: int) -> int:
            return x

    told: list[object] = []
    before = dict(vars(Owner))
    replaced = Replacements()
    for name in ("at_rest", "own", "wrapped_later", "of_another_torch"):
        replaced.replace(Owner, name, between(lambda *given: given[-1], told.append))
    assert (Owner().at_rest(1), Owner().own(2), Owner().wrapped_later(3), told) == (1, 2, 3, [1, 2, 3])
    later = Owner.wrapped_later = lambda self, x: -x  # type: ignore[method-assign]
    replaced.remove()
    assert Owner.wrapped_later is later
    assert (Owner().at_rest(4), Owner().own(5), told) == (4, 5, [1, 2, 3])
    assert Owner.own is before["own"]


def test_a_function_between_two_calls_may_raise() -> None:
    told: list[object] = []
    failing = between(lambda *given: given, told.append)(int)
    with pytest.raises(ValueError, match="invalid literal"):
        failing("x")
    assert told == [("x",)]
