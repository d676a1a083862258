"""The start of a script, and of programs and processes that it starts in order to train: in its own process.

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
from importlib import import_module
from importlib.machinery import FrozenImporter, PathFinder, SourceFileLoader
from itertools import dropwhile, groupby, pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, Final

from foretrace.door import counted
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.replacing import replaces
from foretrace.tracer.rehearse.state import State
from foretrace.tracer.rehearse.words import STUB, asker, led_to
from foretrace.tracer.rehearse.world import launchers
from foretrace.tracer.rehearse.world.launchers import (
    accelerate_flags,
    exported,
    on_node,
    started,
    tell_accelerate,
    told_by_fabric,
)

STARTS_RANKS: Final = "starts_ranks"
"""Key in the description of a job whose script starts the processes of its ranks itself."""

# The start of a script, in a process that has loaded torch, as of a process that has not.


def begin(words: Sequence[str], *, is_module: bool) -> None:
    """Let arguments, path and modules be those of a process that a launcher starts.

    What the folder of the script has is imported from there, also if something of that name is loaded.
    """
    sys.argv = [*words]
    sys.modules.pop("__mp_main__", None)
    sys.orig_argv = [sys.executable, "-u", *(["-m"] if is_module else []), *words]
    if sys.flags.safe_path:
        return
    first = str(Path.cwd() if is_module else Path(words[0]).resolve().parent)
    # The command may set it: this process began without that.
    told = [str(Path(one).absolute()) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:0] = [first, *(one for one in told if one not in sys.path)]
    # Python imports the last three unasked, before it comes to a script.
    kept = {"foretrace", "torch", *sys.builtin_module_names, "sitecustomize", "usercustomize", "encodings"}
    for name in {one.partition(".")[0] for one in sys.modules} - kept:
        # What is frozen Python finds before any path: no script imports a ``stat.py`` of its own.
        own = None if FrozenImporter.find_spec(name) else PathFinder.find_spec(name, [first])
        if (
            own is None
            or own.origin is None
            or own.origin == getattr(sys.modules.get(name), "__file__", None)
        ):
            continue
        for one in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
            del sys.modules[one]


def run_file(path: str) -> None:
    """Run the script in *path* as ``__main__``.

    As for ``python path``, ``__file__`` and the names of files in tracebacks are absolute, and
    ``sys.argv[0]`` stays what it is. ``runpy.run_path`` gives all of them the path as it is given.

    Raises:
        FileNotFoundError: there is no such file.
    """
    found = os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118 - which leaves ./ in it
    code = compile(Path(found).read_bytes(), found, "exec", dont_inherit=True)
    module = ModuleType("__main__")
    module.__file__, module.__loader__ = found, SourceFileLoader("__main__", found)
    module.__dict__["__cached__"] = None
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    exec(code, module.__dict__)


# Which rank a training is for that a script starts: by its environment, or by its arguments.

OWN_RANK: Final = MappingProxyType(
    {"--rank": "RANK", "--local_rank": "LOCAL_RANK", "--local-rank": "LOCAL_RANK"}
)
"""Arguments by which a script is told its rank where no variable does, and the variables that would."""


def is_anothers(script: Sequence[str], env: Mapping[str, str], told: Mapping[str, str]) -> bool:
    """Whether a training belongs to another rank than this one.

    A launcher for the GPUs of one node may tell ``RANK`` only.

    >>> [is_anothers(["a.py", f"--rank={n}"], {}, {"RANK": "9", "LOCAL_RANK": "1"}) for n in (0, 1, 9)]
    [True, False, False]
    """
    env = {**env, **rank_of(script)}
    own = [told[name] for name in ("LOCAL_RANK", "RANK") if name in told]
    if not own:
        return False
    return env.get("LOCAL_RANK", own[0]) != own[0] or env.get("RANK", own[-1]) not in own


def rank_of(script: Sequence[str]) -> dict[str, str]:
    """Return what the arguments of *script* say of its rank, by the variables that would say it.

    >>> rank_of(["train.py", "--rank=3", "--num_gpus=8"]), rank_of(["train.py", "--local_rank", "1"])
    ({'RANK': '3'}, {'LOCAL_RANK': '1'})
    >>> rank_of(["train.py", "--rank"]), rank_of(["train.py", "--rank", "r"])
    ({}, {})
    """
    words = [part for word in script[1:] for part in word.split("=", 1)]
    said = [(OWN_RANK[flag], value) for flag, value in pairwise(words) if flag in OWN_RANK]
    return {name: value for name, value in said if counted(value) >= 0}


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


def install(session: State, spec: Mapping[str, Any]) -> None:
    """Run the trainings that the script of *spec* starts in this process, as torchrun would."""
    import torch.distributed.launcher.api

    trainings = _Trainings(session, spec)

    @replaces(subprocess.Popen, name="__init__")
    def init(starts: Any, self: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
        # By position, pipes come behind *bufsize* and *executable*.
        is_captured = any(kwargs.get(name) == subprocess.PIPE for name in CAPTURED) or len(rest) > 1
        found = _allowed(args)
        code = None if is_captured else trainings.start(found, kwargs.get("env"), kwargs.get("cwd"))
        if code is None:
            starts(self, args, *rest, **kwargs)
        else:
            _be_over(self, args, code)

    @replaces(os)
    def system(run_line: Any, command: Any) -> int:
        code = trainings.start(_allowed(command), None, None)
        # As ``wait`` tells it: the exit status is in the upper byte.
        return int(run_line(command)) if code is None else code << 8

    def become(original: Any, file: Any, args: Sequence[Any], *env: Any) -> None:
        # The first of *args* is only what the program is told to be called.
        words = [os.fspath(file), *map(str, args[1:])]
        code = trainings.start(_allowed(words), env[0] if env else None, None)
        if code is None:
            original(file, args, *env)
        # A process does not come back from ``exec``.
        sys.exit(code)

    for name in ("execv", "execve", "execvp", "execvpe"):
        replaces(os, name=name)(become)

    # ``torchrun``, ``accelerate launch`` and ``notebook_launcher`` all call this function, with the words of
    # a program or with a Python function.
    @replaces(torch.distributed.launcher.api)
    def launch_agent(_: Any, config: Any, entrypoint: Any, args: Sequence[Any], *__: Any, **___: Any) -> Any:
        return {spec["rank"]: trainings.launch(entrypoint, args)}


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

    def __init__(self, session: State, spec: Mapping[str, Any]) -> None:
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
        told = launchers.environment(spec, env)
        told |= told_by_fabric(command, spec["world_size"], spec["local_world_size"])
        if is_anothers(script, env or {}, told):
            return 0
        self._session.warn(
            f"{asker()} starts {Path(command[0]).name} on {Path(script[0]).name}, which is run in its place"
        )
        self._session.job[STARTS_RANKS] = True
        flags = accelerate_flags(command)
        with _surroundings({**(env or {}), **told}, cwd, launchers.words_of(spec), is_module=is_module):
            if flags is not None:
                tell_accelerate(flags, self._spec["world_size"])
            return _ended(script[0], is_module=is_module)

    def launch(self, entrypoint: Any, args: Sequence[Any]) -> Any:
        """Run once what torch's launcher would start per GPU; return its result.

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
        self._session.job[STARTS_RANKS] = True
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
    # All words came back: none of them is a script.
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


