"""What a work holds: its operands until somebody waits, its results for as long as somebody keeps it."""

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.world.communicating import RehearsedFuture, install_futures, work_class
from foretrace.traces.rehearsal import WAIT, WHAT, read_rank, rehearsal_folder

torch = pytest.importorskip("torch")

MOST = 4096


class Tape:
    """Keeps what is noted."""

    def __init__(self) -> None:
        self.noted: list[tuple[int, int]] = []

    def note(self, what: int, *, number: int) -> None:
        """Keep it."""
        self.noted.append((what, number))


@pytest.fixture
def tape() -> Tape:
    return Tape()


@pytest.fixture
def work(tape: Tape) -> Any:
    """Return the class of works on that tape."""
    return work_class(torch.distributed, tape)


def alive(one: Any) -> bool:
    """Whether what the weak reference *one* is of is there still."""
    gc.collect()
    return one() is not None


@pytest.mark.parametrize("how", ["wait", "synchronize"])
def test_a_wait_is_written_down_each_time_for_what_is_in_the_timeline(
    work: Any, tape: Tape, how: str
) -> None:
    for number in (3, -1):
        one = work(number)
        for _ in range(2):
            getattr(one, how)()
    assert tape.noted == [(WAIT, 3)] * 2


def test_operands_are_held_until_somebody_waits_and_results_while_the_work_is(work: Any) -> None:
    operand, result = torch.ones(2), torch.ones(2)
    refs = weakref.ref(operand), weakref.ref(result)
    one = work(0, [result], held=[operand, result])
    del operand, result
    assert [alive(ref) for ref in refs] == [True, True]
    one.wait()
    assert [alive(ref) for ref in refs] == [False, True]
    one.wait()
    assert one.get_future().value()[0] is refs[1]()
    del one
    assert not alive(refs[1])


def test_results_that_nobody_held_are_not_held_by_a_wait(work: Any) -> None:
    result = torch.ones(2)
    ref = weakref.ref(result)
    one = work(0, [result])
    one.wait()
    del result
    assert not alive(ref)


def test_a_work_lives_until_somebody_waits_though_the_script_drops_it(work: Any) -> None:
    """It ends with the last who keeps it, or when very many have come behind it."""
    one, other = work(0), work(1)
    refs = weakref.ref(one), weakref.ref(other)
    del one, other
    assert [alive(ref) for ref in refs] == [True, True]
    kept: Any = refs[0]()
    kept.wait()
    del kept
    assert [alive(ref) for ref in refs] == [False, True]
    for number in range(MOST - 1):
        work(number)
    assert alive(refs[1])
    work(MOST)
    assert not alive(refs[1])


def test_it_is_done_for_whoever_asks(work: Any) -> None:
    one = work(0)
    assert one.is_completed()
    assert one.is_success()
    assert one.get_future().done()


def test_futures_of_torch_are_collected_and_waited_for_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("collect_all", "wait_all"):
        monkeypatch.setattr(torch.futures, name, getattr(torch.futures, name))  # and set back
    install_futures()
    futures = [torch.futures.Future() for _ in range(2)]
    collected = torch.futures.collect_all(futures)
    assert not collected.done()
    for number, future in enumerate(futures):
        future.set_result(number)
    assert [one.value() for one in collected.wait()] == torch.futures.wait_all(futures) == [0, 1]


def test_all_of_several_are_waited_for_when_their_collection_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("collect_all", "wait_all"):
        monkeypatch.setattr(torch.futures, name, getattr(torch.futures, name))
    install_futures()
    waited: list[int] = []
    futures = [RehearsedFuture(partial(waited.append, number), number) for number in range(3)]
    collected = torch.futures.collect_all(futures)
    assert waited == []
    assert [one.value() for one in collected.wait()] == waited == [0, 1, 2]
    assert torch.futures.wait_all(futures) == [0, 1, 2]
    assert waited == [0, 1, 2] * 2


BY_GROUP = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
kept, options = [], dist.AllreduceOptions()
options.reduceOp = dist.ReduceOp.MAX


def shared(gradient):
    numbers = torch.tensor([3.0, 5.0], device="cuda")
    kept.append(dist.group.WORLD.allreduce([numbers], options).get_future())
    print(numbers.tolist())


model = torch.nn.Linear(8, 8).cuda()
for _ in range(2):
    rows = torch.ones(4, 8, device="cuda", requires_grad=True)
    rows.register_hook(shared)
    model(rows).sum().backward()
"""


def test_what_a_hook_reduces_by_its_group_is_not_taken_for_ddps(tmp_path: Path) -> None:
    """By what is not known, so its numbers are not; and nobody waits for it but the script."""
    script = tmp_path / "by_group.py"
    script.write_text(BY_GROUP)
    rehearse(Asked(command=(str(script),), world_size=4, ranks=(0,), samples=0), tmp_path / "run")
    folder = rehearsal_folder(tmp_path / "run")
    assert (folder / "rank-00000" / "output.log").read_text().splitlines() == ["[nan, nan]"] * 2
    noted = [event["what"] for event in read_rank(folder, 0).events.to_pylist()]
    assert WHAT.index("communication") in noted
    assert WHAT.index("wait") not in noted


LET_GO = """
import gc
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
for _ in range(3):
    model = DistributedDataParallel(torch.nn.Linear(1024, 1024, bias=False).cuda())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(4, 1024, device="cuda")).sum().backward()
    optimizer.step()
    del model, optimizer
    gc.collect()
    print(torch.cuda.memory_allocated())
"""


def test_a_model_under_ddp_that_is_let_go_holds_nothing(tmp_path: Path) -> None:
    script = tmp_path / "let_go.py"
    script.write_text(LET_GO)
    rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,), samples=0), tmp_path / "run")
    log = rehearsal_folder(tmp_path / "run") / "rank-00000" / "output.log"
    assert set(log.read_text().split()) == {"0"}
