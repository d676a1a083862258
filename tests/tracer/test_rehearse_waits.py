"""What a work holds: its operands until somebody waits, its results for as long as somebody keeps it."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest

from foretrace.tracer.rehearse.events.tape import WAIT
from foretrace.tracer.rehearse.peers.waits import RehearsedFuture, install_futures, work_class

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
