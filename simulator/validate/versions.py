"""Conventions that a framework changed in a known month, for runs that were measured before it."""

from __future__ import annotations

import re
from typing import Final

OF_TORCHTITAN: Final = ("rotary", "activation", "clamp", "loss", "projections", "heads")
"""What torchtitan's models run kernel by kernel without torch.compile, whatever the release of PyTorch."""

SINCE: Final = (
    # NVIDIA/Megatron-LM: megatron/core/distributed came in 2023, with --overlap-grad-reduce; before,
    # gradients of fp16 models were reduced after backward and in fp16 (model/distributed.py of v2.5)
    ("megatron", "2023", (("overlap_grad_reduce", False), ("reduces_in_16_bit", True))),
    # pytorch/torchtitan pull request 1033, merged 1 April 2025: torch.compile takes in the loss
    ("torchtitan", "2025-04", (("compiles_loss", False),)),
    # pytorch pull request 153666, in PyTorch 2.9 of October 2025: torch.rms_norm is one kernel
    ("torchtitan", "2025-10", (("eager", ("norm", *OF_TORCHTITAN)),)),
)
"""Framework, the year or month (ISO) in which a convention came, and what was there before it."""


def conventions_then(framework: str, date: str) -> tuple[tuple[str, object], ...]:
    """Return the conventions of *framework* that differed at *date*; none if it names no year.

    Args:
        framework: name of the profile.
        date: an ISO year, month or day, or a release that is named after its month (``24.05``).

    >>> [name for name, _ in conventions_then("torchtitan", "2024-12")]
    ['compiles_loss', 'eager']
    >>> [name for name, _ in conventions_then("torchtitan", "2025-06")]
    ['eager']
    """
    then = _month(date)
    return tuple(
        setting
        for name, month, before in SINCE
        if name == framework and then and then[: len(month)] < month
        for setting in before
    )


def _month(date: str) -> str:
    """Return the month or year of *date* as ISO has it; nothing if there is none.

    >>> _month("2022/23"), _month("2024-12..2025-02"), _month("v24.05.01"), _month("May 2024"), _month("r3")
    ('2022', '2024-12', '2024-05', '2024', '')
    """
    if found := re.search(r"\b(20\d\d)(?:-(\d\d))?", date):
        return "-".join(filter(None, found.groups()))
    found = re.fullmatch(r"v?(\d\d)\.(0[1-9]|1[0-2])(?:\.\d+)*", date)
    return f"20{found[1]}-{found[2]}" if found else ""
