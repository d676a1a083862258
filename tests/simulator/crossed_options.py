"""Options of a job with the values that tests cross, and what becomes of a job that has some of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from foretrace.simulator.config import job_from
from foretrace.simulator.errors import SimulationError
from foretrace.simulator.framework import framework_names
from foretrace.simulator.job import OFFLOADS, PRECISIONS, RECOMPUTES
from foretrace.simulator.models.model import Model
from foretrace.simulator.schedules import SCHEDULES
from foretrace.simulator.sharding import SHARDINGS
from foretrace.simulator.simulate import simulate
from foretrace.simulator.workload.recipes import RECIPES
from foretrace.topologies.errors import TopologyError
from foretrace.traces.errors import TraceError

SMALL: Final = Model(
    name="small",
    n_layers=4,
    hidden=1024,
    n_heads=8,
    n_kv_heads=4,
    head_dim=128,
    ffn_hidden=4096,
    vocab=8192,
    n_experts=8,
    top_k=2,
    moe_ffn_hidden=1024,
    n_shared_experts=1,
    n_dense_layers=2,
)

OPTIONS: Final[Mapping[str, tuple[Any, ...]]] = {
    "framework": framework_names(),
    "sharding": tuple(SHARDINGS),
    "shard_ranks": (0, 2),
    "tp": (1, 2, 4),
    "pp": (1, 2),
    "cp": (1, 2),
    "ep": (1, 2, 4),
    "expert_tp": (0, 1),
    "sequence_parallel": (True, False),
    "schedule": tuple(sorted(SCHEDULES)),
    "micro_batch": (1, 2),
    "recompute": RECOMPUTES,
    "recompute_every": (1, 2),
    "offload": OFFLOADS,
    "offload_to": ("host", "nvme"),
    "offload_layers": (0, 2),
    "lora_rank": (0, 8),
    "quantized_base": (False, True),
    "fp8": (False, True),
    "recipe": ("", *RECIPES),
    "precision": PRECISIONS,
    "fp32_gradients": (True, False),
    "flash_attention": (True, False),
    "kernels": ("", "fused", "eager"),
    "optimizer": ("adamw", "adamw-8bit", "muon", "sgd"),
    "master_weights": (True, False),
    "capacity_factor": (0.0, 1.5),
    "expert_imbalance": (0.0, 0.5),
    "checkpoint_every": (0, 1),
    "overlap_slowdown": (0.0, 1.0),
    "overlap_p2p": (None, True),
    "counted_ends": ("none", "head"),
    "cluster": ("dgx-h100", "gb200-nvl72"),
}
"""Values of each option; the first plays no part."""

CONVENTIONS: Final[Mapping[str, tuple[Any, ...]]] = {
    "overlap_grad_reduce": (False, True),
    "overlap_param_gather": (False, True),
    "no_sync": (True, False),
    "bucket_mib": (1.0,),
    "async_tp": (True,),
    "context": ("all_gather", "ring", "ulysses"),
    "expert_dispatch": ("once",),
    "overlap_shared_experts": (True,),
    "fused_experts": (True,),
    "dispatch_fp8": (True,),
    "dispatch_processors": (20,),
    "graphed": (("step",), ("attention", "mlp", "router", "dispatch")),
    "wrap": ("model",),
    "reshard_after_forward": (False,),
    "limit_all_gathers": (False,),
    "prefetch_backward": (False,),
    "loss_all_reduce": (True,),
    "step_host_s": (0.01,),
    "host_work": (0.0, 2.0),
}

NEEDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "expert_tp": {"tp": 2, "ep": 2},
    "recompute_every": {"recompute": "full"},
    "offload_to": {"offload": "optimizer"},
    "offload_layers": {"offload": "activations"},
    "quantized_base": {"lora_rank": 8},
    "recipe": {"fp8": True, "cluster": "gb200-nvl72"},
    "checkpoint_every": {"checkpoint_bytes_per_s": 1e9},
    "schedule": {"pp": 2},
}
"""What an option says nothing without."""

ASKED: Final[Mapping[tuple[str, Any], Mapping[str, Any]]] = {
    ("schedule", "combined-1f1b"): {"ep": 2, "virtual_stages": 2},
}
"""What a single value of an option says nothing without."""

BASE: Final[Mapping[str, Any]] = {"cluster": "dgx-h100", "gpus": 16, "global_batch": 32, "seq_len": 512}


def outcome(
    given: Mapping[str, Any], *, covers_unsaid: bool = False, again: bool = True, only_figures: bool = False
) -> str:
    """Return why ``BASE`` with *given* is refused; empty if it runs as every job has to.

    Args:
        given: settings.
        covers_unsaid: run it by the conventions of every framework, too, if none is given.
        again: predict its figures alone, too; it takes as long as all else does.
        only_figures: predict nothing else.
    """
    try:
        job = job_from({**BASE, **given}, model=SMALL)
        summary = simulate(job, covers_unsaid=covers_unsaid, only_figures=only_figures).summary
    except (SimulationError, TopologyError, TraceError) as error:
        return str(error) or "refused without a word"
    assert summary["step_time_s"] > 0
    assert summary["peak_memory_bytes"] > 0
    # The figures alone are the same, although one task stands for several in a row.
    if again and not covers_unsaid and not only_figures:
        assert simulate(job, only_figures=True, covers_unsaid=False).summary == summary
    return ""
