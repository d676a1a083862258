"""Starts a command whose ``torch.distributed`` processes are recorded, without editing its script."""

from __future__ import annotations

import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from foretrace.tracer import record
from foretrace.tracer.ended import watch
from foretrace.tracer.errors import LaunchError
from foretrace.tracer.process import ON_CPU, is_one_of_many, job
from foretrace.tracer.run_directory import check_new, claimed, holds_run, no_empty_folders
from foretrace.tracer.window import Window

SITE: Final = Path(__file__).absolute().parent / "site"
"""Folder whose ``sitecustomize`` Python runs first in every process of the command."""


def launch(
    command: Sequence[str],
    path: Path,
    *,
    name: str = "",
    quiet: bool = False,
    ranks: str = "",
    steps: str = "",
    depth: str = "light",
    n_gpus_on_cpu: int = 0,
    is_stuck: Callable[[], bool] | None = None,
) -> int:
    """Run *command* and record it into the run directory *path*; options as those of ``foretrace record``.

    If *quiet*, what it prints goes to standard error. Once *is_stuck*, which is asked every
    ``LOOK_S`` if it is given, it is ended with all that it has started.

    Returns:
        Its exit status, or -n if signal n ended it.

    Raises:
        LaunchError: the command cannot be started.
        RecordError: *path* holds something already, is being recorded into, or cannot be written; the ranks
            or steps say nothing.
    """
    # Only to refuse what says nothing before anything is made or started.
    Window.parsed(ranks=ranks, steps=steps)
    if not command:
        raise LaunchError("nothing to record: give a command after --, e.g. -- torchrun train.py")
    path = path.absolute()
    check_new(path)
    words, program = [*command], _program(command[0])
    if shutil.which(command[0]) is None:  # it looks for itself by its name
        words[0] = program
    env = environment(path, name or path.name)
    asked = {record.RANKS_VARIABLE: ranks, record.STEPS_VARIABLE: steps, ON_CPU: str(n_gpus_on_cpu or "")}
    asked[record.DEPTH_VARIABLE] = "" if depth == record.DEPTHS[0] else depth
    # Options that are not asked for are taken out: those of a recording around this one are not meant here.
    env = {word: value for word, value in {**env, **asked}.items() if value or word not in asked}
    with no_empty_folders(path), claimed(path, job()):
        # Looked at again under the claim: another recording may have ended since.
        if holds_run(path) and not is_one_of_many():
            raise LaunchError(f"{path} holds a run already: nothing started; give a new directory")
        watch(str(path))  # the command may be a rank itself, as behind srun
        try:
            return run(words, env, program=program, output=sys.stderr if quiet else None, is_stuck=is_stuck)
        except OSError as error:
            raise LaunchError(f"cannot start {command[0]!r}: {error.strerror or error}") from error


