"""What stands before a script on a command line starts a process per rank, which a rehearsal does itself.

What such a launcher would tell the script in the environment, a rehearsal tells it, too. torchrun, srun and
mpirun say who a process is.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from foretrace.tracer.rehearse.errors import RehearsalError

# Variables of the environment that a script asks for: what sets them, and what a command line sets itself.


SETS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "torchrun"),
        "SLURM_": "srun",
        **dict.fromkeys(("OMPI_", "PMI_", "MPI_", "MV2_"), "mpirun"),
    }
)
"""How names of variables begin, and which launcher sets them."""

BY: Final[Mapping[str, str]] = MappingProxyType(
    {"torchrun": "train.py", "srun": "python train.py", "mpirun": "python train.py"}
)
"""What stands behind a launcher on a command line."""

ALIKE: Final = frozenset({"WORLD_SIZE", "LOCAL_WORLD_SIZE"})
"""Variables of torchrun that are the same for every rank, so that a file of a batch job can export them."""

_VARIABLE: Final = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def exported(command: Sequence[str]) -> dict[str, str]:
    """Return the variables that *command* sets before it names what it starts, as a shell or ``env`` does.

    >>> exported(["WORLD_SIZE=64", "srun", "python", "train.py", "lr=1"])
    {'WORLD_SIZE': '64'}
    """
    words = command[: len(command) - len(started(command))]
    return {match[1]: match[2] for word in words if (match := _ASSIGNMENT.fullmatch(word))}


def started(command: Sequence[str]) -> Sequence[str]:
    """Return *command* without the variables that it sets first.

    >>> started(["env", "WORLD_SIZE=64", "srun", "python", "train.py"]), started(["train.py", "lr=1"])
    (['srun', 'python', 'train.py'], ['train.py', 'lr=1'])
    """
    at = int(bool(command) and Path(command[0]).name == "env")
    while at < len(command) and _ASSIGNMENT.fullmatch(command[at]):
        at += 1
    return command[at:]


def missing(variable: str, spec: Mapping[str, Any]) -> str:
    """Return what to do about a *variable* that is not set, empty if it is none of a launcher.

    >>> spec = {"launchers": ("srun", "python"), "world_size": 64, "local_world_size": 8}
    >>> missing("WORLD_SIZE", spec)
    'which srun does not set: write it before srun, as in -- env WORLD_SIZE=64 srun python train.py'
    >>> missing("SLURM_PROCID", {**spec, "launchers": ()})
    'which srun sets: write it before the script, as in -- srun python train.py'
    """
    launcher = next((name for sign, name in SETS.items() if variable.startswith(sign)), "")
    given = next((name for name in spec.get("launchers", ()) if name in BY), "")
    if not launcher:
        return ""
    if given and (launcher == given or variable in ALIKE):
        size = spec["world_size" if variable == "WORLD_SIZE" else "local_world_size"]
        value = size if variable in ALIKE else "..."
        example = f"-- env {variable}={value} {given} {BY[given]}"
        return f"which {given} does not set: write it before {given}, as in {example}"
    return f"which {launcher} sets: write it before the script, as in -- {launcher} {BY[launcher]}"


LAUNCHERS: Final = ("torchrun", "accelerate", "deepspeed", "fabric", "python", "python3")
"""First words of commands that start a script; ``fabric run`` is Lightning's."""

OF_TASKS: Final[Mapping[str, str]] = MappingProxyType(
    {"srun": "SLURM", **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "orterun"), "MPI")}
)
"""Those that start whatever they are told, and whose variables say which task of all a process is."""

MODULES: Final = frozenset(
    {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "torchrun"}
)
"""Modules that do the same after ``python -m``."""

PARSING: Final = MODULES | {"torchrun", "accelerate", "deepspeed", "fabric"}
"""Those that parse what is behind them, the script's own words apart."""

OLD: Final = "torch.distributed.launch"
"""The module that also tells a script its rank on the node by an argument, unless told ``--use-env``."""

BY_ARGUMENT: Final[Mapping[str, str]] = MappingProxyType({OLD: "--local-rank", "deepspeed": "--local_rank"})
"""Launchers that tell a script its rank on the node by an argument, too, and by which."""

