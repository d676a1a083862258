"""What is taken for a setting that a row of a table of steps does not state, and how that is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from foretrace.simulator.job import Job
from foretrace.simulator.profiles import framework_of
from foretrace.simulator.validate.job import job_of
from foretrace.simulator.validate.memory import stage_memories
from foretrace.simulator.validate.model import DOCUMENT, is_packed
from foretrace.simulator.validate.spelling import stated
from foretrace.simulator.validate.table import Row

ASSUMED: Final = {"recompute": "none", "virtual_pp": "1", "micro_batch": "1"}
"""What is taken for a setting that a row does not give, unless something below says better."""

RECOMPUTED_BY: Final = {"jax": "full"}
"""Frameworks that recompute unless they are told not to: MaxText ``configs/base.yml`` has ``remat_policy:
'full'``, Pax ``LmCloudSpmdAdam`` the policy ``SAVE_NOTHING``. The others recompute nothing by default."""

FILLED: Final = 0.95
"""Share of a device's memory that people fill at most: the allocator keeps some beside tensors."""


def filled(row: Row) -> tuple[Row, tuple[str, ...]]:
    """Return *row* with what it does not state, and that in words.

    Raises:
        TableError: the row does not say enough, or something the simulator does not have.
        SimulationError, TopologyError, TraceError: its layout, batch, model or machine is not possible.
    """
    unsaid = [name for name in ASSUMED if not stated(row.text(name))]
    taken = {name: ASSUMED[name] for name in unsaid}
    if "recompute" in taken:
        framework = framework_of(row.text("framework"))
        taken["recompute"] = RECOMPUTED_BY.get(framework, ASSUMED["recompute"])
    found = Row(taken, row.number).over(row)
    in_pipeline = row.integer("pp", 1) > 1
    if "micro_batch" in taken and not in_pipeline and stated(row.text("global_batch")):
        taken["micro_batch"] = str(largest_micro_batch(job_of(found)))
        found = Row(taken, row.number).over(row)
    matters = [name for name in unsaid if name != "virtual_pp" or in_pipeline]
    words = [f"{name} not stated: {taken[name]}" for name in matters]
    if is_packed(row):
        words.append(f"documents of a packed sequence not stated: {DOCUMENT} tokens each")
    return found, tuple(words)


def largest_micro_batch(job: Job) -> int:
    """Return the largest micro-batch that fits, a power of two times that of *job* which divides its batch.

    People who do not say theirs have usually taken it. Without a pipeline steps only get faster with it, and
    where recipes do state it, errors are a half to a fifth of those with one sequence
    (docs/accuracy-evidence.md).
    """
    room = FILLED * job.cluster.device.memory_bytes
    while job.n_microbatches % 2 == 0:
        larger = replace(job, micro_batch=2 * job.micro_batch)
        if max(memory.peak_bytes for _, memory in stage_memories(larger)) > room:
            break
        job = larger
    return job.micro_batch
