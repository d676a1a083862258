"""Learns which process group serves which axis, from device meshes and from data-parallel wrappers."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tracer.groups import Groups, axis_of
from traces.layout import AXES

if TYPE_CHECKING:
    from tracer.session import Session


class MeshHook:
    """Wrapper around the making of device meshes; looks at those that are there already, too.

    A mesh of one dimension over the whole world uses the default group, which does not bear its name. One
    that joins the process group while it is made, and so begins the recording, is met with the parameters
    that it distributes.

    Args:
        session: the recording.
    """

    def __init__(self, session: Session) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        self._type: Any = DeviceMesh
        self._original = original = DeviceMesh.__init__
        note = session.guarded("meshes", lambda mesh: name_axes(session.groups, mesh))

        @functools.wraps(original)
        def init(made: Any, /, *args: Any, **kwargs: Any) -> None:  # torch 2.6 passes mesh= by name
            original(made, *args, **kwargs)
            note(made)

        self._type.__init__ = init
        # An object refers to its class: of 10 million objects these are found in 0.1 s, once.
        for mesh in [thing for thing in gc.get_referrers(DeviceMesh) if type(thing) is DeviceMesh]:
            note(mesh)

    def remove(self) -> None:
        """Give ``DeviceMesh`` back as it was."""
        self._type.__init__ = self._original


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


def data_parallel(model: Any) -> tuple[str, list[Any]]:
    """Return how *model* is sharded over data-parallel ranks, and over which process groups.

    Args:
        model: a ``torch.nn.Module`` that is called from outside of any other.

    Returns:
        One of ``"ddp"``, ``"fsdp"`` and ``""`` if it is neither, and the groups, which may repeat.
    """
    if type(model).__name__ == "DistributedDataParallel":
        return "ddp", [model.process_group]
    groups = list(_sharding_groups(model))
    return ("fsdp", groups) if groups else ("", [])


def _sharding_groups(model: Any) -> Iterator[Any]:
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            yield module.process_group
        state = getattr(module, "_get_fsdp_state", None)
        parameters = getattr(state(), "_fsdp_param_group", None) if state is not None else None
        mesh_info = getattr(parameters, "mesh_info", None)
        for name in ("shard_process_group", "replicate_process_group"):
            if (group := getattr(mesh_info, name, None)) is not None:
                yield group
