"""torchtitan's TOML: keys as in torchtitan/config/job_config.py (``parallelism``, ``training``, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from foretrace.simulator.configs.rules import Leave, Read, Reading, table_of, whole, words


def presets() -> dict[tuple[str, str], str]:
    """Return models by name and flavor."""
    families = table_of("torchtitan")["presets"]
    return {(family, name): preset for family, named in families.items() for name, preset in named.items()}


def _degree(value: Any) -> int | None:
    """Return a degree; -1 stands for what is left over."""
    return None if value == -1 else whole(value)


def _every(value: Any) -> Any:
    """Return what selective recomputation does: ``"op"``, or every so many layers."""
    return "op" if str(value) == "op" else whole(value)


def _converts(value: Any) -> bool | None:
    """Return true if a converter quantises, as ``float8``, ``mx``, ``quantize.linear.float8`` do."""
    names = [value] if isinstance(value, str) else value
    return True if any("float8" in name or "mx" in name for name in names) else None


def _components(value: Any) -> Any:
    return Leave("the model and the loss are compiled here") if "model" in value else False


READERS: Final[Mapping[str, Read]] = MappingProxyType(
    {
        "components": _components,
        "converts": _converts,
        "degree": _degree,
        "every": _every,
        "file": lambda value: value or None,
        "reshard": words(default=None, always=True, never=False),
    }
)
"""Readers of its own, by heading of ``torchtitan.toml``."""


def finish(reading: Reading, given: Mapping[str, Any]) -> None:
    """Add torchtitan's defaults (job_config.py), and find the preset of its model."""
    facts = reading.facts
    reading.assume("framework", "torchtitan", "whose file this is")
    reading.assume("local_batch", 8, "training.local_batch_size is 8 unless given")
    reading.assume("seq_len", 2048, "training.seq_len is 2048 unless given")
    reading.assume("precision", "bf16", "training.mixed_precision_param is bfloat16 unless given")
    reading.assume("recompute", "selective", "activation_checkpoint.mode is selective unless given")
    if facts.pop("compiled", True) is False:
        facts.pop("kernels", None)  # the loss alone is compiled
    _model(reading, given)
    _recompute(reading)
    replicas, shards = facts.get("replicate_degree", 1), facts.get("shard_degree")
    # Context-parallel ranks share out the states, whether others do or not (``ParallelDims.fsdp_enabled``).
    is_ddp = replicas > 1 and shards == 1 and facts.get("cp", 1) == 1
    reading.assume("sharding", "ddp" if is_ddp else "fsdp", "data_parallel_shard_degree")
    if facts.get("pp", 1) == 1:
        for name in ("schedule", "layers_per_virtual_stage", "micro_batch"):
            facts.pop(name, None)  # said of a pipeline that is not there
    else:
        reading.assume("micro_batch", 1, "pipeline_parallel_microbatch_size is 1 unless given")
    _reshard(reading)
    if facts.get("ep", 1) == 1:
        facts.pop("expert_tp", None)  # experts are cut as the layers are
    elif facts.get("tp", 1) > 1:
        reading.assume("expert_tp", 1, "expert_tensor_parallel_degree is 1 unless given")


def _model(reading: Reading, given: Mapping[str, Any]) -> None:
    """Name the preset of the family and flavor; another model has to be given."""
    facts = reading.facts
    family, flavor = facts.pop("family", "llama3"), facts.pop("flavor", "debugmodel")
    if (preset := presets().get((family, flavor))) is not None and not given.get("model"):
        reading.assume("model", preset, f"{family} {flavor}")


def _recompute(reading: Reading) -> None:
    """Every second layer is recomputed unless the file says ``op``, which keeps every other product."""
    facts = reading.facts
    every = facts.pop("form", 2)
    if facts["recompute"] == "selective" and every != "op":
        facts |= {"recompute": "full", "recompute_every": every}


def _reshard(reading: Reading) -> None:
    """By default parameters stay gathered where there is a pipeline, which would gather them often."""
    facts = reading.facts
    if facts["sharding"] == "fsdp":
        always = facts.pop("reshard", None)
        reading.assume(
            "convention.reshard_after_forward",
            facts.get("pp", 1) == 1 if always is None else always,
            "fsdp_reshard_after_forward: not with a pipeline unless always",
        )
