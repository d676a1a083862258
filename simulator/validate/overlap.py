"""What a table says about overlap and sharding, as conventions of a job's framework."""

from __future__ import annotations

import re
from typing import Final

ON: Final = True
OFF: Final = False

SAID: Final = (
    (r"no --overlap-grad-reduce", (("overlap_grad_reduce", OFF), ("overlap_param_gather", OFF))),
    (
        r"(?:dp )?grad/param (?:overlap|sync) on|overlap_grad_reduce=true",
        (("overlap_grad_reduce", ON), ("overlap_param_gather", ON)),
    ),
    (r"no tp overlap|tp overlap off|(?<!mc_)tp_comm_overlap=false", (("async_tp", OFF),)),
    (r"async tp|tp comm overlap.*? on|(?<!mc_)tp_comm_overlap=true", (("async_tp", ON),)),
    (r"bf16 grad sync", (("reduces_in_16_bit", ON),)),
    (r"overlap_param_gather=true", (("overlap_param_gather", ON),)),
)
"""What people write, in lower case, and the conventions it means; every pattern that is found counts."""

P2P_ON: Final = re.compile(r"p2p overlap on")
KEEPS_PARAMETERS: Final = re.compile(r"zero2-fsdp|shard_grad_op")
"""FSDP that frees gathered parameters after backward only."""


def conventions_of(overlap: str, sharding: str) -> tuple[tuple[str, object], ...]:
    """Return what *overlap* and *sharding*, as a table has them, say about conventions.

    >>> conventions_of("DP grad/param overlap on, bf16 grad sync", "zero1")
    (('overlap_grad_reduce', True), ('overlap_param_gather', True), ('reduces_in_16_bit', True))
    """
    text = overlap.lower()
    found: dict[str, object] = {}
    for pattern, settings in SAID:
        if re.search(pattern, text):
            found.update(settings)
    if KEEPS_PARAMETERS.search(sharding.lower()):
        found["reshard_after_forward"] = OFF
    return tuple(found.items())


def p2p_of(overlap: str) -> bool | None:
    """Return whether *overlap* says that transfers between stages run beside products; None if nothing."""
    return True if P2P_ON.search(overlap.lower()) else None
