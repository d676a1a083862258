"""What ``fabric run`` tells Lightning's Fabric, beside what torchrun tells a script, which it calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from foretrace.tracer.rehearse.ranks.launchers import before_script

FLAGS: Final = MappingProxyType(
    {"--accelerator": "LT_ACCELERATOR", "--strategy": "LT_STRATEGY", "--precision": "LT_PRECISION"}
)
"""Flags of ``fabric run`` that are told to Fabric, and the variables that tell them."""


def told_by_fabric(command: Sequence[str], world_size: int, n_local: int) -> dict[str, str]:
    """Return the variables by which ``fabric run`` tells Fabric what its flags say; none for other commands.

    How many processes it would start is said by the world of the rehearsal, as for other launchers.

    Args:
        command: launcher, script and arguments.
        world_size: ranks of the world.
        n_local: ranks of a node.

    Source: ``_set_env_variables`` in lightning/fabric/cli.py.

    >>> told_by_fabric(["fabric", "run", "--devices=8", "--strategy", "ddp", "train.py"], 4, 2)
    {'LT_CLI_USED': '1', 'LT_DEVICES': '2', 'LT_NUM_NODES': '2', 'LT_STRATEGY': 'ddp'}
    >>> told_by_fabric(["torchrun", "train.py"], 4, 2)
    {}
    """
    before = before_script(command)
    start = next((at for at, word in enumerate(before[1:]) if word == "run" and _is_fabric(before[at])), None)
    if start is None:
        return {}
    words = [part for word in before[start + 2 :] for part in word.split("=", 1)]
    given = dict(zip(words[::2], words[1::2], strict=False))
    told = {"LT_CLI_USED": "1", "LT_DEVICES": str(n_local), "LT_NUM_NODES": str(-(-world_size // n_local))}
    return told | {name: given[flag] for flag, name in FLAGS.items() if flag in given}


def _is_fabric(word: str) -> bool:
    return Path(word).name == "fabric"
