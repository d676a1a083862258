"""Conventions that a framework changed in a known month, for runs that were measured before it."""

from __future__ import annotations

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
    """Return the conventions of *framework* that differed at *date*, an ISO month or day; none if empty.

    >>> [name for name, _ in conventions_then("torchtitan", "2024-12")]
    ['compiles_loss', 'eager']
    >>> [name for name, _ in conventions_then("torchtitan", "2025-06")]
    ['eager']
    """
    return tuple(
        setting
        for name, month, before in SINCE
        if name == framework and date and date[: len(month)] < month
        for setting in before
    )
