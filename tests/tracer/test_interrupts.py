"""What a handler of signals raises is the training's, also where code of the recording runs just then."""

import functools
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretrace.tracer.guarded import Guarded, is_interrupt
from foretrace.traces.store import open_run


class Handlers:
    """Ways to write a handler, each of which raises TimeoutError."""

    def method(self, number: int, frame: Any) -> None:
        raise TimeoutError(number)

    def __call__(self, *given: Any) -> None:
        self._deeper()

    def _deeper(self) -> None:
        raise TimeoutError

    @staticmethod
    def with_more(what: str, number: int, frame: Any, *, also: int = 0) -> None:
        raise TimeoutError(what, number, also)


HANDLERS: dict[str, Callable[..., Any]] = {
    "function": lambda number, frame: Handlers().method(number, frame),
    "any arguments": lambda *_: Handlers()._deeper(),
    "method": Handlers().method,
    "object": Handlers(),
    "partial": functools.partial(Handlers.with_more, "late", also=1),
}


@pytest.mark.parametrize("handler", HANDLERS.values(), ids=HANDLERS)
@pytest.mark.parametrize("depth", [0, 3])
def test_a_handler_s_exception_is_passed_on_and_the_hook_stays(
    handler: Callable[..., Any], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    before = signal.signal(signal.SIGUSR1, handler)
    guard = Guarded([])

    def hook(left: int) -> str:
        if left:
            return hook(left - 1)
        signal.raise_signal(signal.SIGUSR1)
        return "not reached"

    try:
        with pytest.raises(TimeoutError):
            guard.guarded("modules", hook)(depth)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (guard.disabled, guard.warnings) == (set(), [])
    assert guard.guarded("modules", lambda: 5)() == 5


def test_a_fault_of_a_hook_is_none_of_the_training() -> None:
    """Nor where a function is given a number and a frame that is not its caller's."""
    guard = Guarded([])

    def failing(number: int, frame: Any) -> None:
        raise TimeoutError("ours")

    guard.guarded("modules", failing)(14, sys._getframe().f_back)
    guard.guarded("meshes", lambda: failing(14, None))()
    assert guard.disabled == {"modules", "meshes"}
    assert guard.warnings[0] == "recording of modules stopped: TimeoutError: ours"
    assert not is_interrupt(TimeoutError())


ALARMED = """
import signal, sys
import torch
import foretrace

def late(number, frame):
    raise TimeoutError

signal.signal(signal.SIGUSR1, late)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
with foretrace.record(sys.argv[1]) as recording:
    session = recording.session
    as_it_is = session.called

    def interrupted(*given):
        session.called = as_it_is
        signal.raise_signal(signal.SIGUSR1)

    session.called = interrupted
    try:
        model(torch.ones(1, 2))
        for _ in range(10):
            pass
    except TimeoutError:
        print("late")
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
print(session.warnings, sorted(session.disabled - {"collectives", "meshes", "modules", "pipeline"}))
"""


def test_an_alarm_within_a_hook_reaches_the_training_and_its_steps_are_recorded(
    tmp_path: Path, ranks: Any
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", ALARMED, str(tmp_path / "run")]
    (done,) = ranks.launch(command, fresh=tmp_path)
    assert (done.returncode, done.stdout) == (0, "late\n[] []\n"), done.stderr
    rows = open_run(tmp_path / "run").spans().to_pylist()
    assert sum(row["kind"] == "forward" for row in rows) >= 3
