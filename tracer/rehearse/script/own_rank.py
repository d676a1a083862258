"""Which rank a training is for that a script starts: by its environment, or by its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Final

OWN_RANK: Final = MappingProxyType(
    {"--rank": "RANK", "--local_rank": "LOCAL_RANK", "--local-rank": "LOCAL_RANK"}
)
"""Arguments by which a script is told its rank where no variable does, and the variables that would."""


def is_anothers(script: Sequence[str], env: Mapping[str, str], told: Mapping[str, str]) -> bool:
    """Whether a training belongs to another rank than this one.

    A launcher for the GPUs of one node may tell ``RANK`` only.

    Args:
        script: script and arguments of the training.
        env: environment that it is started with.
        told: environment of this rank.

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
    return {name: value for name, value in said if value.isdecimal()}
