"""Programs that a script starts in order to train: they are run in the script's own process.

Command lines of libraries start torchrun, ``accelerate launch`` or Python on the training script, once per
node or once per GPU, or call torch's launcher themselves. That would start a real training, which the
rehearsal could not see. A program that installs packages is refused: a rehearsal changes nothing on the
machine. Every other program is really started.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import dropwhile, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.hints import STUB
from foretrace.tracer.rehearse.ranks import accelerated, launchers
from foretrace.tracer.rehearse.ranks.exported import exported, started
from foretrace.tracer.rehearse.ranks.fabric import told_by_fabric
from foretrace.tracer.rehearse.script.main_file import begin, run_file
from foretrace.tracer.rehearse.script.own_rank import is_anothers
from foretrace.tracer.rehearse.words import asker

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

CAPTURED: Final = ("stdin", "stdout", "stderr")
"""Arguments by which a caller asks for a pipe to a program; a caller that starts a training does not."""

SHELLS: Final = frozenset({"sh", "bash", "zsh", "dash"})
"""Shells, which take a line after ``-c``."""

JOINS: Final = frozenset("();<>|&")
"""Letters of the words that join commands in a line for a shell, or lead to a file."""

INSTALLS: Final = re.compile(
    r"(pip3?|uv( pip)?|conda|mamba|micromamba|apt|apt-get) (env )?"
    r"(install|uninstall|sync|add|remove|purge|create|update|upgrade|dist-upgrade|full-upgrade|build-dep)\b"
)
"""Commands, without their options, that change the packages of the machine."""

LOCAL_RANK: Final = "${local_rank}"
"""Text that torch's launcher replaces by the local rank of a process (``macros`` of its elastic API)."""


