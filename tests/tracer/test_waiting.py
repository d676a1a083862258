"""Waiting is told from computing: a rank that waits for a late one does not compute meanwhile."""

import sys
from pathlib import Path
from typing import Any

import pytest

from foretrace.traces.analysis.activity import activity
from foretrace.traces.store import open_run

SCRIPT = """
import sys, time
import torch, torch.distributed as dist
import foretrace
from torch.distributed._functional_collectives import all_reduce

dist.init_process_group("gloo")

class Late(torch.nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way = way
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.inner(x)
        if dist.get_rank() == 1:
            time.sleep(0.3)
        way, z = self.way, y.detach().clone()
        if way == "sync":
            dist.all_reduce(z)
        elif way == "async":
            dist.all_reduce(z, async_op=True).wait()
        elif way == "scatter":
            dist.reduce_scatter_tensor(torch.zeros(8), z[:2].flatten())
        elif way == "functional":
            z = all_reduce(z, "sum", dist.group.WORLD) + 0
        elif dist.get_rank() == 1:
            dist.send(z, 0)
        else:
            dist.recv(z, 1)
        return y

for way in sys.argv[2:]:
    model = Late(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with foretrace.record(f"{sys.argv[1]}/{way}"):
        for _ in range(2):
            dist.barrier()
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
dist.destroy_process_group()
"""


WAYS = ("sync", "async", "scatter", "functional", "p2p")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, ranks: Any) -> Path:
    """One recording for each way to wait, made one after the other by the same processes."""
    folder = tmp_path_factory.mktemp("waiting")
    script, made = folder / "train.py", folder / "runs"
    script.write_text(SCRIPT)
    result = ranks.run([sys.executable, str(script), str(made), *WAYS], ranks.env(), fresh=made)
    assert result.status == (0, 0), result.errors
    return made


@pytest.mark.parametrize("way", WAYS)
def test_time_blocked_in_communication_is_not_compute(runs: Path, way: str) -> None:
    run = open_run(runs / way)
    assert run.warnings == ()
    for step in (0, 1):
        spans = {
            rank: [row for row in run.spans([rank]).to_pylist() if row["step"] == step] for rank in (0, 1)
        }
        waited, late = (
            next(row for row in spans[rank] if row["axis"] and row["kind"] != "barrier") for rank in (0, 1)
        )
        ended_ns = waited["start_ns"] + waited["duration_ns"]
        assert ended_ns >= late["start_ns"] >= waited["start_ns"]
        assert waited["name"] == "Late"
        for row in spans[0]:
            if row["category"] == "compute":  # none begins meanwhile, and what goes on has ended by then
                assert not waited["start_ns"] < row["start_ns"] < ended_ns, row
                if row["start_ns"] <= waited["start_ns"]:
                    assert row["start_ns"] + row["duration_ns"] <= late["start_ns"], row
        found = activity(run, 0, step)
        state = dict.fromkeys(found.states, 0)
        for start, end, index in zip(found.start_ns, found.end_ns, found.state, strict=True):
            state[found.states[index]] += int(end - start)
        assert max(state, key=lambda name: state[name]) == "wait:world", state


FORGETFUL = """
import sys
import torch, torch.distributed as dist
import foretrace

dist.init_process_group("gloo")
with foretrace.record(sys.argv[1]):
    for _ in range(20):
        dist.all_reduce(torch.zeros(1 << 16), async_op=True)
"""


def test_what_nobody_waits_for_is_followed_to_its_end(tmp_path: Path, ranks: Any) -> None:
    """The last reduction of DDP is waited for in C++: when the recording ends, a watcher knows its end."""
    script, path = tmp_path / "train.py", tmp_path / "run"
    script.write_text(FORGETFUL)
    # The processes end with the recording: a thread still in a wait would abort them.
    result = ranks.run([sys.executable, str(script), str(path)], ranks.env(), fresh=path)
    assert result.status == (0, 0), result.errors
    run = open_run(path)
    assert run.info.dropped == {}
    for rank in (0, 1):
        spans = run.spans([rank]).to_pylist()
        assert sorted(row["sequence"] for row in spans) == list(range(20))


ASKED = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
import foretrace
from foretrace.tracer import completion

completion.WATCH_EVERY_NS = completion.WAIT_EVERY_NS = 1 << 62
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
with foretrace.record(sys.argv[1]) as recording:
    for _ in range(20):
        dist.all_reduce(torch.zeros(1 << 10), async_op=True)
        dist.barrier()
        time.sleep(0.01)
        model(torch.ones(1, 8))
    completions = recording.session.completions
    print(int(completions.watcher.has_begun))
"""


def test_hooks_find_what_is_complete_without_a_thread_for_each(tmp_path: Path, ranks: Any) -> None:
    script, path = tmp_path / "train.py", tmp_path / "run"
    script.write_text(ASKED)
    result = ranks.run([sys.executable, str(script), str(path)], ranks.env(), fresh=path)
    assert result.status == (0, 0), result.errors
    assert result.output.split() == ["0", "0"]
    run = open_run(path)
    assert run.info.dropped == {}
    for rank in (0, 1):
        calls = [row for row in run.spans([rank]).to_pylist() if row["kind"] == "all_reduce"]
        assert sorted(row["sequence"] for row in calls) == list(range(0, 40, 2))
        ends = [row["start_ns"] + row["duration_ns"] for row in calls]
        # The forward finds it, unless the machine was so busy that it was not complete by then.
        assert any(end <= row["start_ns"] for end, row in zip(ends, calls[1:], strict=False))


UNMATCHED = """
import atexit, ctypes, time, _thread
import torch, torch.distributed as dist

library = ctypes.CDLL("libstdc++.so.6")
terminate = library._ZSt13get_terminatev
terminate.restype = ctypes.c_void_p
before = terminate()
atexit.register(lambda: print(_thread._count(), terminate() == before))  # behind what ends a recording
dist.init_process_group("gloo")
other = 1 - dist.get_rank()
left = dist.irecv(torch.zeros(4), other), dist.isend(torch.ones(4), other, tag=7)
for _ in range(3):  # moments to look at what is under way
    torch.nn.Linear(8, 8)(torch.ones(2, 8)).sum().backward()
    dist.barrier()
    time.sleep(0.02)
"""


def test_transfers_that_never_end_do_not_hold_up_the_end_of_the_process(tmp_path: Path, ranks: Any) -> None:
    """Python's shutdown ends threads that wait for them, which C++ does not allow: there are none by then.

    What ``std::terminate`` does stays as it was: an abort of torch's own is no hang.
    """
    script = tmp_path / "train.py"
    script.write_text(UNMATCHED)
    result = ranks.run([sys.executable, "-W", "ignore", str(script)], ranks.env(tmp_path / "run"))
    assert result.status == (0, 0), result.errors
    assert result.output.split() == ["0", "True"] * 2
    assert open_run(tmp_path / "run").info.finished
