"""SimuMax's JSON: a strategy and a model, keys as in MooreThreads/SimuMax simumax/core/config.py."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from foretrace.simulator.configs.megatron import comma_list, complete_experts, complete_latent
from foretrace.simulator.configs.rules import MODEL, Leave, Read, Reading, words

_PARTS: Final = Leave("parts of a layer are recomputed by --recompute and --recompute-modules here")


def _dispatcher(value: Any) -> Any:
    return "copies" if str(value).startswith("all2all") else Leave("not a way of dispatching here")


def _granularity(value: Any) -> Any:
    known = {"full_block": "full", "sdp_only": "selective"}
    return known.get(str(value), _PARTS)


READERS: Final[Mapping[str, Read]] = MappingProxyType(
    {
        "attention": words(mha=None, mla=True),
        "comma_list": comma_list,
        "dispatcher": _dispatcher,
        "granularity": _granularity,
    }
)
"""Readers of its own, by heading of ``simumax.toml``."""


def finish(reading: Reading, given: Mapping[str, Any]) -> None:
    """Add SimuMax's defaults, which are those of a Megatron-LM run, and complete the model."""
    facts = reading.facts
    # A model's file has neither, and says nothing of a run.
    if "accumulation" in facts or "gpus" in facts:
        reading.assume("framework", "megatron", "what SimuMax imitates")
        reading.assume("precision", "bf16", "dtype is bf16 unless given")
        reading.assume(
            "sequence_parallel", value=True, reason="enable_sequence_parallel is true unless given"
        )
        reading.assume("sharding", "zero1", "zero_state is 1 unless given")
        reading.assume("convention.overlap_grad_reduce", value=True, reason="true unless given")
    # Without a granularity nothing is recomputed.
    if facts.pop("recomputes", True) is False or "recompute" not in facts:
        for name in ("recompute", "recompute_layers", "recompute_modules"):
            facts.pop(name, None)
    if facts.get("recompute") != "full":
        facts.pop("recompute_layers", None)
    if facts.get("virtual_stages", 1) > 1:
        reading.assume("schedule", "interleaved-1f1b", "interleaving_size stages per rank")
    if given.get("model"):
        for name in [name for name in facts if name == "model" or name.startswith(MODEL)]:
            del facts[name]
    elif f"{MODEL}n_layers" in facts:
        complete_experts(facts)
        complete_latent(reading)
    dropout = facts.pop("dropout", None)
    if dropout and f"{MODEL}n_layers" in facts:
        facts[f"{MODEL}dropout"] = True
    for name in ("shared_expert_hidden", "latent_attention", "qk_head_dim"):
        facts.pop(name, None)