def install(session: RehearsalSession, spec: Mapping[str, Any]) -> None:
    """Run the trainings that the script of *spec* starts in this process, as torchrun would."""
    trainings = _Trainings(session, spec)
    starts, run_line = subprocess.Popen.__init__, os.system
    anywhere: Any = subprocess.Popen

    def init(self: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
        is_captured = any(kwargs.get(name) == subprocess.PIPE for name in CAPTURED) or len(rest) > 1
        found = _allowed(args)
        code = None if is_captured else trainings.start(found, kwargs.get("env"), kwargs.get("cwd"))
        if code is None:
            starts(self, args, *rest, **kwargs)
        else:
            _be_over(self, args, code)

    def system(command: Any) -> int:
        code = trainings.start(_allowed(command), None, None)
        return run_line(command) if code is None else code << 8

    anywhere.__init__, os.system = init, system
    for name in ("execv", "execve", "execvp", "execvpe"):
        setattr(os, name, _replacing(getattr(os, name), trainings))
    _launch(trainings, spec["rank"])


def _launch(trainings: _Trainings, rank: int) -> None:
    """Do the same for calls of torch's launcher in this process, as by the commands of TRL and Accelerate.

    ``torchrun``, ``accelerate launch`` and ``notebook_launcher`` all call this function, with the words of a
    program or with a Python function.
    """
    import torch.distributed.launcher.api

    def launch_agent(_: Any, entrypoint: Any, args: Sequence[Any], *__: Any, **___: Any) -> dict[int, Any]:
        return {rank: trainings.launch(entrypoint, args)}

    anywhere: Any = torch.distributed.launcher.api
    anywhere.launch_agent = launch_agent


def _replacing(original: Callable[..., Any], trainings: _Trainings) -> Callable[..., Any]:
    """Return the ``exec`` function *original*, which runs a training in this process instead."""

    def become(file: Any, args: Sequence[Any], *env: Any) -> None:
        words = [os.fspath(file), *map(str, args[1:])]
        code = trainings.start(_allowed(words), env[0] if env else None, None)
        if code is None:
            original(file, args, *env)
        sys.exit(code)

    return become


def _allowed(command: Any) -> list[list[str]]:
    """Return the words of each command in *command*. Raises RehearsalError if one installs packages."""
    found = _commands(command)
    for words in found:
        if INSTALLS.match(" ".join(_program(words))):
            raise RehearsalError(
                f"{asker()} starts {shlex.join(words)}: a rehearsal installs nothing; install what the "
                "script needs beforehand, and leave that out, by an argument of the script or a stub file "
                f"({STUB})"
            )
    return found


def _commands(command: Any) -> list[list[str]]:
    """Return the words of each command in *command*, a line or words as ``subprocess`` accepts them.

    A line whose quotes do not close has none.

    >>> _commands("cd 'my runs' && A=1 torchrun a.py -n 2; echo done")
    [['cd', 'my runs'], ['A=1', 'torchrun', 'a.py', '-n', '2'], ['echo', 'done']]
    >>> _commands(["bash", "-lc", "torchrun a.py"]), _commands("echo 'open")
    ([['torchrun', 'a.py']], [])
    """
    if isinstance(command, str):
        line = os.path.expandvars(command.replace("\n", ";"))
        read = shlex.shlex(line, posix=True, punctuation_chars=True)
        read.whitespace_split = True
        try:
            return [[*one] for joins, one in groupby(read, lambda word: set(word) <= JOINS) if not joins]
        except ValueError:
            return []
    words = [str(word) for word in command] if isinstance(command, Sequence) else []
    if len(words) > 2 and Path(words[0]).name in SHELLS and re.fullmatch(r"-\w*c", words[1]):
        return _commands(words[2])
    return [words] if words else []


def _be_over(program: Any, args: Any, code: int) -> None:
    """Make *program*, a ``Popen`` object, one that has ended with *code*."""
    program.args, program.pid, program.returncode = args, os.getpid(), code
    program.stdin = program.stdout = program.stderr = None
    program._child_created = program._communication_started = False  # noqa: SLF001 - as Popen makes them
    program._waitpid_lock, program._input = threading.Lock(), None  # noqa: SLF001
    program.text_mode = program.encoding = program.errors = None


class _Trainings:
    """Runs in this process the trainings that the script starts."""

    def __init__(self, session: RehearsalSession, spec: Mapping[str, Any]) -> None:
        self._session, self._spec = session, spec

    def start(self, lines: Sequence[list[str]], env: Mapping[str, str] | None, cwd: Any) -> int | None:
        """Run the training that one of the commands *lines* starts, behind others that change the folder.

        Returns:
            How it ended; None if none of them is a training.

        Raises:
            RehearsalError: a launcher is one of several commands, or is told nothing that could be run.
        """
        left = list(lines)
        while len(left) > 1 and left[0][0] == "cd" and len(left[0]) == 2:
            cwd = Path(cwd or "", left.pop(0)[1])
        if len(left) == 1:
            return self.run(left[0], env, cwd)
        if unclear := next((words for words in left if _is_launcher(started(words))), None):
            raise RehearsalError(_unclear(started(unclear), " among other commands"))
        return None

    def run(self, words: Sequence[str], env: Mapping[str, str] | None, cwd: Any) -> int | None:
        """Run the training that the command *words* starts; return how it ended, None if it starts none.

        Raises:
            RehearsalError: a launcher is told nothing that a rehearsal could run.
        """
        command = started(words)
        if own := exported(words):
            env = {**(env or {}), **own}
        found = training_of(command)
        if found is None:
            return None
        script, is_module = found
        if not script:
            raise RehearsalError(_unclear(command))
        before = (*self._spec["launchers"], *launchers.launchers_of(command))
        spec = {**self._spec, "launchers": before, "command": script}
        told = launchers.environment(spec)
        told |= told_by_fabric(command, spec["world_size"], spec["local_world_size"])
        if is_anothers(script, env or {}, told):
            return 0
        self._session.warn(
            f"{asker()} starts {Path(command[0]).name} on {Path(script[0]).name}, which is run in its place"
        )
        flags = accelerated.accelerate_flags(command)
        with _surroundings({**(env or {}), **told}, cwd, launchers.words_of(spec), is_module=is_module):
            if flags is not None:
                accelerated.tell_accelerate(flags, self._spec["world_size"])
            return _ended(script[0], is_module=is_module)

    def launch(self, entrypoint: Any, args: Sequence[Any]) -> Any:
        """Run once what torch's launcher would start per GPU; return its result.

        Args:
            entrypoint: a function, or a program.
            args: arguments of the function, or of the program.

        Raises:
            RehearsalError: a rehearsal cannot run the program.
        """
        told = launchers.environment({**self._spec, "launchers": (*self._spec["launchers"], "torchrun")})
        if not callable(entrypoint):
            words = [entrypoint, *(str(word).replace(LOCAL_RANK, told["LOCAL_RANK"]) for word in args)]
            code = self.run(["torchrun", *words[1:]] if is_interpreter(words[0]) else words, None, None)
            if code is None:
                raise RehearsalError(_unclear(words))
            return sys.exit(code) if code else None
        name = getattr(entrypoint, "__name__", "a function")
        self._session.warn(f"{asker()} starts {name} once per GPU, which is run in its place")
        with _own(told):
            return entrypoint(*args)


def _program(command: Sequence[str]) -> list[str]:
    """Return what *command* runs and is told, without ``sudo``, folders and options.

    >>> _program(["sudo", "-E", "/usr/bin/apt-get", "-y", "install", "x"])
    ['apt-get', 'install', 'x']
    >>> _program(["A=1", "python3", "-I", "-m", "pip", "install", "-q", "x"])
    ['pip', 'install', 'x']
    """
    words = [*started(command)]
    if words and Path(words[0]).name == "sudo":
        words = [*dropwhile(lambda word: word.startswith("-"), words[1:])]
    if words and is_interpreter(words[0]):
        words = past_options(words[1:])
        words = words[1:] if words[:1] == ["-m"] else []
    return [Path(word).name if at == 0 else word for at, word in enumerate(words) if not word.startswith("-")]


def _unclear(command: Sequence[str], where: str = "") -> str:
    """Return what to say of a *command* that trains, and does not tell what, and of *where* it stands."""
    starts = f"{asker()} starts {' '.join(command[:2])}{where}"
    return f"{starts}, and it is not clear what that runs; rehearse that command instead"


def training_of(command: Sequence[str]) -> tuple[tuple[str, ...], bool] | None:
    """Return script and arguments of the training that *command* starts, and whether the script is a module.

    The script is empty if it is unclear what a launcher starts; None if *command* starts no training.

    >>> training_of(["/usr/bin/python3", "-m", "torch.distributed.run", "--nnodes", "8", "a.py", "-v"])
    (('a.py', '-v'), False)
    >>> training_of(["accelerate", "launch", "-m", "axolotl.cli.train", "a.yaml"])
    (('axolotl.cli.train', 'a.yaml'), True)
    >>> training_of(["python", "-u", "-W", "ignore", "a.py", "-v"])
    (('a.py', '-v'), False)
    >>> training_of(["torchrun", "--help"])
    ((), False)
    >>> training_of(["python", "-m", "pip", "install", "x"]) is training_of(["git", "status"]) is None
    True
    """
    if not command:
        return None
    name, words = Path(command[0]).name, list(command[1:])
    if is_python := is_interpreter(command[0]):
        name, words = "python", past_options(words)
    if not _is_launcher(command) and not (is_python and words and words[0].endswith(".py")):
        return None
    script, is_module = launchers.script_of([name, *words])
    return ((), False) if len(script) == len(words) + 1 else (script, is_module)


def _is_launcher(command: Sequence[str]) -> bool:
    """Whether *command* is one that starts a process per rank."""
    if not command:
        return False
    name, words = Path(command[0]).name, list(command[1:])
    if is_interpreter(command[0]):
        module = past_options(words)
        return module[:1] == ["-m"] and len(module) > 1 and module[1] in launchers.MODULES
    return name in {"torchrun", "deepspeed"} or (name == "accelerate" and words[:1] == ["launch"])


def is_interpreter(program: str) -> bool:
    """Whether *program* is a Python interpreter."""
    return program == sys.executable or Path(program).name.startswith("python")


def past_options(words: Sequence[str]) -> list[str]:
    """Return the arguments of Python after its own options: a file, ``-m`` and a module, or ``-c`` and code.

    >>> past_options(["-u", "-X", "dev", "-m", "a", "-u"])
    ['-m', 'a', '-u']
    """
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in {"-m", "-c", "-"}:
        at += 2 if words[at] in {"-W", "-X"} else 1
    return list(words[at:])


@contextmanager
def _surroundings(
    env: Mapping[str, str], cwd: Any, script: Sequence[str], *, is_module: bool
) -> Iterator[None]:
    """Inside this context, set what a new process would have: *env*, *cwd*, the command line *script*."""
    with _own(env):
        if cwd is not None:
            os.chdir(cwd)
        begin(script, is_module=is_module)
        yield


@contextmanager
def _own(env: Mapping[str, str]) -> Iterator[None]:
    """Add *env* to the environment; on exit restore it, the folder and the state of the interpreter."""
    kept = dict(os.environ), Path.cwd(), sys.argv, list(sys.path), sys.modules["__main__"]
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept[0])
        os.chdir(kept[1])
        sys.argv, sys.path[:], sys.modules["__main__"] = kept[2:]


def _ended(script: str, *, is_module: bool) -> int:
    """Run *script* as the main program; return its exit status.

    An error in it is raised here: it says where the training went wrong.
    """
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            run_file(script)
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    return 0
