"""A recording leaves nothing behind by which a process ends otherwise than without one."""

import sys
from pathlib import Path
from typing import Any

import pytest

FREED = """
import gc, sys, weakref
import torch, torch.distributed as dist
import foretrace

def step():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters()).step()
    dist.all_reduce(torch.ones(2), async_op=True)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
step()  # torch's compiler, when it is first imported, keeps what it finds in place of functions
with foretrace.record(sys.argv[1]) as recording:
    step()
    session = weakref.ref(recording.session)
del recording
gc.collect()
print(session() is None)
dist.destroy_process_group()
"""


def test_a_recording_that_is_over_is_freed(tmp_path: Path, ranks: Any) -> None:
    """What keeps it alive keeps what it knows alive, behind the end of Python: the process groups."""
    command = [sys.executable, "-W", "ignore", "-c", FREED, str(tmp_path / "run")]
    (done,) = ranks.launch(command, fresh=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"]


ENDING = """
import sys, time
import torch, torch.distributed as dist
import foretrace
from foretrace.tracer import completion

completion.CLOSE_TIMEOUT_S = 0.0
completion.Completions.close.__defaults__ = (0.0,)
dist.init_process_group("gloo")
tensors = [torch.full((4,), float(i)) for i in range(40)]

def issue():
    if dist.get_rank() == 1:
        time.sleep(3)  # the other rank has ended by then, unless it waits
    return [dist.all_reduce(one, async_op=True) for one in tensors]

works = []
with foretrace.record(sys.argv[1]):
    if sys.argv[2] == "within":
        works = issue()
if sys.argv[2] == "behind":
    works = issue()
if dist.get_rank() == 1:
    for work in works:
        work.wait()
    print(sum(bool((one == 2 * i).all()) for i, one in enumerate(tensors)))
del works
"""


@pytest.mark.parametrize("where", ["within", "behind"])
def test_what_a_rank_leaves_under_way_is_done_when_it_ends(tmp_path: Path, ranks: Any, where: str) -> None:
    """Python's end takes process groups apart, and gloo then does what it was given: without us, and with us.

    Where a process group outlives Python, the process ends at once. The other rank loses its peer, and
    gloo's threads meet a C++ library that is taken apart under them (SIGSEGV).
    """
    script = tmp_path / "train.py"
    script.write_text(ENDING)
    path = tmp_path / "run"
    command = [sys.executable, "-W", "ignore", str(script), str(path), where]
    done = ranks.run(command, ranks.env(), fresh=path, loads_torch=True)
    assert done.status == (0, 0), done.errors
    assert done.output.split() == ["40"]


OUTLIVING = """
import torch

torch.kept = model = torch.nn.Linear(2, 2)
model(torch.ones(1, 2)).sum().backward()
torch.optim.SGD(model.parameters()).step()
model(torch.ones(1, 2))
raise ValueError("dies")
"""


def test_a_model_that_outlives_a_recording_calls_nothing_of_it(tmp_path: Path, ranks: Any) -> None:
    """It is freed when Python has emptied modules already."""
    record = [sys.executable, "-m", "foretrace", "record", "-o", str(tmp_path / "run"), "--"]
    command = [*record, sys.executable, "-W", "ignore", "-c", OUTLIVING]
    (done,) = ranks.launch(command, fresh=tmp_path, loads_torch=True)
    assert "ValueError: dies" in done.stderr
    assert "1 rank" in done.stderr
    assert "ignored" not in done.stderr
