"""``with foretrace.record("runs/x"):`` and what both ways of recording share: joining ranks, ending well."""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import select
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlparse

from foretrace.tracer import internals, on_cpu, run_directory
from foretrace.tracer.errors import RecordError
from foretrace.tracer.guarded import everywhere, is_interrupt, take_out
from foretrace.tracer.importing import Expectation
from foretrace.tracer.optimizing import optimizer_steps
from foretrace.tracer.process import is_distributed, is_first, is_told_world, own_name
from foretrace.tracer.window import Window

if TYPE_CHECKING:
    from foretrace.tracer.clock import RunClock
    from foretrace.tracer.session import Session

DEPTHS: Final = ("light", "kernels")
"""How much is recorded: communication and blocks, or kernels of some steps by ``torch.profiler``, too."""

NO_GROUP: Final = "nobody called torch.distributed.init_process_group in the block, for which it waited"
"""Why nothing was recorded of a block in a process that is one of several."""


class Recording:
    """A recording that may still have to begin: when this process joins its process group.

    A process that is in none, and was not told that it will be, is recorded as a world of its own until then.
    If *is_shared*, several trainings of one command may record into *path*, one after the other.

    Attributes:
        target: the run directory that is asked for.
        path: that into which this process records: beside *target* where others may need that.
        is_over: it has been ended, begun or not, and does not begin any more.
        notes_errors: uncaught exceptions of this process are noted in it.
        awaits_group: nothing is recorded before this process joins its process group.
    """

    def __init__(
        self,
        path: Path,
        *,
        name: str,
        flush_s: float | None,
        window: Window | None = None,
        depth: str = "light",
        is_shared: bool = False,
    ) -> None:
        self.path = self.target = path
        self.session: Session | None = None  # the recording in this process, None before it has begun
        self.is_over = self._is_alone = self.notes_errors = False
        self._n_groups = 0
        self._name = name or path.name
        self._flush_s = flush_s
        self._window = Window() if window is None else window
        self._depth = depth
        self._is_shared = is_shared
        self.awaits_group = is_told_world() or (bool(own_name()) and self._window.ranks is not None)

    def begin_if_due(self) -> bool:
        """Begin unless it has begun or ended; return whether it has begun now. Raises as `begin` does.

        It begins again when this process joins a process group: after it was alone, or has left another.
        """
        if self.is_over:
            return False
        if self.session is not None:
            if not is_distributed() or self.session.is_closed == self._is_alone:
                return False
            if self._is_alone:
                self.session.close()
                run_directory.set_aside(self.path, self.target, self.session.sink.n_spans)
        self.begin()
        return True

    def begin(self) -> None:
        """Begin to record; every rank of a distributed training has to.

        Raises:
            RunError: the directory cannot be written, or holds a run already.
            RecordError: no rank is to be recorded, or torch lacks what recording needs.
        """
        from foretrace.tracer.hooks import install
        from foretrace.tracer.session import Session
        from foretrace.tracer.sink import FLUSH_S

        self.awaits_group = False
        self._is_alone = not is_distributed()
        internals.check(in_group=not self._is_alone)
        if self._is_alone:
            self.path = run_directory.folder_alone(self.target, is_shared=self._is_shared)
        else:
            self.path = run_directory.with_words(
                self.target, f"{run_directory.AGAIN}{self._n_groups}" if self._n_groups else ""
            )
            self._n_groups += 1
        rank, world_size, clock = _joined(self.path / "ranks")
        self._window.check_world(world_size)
        if not self._window.has_rank(rank):
            self.is_over = True
            atexit.register(clock.close)  # others may still compare their clocks with this one
            return
        session = Session(
            self.path,
            rank,
            world_size,
            clock,
            name=self._name,
            flush_s=FLUSH_S if self._flush_s is None else self._flush_s,
            window=self._window,
            depth=self._depth,
        )
        install(session)
        self.session = session
        _follow_forks()
        on_cpu.tell(session.warn)

    def end_step(self) -> None:
        """End a step, because the training says so."""
        if self.session is not None and not self.session.is_closed:
            self.session.guarded("modules", self.session.steps.told)()

    def note_error(self, error: BaseException) -> None:
        """Note the exception that ends the training."""
        if self.session is not None and not isinstance(error, SystemExit):
            said = ": ".join(filter(None, (type(error).__name__, first_line(error))))
            self.session.ends_with(said)

    def leave_group(self) -> None:
        """Write what is left, because this process leaves its process group. Raises as little as `end`."""
        if self.session is None or self.session.is_closed:
            return
        try:
            self.session.close()
        except Exception as error:  # the training is worth more than its recording
            if is_interrupt(error):
                raise
            sys.stderr.write(f"foretrace: the recording could not be finished: {error}\n")

    def end(self) -> None:
        """Write what is left. Raises nothing into the training but what a handler of signals has raised."""
        self.is_over = True
        self.leave_group()
        if self._is_alone and self.session is not None:
            self._is_alone = False
            self.path = run_directory.settle(self.path, self.target)


