"""Which hooks a recording puts into a process, in which order; and those by which it sees waits.

What waits for communication, in Python, in C++ or on the device, does not compute meanwhile.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.backward import BackwardHook, CheckpointHook
from foretrace.tracer.collectives import CollectiveHook, SymmetricHook
from foretrace.tracer.completion import Completions
from foretrace.tracer.guarded import Hook, Replacements, between
from foretrace.tracer.importing import Expectation
from foretrace.tracer.memory import PeakHook
from foretrace.tracer.modules import CompilerHook, ExportHook, ModuleHook
from foretrace.tracer.parallelism import MeshHook
from foretrace.tracer.pipeline import PipelineHook
from foretrace.tracer.process import is_distributed
from foretrace.tracer.session import Session
from foretrace.tracer.stamps import GATE
from foretrace.tracer.steps import OptimizerHook, SaveHook

CHECKPOINTS: Final = "torch.distributed.checkpoint"  # module that saves what is spread over ranks


def install(session: Session) -> None:
    """Put all hooks of *session* in place and into its care; those that others need are attributes of it."""
    import torch

    def once(name: str, module: str, make: Callable[[], Hook]) -> Hook:
        """Return hook *name* that *make* makes once *module* is imported: at once, or what waits for it."""
        if module in sys.modules:
            return make()
        return Expectation(module, session.guarded(name, lambda _: session.keep(make())))

    session.backward = BackwardHook(session)
    modules = ModuleHook(session)
    hooks: list[Hook] = [session.backward, modules]
    hooks += [once("modules", internals.EXPORTING, lambda: ExportHook(session, modules))]
    hooks += [once("modules", internals.DYNAMO, lambda: CompilerHook(modules))]
    hooks += [CheckpointHook(session), OptimizerHook(session), BlockingHook(session), GraphHook()]
    hooks += [SaveHook(session, torch, "save")]
    hooks += [
        once(
            "modules", CHECKPOINTS, lambda: SaveHook(session, sys.modules[CHECKPOINTS], "save", "async_save")
        )
    ]
    hooks += [PeakHook(session.memory, session)]
    if is_distributed():
        import torch.distributed as dist

        session.completions = Completions(dist.Work.wait, session.rank)
        session.device_times.ask = session.completions.ask
        hooks += [
            CollectiveHook(session),
            WaitHook(session),
            BatchHook(session),
            MeshHook(session.groups, session),
        ]
        hooks += [once("pipeline", internals.PIPELINING, lambda: _pipeline(session))]
        hooks += [once("collectives", internals.SYMMETRIC, lambda: SymmetricHook(session))]
    session.keep(*hooks)


def _pipeline(session: Session) -> Hook:
    session.pipeline = hook = PipelineHook(session)
    return hook


class WaitHook(Replacements):
    """``Work.wait`` that tells the end of a communication, and that its time is not compute."""

    def __init__(self, session: Session) -> None:
        import torch.distributed as dist

        super().__init__()
        waited, by_work = session.waiting(), session.completions.by_work

        def waiting(original: Any) -> Any:
            def wait(work: Any, /, *args: Any, **kwargs: Any) -> Any:
                return waited(by_work.get(id(work)), original, work, *args, **kwargs)

            return wait

        self.replace(dist.Work, "wait", waiting)


class BlockingHook(Replacements):
    """Functions that wait in C++, and a stream that waits for another one: that time is not compute.

    ``Stream.wait_event``, by which FSDP2 waits for what it has gathered, and ``wait_stream`` end in
    ``Event.wait`` of CUDA.
    """

    def __init__(self, session: Session) -> None:
        import torch

        super().__init__()
        lane, (pause, resume) = session.lane, session.pausing()
        if is_distributed():
            for owner, name in internals.blocking_functions():
                self.replace(owner, name, between(lambda *_, **__: pause(), resume))

        def pause_stream(event: Any, stream: Any = None) -> bool:
            if lane.device is None:
                return False
            return lane.pause() if stream is None else lane.pause_stream(stream)

        self.replace(torch.cuda.Event, "wait", between(session.guarded("modules", pause_stream), resume))


class BatchHook(Replacements):
    """The end of a batch of transfers, of which NCCL makes one work."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        kind, start, end = internals.batching()
        completions, of = session.completions, session.groups.of
        begun, issued, failed = (
            session.guarded("collectives", f)
            for f in (
                lambda group: completions.batch_begun(of(group)),
                lambda group, work, called: completions.batch_issued(of(group), work, called),
                lambda group: completions.batch_failed(of(group)),
            )
        )

        def starting(original: Any) -> Any:
            def function(group: Any, /, *args: Any, **kwargs: Any) -> None:
                original(group, *args, **kwargs)
                begun(group)

            return function

        def ending(original: Any) -> Any:
            def function(group: Any, /, *args: Any, **kwargs: Any) -> Any:
                called = time.time_ns()
                try:
                    work = original(group, *args, **kwargs)
                except BaseException:
                    failed(group)
                    raise
                issued(group, work, called)
                return work

            return function

        self.replace(kind, start, starting)
        self.replace(kind, end, ending)


class GraphHook(Replacements):
    """Captures of CUDA graphs, during which no thread of ours may ask CUDA anything."""

    def __init__(self) -> None:
        super().__init__()
        for kind in internals.graphs():
            self.replace(kind, "capture_begin", self._beginning)
            self.replace(kind, "capture_end", between(lambda *_, **__: None, lambda _: GATE.capture_ended()))

    @staticmethod
    def _beginning(original: Any) -> Any:
        def capture_begin(graph: Any, /, *args: Any, **kwargs: Any) -> Any:
            GATE.capture_begins()
            try:
                return original(graph, *args, **kwargs)
            except BaseException:
                GATE.capture_ended()
                raise

        return capture_begin