def environment(path: Path, name: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment in which Python processes record themselves into *path*."""
    found = dict(os.environ if base is None else base)
    before = found.get("PYTHONPATH")
    found["PYTHONPATH"] = f"{SITE}{os.pathsep}{before}" if before else str(SITE)
    found[record.RUN_VARIABLE] = str(path)
    found[record.NAME_VARIABLE] = name
    return found


def _program(name: str) -> str:
    """Return the program *name*: on the path, or beside the Python that runs this. Raises LaunchError."""
    beside = Path(sys.executable).parent
    found = shutil.which(name) or shutil.which(name, path=str(beside))
    if found is None:
        raise LaunchError(f"cannot start {name!r}: no such program on the path or in {beside}")
    return found


# The command stays in our process group and session, so that a terminal and a shell treat it as they would
# without us. A signal to our process alone has to be passed on to it; one to the whole group, as Ctrl-C of
# a terminal is, has reached it already. Nothing in a signal tells which of the two it was. So we keep a
# witness: a fork of ours in the same group, in which all these signals are blocked. What is pending there,
# too, was sent to the group.

PASSED_ON: Final = frozenset(signal.valid_signals()) - {
    getattr(signal, f"SIG{name}", None)
    for name in (
        *("KILL", "STOP"),  # nobody can receive these
        *("ILL", "TRAP", "ABRT", "BUS", "FPE", "SEGV", "SYS", "PIPE", "STKFLT"),  # about our own code
        *("XCPU", "XFSZ", "ALRM", "VTALRM", "PROF"),  # about our own limits and timers
        *("CHLD", "TTIN", "TTOU"),  # for the kernel to send; the last two stop us as they stop the command
    )
}
"""Signals that are meant for the command where they are sent to us."""

GRACE_S: Final = 0.1
"""Time in which a signal that was sent to every process of a group, one by one, reaches all of them."""

LATE_S: Final = 1.0  # time after which nobody asks any more for a signal that is pending
POLL_S: Final = 0.002  # time between two looks of the witness
LOOK_S: Final = 1.0  # time between two questions whether the command is stuck


def run(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    program: str,
    output: IO[str] | None = None,
    is_stuck: Callable[[], bool] | None = None,
) -> int:
    """Run *command* in the environment *env* to its end, or until it *is_stuck*; pass signals on to it.

    Returns:
        Its exit status, or -n if signal n ended it.

    Raises:
        OSError: it cannot be started.
    """
    # Before the first fork: both children begin with these signals blocked, and none is lost meanwhile.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON | {signal.SIGCHLD})
    children = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, nobody can wait for them
    try:
        with _Witness() as witness:

            def as_without_us() -> None:
                """Run in the child before the command: leave to it what we were given."""
                witness.guard(os.getpid())
                if children == signal.SIG_IGN:
                    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

            # This process has one thread, so that Python code may run between fork and exec.
            process = subprocess.Popen(
                command,
                executable=program,
                env=env,
                stdout=output,
                preexec_fn=as_without_us,  # noqa: PLW1509
            )
            return _ended(process, witness, is_stuck)
    finally:
        for late in signal.sigpending() & PASSED_ON:  # for a command that has gone
            signal.sigwait({late})
        if children is not None:
            signal.signal(signal.SIGCHLD, children)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _ended(process: subprocess.Popen[bytes], witness: _Witness, is_stuck: Callable[[], bool] | None) -> int:
    is_to_stop, stopped_by = False, 0
    while True:
        # A second thread could be given one of these signals, and the process would die of it: there is none.
        waited = PASSED_ON | {signal.SIGCHLD}
        if not is_stuck:
            number = signal.sigwait(waited)
        elif found := signal.sigtimedwait(waited, LOOK_S):
            number = found.si_signo
        else:
            if is_stuck():
                _kill_all(process.pid)
            continue
        if number != signal.SIGCHLD:
            is_to_stop = number == signal.SIGTSTP or (is_to_stop and number != signal.SIGCONT)
            if not witness.has_seen(number):
                os.kill(process.pid, number)
        who, status = os.waitpid(process.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        if who and not (os.WIFSTOPPED(status) or os.WIFCONTINUED(status)):
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode
        if who:
            stopped_by = os.WSTOPSIG(status) if os.WIFSTOPPED(status) else 0
        # Ctrl-Z: the shell waits for us to stop. The command may clean up before it does, or not stop at all.
        # Of a signal to the group, we may hear last, when the command has stopped already.
        if stopped_by and is_to_stop and signal.SIGCONT not in signal.sigpending():
            is_to_stop = False
            _stop(stopped_by)


def _kill_all(pid: int) -> None:
    """Kill process *pid* and what it has started: ranks that wait for each other need not hear a request."""
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in file.read_text().split():
                _kill_all(int(child))
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _stop(number: int) -> None:
    """Stop this process by signal *number* until it is continued."""
    # The signal is blocked here, and so stops this process in the next line.
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})


def end_as(status: int) -> int:
    """End this process by the signal that has ended a command, if one has; return the exit status otherwise.

    Returns:
        *status*; 128 + n where signal n does not end this process, as in the first of a container.
    """
    if status >= 0:
        return status
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    # The command has written its core file. One of ours would say nothing of it.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with suppress(OSError):  # SIGKILL has no handler
        signal.signal(-status, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {-status})
    os.kill(os.getpid(), -status)
    return 128 - status


class _Witness:
    """A process of our group that tells which signals were sent to the group.

    It also outlives us if we are killed, and then asks the command to terminate.
    """

    def __init__(self) -> None:
        asked, self._ask = os.pipe()
        self._answers, answer = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            try:
                os.close(self._ask)
                os.close(self._answers)
                _attest(asked, answer)
            finally:
                os._exit(0)
        os.close(asked)
        os.close(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self._say(0)
        os.close(self._ask)
        os.close(self._answers)
        os.waitpid(self._pid, 0)

    def guard(self, command: int) -> None:
        """Have it ask the process *command* to terminate when this one is killed."""
        self._say(command)

    def has_seen(self, number: int) -> bool:
        """Return whether the signal *number*, which we have received, was sent to the group."""
        self._say(number)
        return os.read(self._answers, 1) == b"1"

    def _say(self, number: int) -> None:
        with suppress(BrokenPipeError):  # somebody has killed it: then every signal is passed on
            os.write(self._ask, b"%d\n" % number)


def _attest(asked: int, answer: int) -> None:
    """Answer as the witness: first comes the process to guard, then signals, then 0 if all ends well."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # whoever reads our output waits for its end
        os.dup2(nowhere, stream)
    words, command = _words(asked), 0
    for number in words:
        if not number:
            return
        if not command:
            command = number
            continue
        until = time.monotonic() + GRACE_S
        while number not in signal.sigpending() and time.monotonic() < until:
            time.sleep(POLL_S)
        has_seen = number in signal.sigpending()
        if has_seen:
            signal.sigwait({number})
        os.write(answer, b"01"[has_seen : has_seen + 1])
    if command:
        with suppress(ProcessLookupError):
            os.kill(command, signal.SIGTERM)


def _words(asked: int) -> Iterator[int]:
    """Yield the numbers that come in until nobody can send any more.

    Nobody has asked for a signal that is pending for long: of two to the group, we may have received one. It
    goes, or the next one of its kind that is for us alone would be taken for it, and lost.
    """
    late, rest = set[int](), b""
    while True:
        if not select.select([asked], [], [], LATE_S)[0]:
            for number in late & signal.sigpending():
                signal.sigwait({number})
            late = signal.sigpending()
            continue
        said = os.read(asked, 1 << 10)
        if not said:
            return
        *lines, rest = (rest + said).split(b"\n")
        yield from map(int, lines)
