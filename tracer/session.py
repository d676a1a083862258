"""One recording in one process: what the hooks share, and their life from the first to the last."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from foretrace.tracer.audit import Auditor
from foretrace.tracer.clock import RunClock, now_ns
from foretrace.tracer.device_works import DeviceTimes
from foretrace.tracer.guarded import Guarded, Hook, is_interrupt
from foretrace.tracer.kernels import kernel_trace
from foretrace.tracer.lane import Lane
from foretrace.tracer.memory import MemoryLog
from foretrace.tracer.parallelism import SHARDING, data_parallel, name_axes, parameter_meshes
from foretrace.tracer.passes import Passes
from foretrace.tracer.pending import Issued, Pending
from foretrace.tracer.process import is_distributed, versions
from foretrace.tracer.records import Communication
from foretrace.tracer.shape import describe_machine, describe_model
from foretrace.tracer.sink import FLUSH_S, Sink
from foretrace.tracer.stamps import GATE, Resolver
from foretrace.tracer.steps import Steps
from foretrace.tracer.training import Training
from foretrace.tracer.window import Window
from foretrace.traces.info import Audit, Process, RunInfo
from foretrace.traces.store import SpanWriter, write_info

HOOKS: Final = ("modules", "collectives", "pipeline", "meshes")  # names of the hooks, as warnings call them


class Session(Training[Lane], Guarded):
    """A recording in this process.

    Raises:
        RunError: the directory cannot be written, or holds spans of this rank already.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        world_size: int,
        clock: RunClock,
        *,
        name: str = "",
        flush_s: float = FLUSH_S,
        window: Window | None = None,
        depth: str = "light",
    ) -> None:
        Training.__init__(self, rank, world_size)
        Guarded.__init__(self)
        self.window = Window() if window is None else window
        self.path, self.clock, self.name = path, clock, name
        self.is_closed = self._has_failed = False
        self.memory = MemoryLog()
        self._started = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.job.update(self.window.describe(world_size))
        self._machine = describe_machine(world_size)
        self._process = Process.here()
        self._written_state: object = None
        moments = Resolver()
        self._pending = Pending(
            path,
            rank,
            self.groups,
            clock.shift_ns,
            moments,
            under_way=lambda: self.sink.under_way(),  # noqa: PLW0108 - the sink is made later
            step=lambda: self.position.step,
        )
        self.device_times = DeviceTimes(moments)
        self._audit: Audit | None = None
        self._auditor = self.guarded("the audit", Auditor)(self.groups) if is_distributed() else None
        writer = SpanWriter(path, rank)
        self._id = writer.id
        self.sink = Sink(
            writer,
            clock.span_shift_ns,
            moments,
            self.device_times,
            beside=self._beside,
            failed=self._writing_failed,
            flush_s=flush_s,
            has_step=self.window.has_step,
            seen=self._seen,
        )
        self.issued = Issued(path, rank, clock.shift_ns)
        self.lane = Lane(self.position, self.sink.put)
        self._described: Callable[[], Any] = lambda: None
        self.steps, self.passes = Steps(self), Passes(self.groups, self, self.trains)
        self.completions: Any = None
        self.backward: Any = None
        self._hooks: list[Hook] = []
        self._kernels = kernel_trace(path, rank, self.window) if depth == "kernels" else None
        self._write_beginning()
        self.sink.start()  # its thread describes this object, all of it

    def _write_beginning(self) -> None:
        if self.rank == self.window.first_rank(self.world_size):
            # What comes first into run.json stays: layout and device are known once they are used.
            known = replace(self.info(finished=False), layout=None, cluster=None)
            write_info(self.path, replace(known, files={"run.json": self._id}))
        self._write_sidecar()

    def pausing(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return what is called before and after a wait; the first returns what the second takes."""
        return self.guarded("modules", self.lane.pause), self.guarded("modules", self.lane.resume)

    def waiting(self) -> Callable[..., Any]:
        """Return what waits for a communication, None if it is not known which, by the function that does."""
        completions, (pause, resume) = self.completions, self.pausing()
        ended, claim = (self.guarded("collectives", f) for f in (completions.ended, completions.claim))

        def wait(communication: Communication | None, original: Any, *args: Any, **kwargs: Any) -> Any:
            if communication is not None:
                claim(communication)
            is_paused = pause()
            try:
                return original(*args, **kwargs)
            except Exception as error:
                if not is_interrupt(error):
                    completions.raised()
                raise
            finally:
                if communication is not None:
                    ended(communication)
                resume(is_paused)

        return wait

    def met_model(self, model: Any, args: Any) -> dict[str, Any]:
        """Learn from a model that is called for the first time."""
        from torch import is_grad_enabled

        if self.model is None:
            self._machine = describe_machine(self.world_size)
        for mesh in parameter_meshes(model):
            name_axes(self.groups, mesh)
        if self.model is None and is_grad_enabled():
            self._described = weakref.ref(model)
        if is_grad_enabled() and (self.model is None or self.is_pipelined):
            self.precision.expect(model)
        settings = super().met_model(model, args)
        self.backward.ends_with_graph |= settings.get("sharding") == "ddp"
        return settings

    def trains(self, model: Any) -> None:
        """It is *model* that trains, whichever was called first, or called without gradients."""
        if self._described() is model:
            return
        settings, _ = data_parallel(model)
        self.job = {name: value for name, value in self.job.items() if name not in SHARDING}
        self.note_job(**settings)
        self.model = describe_model(model)
        self.precision.expect(model)

    def called(self, model: Any, args: Any) -> bool:
        """*model* is called from outside of any other, with *args*; return whether it is to train."""
        trains = super().called(model, args)
        if trains and not self.is_pipelined:
            self.passes.begins(model, args, self.position.step)
        return trains

    def called_with(self, values: Iterable[Any]) -> None:
        """The call of a model is over, which had *values* by name."""
        values = tuple(values)
        super().called_with(values)
        self.passes.called_with(values)

    def sweep(self) -> None:
        """A moment to look at communications that nobody waits for."""
        if self.completions is not None and self.completions.loose:
            self.completions.sweep()

    def wait_follows(self) -> None:
        """A backward pass is going to wait, in C++, for the collectives that it has issued."""
        if self.completions is not None:
            self.completions.wait_follows()

    def step_began(self) -> None:
        """A step begins."""
        if self._kernels is not None:
            self.guarded("kernels", self._kernels.at_step)(self.position.step)

    def step_ended(self) -> None:
        """A step is over: a moment to look at memory, or the end of what is to be recorded."""
        if self.completions is not None and not self.is_closed:  # what has failed may be what closes it
            self.completions.step_ended()
        self.memory.sample(on_cuda=self.lane.device is not None)
        self.step_began()
        if self.window.is_past(self.position.step):
            self.close()

    def info(self, *, finished: bool) -> RunInfo:
        """Return what this rank knows about the run."""
        groups, dropped = self.groups.table(), self.sink.dropped
        own = f"ranks/rank-{self.rank:05d}"
        return RunInfo(
            origin="recorded",
            name=self.name,
            world_size=self.world_size,
            layout=self.groups.layout(self.rank),
            model=self.whole_model(),
            cluster=self._machine,
            job={**self.job, **self.passes.describe()} or None,
            groups=groups,
            clock={self.rank: self.clock.shown()},
            processes={self.rank: replace(self._process, is_finished=finished)},
            warnings=(*self.warnings, *(f"{n:,} {reason}: in no span" for reason, n in dropped.items())),
            dropped=dropped,
            audit=self._audit,
            versions=versions(),
            files=dict.fromkeys(
                (f"{own}.json", f"{own}.memory.arrow", f"spans/rank-{self.rank:05d}.arrow"), self._id
            ),
            started=self._started,
            finished=finished,
        )

    def close(self) -> None:
        """End the recording: take the hooks away, write what is left."""
        if self.is_closed:
            return
        self.is_closed = True
        self.steps.finish()
        if self._kernels is not None:
            self.guarded("kernels", self._kernels.close)(self.position.step)
        self.switch_off(*HOOKS)
        self.unhook()
        self.clock.close()
        self.memory.close()
        self.sink.close()
        self._tell_pending(last=True)
        self.issued.close()
        if self._has_failed:  # and has said so; the disk may have room for what is known of the run
            with suppress(Exception):
                write_info(self.path, self.info(finished=False), self.rank)
            return
        self.guarded("the audit", self._ask_c10d)()
        self.memory.write(self.path, self.rank, self.clock.mapping(), of=self._id)
        write_info(self.path, self.info(finished=True), self.rank)

    def _seen(self, one: Communication) -> None:
        self.passes.summed(one)
        if self._auditor is not None:
            self._auditor.add(one)

    def _ask_c10d(self) -> None:
        with GATE.asking() as may_ask:
            if self._auditor is not None and may_ask:
                for one in self.sink.under_way():
                    self._auditor.add(one, is_written=False)
                self._audit = self._auditor.audit(self.rank)

    def ends_with(self, error: str) -> None:
        """Note the exception that ends the training, on disk at once: a launcher may end this process."""
        self.warn(f"the training ended with {error}")
        at_ns, calls = now_ns() + self.clock.shift_ns, self.completions
        failed = calls is not None and bool(self.guarded("collectives", calls.failure_seen)())
        self._process = replace(self._process, error=error, error_ns=at_ns, call_failed=failed)
        if not self.is_closed:
            self._write_sidecar()

    def stop(self, name: str, reason: str) -> None:
        """Switch hook *name* off, for good, and say why."""
        super().stop(name, reason)
        if name == "collectives":
            self._process = replace(self._process, sees_calls=False)

    def keep(self, *hooks: Hook) -> None:
        """Take *hooks* into care, which are in place: some when the training has imported what they watch."""
        self._hooks += hooks

    def unhook(self) -> None:
        """Take all hooks away, when what they follow has ended; ranks that do so must do it together."""
        if self.completions is not None:
            self.completions.close()
        while self._hooks:
            hook = self._hooks.pop(0)
            try:
                hook.remove()
            except Exception as error:  # somebody has changed what the hook had changed
                self.warn(f"{type(hook).__name__} was not removed: {type(error).__name__}: {error}")

    def _beside(self) -> None:
        """What the writing thread does after each batch."""
        self._write_sidecar()
        self._tell_pending(last=False)

    def _tell_pending(self, *, last: bool) -> None:
        """Tell what is under way, for whoever looks at a training that hangs."""
        try:
            if last:
                self._pending.close(() if self._has_failed else self.sink.under_way())
            else:
                self._pending.update()
        except Exception as error:  # the spans are worth more
            self.warn(f"what is under way not written: {error}")

    def _write_sidecar(self) -> None:
        state = self.groups.n_changes, len(self.warnings), self.n_notes, id(self.model), self.clock.shown()
        if state != self._written_state:
            self._written_state = state
            try:
                write_info(self.path, self.info(finished=False), self.rank)
            except Exception as error:  # the spans are worth more than their description
                self.warn(f"sidecar not written: {error}")

    def _writing_failed(self, error: Exception) -> None:
        self._has_failed = True
        self._process = replace(self._process, sees_calls=False)
        self.switch_off(*HOOKS)
        self._tell_pending(last=True)  # nobody follows it any more: it is no hang, and no last call
        self.issued.close()
        self.warn(f"recording stopped: {error}")
        sys.stderr.write(f"foretrace: recording of rank {self.rank} stopped: {error}\n")

    def forked(self) -> None:
        """In a forked child, as of a data loader: it has no writer, and records nothing."""
        self.is_closed = True
        self.switch_off(*HOOKS)