_active: list[Recording] = []  # the recording of this process, if any: hooks are global, so there can be one


@functools.cache
def _follow_forks() -> None:
    """Have forked children record nothing; once, for Python never forgets what it is told to call there."""
    os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    for recording in _active:
        if recording.session is not None:
            recording.session.forked()


@contextlib.contextmanager
def record(
    path: str | os.PathLike[str],
    *,
    name: str = "",
    flush_s: float | None = None,
    ranks: Iterable[int] | None = None,
    steps: str = "",
    wait: int = 0,
    warmup: int = 0,
    active: int = 0,
    repeat: int = 0,
    depth: str = "light",
) -> Iterator[Recording]:
    """Record what happens inside of the ``with`` block into the run directory *path*, on every rank.

    Enter it after ``init_process_group``, or before: then ranks are recorded from that call on, and a process
    that never makes it as a world of one, unless WORLD_SIZE says that there are others. Within a process that
    ``foretrace record`` has started, that recording goes on and this one does nothing.

    Args:
        path: the run directory; new or empty, the same for all ranks.
        name: what a person calls the run; empty: the last part of *path*.
        flush_s: seconds between two batches of spans, None: one second.
        ranks: global ranks to record, None: all. The others enter the block, too, and do nothing in it.
        steps: steps to record, e.g. ``"10:20"`` or ``"0:2,50:52"``; empty: all. After the last it ends.
        wait: steps to leave out at the beginning of each cycle, as ``torch.profiler.schedule`` has it.
        warmup: steps to leave out after those.
        active: steps to record after those; in place of *steps*.
        repeat: number of cycles, 0: no end.
        depth: ``"light"``, or ``"kernels"`` to run ``torch.profiler`` in the chosen steps, too.

    Yields:
        The recording.

    Raises:
        RecordError: *path* holds something already, or the ranks and steps are none.
        RunError: it cannot be written.
    """
    check_depth(depth)
    if active or wait or warmup or repeat:
        window = Window.scheduled(ranks=ranks, wait=wait, warmup=warmup, active=active, repeat=repeat)
    else:
        window = replace(Window.parsed(steps=steps), ranks=None if ranks is None else frozenset(ranks))
    if _active:
        yield _active[0]
        return
    recording = Recording(Path(path).absolute(), name=name, flush_s=flush_s, window=window, depth=depth)
    run_directory.check_new(recording.path)
    _active.append(recording)
    try:
        _enter(recording)
        yield recording
    except BaseException as error:
        recording.note_error(error)
        raise
    finally:
        try:
            recording.end()
        finally:
            forget(recording)
            _active.remove(recording)
        if recording.awaits_group and is_first():
            sys.stderr.write(f"foretrace: nothing recorded: {NO_GROUP}\n")


def _enter(recording: Recording) -> None:
    """Begin *recording*, now or when this process joins its process group."""
    if in_group := is_distributed():
        follow()
    else:
        expect(recording)
    if in_group or not recording.awaits_group:
        recording.begin()


def step() -> None:
    """Say that a step of the training is over, for a loop in which an optimizer does not tell.

    From the first call on, optimizers end no steps any more. Does nothing where nothing is recorded.
    """
    if _active:
        _active[0].end_step()


def activate(recording: Recording) -> None:
    """Make *recording* that of this process: a ``record`` block in it joins this one."""
    _active.append(recording)


def check_depth(depth: str) -> None:
    """Raise RecordError unless *depth* is one."""
    if depth not in DEPTHS:
        raise RecordError(f"depth {depth!r}: one of {', '.join(DEPTHS)}")


