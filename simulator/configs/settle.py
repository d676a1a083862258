"""Turns the facts of foreign configurations into settings of a job, or says which contradict each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from foretrace.simulator.configs.rules import CONVENTION, MODEL
from foretrace.simulator.errors import ConfigError
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.nearest import near_multiples
from foretrace.simulator.settings import CONVENTIONS, KINDS, SHAPE, checked

_PLACES: Final = {"cpu": "host", "nvme": "nvme"}


def settled(facts: Mapping[str, Any], given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings that *facts* and flags that were *given* come to; flags go before.

    Args:
        facts: as ``simulator.configs.rules.Reading`` has them.
        given: settings by name.
        where: what to call the files in messages.

    Raises:
        ConfigError: sizes contradict each other; the message has the nearest that do not.
    """
    facts = dict(facts)
    # One follows from the other: sizes of a file would contradict what was given.
    if {"gpus", "dp"} & set(given):
        for name in ("gpus", "dp", "nodes", "gpus_per_node"):
            facts.pop(name, None)
    if "virtual_stages" in given:
        facts.pop("layers_per_virtual_stage", None)
    if "global_batch" in given:
        facts.pop("accumulation", None)
    facts |= {name: checked(name, name, value) for name, value in given.items() if value is not None}
    # In this order: GPUs give replicas, these the batch, and both the stages.
    _experts(facts, given)
    _gpus(facts)
    _replicas(facts, where)
    _batch(facts, where)
    _stages(facts, where)
    _offload(facts)
    found = {name: value for name, value in facts.items() if name in KINDS}
    conventions = _named(facts, CONVENTION) | dict(given.get(CONVENTIONS) or {})
    return {
        **found,
        **_shape(facts, given, where),
        **({CONVENTIONS: conventions} if conventions else {}),
    }


