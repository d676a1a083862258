"""What 8-bit products with delayed scales say to each other: the largest values they have seen.

With delayed scaling the scale of a tensor comes from the largest values of the steps before, which all ranks
that hold a part of it have to agree on. Transformer Engine collects them and reduces them at once, in
``autocast_exit`` after each forward and in the backward of the first module, and waits for the result
(``FP8GlobalStateManager.reduce_and_update_fp8_tensors``, ``async_op=False``): once for every micro-batch of
every stage and direction. Scales that are found on the spot, or for blocks, are nobody else's business.
"""

from __future__ import annotations

from typing import Final

from foretrace.simulator.builder.instances import Message
from foretrace.simulator.builder.program_builder import STREAMS, Task, Template
from foretrace.simulator.job import Job
from foretrace.simulator.program import Label
from foretrace.simulator.workload.linear import job_recipe
from foretrace.simulator.workload.ops import DTYPE_BYTES

PRODUCTS: Final = 4
"""Matrices of a layer that have scales: two of attention, two of the MLP."""

TENSORS: Final = {"F": 3, "B": 2, "I": 2}
"""Tensors of each product with a scale, by the kind of an action: input, weight and output; two gradients."""


def amax_scope(job: Job) -> str:
    """Return whose ranks agree on scales in *job*: ``"stage"``, ``"tp"``, or nobody, ``""``.

    >>> from foretrace.simulator.config import job_from
    >>> where = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "global_batch": 8, "tp": 2}
    >>> amax_scope(job_from(where)), amax_scope(job_from({**where, "fp8": True}))
    ('', 'stage')
    """
    recipe = job_recipe(job)
    return job.profile.amax_ranks if recipe is not None and recipe.is_delayed else ""


def write_amax(template: Template, job: Job, kind: str, n_layers: int) -> None:
    """Append to *template* the reduction of the largest values in *n_layers*, which what follows waits for.

    Args:
        template: template of an action.
        job: the job.
        kind: kind of the action.
        n_layers: that it went through.
    """
    if n_layers == 0 or kind not in TENSORS:
        return
    scope = amax_scope(job)
    size_bytes = n_layers * PRODUCTS * TENSORS[kind] * DTYPE_BYTES["fp32"]
    label = Label("collective", "all_reduce", "largest values", "tp" if scope == "tp" else "dp", "fp32")
    message = Message("all_reduce", scope, size_bytes, "fp32")
    template.then(Task(STREAMS.index("tp"), label, message=message))
