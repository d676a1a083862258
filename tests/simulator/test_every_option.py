"""Options crossed: whatever is asked for runs, or is refused in one line that says why."""

from __future__ import annotations

import random
from typing import Any, Final

import pytest

from simulator.config import job_from
from simulator.errors import SimulationError
from simulator.framework import framework_names
from simulator.job import OFFLOADS, PRECISIONS, RECOMPUTES, SHARDINGS
from simulator.models.model import Model
from simulator.schedules import SCHEDULES
from simulator.simulate import simulate
from simulator.workload.recipes import RECIPES
from topologies.errors import TopologyError
from traces.errors import TraceError

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

OPTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "framework": framework_names(),
    "sharding": SHARDINGS,
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
    "lora_rank": (0, 8),
    "quantized_base": (False, True),
    "fp8": (False, True),
    "recipe": ("", *RECIPES),
    "precision": PRECISIONS,
    "fp32_gradients": (True, False),
    "flash_attention": (True, False),
    "kernels": ("", "fused", "eager"),
    "capacity_factor": (0.0, 1.5),
    "expert_imbalance": (0.0, 0.5),
    "checkpoint_every": (0, 1),
    "overlap_slowdown": (0.0, 1.0),
    "overlap_p2p": (None, True),
    "counted_ends": ("none", "head"),
    "cluster": ("dgx-h100", "gb200-nvl72"),
}
"""Values of each option; the first plays no part."""

CONVENTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "overlap_grad_reduce": (False, True),
    "overlap_param_gather": (False, True),
    "no_sync": (True, False),
    "bucket_mib": (1.0,),
    "async_tp": (True,),
    "context": ("all_gather", "ring", "ulysses"),
    "expert_dispatch": ("once",),
    "overlap_shared_experts": (True,),
    "fused_experts": (True,),
    "wrap": ("model",),
    "reshard_after_forward": (False,),
    "limit_all_gathers": (False,),
    "prefetch_backward": (False,),
    "loss_all_reduce": (True,),
    "step_host_s": (0.01,),
    "host_work": (0.0, 2.0),
}


def crossed(seed: int) -> dict[str, Any]:
    """Return a job in which about a third of all options are not what they are by default."""
    draw = random.Random(seed)
    found = {
        name: draw.choice(values[1:])
        for name, values in OPTIONS.items()
        if draw.random() < 1 / 3 and len(values) > 1
    }
    names = draw.sample(sorted(CONVENTIONS), 3)
    found["conventions"] = {name: draw.choice(CONVENTIONS[name]) for name in names}
    if found.get("checkpoint_every"):
        found["checkpoint_bytes_per_s"] = 1e9
    return {"cluster": "dgx-h100", "gpus": 16, "global_batch": 32, "seq_len": 512, **found}


def outcome(given: dict[str, Any]) -> str:
    """Return why *given* is refused; empty if it runs."""
    try:
        summary = simulate(job_from(given, model=SMALL)).summary
    except (SimulationError, TopologyError, TraceError) as error:
        return str(error) or "refused without a word"
    assert summary["step_time_s"] > 0
    assert summary["peak_memory_bytes"] > 0
    return ""


@pytest.mark.parametrize("seed", range(40))
def test_what_is_asked_for_runs_or_is_refused_in_one_line(seed: int) -> None:
    refused = outcome(crossed(seed))
    assert "\n" not in refused
    assert refused != "refused without a word"


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_every_option_runs_somewhere(name: str) -> None:
    """Alone, with what it needs beside it."""
    needs: dict[str, dict[str, Any]] = {
        "expert_tp": {"tp": 2, "ep": 2},
        "recompute_every": {"recompute": "full"},
        "offload_to": {"offload": "optimizer"},
        "quantized_base": {"lora_rank": 8},
        "recipe": {"fp8": True, "cluster": "gb200-nvl72"},
        "checkpoint_every": {"checkpoint_bytes_per_s": 1e9},
        "schedule": {"pp": 2},
    }
    given = {"cluster": "dgx-h100", "gpus": 16, "global_batch": 32, "seq_len": 512, **needs.get(name, {})}
    assert {value: outcome({**given, name: value}) for value in OPTIONS[name]} == dict.fromkeys(
        OPTIONS[name], ""
    )
