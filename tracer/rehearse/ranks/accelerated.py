"""What Accelerate's launcher tells a script: by what its configuration shards the model, in which types."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.ranks.launchers import before_script

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
