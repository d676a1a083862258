"""Recordings that begin and end with a process group: laws of how that is seen, without a group."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from foretrace.tracer import record as with_group
from foretrace.tracer.run_directory import REFUSED

pytest.importorskip("torch.distributed")


class Recorded:
    """A recording as this module sees one: says what it was asked, in the order of all that happens."""

    def __init__(self, events: list[str], target: Path, error: Exception | None = None) -> None:
        self.events, self.target, self.error = events, target, error
        self.is_due, self.notes_errors = True, False

    def begin_if_due(self) -> bool:
        if self.error is not None:
            raise self.error
        due, self.is_due = self.is_due, False
        self.events.append("begins" if due else "has begun")
        return due

    def leave_group(self) -> None:
        self.events.append("ends")

    def end(self) -> None:
        self.events.append("left")

    def note_error(self, error: BaseException) -> None:
        self.events.append(f"notes {error}")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return where is written what happens; nothing of it stays behind in this process."""
    for name in ("torch_like", "a_script"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(with_group, "_expecting", [])
    monkeypatch.setattr(sys, "excepthook", lambda *_: happened.append("shown"))
    ending = SimpleNamespace(register=lambda _: happened.append("ends with the process"))
    monkeypatch.setattr(with_group, "atexit", ending)  # torch uses the true one while it is imported
    happened: list[str] = []
    return happened


TORCH = """
import functools

class group:
    WORLD = "all ranks"

def logged(function):
    @functools.wraps(function)
    def logging(*args, **kwargs):
        events.append("logs")
        return function(*args, **kwargs)
    return logging

def init_process_group(backend, *, rank=-1):
    'Join a group.'
    events.append(f"joins {backend} {rank}")

def destroy_process_group(group=None):
    events.append(f"leaves {group}")
"""


def torch_like(events: list[str]) -> Any:
    """Return a module with the two functions, which write to *events* what they are given."""
    module = sys.modules["torch_like"]
    vars(module)["events"] = events
    exec(TORCH, vars(module))
    return module


def test_a_recording_begins_behind_the_join_and_ends_before_the_leave(
    events: list[str], tmp_path: Path
) -> None:
    """Also where a script has imported the functions before, by names of its own."""
    module, script = torch_like(events), sys.modules["a_script"]
    vars(script).update(join=module.init_process_group, destroy_process_group=module.destroy_process_group)
    with_group.expect(Recorded(events, tmp_path), module)  # type: ignore[arg-type]
    script.join("gloo", rank=3)
    script.destroy_process_group()
    assert events == ["joins gloo 3", "begins", "ends with the process", "ends", "leaves None"]


def test_a_function_that_is_seen_looks_and_does_as_before(events: list[str]) -> None:
    module = torch_like(events)
    before = module.init_process_group
    with_group.follow(module)
    assert module.init_process_group.__wrapped__ is before
    assert inspect.signature(module.init_process_group) == inspect.signature(before)
    assert module.init_process_group.__doc__ == "Join a group."
    module.init_process_group("nccl")  # with the defaults of its keywords
    assert events == ["joins nccl -1"]


def test_what_decorates_a_function_is_called_as_before(events: list[str], tmp_path: Path) -> None:
    """As torch's loggers of errors and times are around ``init_process_group``."""
    module = torch_like(events)
    module.init_process_group = module.logged(module.init_process_group)
    with_group.expect(Recorded(events, tmp_path), module)  # type: ignore[arg-type]
    module.init_process_group("gloo")
    assert events[:3] == ["logs", "joins gloo -1", "begins"]


def test_a_group_is_joined_where_ranks_of_an_earlier_one_do_not_wait(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ``Meeting``, which waits until the store of that group has gone."""

    def join(function: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        events.append("waits")
        function(*args, **kwargs)

    module = torch_like(events)
    monkeypatch.setattr(with_group, "_meeting", SimpleNamespace(join=join))
    with_group.follow(module)
    module.init_process_group("gloo")
    assert events == ["waits", "joins gloo -1"]


def test_functions_are_followed_once(events: list[str], tmp_path: Path) -> None:
    module = torch_like(events)
    recording = Recorded(events, tmp_path)
    with_group.expect(recording, module)  # type: ignore[arg-type]
    with_group.follow(module)
    module.init_process_group("gloo")
    assert events.count("joins gloo -1") == events.count("begins") == 1


def test_the_end_of_a_smaller_group_ends_nothing(events: list[str], tmp_path: Path) -> None:
    module = torch_like(events)
    with_group.expect(Recorded(events, tmp_path), module)  # type: ignore[arg-type]
    module.destroy_process_group("two ranks of four")
    assert events == ["leaves two ranks of four"]


def test_the_group_of_all_ranks_may_be_named(
    events: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``destroy_process_group(dist.group.WORLD)`` is the end of it as well."""
    module = torch_like(events)
    monkeypatch.setattr(with_group, "_meeting", SimpleNamespace(leave=lambda: events.append("parts")))
    with_group.expect(Recorded(events, tmp_path), module)  # type: ignore[arg-type]
    module.destroy_process_group(module.group.WORLD)
    assert events == ["ends", "parts", "leaves all ranks"]


def test_a_forgotten_recording_stays_out_of_it(events: list[str], tmp_path: Path) -> None:
    module = torch_like(events)
    kept, gone = Recorded(events, tmp_path), Recorded([], tmp_path)
    for one in (gone, kept):
        with_group.expect(one, module)  # type: ignore[arg-type]
    for _ in range(2):  # forgetting twice is once
        with_group.forget(gone)  # type: ignore[arg-type]
    module.init_process_group("gloo")
    module.destroy_process_group()
    assert gone.events == []
    assert events == ["joins gloo -1", "begins", "ends with the process", "ends", "leaves None"]


def test_what_has_begun_does_not_begin_again(events: list[str], tmp_path: Path) -> None:
    recording: Any = Recorded(events, tmp_path)
    for _ in range(2):
        with_group.begin_now(recording)
    assert events == ["begins", "ends with the process", "has begun"]


def test_an_uncaught_exception_is_noted_and_then_shown(events: list[str], tmp_path: Path) -> None:
    recording: Any = Recorded(events, tmp_path)
    with_group.begin_now(recording)
    error = ValueError("out of data")
    sys.excepthook(ValueError, error, None)
    assert events[2:] == ["notes out of data", "shown"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_recording_that_cannot_begin_lets_the_training_go_on(
    events: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], is_there: bool
) -> None:
    """It says why in one line, and leaves it for the end of the command if there is a directory."""
    target = tmp_path if is_there else tmp_path / "missing"
    recording: Any = Recorded(events, target, OSError("the disk is full\nand more"))
    with_group.begin_now(recording)
    assert capsys.readouterr().err == "foretrace: not recording: the disk is full\n"
    assert [path.read_text() for path in tmp_path.glob(REFUSED)] == ["the disk is full"] * is_there
    assert events == []


def test_what_a_handler_of_signals_raises_goes_through(
    events: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script may end its training by an exception of its own, whatever runs just then."""

    class TimeIsUpError(Exception):
        pass

    def handler(number: int, frame: object) -> None:
        raise TimeIsUpError

    recording: Any = Recorded(events, tmp_path)
    recording.begin_if_due = interrupted_by(handler)
    with pytest.raises(TimeIsUpError):
        with_group.begin_now(recording)
    assert capsys.readouterr().err == ""


def interrupted_by(handler: Callable[[int, object], None]) -> Callable[[], bool]:
    """Return a function that Python interrupts to call *handler*, as it does when a signal arrives."""

    def interrupted() -> bool:
        handler(15, sys._getframe())
        return True

    return interrupted
