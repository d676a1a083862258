"""Callbacks for training libraries: they record the training, and log where each step went while it runs."""

from __future__ import annotations

import atexit
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from foretrace.tracer.errors import RecordError
from foretrace.tracer.process import is_first
from foretrace.tracer.record import first_line, record
from foretrace.traces.analysis.metrics import breakdown
from foretrace.traces.info import RunInfo
from foretrace.traces.run import Part, Run
from foretrace.traces.timeline import MEMORY

PREFIX: Final = "foretrace/"  # what the names of logged figures begin with

Log = Callable[[int, Mapping[str, float]], Any]


class Steps:
    """Where the steps of this rank went, some seconds after each is over.

    What others do meanwhile is unknown here: waiting for them counts as exposed communication. The recording
    knows better when it has ended.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._info = RunInfo(origin="recorded", world_size=world_size)
        self._spans: pa.Table | None = None
        self._found: deque[tuple[int, dict[str, float]]] = deque()

    def hear(self, spans: pa.Table) -> None:
        """Take a batch of spans, on the thread that writes them.

        A step is worked out once the next one is over: a communication may end behind its step.
        """
        self._spans = spans if self._spans is None else pa.concat_tables([self._spans, spans])
        self._settle()

    def finish(self) -> None:
        """Work out what is left, once nothing more is heard."""
        self._settle(last=True)

    def take(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield number and figures of each step that was not yielded before.

        The figures are ``step_s``, seconds, and shares of them by state, which add up to 1.
        """
        while self._found:
            yield self._found.popleft()

    def _settle(self, *, last: bool = False) -> None:
        spans = self._spans
        if spans is None:
            return
        ends = pc.add(spans["start_ns"], spans["duration_ns"])
        windows = ends.filter(pc.equal(pc.cast(spans["category"], pa.string()), "step"))
        if len(windows) < 2 - last:
            return
        until = sorted(windows.to_pylist())[-1 if last else -2]
        known = spans.filter(pc.less(spans["start_ns"], until))
        run = Run("", self._info, [Part(self._rank, lambda: known)], MEMORY.empty_table(), ())
        for row in breakdown(run):
            shares = {state: share for state, share in row.shares.items() if not state.startswith("wait")}
            self._found.append((row.step, {"step_s": row.window_ns / 1e9} | shares))
        # What reaches into the next step is needed there, too.
        self._spans = spans.filter(pc.greater(ends, until))


class Logged:
    """A recording whose steps are logged as they end.

    It lasts until a training has ended. One that begins before, because the last has raised and is tried
    again, goes on in it; one that begins after is not recorded, which one line says. What a logger raises
    ends no training: it is said once, and nothing more is logged.
    """

    def __init__(self, path: str | os.PathLike[str], how: Mapping[str, Any]) -> None:
        self._path, self._how = path, how
        self._stack = ExitStack()
        self._steps: Steps | None = None
        self._is_open = self._has_ended = False
        self._first = 0

    def begin(self, first: int) -> None:
        """Begin to record, in the process group that both libraries have joined by now.

        *first* is the number that the library gives to the step that comes: not the first one of a training
        that goes on from a checkpoint. Raises as `foretrace.record` does.
        """
        if self._is_open:
            return
        if self._has_ended:
            if is_first():
                sys.stderr.write(
                    f"foretrace: {self._path} has the training before; this one is not recorded\n"
                )
            return
        self._is_open, self._first = True, first
        session = self._stack.enter_context(record(self._path, **self._how)).session
        atexit.register(self.end)  # a training that raises does not say that it has ended
        if session is not None:  # None: this rank is not recorded
            self._steps = Steps(session.rank, session.world_size)
            session.sink.heard.append(session.guarded("callbacks", self._steps.hear))

    def tell(self, log: Log, *, last: bool = False) -> None:
        """Give *log* the library's number, and figures by name, of each step that has become known."""
        if self._steps is None:
            return
        try:
            if last:
                self._steps.finish()
            for step, figures in self._steps.take():
                named = {f"{PREFIX}{name.replace(':', '_')}": value for name, value in figures.items()}
                log(self._first + step, named)
        except Exception as error:  # the training is worth more than its log
            sys.stderr.write(f"foretrace: steps are not logged any more: {first_line(error)}\n")
            self._steps = None

    def end(self, log: Log | None = None) -> None:
        """End the recording; give *log* what was not told before."""
        atexit.unregister(self.end)
        # Before the rest is told: closing writes the last spans, and they are heard.
        self._stack.close()
        self._is_open, self._has_ended = False, self._has_ended or self._is_open
        if log is not None:
            self.tell(log, last=True)
        self._steps = None


