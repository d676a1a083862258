"""Why a search has no layout at all to look at: what the first value of every choice runs against."""

from __future__ import annotations

from foretrace.simulator.config import inferred_dp
from foretrace.simulator.errors import JobError, SimulationError
from foretrace.simulator.job import Job, check_chunks, check_heads
from foretrace.simulator.schedules import plan
from foretrace.simulator.search.space import ONE_STAGE, Space
from foretrace.topologies.errors import TopologyError
from foretrace.traces.errors import TraceError
from foretrace.traces.layout import Layout

NOWHERE = "the batch, the layers or the heads divide over none of these degrees"


def why_impossible(space: Space) -> str:
    """Return what the first layout that *space* asks for runs against, with values that would work.

    Degrees that are left open are 1 there.
    """
    axes = {name: getattr(space, name) for name in ("tp", "pp", "cp", "ep", "expert_tp")}
    degrees = {axis: values[0] for axis, values in axes.items() if values}
    try:
        _first(space, degrees)
    except (SimulationError, TopologyError, TraceError) as error:
        return str(error)
    return NOWHERE


def _first(space: Space, degrees: dict[str, int]) -> None:
    """Check the first layout with *degrees*.

    Raises:
        SimulationError, TopologyError, TraceError: it is not possible.
    """
    n_layers = space.model.n_layers
    check_heads(degrees.get("tp", 1), space.model)
    if degrees.get("pp", 1) > n_layers:
        raise JobError(
            f"pp={degrees['pp']} stages for {n_layers} layers of {space.model.name}: at most {n_layers}"
        )
    layout = Layout(**degrees, dp=inferred_dp(space.cluster.n_gpus, degrees))
    is_cut = layout.pp > 1
    job = Job(
        model=space.model,
        cluster=space.cluster,
        layout=layout,
        global_batch=space.global_batch,
        micro_batch=(space.micro_batch or (1,))[0],
        seq_len=space.seq_len,
        schedule=space.schedule[0] if is_cut else ONE_STAGE,
        virtual_stages=space.virtual_stages[0] if is_cut and space.virtual_stages else None,
        sharding=space.sharding[0],
        recompute=space.recompute[0],
        offload=space.offload[0],
        offload_layers=space.offload_layers[0] if space.offload_layers else 0,
        **space.others,
    )
    check_chunks(job)
    plan(job.schedule, layout.pp, job.n_microbatches, job.virtual_stages)