def _shape(facts: Mapping[str, Any], given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the model that a file describes, named after the file, unless a flag names another."""
    fields = _named(facts, MODEL)
    if not fields or "model" in given or SHAPE in given:
        return {}
    return {"model": facts.get("model", Path(where.rpartition(", ")[2]).stem), SHAPE: fields}


def _named(facts: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in facts.items() if name.startswith(prefix)}


def _experts(facts: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Leave out over how many ranks an expert is cut where the model, of another file or a flag, has none."""
    # 1 is what frameworks say of dense models, too; any other number is meant.
    if facts.get("expert_tp") != 1 or "expert_tp" in given:
        return
    shape = facts.get(SHAPE) or _named(facts, MODEL)
    if not shape and facts.get("model") is not None:
        shape = {"n_experts": load_model(facts["model"]).n_experts}
    # A dense model with it would be refused.
    if shape and not shape.get("n_experts"):
        del facts["expert_tp"]


def _gpus(facts: dict[str, Any]) -> None:
    per_node, nodes = facts.pop("gpus_per_node", None), facts.pop("nodes", 1)
    # A number of GPUs, or of replicas, goes before nodes and what is on each.
    if per_node and "gpus" not in facts and "dp" not in facts:
        facts["gpus"] = per_node * nodes


def _replicas(facts: dict[str, Any], where: str) -> None:
    """Find the data-parallel degree: what fills the GPUs, or shards times copies."""
    shards, copies = facts.pop("shard_degree", None), facts.pop("replicate_degree", 1)
    ranks = {axis: facts.get(axis, 1) for axis in ("tp", "cp", "pp")}
    replica = ranks["tp"] * ranks["cp"] * ranks["pp"]
    gpus = facts.get("gpus")
    if gpus is not None and "dp" not in facts:
        if gpus % replica or gpus < replica:
            raise ConfigError(
                f"{where}: {gpus} GPUs do not factor into tp*cp*pp = "
                f"{ranks['tp']}*{ranks['cp']}*{ranks['pp']} = {replica} times replicas; "
                f"{near_multiples(gpus, replica)} GPUs would work"
            )
        if shards is not None and gpus // replica != shards * copies:
            raise ConfigError(
                f"{where}: {shards} shards times {copies} copies times tp*cp*pp = {replica} are "
                f"{shards * copies * replica} ranks, not {gpus} GPUs; "
                f"{gpus // replica // copies or 1} shards, or {shards * copies * replica} GPUs, would work"
            )
        facts["dp"] = gpus // replica
    elif shards is not None and "dp" not in facts:
        facts["dp"] = shards * copies
    if copies > 1 and facts.get("sharding") == "fsdp" and (dp := facts.get("dp")):
        if dp % copies:
            raise ConfigError(
                f"{where}: {copies} copies do not divide dp={dp}; {near_multiples(dp, copies)} would work"
            )
        # Shards are over replicas and context-parallel ranks alike.
        facts.setdefault("shard_ranks", dp // copies * ranks["cp"])


def _batch(facts: dict[str, Any], where: str) -> None:
    """Find the global batch: micro-batches times accumulation times replicas."""
    local, steps, dp = facts.pop("local_batch", None), facts.pop("accumulation", None), facts.get("dp")
    if local is not None and "micro_batch" not in facts:
        facts["micro_batch"] = local
    micro, batch = facts.get("micro_batch"), facts.get("global_batch")
    if local is not None and batch is None and dp:
        facts["global_batch"] = batch = local * dp
    if dp is None:
        return
    if batch is None and micro is not None:
        facts["global_batch"] = micro * (steps or 1) * dp
    elif batch is not None and steps is not None and micro is not None and batch != micro * steps * dp:
        raise ConfigError(
            f"{where}: a global batch of {batch} is not micro-batch times accumulation times dp = "
            f"{micro}*{steps}*{dp} = {micro * steps * dp}"
            + (f"; accumulation {batch // (micro * dp)}" if batch % (micro * dp) == 0 else "; another batch")
            + f" or a batch of {micro * steps * dp} would work"
        )
    elif batch is not None and micro is None and steps is not None and batch % (steps * dp) == 0:
        facts["micro_batch"] = batch // (steps * dp)
    elif batch is not None and batch % ((micro or 1) * dp):
        chunk = (micro or 1) * dp
        raise ConfigError(
            f"{where}: a global batch of {batch} does not divide into micro-batch times dp = "
            f"{micro or 1}*{dp} = {chunk}; {near_multiples(batch, chunk)} would work"
        )


def _stages(facts: dict[str, Any], where: str) -> None:
    """Find virtual stages and uneven ends from numbers of layers."""
    per_stage, pp = facts.pop("layers_per_virtual_stage", None), facts.get("pp", 1)
    first, last = facts.pop("first_stage_layers", None), facts.pop("last_stage_layers", None)
    layers = facts.get(MODEL + "n_layers", facts.get(SHAPE, {}).get("n_layers"))
    # The model is loaded only if somebody has to know its layers.
    if layers is None and facts.get("model") is not None and (per_stage or first or last):
        layers = load_model(facts["model"]).n_layers
    if layers is None or pp == 1:
        return
    if per_stage:
        if layers % (pp * per_stage):
            raise ConfigError(
                f"{where}: {layers} layers do not divide into {pp} ranks of stages of {per_stage} "
                f"layers; {near_multiples(layers, pp * per_stage)} layers, "
                f"or {_divisors(layers, pp)} per stage, would work"
            )
        facts["virtual_stages"] = layers // (pp * per_stage)
    if first or last:
        facts["layers_per_stage"] = _uneven(layers, pp, first, last, where)
    virtual = facts.get("virtual_stages") or 1
    # One stage on each rank is no interleaving.
    if virtual == 1 and facts.get("schedule") == "interleaved-1f1b":
        facts |= {"schedule": "1f1b"}
        facts.pop("virtual_stages", None)


def _uneven(layers: int, pp: int, first: int | None, last: int | None, where: str) -> tuple[int, ...]:
    """Return layers per stage when the ends have a number of their own, the rest evenly."""
    ends = [n for n in (first, last) if n]
    inner = pp - len(ends)
    rest = layers - sum(ends)
    if inner < 0 or (rest if inner == 0 else rest < inner or rest % inner):
        raise ConfigError(
            f"{where}: {layers} layers with {' and '.join(map(str, ends))} at the ends leave {rest} "
            f"for {max(inner, 0)} stages; "
            f"{near_multiples(rest, inner) if inner > 0 else 'more stages'} would work"
        )
    each = rest // inner if inner else 0
    return (*([first] if first else []), *([each] * inner), *([last] if last else []))


def _divisors(layers: int, pp: int) -> str:
    """Return the numbers that the layers of a rank divide into, in words."""
    share = layers // pp if layers % pp == 0 else layers
    found = [n for n in range(1, share + 1) if share % n == 0]
    return ", ".join(map(str, found[:6]))


def _offload(facts: dict[str, Any]) -> None:
    """Turn what is offloaded, one by one, into one of ``simulator.job.OFFLOADS``."""
    optimizer, states = facts.pop("offload_optimizer", None), facts.pop("offload_states", None)
    activations = facts.pop("offload_activations", None)
    # Optimizer states may be elsewhere than parameters; one place is all that a job has.
    place = _PLACES.get(states or optimizer or "")
    if states and (activations or facts.get("offload_layers")):
        facts["offload"] = "all"
    elif states or optimizer:
        facts["offload"] = "states" if states else "optimizer"
    elif activations or facts.get("offload_layers"):
        facts["offload"] = "activations"
    if place:
        facts["offload_to"] = place
