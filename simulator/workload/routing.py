"""How many tokens experts get: evenly, at a capacity, or as unevenly as a router leaves them.

Ranks of an expert group exchange tokens, so that the one with the most tokens sets the pace for all. What is
predicted is that rank.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

from foretrace.simulator.job import Job
from foretrace.simulator.models.model import share

BLOM: Final = 0.375
"""Of the expected largest of ``n`` normal values, ``quantile((n - a) / (n + 1 - 2 a))``.

Blom 1958, Statistical Estimates and Transformed Beta-Variables.
"""


def load_factor(job: Job) -> float:
    """Return the tokens on the fullest rank of an expert group over their even share; 1 for a dense model.

    With ``job.capacity_factor`` every expert computes just as many tokens, padded or cut: that factor.
    Without, tokens per expert vary by ``job.expert_imbalance`` (standard deviation over mean), experts lie on
    ranks at random, and the fullest of ``ep`` ranks with ``E/ep`` experts each is looked for.
    """
    if not job.model.n_experts:
        return 1.0
    if job.capacity_factor:
        return job.capacity_factor
    return fullest(job.model.n_experts, job.layout.ep, job.expert_imbalance)


def fullest(n_experts: int, n_ranks: int, imbalance: float) -> float:
    """Return the expected load of the fullest of *n_ranks* over the mean.

    A rank has the mean of ``n = E / ranks`` of ``E`` loads, drawn without replacement, whose standard
    deviation is ``imbalance sqrt((E - n) / (n (E - 1)))``. At most everything is on one rank.

    >>> fullest(64, 1, 0.5), fullest(64, 8, 0.0)
    (1.0, 1.0)
    """
    n_local = share(n_experts, n_ranks)
    if n_ranks == 1 or n_experts == 1 or not imbalance:
        return 1.0
    spread = imbalance * math.sqrt((n_experts - n_local) / (n_local * (n_experts - 1)))
    highest = NormalDist().inv_cdf((n_ranks - BLOM) / (n_ranks + 1 - 2 * BLOM))
    return min(1 + spread * highest, float(n_ranks))


def routed_tokens(job: Job, n_tokens: int) -> int:
    """Return the token copies that the fullest rank gets where *n_tokens* on each rank are routed."""
    return math.ceil(n_tokens * job.model.top_k * load_factor(job))