_n_recordings: list[int] = [0]
"""Recordings that this process has begun: keeps the keys of one apart from those of the next."""


def _joined(folder: Path) -> tuple[int, int, RunClock]:
    from foretrace.tracer.clock import JOIN_TIMEOUT, CommonClock, RunClock, now_ns, synchronise

    if not is_distributed():
        return 0, 1, RunClock(CommonClock(now_ns()))
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    _n_recordings[0] += 1
    store = dist.PrefixStore(f"foretrace/{_n_recordings[0]}", internals.default_store())
    try:
        return rank, world_size, RunClock(synchronise(store, rank, world_size), store, folder)
    except RuntimeError as error:
        raise RecordError(
            f"not all of the {world_size} ranks began to record within {JOIN_TIMEOUT.total_seconds():.0f} s: "
            f"{first_line(error)}; record every rank, or none"
        ) from error


# Ranks that make a process group again at the same address. Rank 0 holds the store of a group. Where
# another rank makes the next group before rank 0 has left the last, torch connects it to the old store, and
# the ranks wait for each other for half an hour. Of two processes that made six groups in a row (torch
# 2.13, a busy machine), 3 of 24 trials ended so without a recording, and 8 of 24 with one, as each rank
# writes before it leaves.

PATIENCE_S: Final = 60.0
"""How long the old store may stay: rank 0 may have much left to write, or the script holds its store."""

AGENT: Final = "TORCHELASTIC_USE_AGENT_STORE"  # set where the store is that of torchrun, which stays
CONNECT_S: Final = 5.0  # how long a store that is there takes to accept a connection, at most

Address = tuple[str, int]


