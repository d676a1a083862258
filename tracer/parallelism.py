"""Learns which process group serves which axis, from device meshes and from data-parallel wrappers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from math import ceil, prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from foretrace.tracer import internals
from foretrace.tracer.groups import GroupInfo, Groups, axis_of
from foretrace.tracer.guarded import Replacements
from foretrace.tracer.wrapped import around, inside, said_by_holders, said_by_parts
from foretrace.traces.layout import AXES

if TYPE_CHECKING:
    from foretrace.tracer.guarded import Guards


SHARDING: Final = ("sharding", "shard_ranks", "reshard_after_forward")
"""Settings by which ``data_parallel`` says how a model is sharded."""


class MeshHook(Replacements):
    """Wrapper around the making of device meshes; looks at those that are there already, too.

    A mesh of one dimension over the whole world uses the default group, which does not bear its name. One
    that joins the process group while it is made, and so begins the recording, is met with the parameters
    that it distributes.
    """

    def __init__(self, groups: Groups, guards: Guards) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        super().__init__()
        note = guards.guarded("meshes", lambda mesh: name_axes(groups, mesh))

        def noting(original: Any) -> Any:
            def init(made: Any, /, *args: Any, **kwargs: Any) -> None:  # torch 2.6 passes mesh= by name
                original(made, *args, **kwargs)
                note(made)

            return init

        self.replace(DeviceMesh, "__init__", noting)
        # An object refers to its class: of 10 million objects these are found in 0.1 s, once.
        for mesh in [thing for thing in gc.get_referrers(DeviceMesh) if type(thing) is DeviceMesh]:
            note(mesh)


def parameter_meshes(model: Any) -> list[Any]:
    """Return the device meshes over which the parameters of *model* are distributed."""
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    return list({id(mesh): mesh for mesh in meshes if mesh is not None}.values())


def name_axes(groups: Groups, mesh: Any) -> None:
    """Note which axis each group of a device mesh serves, as the names of its dimensions tell."""
    for i, name in enumerate(getattr(mesh, "mesh_dim_names", None) or ()):  # it may be in the making
        if (axis := axis_of(name, fallback="")) in AXES:
            try:
                group = mesh.get_group(i)
            except (RuntimeError, LookupError, ValueError):  # a mesh without groups, or not of this rank
                continue
            groups.name_axis(group, axis)


def tensor_parallel(model: Any) -> list[Any]:
    """Return the groups over whose ranks matrices of *model* are cut by columns, as ``RowwiseParallel`` does.

    So they are found where a mesh has no names: FSDP cuts rows, unless asked for another dimension.
    """
    found = {}
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None or parameter.dim() != 2:  # experts have three
            continue
        for i, placement in enumerate(parameter.placements):
            if placement.is_shard(dim=1):
                found[id(mesh), i] = mesh.get_group(i)
    return list(found.values())


def cutting(groups: Groups, model: Any) -> Iterator[GroupInfo]:
    """Yield the groups over which parameters of *model* are cut that know their whole shape."""
    for parameter in model.parameters():
        if (mesh := getattr(parameter, "device_mesh", None)) is None:
            continue
        for i, placement in enumerate(parameter.placements):
            if placement.is_shard():
                yield groups.of(mesh.get_group(i))


def gathered(groups: Groups, model: Any) -> tuple[int, int]:
    """Return how many numbers FSDP2 gathers to have all parameters of *model* once, and how many of them pad.

    Of a parameter that is cut over ranks each has as many rows, of which the last ones may be zeros.
    """
    n_gathered = n_padding = 0
    is_fsdp2 = any(internals.fsdp2_groups(module) for module in model.modules())
    for parameter in model.parameters() if is_fsdp2 else ():
        if (mesh := getattr(parameter, "device_mesh", None)) is None:
            continue
        shape, ranks, at = [*parameter.shape], 1, 0
        for i, placement in enumerate(parameter.placements):
            if placement.is_shard() and groups.of(mesh.get_group(i)).axis == "dp":
                ranks, at = ranks * mesh.size(i), placement.dim
            elif placement.is_shard():  # before FSDP, by tensor parallelism
                shape[placement.dim] = ceil(shape[placement.dim] / mesh.size(i))
        n_own = prod(shape)
        shape[at] = ceil(shape[at] / ranks) * ranks
        n_gathered += prod(shape) if ranks > 1 else 0
        n_padding += prod(shape) - n_own if ranks > 1 else 0
    return n_gathered, n_padding


def data_parallel(model: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return how *model* is sharded over data-parallel ranks, and over which process groups.

    Returns:
        Settings for ``RunInfo.job``: ``sharding``, one of ``"ddp"``, ``"zero1"`` to ``"zero3"``, ``"fsdp"``;
        ``shard_ranks`` where a copy is spread over some of the ranks only; ``reshard_after_forward`` where it
        is false. None if nobody says. And the groups, which may repeat.
    """
    said, groups = said_by_holders(model)
    if said:
        return said, groups
    model = inside(model)
    units = list(_units(model))
    if not units:
        said, groups = said_by_parts(model)
        if said:
            return said, groups
        holder = around(model) if next(model.parameters(), None) is not None else None
        if holder is None:
            return {}, []
        return said_by_holders(holder) if inside(holder) is model else data_parallel(holder)
    settings: dict[str, Any] = {"sharding": "fsdp"}
    hybrid = [unit for unit in units if unit.shard is not None and unit.replicate is not None]
    if all(unit.shard is None for unit in units):
        settings["sharding"] = "ddp"
    elif hybrid:
        settings["shard_ranks"] = hybrid[0].shard.size()
    if settings["sharding"] == "fsdp" and not any(unit.reshards for unit in units):
        settings["reshard_after_forward"] = False
    return settings, [group for unit in units for group in (unit.shard, unit.replicate) if group is not None]


class _Unit(NamedTuple):
    """Parameters that FSDP, the first or the second, gathers together."""

    shard: Any  # group over which they are cut, None if they are not
    replicate: Any  # group of the ranks that hold the same part, None if there are no others
    # whether they are freed after forward; those of the model itself never are with FSDP2, unless that is
    # asked for
    reshards: bool


def _units(model: Any) -> Iterator[_Unit]:
    for module in model.modules():
        if type(module).__name__ == internals.FSDP1:
            strategy = module.sharding_strategy.name
            within, across = module.process_group, getattr(module, "_inter_node_pg", None)
            if strategy == "NO_SHARD":
                yield _Unit(None, within, reshards=False)
            else:
                is_hybrid = "HYBRID" in strategy
                # The other strategies, SHARD_GRAD_OP and _HYBRID_SHARD_ZERO2, free parameters after backward
                # only.
                yield _Unit(within, across if is_hybrid else None, strategy in ("FULL_SHARD", "HYBRID_SHARD"))
        for parameters in internals.fsdp2_groups(module):
            info = parameters.mesh_info
            within, across = (getattr(info, f"{name}_process_group", None) for name in ("shard", "replicate"))
            reshards = parameters.post_forward_mesh_info is not None and module is not model
            yield _Unit(within, across, reshards)
