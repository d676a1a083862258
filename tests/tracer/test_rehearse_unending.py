"""Scripts that would go on for ever in a rehearsal end with one line; those that go on for long do not."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.data.loaders import MOST_IN_VAIN
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.world.stuck import GOES_ON, WAITS, Watchdog
from foretrace.traces.rehearsal import Rehearsal

pytest.importorskip("torch")

HEAD = """
import itertools, torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("nccl")
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.randn(4, 8, device="cuda")


def step():
    model(rows).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


"""
TAIL = "\nfor _ in range(3):\n    step()\n"
FIRST = HEAD.count("\n") + 1


def _rehearsed(folder: Path, body: str) -> Rehearsal:
    script = folder / "searching.py"
    script.write_text(HEAD + body + TAIL)
    asked = Asked(command=(str(script),), world_size=2, ranks=(0,), samples=0)
    return rehearse(asked, folder / "run")


ENDS = {
    "a loss that is to be small": "while model(rows).square().mean().item() > 1e-3:\n    pass\n",
    "others say so": """
flag = (model(rows).mean() < -1.0).float()
dist.all_reduce(flag)
while flag.item() < 5.0:
    pass
""",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_loop_that_an_unknown_number_ends_is_named(tmp_path: Path, name: str) -> None:
    lines = (HEAD + ENDS[name]).splitlines()
    loop = next(at + 1 for at, line in enumerate(lines) if line.startswith("while"))
    with pytest.raises(
        RehearsalError, match=f"searching.py:{loop} needs a number, which a rehearsal does not"
    ):
        _rehearsed(tmp_path, ENDS[name])


ASKING = """
loader = DataLoader(TensorDataset(rows), batch_size=8, drop_last=True)
while True:
    for _ in loader:
        step()
"""
CATCHING = """
while True:
    try:
        {call}
        break
    except Exception:
        continue
"""
WHERE = f"searching.py:{FIRST + 3}"


def test_a_loader_without_batches_is_not_asked_for_ever(tmp_path: Path) -> None:
    with pytest.raises(RehearsalError, match=rf"a DataLoader has no batch: 4 rows .* \({MOST_IN_VAIN} times"):
        _rehearsed(tmp_path, ASKING)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("(model(rows) > 0.3).nonzero()", f"{WHERE}: aten.nonzero"),
        ("rows @ rows", f"{WHERE}: the script has caught 1,000 errors without a step"),
    ],
)
def test_an_error_is_not_caught_for_ever(tmp_path: Path, call: str, words: str) -> None:
    with pytest.raises(RehearsalError, match=words):
        _rehearsed(tmp_path, CATCHING.format(call=call))


def _session() -> SimpleNamespace:
    return SimpleNamespace(
        position=SimpleNamespace(step=0),
        tape=SimpleNamespace(next_number=0, n_distinct=0),
        memory=SimpleNamespace(n_held=0),
        stated=SimpleNamespace(told={}),
    )


def test_a_script_that_waits_is_found_and_one_that_issues_nothing_new() -> None:
    session = _session()
    waits = Watchdog(session, lambda words: None, waiting_s=0.0)
    assert waits.found() == WAITS
    goes_on = Watchdog(session, lambda words: None, waiting_s=60.0, busy_s=0.0)
    session.tape.next_number += 1
    assert goes_on.found() == GOES_ON


def test_a_script_that_issues_something_new_is_let_alone() -> None:
    session = _session()
    watchdog = Watchdog(session, lambda words: None, waiting_s=0.05, busy_s=0.05)
    for _ in range(3):
        time.sleep(0.03)
        session.tape.next_number += 1
        session.tape.n_distinct += 1
        assert not watchdog.found()
