"""Checkpoints of a rehearsal: nothing is written or read, because tensors have no data."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import functools
import io
import os
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.script import loading

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession


def install(session: RehearsalSession) -> None:
    """Replace ``torch.save``, ``torch.load`` and their counterparts in ``torch.distributed.checkpoint``."""
    import torch
    import torch.distributed.checkpoint as dcp

    anywhere: Any = torch
    anywhere.save, anywhere.load = _files(session, torch.load)
    for name, function in _distributed(session.warn).items():
        for module in (dcp, *_modules()):
            if hasattr(module, name):
                setattr(module, name, function)
    _shards()
    _told_states()


def _files(session: RehearsalSession, original: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """Return the replacements of ``torch.save`` and ``torch.load``; *original* is the latter."""
    import torch

    saved: set[Path] = set()
    buffers: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(torch.save)
    def save(obj: Any, f: Any = None, *args: Any, **kwargs: Any) -> None:
        del obj, args, kwargs
        if (path := _path(f)) is not None:
            saved.add(path)
        elif isinstance(f, io.BytesIO):
            buffers.add(f)
        session.warn("torch.save wrote nothing: in a rehearsal tensors have no data")

    @functools.wraps(original)
    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        path = _path(f)
        was_saved = path in saved if path is not None else isinstance(f, io.BytesIO) and f in buffers
        if _is_empty(f if path is None else path):
            session.steps.finish()  # which ends the rehearsal if that was the last step to keep
            if was_saved:
                raise RehearsalError(_refusal(_name(f), session.position.step))
        where = kwargs.get("map_location", args[0] if args else None)
        with loading.to(session, where):
            return original(f, *args, **kwargs)

    return save, load


def _path(file: Any) -> Path | None:
    """Return where *file* is, which a script saves to or reads from: a path, or an open file."""
    named = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
    return Path(named).resolve() if isinstance(named, str | os.PathLike) else None


def _name(file: Any) -> str:
    """Return what to call *file*: as the script does, without the folder of a copy that it was given."""
    if isinstance(file, str | os.PathLike):
        return os.fspath(file)
    path = _path(file)
    return "a buffer" if path is None else path.name


def _is_empty(file: Any) -> bool:
    """Whether nothing is in *file*, a path or a buffer, or there is none, as if states were saved there."""
    if isinstance(file, io.BytesIO):
        return not file.getbuffer().nbytes
    return isinstance(file, Path) and not (file.exists() and file.stat().st_size)


def _refusal(name: str, n_done: int) -> str:
    """Return what to say of a script that reads *name*, which it has saved, after *n_done* whole steps."""
    if n_done > 0:
        instead = f"keep only steps before that (--warmup {n_done - 1} --steps 1)"
    else:
        instead = "if no optimizer of torch.optim trains it, call foretrace.step() at the end of each step"
    return (
        f"the script reads {name}, which it has saved itself, but a rehearsal writes no checkpoints: "
        f"turn saving or loading off with an argument of the script, or {instead}"
    )


def _shards() -> None:
    """Make FSDP1 collect optimizer states of parameters of which this rank has no shard.

    With ``use_orig_params`` a rank has states only for parameters in its shard. In a real run it receives the
    names of the others from other ranks.
    """
    from torch.distributed.fsdp import _optim_utils

    anywhere: Any = _optim_utils
    original = anywhere._map_param_key_to_optim_keys

    def mapped(
        states: Any, group: Any, params: Any, names: Any, shards: Mapping[str, Any], *, merge_keys: bool
    ) -> tuple[list[Any], dict[Any, Any]]:
        keys, own = original(states, group, params, names, shards, merge_keys=merge_keys)
        if not (merge_keys and keys):
            return keys, own
        trained = (
            anywhere._OptimStateKey(unflat_param_names=(name,), is_fsdp_managed=True)
            for name, info in shards.items()
            if info.param_requires_grad[info.param_indices[name]]
        )
        return sorted({*keys, *trained}), own

    anywhere._map_param_key_to_optim_keys = mapped


def _told_states() -> None:
    """Give ranks that wait for the states of rank 0 their own names, with the sizes of whole tensors.

    In a real run rank 0 sends names, sizes and dtypes as an object, and then broadcasts each tensor.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import _state_dict_utils as module
    from torch.distributed.checkpoint import state_dict as user

    anywhere: Any = module
    original = anywhere._broadcast_state_dict

    def broadcast(whole: Any, own: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        told = {
            name: anywhere._TensorInfo(one.size(), one.dtype) if torch.is_tensor(one) and one.dim() else one
            for name, one in own.items()
        }

        def tell(objects: list[Any], *_: Any, **__: Any) -> None:
            if dist.get_rank():
                objects[0] = told

        hear, dist.broadcast_object_list = dist.broadcast_object_list, tell
        try:
            original(whole, own, *args, **kwargs)
        finally:
            dist.broadcast_object_list = hear

    anywhere._broadcast_state_dict = user._broadcast_state_dict = broadcast


def _modules() -> tuple[Any, ...]:
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    return state_dict_saver, state_dict_loader


def _distributed(warn: Callable[[str], None]) -> dict[str, Callable[..., Any]]:
    """Return functions that save and load nothing. Saving still collects states, which may communicate."""

    def save(state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        warn(
            "torch.distributed.checkpoint wrote nothing: in a rehearsal tensors have no data; copies to the "
            "host and writing take no time"
        )
        for part in state_dict.values():
            if hasattr(part, "load_state_dict") and hasattr(part, "state_dict"):
                part.state_dict()

    def load(*args: Any, **kwargs: Any) -> None:
        del args, kwargs
        warn("torch.distributed.checkpoint read nothing: weights keep their initial values")

    def async_save(state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Future[None]:
        save(state_dict, *args, **kwargs)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    return {"save": save, "async_save": async_save, "load": load}
