"""What libraries put around a model, and what each of these says of data parallelism.

The ``DistributedDataParallel`` of torch, that of Megatron-core, and DeepSpeed's engine hold the model as
``module``. They are told by the names of their classes, so that nobody has to be imported.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, Final

from foretrace.tracer.internals import FSDP1

HOLDERS: Final = frozenset({"DistributedDataParallel", "DataParallel", "DeepSpeedEngine", "Float16Module"})
"""Classes that call a model of their own, and whose subclasses do."""

PASSING: Final = {"OptimizedModule": "_orig_mod", "_FabricModule": "_forward_module"}
"""Classes that only pass calls on, and where they hold what they pass them to: those of ``torch.compile`` and
of Lightning Fabric, which puts its own around a model or around what holds it."""

LOSSES: Final = "torch.nn.modules.loss"
CONTAINERS: Final = "torch.nn.modules.container"
"""Where torch has its losses, and what only lists modules, whose name says nothing."""

ZERO: Final = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
"""Stages of DeepSpeed's ZeRO, as ``RunInfo.job`` names them."""


def compiled_of(model: Any) -> Any:
    """Return what *model* passes its calls on to, as what ``torch.compile`` made it of, or *model* itself."""
    while name := PASSING.get(type(model).__name__):
        model = getattr(model, name)
    return model


def is_holder(model: Any) -> bool:
    """Whether *model* is put around another one, which it holds as ``module``."""
    return any(base.__name__ in HOLDERS for base in type(model).__mro__) and hasattr(model, "module")


def holders(model: Any) -> Iterator[Any]:
    """Yield what is around a model, the outermost first."""
    model = compiled_of(model)
    while is_holder(model):
        yield model
        model = compiled_of(model.module)


def around(model: Any) -> Any | None:
    """Return what holds *model*, where its own ``forward`` was called, or *model* itself was; None: nothing.

    Hooks see no call of ``wrapper.forward(...)``. An object refers to its class: one look at all objects.
    """
    from torch.nn import Module

    names = HOLDERS | {FSDP1}
    kinds = [kind for kind in _subclasses(Module) if any(base.__name__ in names for base in kind.__mro__)]
    for found in gc.get_referrers(*kinds) if kinds else ():
        # Most of what refers to a class is no object of it.
        if type(found) in kinds and any(compiled_of(one) is model for one in found.children()):
            return around(found) or found
    return None


def _subclasses(kind: type[Any]) -> set[type[Any]]:
    found = set(kind.__subclasses__())
    return found.union(*map(_subclasses, found))


def inside(model: Any) -> Any:
    """Return the model itself, without what is around it."""
    found = compiled_of(model)
    for holder in holders(model):
        found = compiled_of(holder.module)
    return found


def held_whole(model: Any) -> Any:
    """Return what is around all parameters of *model* within it, as within a loss, or *model*.

    A loss is told by what it has beside that one part: nothing but losses of torch.
    """
    if not (own := parameters_of(model)):
        return model
    found = next((one for one in model.modules() if is_holder(one) and parameters_of(one) == own), model)
    parts = list(inside(found).children())
    others = [part for part in parts if not _is_of(part, LOSSES)]
    is_loss = len(others) == 1 < len(parts) and not _is_of(others[0], CONTAINERS)
    return others[0] if is_loss and parameters_of(others[0]) == own else found


def parameters_of(model: Any) -> set[int]:
    """Return who the parameters of *model* are."""
    return {id(one) for one in model.parameters()}


def _is_of(model: Any, module: str) -> bool:
    """Whether a class of torch's *module* is among those of *model*."""
    return any(base.__module__ == module for base in type(model).__mro__)


def said_by_holders(model: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return settings and groups as ``parallelism.data_parallel`` does, {} if nothing around *model* says."""
    for holder in holders(model):
        if hasattr(holder, "zero_optimization_stage"):
            return _deepspeed(holder)
        if hasattr(holder, "ddp_config"):
            return _megatron(holder)
        if hasattr(holder, "process_group"):
            return {"sharding": "ddp"}, [holder.process_group]
    return {}, []


def said_by_parts(model: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return the same of what is around parts of *model*: the settings of the first, the groups of all."""
    found = [said_by_holders(part) for part in model.modules() if is_holder(part)]
    said = [settings for settings, _ in found if settings]
    return (said[0] if said else {}), [group for _, groups in found for group in groups]


def _deepspeed(engine: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return the same of an engine of DeepSpeed, which may cut parameters over a clone of the group."""
    settings: dict[str, Any] = {"sharding": ZERO.get(engine.zero_optimization_stage(), "ddp")}
    first = next(engine.module.parameters(), None)
    found = [engine.seq_data_parallel_group, getattr(first, "ds_process_group", None)]
    if (n_ranks := getattr(engine, "mics_shard_size", int)()) > 0:
        settings["shard_ranks"] = n_ranks
    return settings, [group for group in found if hasattr(group, "group_name")]


def cutting_sequences(model: Any) -> list[Any]:
    """Return the groups over whose ranks an engine of DeepSpeed around *model* cuts sequences (Ulysses)."""
    engines = [one for one in holders(model) if getattr(one, "sequence_parallel_size", 1) > 1]
    found = [getattr(one, "seq_parallel_group", None) for one in engines]
    return [group for group in found if hasattr(group, "group_name")]


def _megatron(holder: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return the same of what Megatron-core puts around a model."""
    is_sharded = holder.ddp_config.use_distributed_optimizer
    return {"sharding": "zero1" if is_sharded else "ddp"}, [holder.dp_cp_group]


def whole_shape(parameter: Any) -> list[int]:
    """Return the shape of *parameter* before DeepSpeed cut it, which leaves an empty one between uses."""
    return list(getattr(parameter, "ds_shape", parameter.shape))