NO_ARGUMENT: Final = frozenset({"--use-env", "--use_env", "--no_local_rank"})
"""What they are told so that they do not."""

MOST_READ: Final = 4096
"""Bytes of a file that are read: its first lines name who runs it, by way of a shell if the name is long."""

CPUS_PER_TASK: Final = 8
"""Processors that a task of SLURM is told to have; loaders, which ask for them, work in the rank itself."""


def environment(spec: Mapping[str, Any], env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what the launchers of a command set for a rank, and where the first rank is.

    The launchers are started with *env* beside what this process has and the command exports.
    Where none is named it is what torchrun sets, which is also so behind ``srun`` or ``mpirun``: those then
    start one torchrun per node.
    """
    rank, n_ranks, n_local = spec["rank"], spec["world_size"], spec["local_world_size"]
    found: dict[str, object] = {**spec.get("exported", {}), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    families = [OF_TASKS[name] for name in spec["launchers"] if name in OF_TASKS]
    is_per_rank = not families or spec["launchers"][-1] not in {*OF_TASKS, "python", "python3"}
    if is_per_rank:
        found |= _of_torchrun(rank, n_ranks, n_local)
        if n_local > 1:
            # torchrun does so for several processes, unless the variable is set (torch/distributed/run.py).
            given = {**os.environ, **spec.get("exported", {}), **(env or {})}
            found["OMP_NUM_THREADS"] = given.get("OMP_NUM_THREADS", "1")
    # Where torchrun starts the ranks, SLURM or MPI have one task on each node.
    task = (rank // n_local, -(-n_ranks // n_local), 1) if is_per_rank else (rank, n_ranks, n_local)
    for family in families:
        found |= _OF_FAMILY[family](*task)
    if "SLURM" in families:
        found["SLURM_GPUS_ON_NODE"] = n_local  # also where a task of a node starts torchrun on them
    return {name: str(value) for name, value in found.items()}


def words_of(spec: Mapping[str, Any]) -> list[str]:
    """Return script and arguments as a rank is started with them.

    What a launcher sets may stand in an argument, as ``$RANK`` in a line that a shell on every node reads.
    Sources: ``config_from_args`` in torch/distributed/run.py; ``main`` in deepspeed/launcher/launch.py.

    >>> spec = {"rank": 9, "world_size": 16, "local_world_size": 8, "command": ["a.py", "--id=$RANK", "$5"]}
    >>> words_of({**spec, "launchers": ("python", OLD)}), words_of({**spec, "launchers": ("torchrun",)})
    (['a.py', '--local-rank=1', '--id=9', '$5'], ['a.py', '--id=9', '$5'])
    """
    script, *arguments = spec["command"]
    at, is_set = spec["rank"] % spec["local_world_size"], environment(spec)
    told = [f"{BY_ARGUMENT[name]}={at}" for name in spec["launchers"] if name in BY_ARGUMENT]
    own = [_VARIABLE.sub(lambda found: is_set.get(found[1] or found[2], found[0]), one) for one in arguments]
    return [script, *told[-1:], *own]


def _of_torchrun(rank: int, n_ranks: int, n_local: int) -> dict[str, object]:
    """Return what torchrun sets: one group of workers per node, none of which was started again.

    Source: ``worker_env`` in torch/distributed/elastic/agent/server/local_elastic_agent.py.
    """
    return {
        "RANK": rank,
        "WORLD_SIZE": n_ranks,
        "LOCAL_RANK": rank % n_local,
        "LOCAL_WORLD_SIZE": n_local,
        "GROUP_RANK": rank // n_local,
        "GROUP_WORLD_SIZE": -(-n_ranks // n_local),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": n_ranks,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": "rehearsal",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
    }


def _of_slurm(task: int, n_tasks: int, n_local: int) -> dict[str, object]:
    """Return what srun sets for a task (section "Output environment variables" of its manual)."""
    n_nodes = -(-n_tasks // n_local)
    nodes = f"node[0-{n_nodes - 1}]" if n_nodes > 1 else "node0"
    return {
        "SLURM_PROCID": task,
        "SLURM_LOCALID": task % n_local,
        "SLURM_NODEID": task // n_local,
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), n_tasks),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES"), n_nodes),
        **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST"), nodes),
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), 1),
        "SLURM_STEP_ID": 0,
        "SLURM_JOB_NAME": "rehearsal",
        "SLURM_NTASKS_PER_NODE": n_local,
        "SLURM_GPUS_ON_NODE": n_local,
        "SLURM_CPUS_ON_NODE": CPUS_PER_TASK * n_local,
        "SLURM_CPUS_PER_TASK": CPUS_PER_TASK,
        "SLURM_TASKS_PER_NODE": f"{n_local}(x{n_nodes})" if n_nodes > 1 else n_local,
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURMD_NODENAME": f"node{task // n_local}",
    }


def _of_mpi(task: int, n_tasks: int, n_local: int) -> dict[str, object]:
    """Return what Open MPI sets for a task, and MPICH with the MPIs that come of it."""
    names = ("OMPI_COMM_WORLD_{}", "PMI_{}", "MV2_COMM_WORLD_{}")
    found: dict[str, object] = {name.format("RANK"): task for name in names}
    found |= {name.format("SIZE"): n_tasks for name in names}
    for name in ("OMPI_COMM_WORLD_LOCAL_{}", "MV2_COMM_WORLD_LOCAL_{}"):
        found |= {name.format("RANK"): task % n_local, name.format("SIZE"): n_local}
    return found | {"MPI_LOCALRANKID": task % n_local, "MPI_LOCALNRANKS": n_local}


_ON_NODE: Final = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)

_OF_FAMILY: Final[Mapping[str, Callable[[int, int, int], dict[str, object]]]] = MappingProxyType(
    {"SLURM": _of_slurm, "MPI": _of_mpi}
)


def on_node() -> tuple[int, int]:
    """Return the rank of this process on its node and how many there are, as its launchers have said."""
    found = _names_on_node()
    return (int(os.environ[found[0]]), int(os.environ[found[1]])) if found else (0, 1)


def name_on_node() -> str:
    """Return the name of the variable that says the rank of this process on its node."""
    return next(iter(_names_on_node()), "LOCAL_RANK")


def is_task() -> bool:
    """Whether this process is one of several tasks that SLURM or MPI have started on its node."""
    return any(int(os.environ.get(size, "1")) > 1 for _, size in _ON_NODE[1:])


def _names_on_node() -> tuple[str, ...]:
    """Return the variables that say the rank on the node, and how many there are; () if none is set."""
    return next((names for names in _ON_NODE if all(name in os.environ for name in names)), ())


def inherited(names: Iterable[str]) -> list[str]:
    """Return those of *names* by which the launcher of this very process says who it is, not of a rank."""
    own = {*_of_torchrun(0, 1, 1), *_of_slurm(0, 1, 1), *_of_mpi(0, 1, 1)}
    return [name for name in names if name in own]


def launchers_of(command: Sequence[str]) -> tuple[str, ...]:
    """Return what starts the script of *command*, each after what it is started by.

    >>> launchers_of(["srun", "-n", "2", "torchrun", "--nproc-per-node", "8", "train.py"])
    ('srun', 'torchrun')
    >>> launchers_of(["train.py"]), launchers_of(["mpirun", "python", "-m", "package.train"])
    ((), ('mpirun', 'python'))
    >>> launchers_of(["srun", "python", "-m", "torch.distributed.run", "train.py"])
    ('srun', 'python', 'torchrun')
    >>> launchers_of(["python", "-m", "torch.distributed.launch", "train.py"])
    ('python', 'torch.distributed.launch')
    >>> launchers_of(["deepspeed", "train.py"]), launchers_of(["deepspeed", "--no_local_rank", "train.py"])
    (('deepspeed',), ('torchrun',))
    """
    before = [Path(word).name for word in before_script(command)]
    modules = [word for flag, word in pairwise(before) if flag == "-m" and word in MODULES]
    is_silent = bool(NO_ARGUMENT & {*before})
    if modules:
        before.append(OLD if modules == [OLD] and not is_silent else "torchrun")
    if is_silent:
        before = ["torchrun" if word in BY_ARGUMENT else word for word in before]
    # What stands behind -m was added above, and counts once.
    return tuple(word for at, word in enumerate(before) if _starts(word) and before[at - 1 : at] != ["-m"])


def _starts(word: str) -> bool:
    """Whether *word* of a command names what starts the words behind it."""
    return word in LAUNCHERS or word in OF_TASKS or word == OLD


def before_script(command: Sequence[str]) -> tuple[str, ...]:
    """Return the words of *command* before its script, and before the -m of a module.

    >>> before_script(["torchrun", "--nproc-per-node", "8", "-m", "package.train", "--lr", "1"])
    ('torchrun', '--nproc-per-node', '8')
    """
    script, is_module = _as_written(command)
    return tuple(command[: len(command) - len(script) - is_module])


def script_of(command: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """Return script and arguments of *command*, and whether the script is the name of a module.

    >>> script_of(["torchrun", "--nproc-per-node", "8", "train.py", "--lr", "1"])
    (('train.py', '--lr', '1'), False)
    >>> script_of(["python", "-m", "package.train", "--lr", "1"])
    (('package.train', '--lr', '1'), True)
    >>> script_of(["python", "-m", "accelerate.commands.launch", "-m", "package.train"])
    (('package.train',), True)
    >>> script_of(["srun", "-m", "cyclic", "python", "train.py"])
    (('train.py',), False)
    >>> script_of(["env", "WORLD_SIZE=64", "srun", "python", "train.py"])
    (('train.py',), False)

    Launchers take two dashes behind a script for the end of their own words; Python hands them on.

    >>> script_of(["torchrun", "-m", "train", "--", "-v"]), script_of(["python", "-m", "train", "--", "-v"])
    ((('train', '-v'), True), (('train', '--', '-v'), True))
    """
    script, is_module = _as_written(command)
    before = before_script(command)
    is_parsed = not PARSING.isdisjoint(Path(word).name for word in before)
    if not is_parsed:
        return script, is_module
    return _as_parsed(("--", *script) if before[-1] == "--" else script), is_module


def _as_parsed(script: Sequence[str]) -> tuple[str, ...]:
    """Return what torchrun's parser, which is Python's, makes of a script and the words beside it."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("script")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    found = parser.parse_args([*script])
    return (found.script, *found.words)


def _as_written(command: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """Return script and arguments of *command*, and whether that is a module, word by word."""
    command = started(command)
    if not command:
        return ("",), False
    starts_any = Path(command[0]).name in OF_TASKS  # also what is no script of Python, by its name
    if starts_any:
        of_python = (at for at, word in enumerate(command) if Path(word).name in LAUNCHERS)
        command = command[next(of_python, 0) :]
    elif Path(command[0]).name not in LAUNCHERS:
        return (command_file(command[0]), *command[1:]), False
    # The script is the first file of Python, module that is no launcher, or command that Python runs.
    for at, word in enumerate(command):
        if word.endswith(".py"):
            return tuple(command[at:]), False
        if word in {"-m", "--module"} and at + 1 < len(command) and command[at + 1] not in MODULES:
            return tuple(command[at + 1 :]), True
        file = command_file(word) if starts_any else word
        if at and is_python(Path(file)):
            return (file, *command[at + 1 :]), False
    return tuple(command), False


def is_python(file: Path) -> bool:
    """Whether *file* says in its first lines that Python runs it."""
    try:
        with file.open("rb") as text:
            first = text.read(MOST_READ).splitlines()[:2]
    except OSError:
        return False
    return first[:1] != [] and first[0].startswith(b"#!") and any(b"python" in line for line in first)


def command_file(word: str) -> str:
    """Return the file of a command that a shell finds on its PATH and Python runs, else *word* itself.

    A file of that name in the folder, or a name with folders in it, needs no PATH.
    """
    found = None if not word or "/" in word or Path(word).is_file() else shutil.which(word)
    return found if found and is_python(Path(found)) else word


def name_of(command: Sequence[str]) -> str:
    """Return what to call the rehearsal of *command*: its script without the ending, or its module.

    >>> name_of(["torchrun", "examples/train.py"]), name_of(["torchrun", "-m", "package.train"])
    ('train', 'package.train')
    """
    script, is_module = script_of(command)
    return script[0] if is_module else Path(script[0]).stem


# What ``fabric run`` tells Lightning's Fabric, beside what torchrun tells a script, which it calls.


FLAGS: Final = MappingProxyType(
    {"--accelerator": "LT_ACCELERATOR", "--strategy": "LT_STRATEGY", "--precision": "LT_PRECISION"}
)
"""Flags of ``fabric run`` that are told to Fabric, and the variables that tell them."""


def told_by_fabric(command: Sequence[str], world_size: int, n_local: int) -> dict[str, str]:
    """Return the variables by which ``fabric run`` tells Fabric what its flags say; none for other commands.

    How many processes it would start is said by the world of the rehearsal, as for other launchers.

    Source: ``_set_env_variables`` in lightning/fabric/cli.py.

    >>> told_by_fabric(["fabric", "run", "--devices=8", "--strategy", "ddp", "train.py"], 4, 2)
    {'LT_CLI_USED': '1', 'LT_DEVICES': '2', 'LT_NUM_NODES': '2', 'LT_STRATEGY': 'ddp'}
    >>> told_by_fabric(["torchrun", "train.py"], 4, 2)
    {}
    """
    before = before_script(command)
    pairs = enumerate(pairwise(Path(word).name for word in before))
    start = next((at for at, pair in pairs if pair == ("fabric", "run")), None)
    if start is None:
        return {}
    words = [part for word in before[start + 2 :] for part in word.split("=", 1)]
    given = dict(zip(words[::2], words[1::2], strict=False))
    told = {"LT_CLI_USED": "1", "LT_DEVICES": str(n_local), "LT_NUM_NODES": str(-(-world_size // n_local))}
    return told | {name: given[flag] for flag, name in FLAGS.items() if flag in given}


# What Accelerate's launcher tells a script: by what its configuration shards the model, in which types.


TOLD: Final = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "FP8_")
"""How names of variables begin by which Accelerate's launcher tells its library what to do."""


def accelerate_flags(command: Sequence[str]) -> tuple[str, ...] | None:
    """Return what *command* tells Accelerate's launcher, None if it starts none.

    >>> accelerate_flags(["accelerate", "launch", "--config_file", "fsdp.yaml", "train.py", "--lr", "1"])
    ('--config_file', 'fsdp.yaml')
    >>> accelerate_flags(["torchrun", "train.py"]) is None
    True
    """
    before = before_script(command)
    for at, word in enumerate(before):
        if word == "accelerate.commands.launch" or (word == "launch" and at):
            return tuple(before[at + 1 :])
    return None


def tell_accelerate(flags: Sequence[str], world_size: int) -> None:
    """Set in the environment what Accelerate's launcher would, told *flags*, on a machine with GPUs.

    Raises:
        RehearsalError: it is not installed, or refuses them.
    """
    try:
        from accelerate.commands import launch
        from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
    except ImportError as error:
        raise RehearsalError(f"accelerate launch: {error}; install accelerate where foretrace is") from error
    try:
        # The parser asks for a script, too: any will do.
        args = launch.launch_command_parser().parse_args([*flags, "script"])
        args, defaults, is_typed = launch._validate_launch_command(args)  # noqa: SLF001 - as its launch_command
        args.num_processes, args.num_machines, args.main_process_port = world_size, 1, 0
        if args.use_deepspeed:
            fields = [
                *(defaults.deepspeed_config if defaults else ()),
                *(["mixed_precision"] if is_typed else ()),
            ]
            args.deepspeed_fields_from_accelerate_config = ",".join(fields)
            _, found = prepare_deepspeed_cmd_env(args)
        else:
            found = prepare_multi_gpu_env(args)
    except (OSError, ValueError, SystemExit) as error:
        raise RehearsalError(f"accelerate launch {' '.join(flags)}: {error}") from error
    os.environ.update({name: value for name, value in found.items() if name.startswith(TOLD)})
