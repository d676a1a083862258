"""What the compiled hooks and the session of a recording tell each other."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from foretrace.tracer import internals
from foretrace.tracer.backward import LOSS
from foretrace.tracer.columns import SEGMENT, Segments
from foretrace.tracer.completion import CLOSE_TIMEOUT_S
from foretrace.tracer.groups import GroupInfo
from foretrace.tracer.guarded import is_interrupt
from foretrace.tracer.issued import MOST_NAME
from foretrace.tracer.lane import NOBODY, Lane
from foretrace.tracer.modules import ModuleHook
from foretrace.tracer.operators import dtype_names
from foretrace.tracer.records import Block, Communication

if TYPE_CHECKING:
    from foretrace.tracer.session import Session
    from foretrace.tracer.sink import Record


class NativeLane(Lane):
    """The compute stream, kept in C++; its segments are taken from there by ``Native.collect``.

    Args:
        native: the module of the compiled hooks.
    """

    def __init__(self, native: Any) -> None:
        super().__init__(native.position, lambda segment: None)
        self._native = native
        # As attributes: a call of C in place of one of Python.
        self.__dict__.update({name: getattr(native, name) for name in ("push", "pop", "replace")})
        self.__dict__.update({name: getattr(native, name) for name in ("pause", "resume", "own", "is_own")})

    @property
    def depth(self) -> int:
        """How many owners are on the stack."""
        return int(self._native.depth())

    @property
    def block(self) -> Block:
        """The block that owns the time now."""
        found: Block = self._native.block()
        return found


class Native:
    """The compiled hooks of one recording.

    Args:
        module: the module of the compiled hooks.
        session: the recording.

    Attributes:
        lane: the compute stream.
        modules: the hooks of modules, while there are any.
        module_calls: what modules are called by, and where it is told that torch compiles.
        waited: told of a work that was waited for if the module cannot tell from it what is over by that.
        met_stage: told of a stage of a pipeline that was made before the recording began.
    """

    def __init__(self, module: Any, session: Session) -> None:
        self.module = module
        self._session = session
        self._rank = session.rank
        self._groups: list[tuple[str, GroupInfo, str]] = []
        # Numbers in C++ are places in the list, whichever threads meet groups (or a handler of signals).
        self._meeting = threading.RLock()
        self._under_way: dict[int, Communication] = {}
        self._dtypes = dtype_names()
        self.modules: NativeModuleHook | None = None
        self.lane = NativeLane(module)
        self._waited_boxed = internals.compiled_waited()
        self.module_calls = internals.module_calls()
        self.met_stage: Callable[[Any], Any] = lambda stage: None
        self.waited = session.guarded("collectives", lambda work: self._waited_boxed(work.boxed()))
        names = {dtype: json.dumps(name) for dtype, name in self._dtypes.items()}
        module.begin(self, names, NOBODY, LOSS)

    def switch(self, disabled: set[str]) -> None:
        """Have the hooks note what is not *disabled*."""
        self.module.note(*(name not in disabled for name in ("collectives", "modules", "pipeline")))

    def close(self) -> None:
        """Let go of the session, which C++ would keep alive until the process ends: all is collected."""
        self.module.end()

    def collect(self) -> Iterator[Record]:
        """Yield what was noted since the last time, and learn the ends of what was under way; not raced."""
        segments, kinds, blocks, n_lost = self.module.take_segments()
        if segments:
            yield Segments(np.frombuffer(segments, SEGMENT), kinds, blocks)
        fresh, ended, n_more = self.module.take_calls()
        self._session.sink.n_lost += n_lost + n_more
        for number, (end, peer, sequence) in ended.items():
            if (known := self._under_way.pop(number, None)) is not None:
                known.peer, known.sequence, known.end = peer, sequence, end
        for number, kind, group, sequence, peer, size_bytes, dtype, block, position, start, end in fresh:
            one = Communication(
                kind,
                self._groups[group][1],
                sequence,
                peer,
                size_bytes,
                self._dtypes[dtype],
                block,
                position,
                start,
            )
            if end:
                one.end = end
            else:
                self._under_way[number] = one
            yield one
        self._update_groups()

    def _update_groups(self) -> None:
        """Count what each group has issued, and tell of axes that were found out since."""
        with self._meeting:
            for number, (name, info, axis) in enumerate(self._groups):
                n_collectives, transfers = self.module.n_calls(number)
                info.n_collectives = max(info.n_collectives, n_collectives)
                for peer, is_send, n in transfers:
                    info.n_transfers[(self._rank, peer) if is_send else (peer, self._rank)] = n
                if info.axis != axis:
                    self._groups[number] = (name, info, info.axis)
                    self._tell_group(name, info)

    # What C++ asks.

    def disable(self, name: str, error: str) -> None:
        """Switch hooks off, for good."""
        self._session.stop(name, error)

    def is_interrupt(self, error: BaseException) -> bool:
        """Whether a handler of signals has raised *error*, and not what was asked."""
        return is_interrupt(error)

    def met_group(self, name: str) -> None:
        """Tell of a process group in which something is issued for the first time."""
        info = self._session.groups.of(internals.group_named(name))
        with self._meeting:
            if all(name != known for known, _, _ in self._groups):
                self._groups.append((name, info, info.axis))
            self._tell_group(name, info)

    def _tell_group(self, name: str, info: GroupInfo) -> None:
        self.module.add_group(name, info.id, json.dumps(info.axis[-MOST_NAME:]), info.ranks)

    def describe_block(self, block: Block) -> tuple[int, str]:
        """Return the layer of a block and what a line of the last calls says of it."""
        name = json.dumps(block.name[-MOST_NAME:], ensure_ascii=False)
        return block.layer, f'"name": {name}, "layer": {block.layer}'

    def begin(self, model: Any, args: Any) -> None:
        """A model is called from outside of any other."""
        self._session.called(model, args)

    def begun(self) -> None:
        """The first action of a pipeline in a step begins."""
        self._session.steps.begin()

    def met(self, module: Any, args: Any) -> None:
        """Learn the blocks of a module that is called for the first time."""
        if self.modules is not None:
            self.modules.met(module, args)

    def called_with(self, kwargs: Any) -> None:
        """A model was called with arguments by name."""
        self._session.called_with(kwargs.values())


class NativeCollectiveHook:
    """The compiled kernels of collectives and transfers, and of the wait for functional ones.

    Args:
        session: the recording.
    """

    def __init__(self, session: Session, native: Native) -> None:
        self._native = native.module
        native.switch(session.disabled)
        self._native.install()

    def remove(self) -> None:
        """Give the operators back as they were, when what is under way has ended."""
        until = time.monotonic() + CLOSE_TIMEOUT_S
        while self._native.is_busy() and time.monotonic() < until:
            time.sleep(0.001)
        self._native.remove()


class NativeModuleHook(ModuleHook):
    """Calls of modules as C++ sees them, which knows the block of each.

    Args:
        session: the recording.
        native: the compiled hooks.
    """

    def __init__(self, session: Session, native: Native) -> None:
        from torch.nn import Module

        self._native, self._module_calls = native.module, native.module_calls
        self._module_type: type[Any] = Module
        native.modules = self
        native.switch(session.disabled)
        super().__init__(session)

    def met(self, module: Any, args: Any) -> None:
        """Learn the blocks of a module that is called for the first time; of what is none, torch says so."""
        if isinstance(module, self._module_type):
            self._met(module, args)

    def watch(self) -> None:
        """Have the calls of modules seen from now on."""
        self._native.watch_calls(*self._module_calls, *self._computed())

    def unwatch(self) -> None:
        """Have modules called as they were."""
        self._native.unwatch_calls()

    def _is_inside(self) -> bool:
        return bool(self._native.is_inside())

    def _keep_shell(self, module: Any) -> None:
        self._native.learn_shell(module)

    def _block_of(self, module: Any) -> Block | None:
        found: Block | None = self._native.block_of(module)
        return found

    def _keep(self, module: Any, block: Block | None) -> None:
        self._native.learn(module, block)

    def _forget(self, number: int) -> None:
        self._native.forget(number)
        self._lives.pop(number, None)
