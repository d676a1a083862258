"""Process groups that a script wants of NCCL are of gloo."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

from foretrace.tracer.on_cpu.moves import placed
from foretrace.tracer.rehearse.script.libraries import everywhere

GLOO: Final = "gloo"

MAKERS: Final = (
    "init_process_group",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
)
"""Functions that make a process group."""

AVERAGING: Final = ("all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter_single")
"""Functions that can average, which gloo cannot."""

GATHERING: Final = ("all_gather_into_tensor", "all_gather_single")
"""Functions that NCCL does below autograd, for tensors of any shape."""


def install() -> None:
    """Replace backends, devices and averages."""
    import torch.distributed as dist
    from torch.distributed import device_mesh, distributed_c10d

    for name in MAKERS:
        _replace(distributed_c10d, name, _of_gloo)
    for name in AVERAGING:
        _replace(distributed_c10d, name, _averaging)
    for name in GATHERING:
        _replace(distributed_c10d, name, _gathering)
    _replace(distributed_c10d, "barrier", _anywhere)
    everywhere("is_nccl_available", dist.is_nccl_available, lambda: True)
    _meshes(device_mesh)


def _replace(module: Any, name: str, around: Callable[[Any], Any]) -> None:
    original = getattr(module, name, None)
    if original is not None:
        everywhere(name, original, functools.wraps(original)(around(original)))


def _of_gloo(original: Any) -> Any:
    """Return what makes a group of gloo in place of any that names another backend."""

    def made(*args: Any, **kwargs: Any) -> Any:
        if original.__name__ == MAKERS[0]:
            backend, *rest = args or (kwargs.pop("backend", None),)
            args = (_gloo(backend), *rest)
            kwargs.pop("device_id", None)
        elif kwargs.get("backend") is not None:
            kwargs["backend"] = _gloo(kwargs["backend"])
        kwargs.pop("pg_options", None)
        return original(*args, **kwargs)

    return made


def _gloo(backend: Any) -> Any:
    """Return *backend*, or gloo if it is NCCL, or one per kind of device."""
    return GLOO if backend is None or "nccl" in str(backend).lower() else backend


def _averaging(original: Any) -> Any:
    """Return what sums parts of an average: each rank divides what it gives."""
    import torch.distributed as dist

    signature = inspect.signature(original)

    def averaged(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        found = given.arguments
        if found.get("op") == dist.ReduceOp.AVG:
            n_ranks = dist.get_world_size(found.get("group"))
            found["op"] = dist.ReduceOp.SUM
            if "tensor" in found:
                found["tensor"].div_(n_ranks)
            else:
                found["input"] = found["input"] / n_ranks
        return original(*given.args, **given.kwargs)

    return averaged


def _gathering(original: Any) -> Any:
    """Return what gathers numbers, of any shape, with gradients or without: gloo looks at both."""
    import torch

    signature = inspect.signature(original)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def gathered(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        for name in ("output_tensor", "input_tensor"):
            given.arguments[name] = given.arguments[name].view(-1)
        return original(*given.args, **given.kwargs)

    return gathered


def _anywhere(original: Any) -> Any:
    """Return a barrier that names no GPU: gloo refuses those."""

    def barrier(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_ids", None)
        return original(*args[:2], **kwargs)

    return barrier


def _meshes(module: Any) -> None:
    """Make meshes those of the processor, which use the group of all ranks where those of NCCL do."""
    kind = module.DeviceMesh
    made, backend = kind.__init__, module.get_backend
    module.get_backend = lambda group=None: "nccl" if backend(group) == GLOO else backend(group)

    @functools.wraps(made)
    def init(self: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
        made(self, str(placed(device_type)), *args, **kwargs)

    kind.__init__ = init
