"""Sees what waits for communication, in Python, in C++ and on the device: waiting is not compute."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

from foretrace.tracer import internals
from foretrace.tracer.stamps import GATE
from foretrace.tracer.watchers import join

if TYPE_CHECKING:
    from foretrace.tracer.session import Session


class WaitHook:
    """``Work.wait`` that tells the end of a communication, and that its time is not compute.

    Args:
        session: the recording.
    """

    def __init__(self, session: Session) -> None:
        import torch.distributed as dist

        self._work_type: Any = dist.Work
        self._completions = completions = session.completions
        self._original = original = dist.Work.wait
        ended, claim = (session.guarded("collectives", f) for f in (completions.ended, completions.claim))
        pause, resume = session.pausing()
        by_work = completions.by_work

        @functools.wraps(original)
        def wait(work: Any, /, *args: Any, **kwargs: Any) -> Any:
            communication = by_work.get(id(work))
            watch = claim(communication) if communication is not None else None
            is_paused = pause()
            try:
                return original(work, *args, **kwargs) if watch is None else join(watch, *args, **kwargs)
            finally:
                if communication is not None:
                    ended(communication)
                resume(is_paused)

        self._work_type.wait = wait

    def remove(self) -> None:
        """Give ``Work.wait`` back as it was, unless somebody may still ask for what a watcher waited for."""
        if not self._completions.has_watched_transfers:
            self._work_type.wait = self._original


class BlockingHook:
    """Functions that wait in C++: their time is not compute.

    Args:
        session: the recording.
    """

    def __init__(self, session: Session) -> None:
        pause, resume = session.pausing()

        def waiting(original: Any) -> Any:
            @functools.wraps(original)
            def function(*args: Any, **kwargs: Any) -> Any:
                is_paused = pause()
                try:
                    return original(*args, **kwargs)
                finally:
                    resume(is_paused)

            return function

        found = [(owner, name) for owner, name in internals.blocking_functions() if hasattr(owner, name)]
        self._undo = [(owner, name, getattr(owner, name)) for owner, name in found]
        for owner, name, original in self._undo:
            setattr(owner, name, waiting(original))

    def remove(self) -> None:
        """Give the functions back as they were."""
        for owner, name, original in self._undo:
            setattr(owner, name, original)


class BatchHook:
    """The end of a batch of transfers, of which NCCL makes one work.

    Args:
        session: the recording.
    """

    def __init__(self, session: Session) -> None:
        self._type, start, end = internals.batching()
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

        self._undo: list[tuple[str, Any]] = []
        for name, wrap in ((start, starting), (end, ending)):
            if (original := getattr(self._type, name, None)) is not None:
                self._undo.append((name, original))
                setattr(self._type, name, wrap(original))

    def remove(self) -> None:
        """Give the methods back as they were."""
        for name, original in self._undo:
            setattr(self._type, name, original)


class GraphHook:
    """Captures of CUDA graphs, during which no thread of ours may ask CUDA anything."""

    def __init__(self) -> None:
        self._undo = [(kind, kind.capture_begin, kind.capture_end) for kind in internals.graphs()]
        for kind, begin, end in self._undo:
            self._wrap(kind, begin, end)

    @staticmethod
    def _wrap(kind: Any, begin: Any, end: Any) -> None:
        @functools.wraps(begin)
        def capture_begin(graph: Any, /, *args: Any, **kwargs: Any) -> Any:
            GATE.capture_begins()
            try:
                return begin(graph, *args, **kwargs)
            except BaseException:
                GATE.capture_ended()
                raise

        @functools.wraps(end)
        def capture_end(graph: Any, /, *args: Any, **kwargs: Any) -> Any:
            try:
                return end(graph, *args, **kwargs)
            finally:
                GATE.capture_ended()

        kind.capture_begin, kind.capture_end = capture_begin, capture_end

    def remove(self) -> None:
        """Give the methods back as they were."""
        for kind, begin, end in self._undo:
            kind.capture_begin, kind.capture_end = begin, end


class StreamHook:
    """``Event.wait`` of CUDA: while the compute stream waits for another one, it does not compute.

    ``Stream.wait_event``, by which FSDP2 waits for what it has gathered, and ``wait_stream`` end in it.

    Args:
        session: the recording.
    """

    def __init__(self, session: Session) -> None:
        import torch

        self._type: Any = torch.cuda.Event
        self._original = original = torch.cuda.Event.wait
        lane = session.lane
        pause, resume = (session.guarded("modules", f) for f in (self._pause, lane.resume))
        self._lane = lane

        @functools.wraps(original)
        def wait(event: Any, /, stream: Any = None) -> Any:
            is_paused = pause(stream)
            try:
                return original(event, stream)
            finally:
                resume(is_paused)

        self._type.wait = wait

    def _pause(self, stream: Any) -> bool:
        if self._lane.device is None:
            return False
        return self._lane.pause() if stream is None else self._lane.pause_stream(stream)

    def remove(self) -> None:
        """Give ``Event.wait`` back as it was."""
        self._type.wait = self._original
