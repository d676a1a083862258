"""What stands before a script on a command line starts a process per rank, which a rehearsal does itself.

What such a launcher would tell the script in the environment, a rehearsal tells it, too. torchrun says who a
process is; Accelerate's also says by what its configuration file wants the model sharded, and in which types.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tracer.rehearse.errors import RehearsalError

LAUNCHERS: Final = ("torchrun", "accelerate", "deepspeed", "python", "python3")
"""First words of commands that start a script."""

MODULES: Final = frozenset(
    {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "torchrun"}
)
"""Modules that do the same after ``python -m``."""

MOST_READ: Final = 4096
"""Bytes of a file that are read: its first lines name who runs it, by way of a shell if the name is long."""

TOLD: Final = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "FP8_")
"""How names of variables begin by which Accelerate's launcher tells its library what to do."""


def environment(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return what torchrun sets for a rank: one group of workers, none of which was started again.

    Source: ``worker_env`` in torch/distributed/elastic/agent/server/local_elastic_agent.py.

    Args:
        spec: ``rank``, ``world_size`` and ``local_world_size``.
    """
    rank, n_ranks, n_local = spec["rank"], spec["world_size"], spec["local_world_size"]
    found = {
        "RANK": rank,
        "WORLD_SIZE": n_ranks,
        "LOCAL_RANK": rank % n_local,
        "LOCAL_WORLD_SIZE": n_local,
        "GROUP_RANK": rank // n_local,
        "GROUP_WORLD_SIZE": -(-n_ranks // n_local),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": n_ranks,
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RUN_ID": "rehearsal",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
    }
    return {name: str(value) for name, value in found.items()}


def script_of(command: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """Return script and arguments of *command*, and whether the script is the name of a module.

    >>> script_of(["torchrun", "--nproc-per-node", "8", "train.py", "--lr", "1"])
    (('train.py', '--lr', '1'), False)
    >>> script_of(["python", "-m", "package.train", "--lr", "1"])
    (('package.train', '--lr', '1'), True)
    >>> script_of(["python", "-m", "accelerate.commands.launch", "-m", "package.train"])
    (('package.train',), True)
    """
    if Path(command[0]).name not in LAUNCHERS:
        return tuple(command), False
    for at, word in enumerate(command):
        if word.endswith(".py"):
            return tuple(command[at:]), False
        if word in {"-m", "--module"} and at + 1 < len(command) and command[at + 1] not in MODULES:
            return tuple(command[at + 1 :]), True
        if at and _is_python(Path(word)):
            return tuple(command[at:]), False
    return tuple(command), False


def _is_python(file: Path) -> bool:
    """Whether *file* says in its first lines that Python runs it, as commands do that pip has installed."""
    try:
        with file.open("rb") as text:
            first = text.read(MOST_READ).splitlines()[:2]
    except OSError:
        return False
    return first[:1] != [] and first[0].startswith(b"#!") and any(b"python" in line for line in first)


def accelerate_flags(command: Sequence[str]) -> tuple[str, ...] | None:
    """Return what *command* tells Accelerate's launcher, None if it starts none.

    >>> accelerate_flags(["accelerate", "launch", "--config_file", "fsdp.yaml", "train.py", "--lr", "1"])
    ('--config_file', 'fsdp.yaml')
    >>> accelerate_flags(["torchrun", "train.py"]) is None
    True
    """
    script, is_module = script_of(command)
    before = command[: len(command) - len(script) - is_module]
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
