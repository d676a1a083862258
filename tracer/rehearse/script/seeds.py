"""The random numbers of a rank whose script names no seed: not those of other ranks, as in a real run."""

from __future__ import annotations

import random
from typing import Final

STEP: Final = 0x9E3779B97F4A7C15
"""Between the seeds of two ranks: 2**64 over the golden mean, so that no two are near each other."""


def scatter(rank: int) -> None:
    """Seed what Python, NumPy and torch draw from where a script seeds nothing; real ranks are not seeded.

    A process that was forked would draw what every other one draws, in another order in each rehearsal.
    """
    import numpy as np
    import torch

    seed = (rank + 1) * STEP % 2**63
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
