"""Threads that a script starts issue what the first thread would."""

import sys
import threading
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foretrace.tracer.rehearse.device.threads import Threads
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.tape.tape import IssueLane
from foretrace.traces.rehearsal import RankTables

SCRIPT, RANKS = Path(__file__).parent / "threaded.py", 2

COMMUNICATION = 1


def _issued(tables: RankTables) -> Counter[tuple[object, ...]]:
    """Return what was issued, how often: kind of pass, block, stream, and the work or the message."""
    places, works, messages = (table.to_pylist() for table in (tables.places, tables.works, tables.messages))
    found: Counter[tuple[object, ...]] = Counter()
    for event in tables.events.to_pylist():
        if event["what"] <= COMMUNICATION:
            rows = messages if event["what"] == COMMUNICATION else works
            at, row = places[event["place"]], rows[event["item"]]
            found[at["kind"], at["name"], at["step"], event["stream"], *map(str, row.values())] += 1
    return found


@pytest.mark.parametrize("kind", ["pool", "trainer", "worker", "backward"])
def test_what_threads_issue_is_what_one_thread_issues(kind: str, rehearsed: Any) -> None:
    """Work, messages, streams, blocks and kinds of passes: for batches of a pool, a training in a thread, for
    which the first one waits in Python or in C, and a backward pass beside the forward of another model."""
    found, tables = rehearsed(kind)
    alone, expected = rehearsed("alone")
    assert _issued(tables) == _issued(expected)
    if kind != "backward":  # beside each other they need more
        assert found.memory == alone.memory
    assert not found.notes


def test_an_error_of_a_thread_is_said(rehearsed: Any) -> None:
    """The script does not hear of it, as in a real run."""
    found, tables = rehearsed("broken")
    assert any("threaded.py:" in note and "ValueError: nothing to do" in note for note in found.notes)
    assert _issued(tables) == _issued(rehearsed("alone")[1])


@pytest.mark.parametrize("kind", ["unknown", "asking"])
def test_what_a_thread_needs_and_a_rehearsal_has_not_ends_it(kind: str, rehearsed: Any) -> None:
    """In the line that names it, though the first thread waits for it, or C++ asks for a device there."""
    with pytest.raises(RehearsalError, match=r"threaded.py:\d+: aten._unique2.default needs values"):
        rehearsed(kind)


def _waiting(stop: threading.Event) -> tuple[threading.Thread, list[bool]]:
    """Return a thread that says whether it trains, and then waits."""
    said, begun = [], threading.Event()

    def work() -> None:
        said.append(IssueLane().is_own())
        begun.set()
        stop.wait()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    return thread, said


def test_one_thread_trains_and_the_first_one_has_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another takes its place once it has ended; what others call beside it is no pass of the model."""
    monkeypatch.setattr(IssueLane, "_trainer", None)
    stop = threading.Event()
    (first, is_first), (second, is_second) = _waiting(stop), _waiting(stop)
    stop.set()
    first.join()
    second.join()
    assert (is_first, is_second) == ([True], [False])
    stop.clear()
    third, is_third = _waiting(stop)
    assert is_third == [True]
    assert IssueLane().is_own()
    fourth, is_fourth = _waiting(stop)
    assert is_fourth == [False]
    stop.set()
    third.join()
    fourth.join()


def test_an_error_is_raised_in_the_script_or_where_it_waits_but_not_below_torch() -> None:
    """What calls Python out of C++, as a backward pass calls a hook, may abort where that raises."""
    threads, said = Threads(SimpleNamespace(), (), lambda turn: None), []  # type: ignore[arg-type]

    def ask() -> None:
        said.append(threads._may_raise(sys._getframe(1)))

    names: dict[str, Any] = {"ask": ask}
    for file, name, code in (
        (str(Path(torch.__file__).with_name("hooks.py")), "torch", "def through(hook): hook()"),
        (threading.__file__, "threading", "def wait(): ask()"),
    ):
        own = {**names, "__name__": name}
        exec(compile(code, file, "exec"), own)
        names |= own
    script = "ask()\nwait()\nthrough(lambda: ask())\nthrough(wait)"
    exec(compile(script, "script.py", "exec"), names | {"__name__": "__main__"})
    assert said == [True, True, False, True]


def test_a_thread_has_the_modes_that_are_in_force_where_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is started beside them is not seen; what is still under way at the end writes nothing."""
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)
    seen: list[str] = []
    told: list[Any] = []
    over = threading.Event()

    class Seeing(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(threading.current_thread().name)
            return func(*args, **(kwargs or {}))

    def work() -> None:
        torch.ones(1)

    def later() -> None:
        over.wait()
        with threads:
            seen.append("later")

    mode, session = Seeing(), SimpleNamespace(lane=IssueLane())
    threads = Threads(session, [mode], told.append)  # type: ignore[arg-type]  # all that it asks for
    last = threading.Thread(target=later)
    with threads.seen():
        for where, name in ((nullcontext(), "beside"), (mode, "within")):
            with where:
                thread = threading.Thread(target=work, name=name)
                thread.start()
                thread.join()
            assert told == [threads] * (name == "within")
        last.start()
    over.set()
    last.join(0.2)
    assert seen == ["within"]
    threads._turn.release()
    last.join()
    assert seen == ["within", "later"]