# Processes that a script starts itself, one per GPU: the one of this rank is run in the present process.


JOINING: Final = "init_process_group"
"""Function that a process calls if it trains together with others."""

DEPTH: Final = 4
"""Longest chain of functions that is followed to find a call of ``JOINING``."""


def _over() -> SimpleNamespace:
    """Return the handle of a process that has ended successfully, or that was run in the present process."""
    answers = {**dict.fromkeys(("poll", "wait"), 0), **dict.fromkeys(("close", "terminate", "kill"))}
    told = {name: lambda *_, answer=answer, **__: answer for name, answer in answers.items()}
    return SimpleNamespace(pid=os.getpid(), returncode=0, **told)


ENDED: Final = SimpleNamespace(processes=(), join=lambda *_, **__: True, pids=list)
"""Context of processes that have all ended."""


def install_children(session: State) -> None:
    """Make a script that starts a process per GPU run the one of this rank in the present process."""
    import torch.multiprocessing

    def spawn(
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        nprocs: int = 1,
        join: Any = True,  # noqa: FBT002 - as torch has it
        *_: Any,
        **__: Any,
    ) -> Any:
        number = _number(session, whole=nprocs == session.world_size)
        if number < nprocs:
            _alone(lambda: fn(number, *args))
        return None if join else ENDED

    spawning: Any = import_module("torch.multiprocessing.spawn")
    for module in (torch.multiprocessing, spawning):
        module.spawn = module.start_processes = spawn
    _processes(session)


def _number(session: State, *, whole: bool) -> int:
    """Return the number of this rank's process among those of the *whole* world, or else of a node."""
    session.job[STARTS_RANKS] = True
    return session.rank if whole else on_node()[0]


def _processes(session: State) -> None:
    """Do the same for processes that are started one by one; those of other ranks count as ended."""
    n_started = 0

    @replaces(BaseProcess)
    def start(original: Any, self: Any) -> None:
        nonlocal n_started
        if not _joins(self):
            original(self)
            return
        self._popen, number, n_started = _over(), n_started, n_started + 1
        told = (*self._args, *self._kwargs.values())
        # Only whole numbers are compared: a tensor among the arguments has no single truth.
        is_of_world = any(isinstance(one, int) and one == session.world_size for one in told)
        # Processes that train are taken to be started in the order of their ranks.
        if number == _number(session, whole=is_of_world):
            _alone(self.run)


def _alone(run: Callable[[], Any]) -> None:
    """Do what a process does, whose process groups end with it."""
    import torch.distributed as dist

    is_of_caller = dist.is_initialized()
    run()
    if dist.is_initialized() and not is_of_caller:
        dist.destroy_process_group()


def _joins(process: Any) -> bool:
    """Whether the target of *process* leads to a call of ``JOINING``, by the names in its code."""
    is_own = type(process).run is not BaseProcess.run
    told = (*process._args, *process._kwargs.values())  # noqa: SLF001
    return any(
        JOINING in names
        for function in (type(process).run if is_own else process._target, *told)  # noqa: SLF001
        if isinstance(function, FunctionType)
        for _, names in led_to(function, DEPTH)
    )