class Meeting:
    """Where this process has met the other ranks of its last process group."""

    def __init__(self) -> None:
        self._left: tuple[socket.socket, Address] | None = None

    def leave(self) -> None:
        """Keep a connection to the store of the group that is left; on rank 0 there is none to wait for.

        A question to the store itself would do, but once the store has gone torch prints an error of C++.
        """
        import torch.distributed as dist

        with suppress(Exception):  # torch says what is wrong
            store = internals.default_store()
            while isinstance(store, dist.PrefixStore):
                store = store.underlying_store
            if isinstance(store, dist.TCPStore) and dist.get_rank() != 0:
                address = (store.host, store.port)
                self._left = socket.create_connection(address, CONNECT_S), address

    def join(self, join: Callable[..., None], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Join by *join* with *args* and *kwargs*, once the store of an earlier group there has gone."""
        left, self._left = self._left, None
        if left is not None:
            with left[0] as connection:
                if _address(join, args, kwargs) == left[1]:
                    _wait(connection)
        join(*args, **kwargs)


def _wait(connection: socket.socket) -> None:
    """Wait until rank 0 has closed *connection*, because it has given its store up."""
    closed = select.poll()
    closed.register(connection, select.POLLIN)
    closed.poll(PATIENCE_S * 1e3)


def _address(join: Callable[..., None], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Address | None:
    """Return the address of a store that rank 0 makes for a call of *join*; None where it makes none."""
    try:
        told = inspect.signature(join).bind(*args, **kwargs).arguments
        if told.get("store") is not None or os.environ.get(AGENT) == str(True):
            return None
        method = urlparse(told.get("init_method") or "env://")
        if method.scheme == "env":
            return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return (method.hostname, method.port) if method.hostname and method.port else None
    except (TypeError, ValueError, KeyError):  # torch says what is wrong
        return None


# Recordings that begin when their process joins its process group, and end with it.

_expecting: Final[list[Recording]] = []  # recordings that begin with the process group
FOLLOWED: Final = "_foretrace"  # attribute of torch's function that joins a process group, once that is seen
_meeting: Final = Meeting()  # where this process meets the other ranks


def expect(recording: Recording, module: Any = None) -> None:
    """Have *recording* begin whenever this process calls ``init_process_group`` and end with the group.

    Args:
        recording: what to begin, until `forget` is told.
        module: ``torch.distributed.distributed_c10d``, while torch is being imported; None imports it.
    """
    follow(module)
    _expecting.append(recording)


def follow(module: Any = None) -> None:
    """See whatever process group this process joins and leaves from now on; *module* as for `expect`."""
    module = module or import_module("torch.distributed.distributed_c10d")
    joins, leaves = module.init_process_group, module.destroy_process_group
    if hasattr(joins, FOLLOWED):
        return

    @functools.wraps(joins)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        _meeting.join(joins, args, kwargs)
        for recording in tuple(_expecting):
            begin_now(recording)

    @functools.wraps(leaves)
    def destroy_process_group(group: Any = None) -> None:
        if group is None or group is module.group.WORLD:
            for recording in tuple(_expecting):
                recording.leave_group()
            _meeting.leave()
        leaves(group)

    setattr(init_process_group, FOLLOWED, True)
    # A ``with`` block may begin long after a script, or ``torch.distributed.device_mesh``, has imported them.
    everywhere(joins, init_process_group)
    everywhere(leaves, destroy_process_group)


def forget(recording: Recording) -> None:
    """Expect no process group any more for *recording*."""
    if recording in _expecting:
        _expecting.remove(recording)


def begin_now(recording: Recording) -> None:
    """Begin *recording* unless it has begun or ended, and see that it ends with the process.

    Raises nothing but what a handler of signals has raised.
    """
    _note_uncaught(recording)
    try:
        if not recording.begin_if_due():
            return
    except Exception as error:  # the training goes on without a recording
        if is_interrupt(error):
            raise
        why = first_line(error)
        sys.stderr.write(f"foretrace: not recording: {why}\n")
        from foretrace.traces.replacing import replacing

        with contextlib.suppress(OSError), replacing(recording.target / run_directory.REFUSED) as file:
            file.write(why.encode())  # for the end of the command, far below that line
        return
    atexit.register(recording.end)


def _note_uncaught(recording: Recording) -> None:
    """Have uncaught exceptions noted in the run, also while it begins."""
    if not recording.notes_errors:
        recording.notes_errors = True
        _before_shown(recording.note_error)


def _before_shown(told: Callable[[BaseException], None]) -> None:
    """Have *told* called with an uncaught exception, which is then shown as ever, without calls of ours."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        told(error)
        with suppress(Exception):  # it is shown, whatever is wrong with us
            take_out(error)
            trace = error.__traceback__
        shown(kind, error, trace)

    sys.excepthook = hook


def first_line(error: BaseException) -> str:
    """Return the first line of what *error* says."""
    return str(error).strip().partition("\n")[0]


RUN_VARIABLE: Final = "FORETRACE_RUN"  # environment variable with the absolute path of the run directory
NAME_VARIABLE: Final = "FORETRACE_NAME"  # environment variable with the name of the run

DEPTH_VARIABLE: Final = "FORETRACE_DEPTH"  # environment variable with the depth, ``light`` or ``kernels``

RANKS_VARIABLE: Final = "FORETRACE_RANKS"
STEPS_VARIABLE: Final = "FORETRACE_STEPS"
"""Environment variables with the ranks and steps to record, as ``Window.parsed`` takes them."""

_OPTIMIZER: Final = "torch.optim.optimizer"  # module in which hooks on optimizers are registered


def attach(module: Any) -> None:
    """Arrange for a recording to begin with ``init_process_group``."""
    path = Path(os.environ[RUN_VARIABLE])
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if restart:  # what was recorded before the restart stays as it is
        path = path.with_name(f"{path.name}{run_directory.RESTART}{restart}")
    window = Window.parsed(ranks=os.environ.get(RANKS_VARIABLE, ""), steps=os.environ.get(STEPS_VARIABLE, ""))
    recording = Recording(
        path,
        name=os.environ.get(NAME_VARIABLE, ""),
        flush_s=None,
        window=window,
        depth=os.environ.get(DEPTH_VARIABLE, DEPTHS[0]),
        is_shared=True,
    )
    activate(recording)
    expect(recording, module)
    _before_shown(lambda error: None)  # also one that comes through calls of ours before the recording begins
    if not recording.awaits_group:
        _begin_alone(recording)


def _begin_alone(recording: Recording) -> None:
    """Have *recording* begin with the first step of an optimizer if no process group was joined by then."""

    def register(module: Any) -> None:
        optimizer_steps(module).first = lambda: begin_now(recording)

    if _OPTIMIZER in sys.modules:
        register(sys.modules[_OPTIMIZER])
    else:
        Expectation(_OPTIMIZER, register)