def trainer_callback(path: str | os.PathLike[str], **how: Any) -> Any:
    """Return a callback for the Trainer of transformers, which records each rank into *path*.

    Rank 0 logs each step to the run of wandb that is active, and to TensorBoard where the Trainer reports to
    it: its length and where it went, without what only the other ranks know.

    Args:
        path: the run directory.
        how: what `foretrace.record` takes beside it.

    Raises:
        RecordError: transformers is not installed.
    """
    library = _library("transformers")

    class ForetraceCallback(library.TrainerCallback):  # type: ignore[misc, name-defined]
        """Records the training, and logs where each step went."""

        def __init__(self) -> None:
            self._logged = Logged(path, how)
            self._writer: Any = None
            self._named: set[str] = set()

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._logged.begin(state.global_step + 1)  # the Trainer numbers a step when it is over
            if state.is_world_process_zero and "tensorboard" in args.report_to and find_spec("tensorboard"):
                from torch.utils.tensorboard import SummaryWriter

                where = os.environ.get("TENSORBOARD_LOGGING_DIR") or Path(args.output_dir) / "runs"
                # Named as the recording: a second training in the same folder is not drawn over the first.
                self._writer = SummaryWriter(str(Path(where) / f"foretrace-{Path(path).name}"))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._logged.tell(self._log if state.is_world_process_zero else _nowhere)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._logged.end(self._log if state.is_world_process_zero else _nowhere)
            if self._writer is not None:
                self._writer.close()

        def _log(self, step: int, figures: Mapping[str, float]) -> None:
            # Not imported: whoever logs to wandb has loaded it.
            run = getattr(sys.modules.get("wandb"), "run", None)
            if run is not None:
                # The Trainer lets wandb draw all metrics over its own step, which is some steps ahead by now.
                for name in figures.keys() - self._named:
                    run.define_metric(name, step_metric=f"{PREFIX}step")
                self._named |= figures.keys()
                run.log({**figures, f"{PREFIX}step": step})
            if self._writer is not None:
                for name, value in figures.items():
                    self._writer.add_scalar(name, value, step)

    return ForetraceCallback()


def lightning_callback(path: str | os.PathLike[str], **how: Any) -> Any:
    """Return a callback for Lightning's Trainer, which records each rank into *path*.

    Each step is logged to the Trainer's loggers, whichever they are: its length and where it went, without
    what only the other ranks know.

    Args:
        path: the run directory.
        how: what `foretrace.record` takes beside it.

    Raises:
        RecordError: Lightning is not installed.
    """
    library = _library("lightning.pytorch", "pytorch_lightning")

    class ForetraceCallback(library.Callback):  # type: ignore[misc, name-defined]
        """Records the training, and logs where each step went."""

        def __init__(self) -> None:
            self._logged = Logged(path, how)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._logged.begin(trainer.global_step)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self._logged.tell(_to_loggers(trainer))

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self._logged.end(_to_loggers(trainer))

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self._logged.end()

    return ForetraceCallback()


def _to_loggers(trainer: Any) -> Log:
    def log(step: int, figures: Mapping[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(dict(figures), step)

    return log


def _nowhere(step: int, figures: Mapping[str, float]) -> None:
    """Log nothing: another rank does."""


def _library(*names: str) -> Any:
    """Return the first module of *names* that is installed; one that is loaded already comes first."""
    from importlib import import_module

    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            # A library that is installed, but whose own imports fail, is not one that is missing.
            if error.name is None or not name.startswith(error.name):
                raise
    raise RecordError(f"{names[0].partition('.')[0]} is not installed: there is no training of it to record")
