"""Checkpoints of a rehearsal: nothing is written or read, for there are no numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracer.rehearse.session import RehearsalSession


def install(session: RehearsalSession) -> None:
    """Take the place of ``torch.save`` and of what saves and loads in ``torch.distributed.checkpoint``."""
    import torch
    import torch.distributed.checkpoint as dcp

    def save(*args: Any, **kwargs: Any) -> None:
        del args, kwargs
        session.warn("torch.save wrote nothing: a rehearsal has no numbers to keep")

    anywhere: Any = torch
    anywhere.save = save
    for name, function in _distributed(session.warn).items():
        for module in (dcp, *_modules()):
            if hasattr(module, name):
                setattr(module, name, function)


def _modules() -> tuple[Any, ...]:
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    return state_dict_saver, state_dict_loader


def _distributed(warn: Callable[[str], None]) -> dict[str, Callable[..., Any]]:
    """Return what saves and loads: parts are asked for their state, which may communicate."""

    def save(state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        warn(
            "torch.distributed.checkpoint wrote nothing: a rehearsal has no numbers to keep; "
            "copies to the host and files take no time in it"
        )
        for part in state_dict.values():
            if hasattr(part, "load_state_dict") and hasattr(part, "state_dict"):
                part.state_dict()

    def load(*args: Any, **kwargs: Any) -> None:
        del args, kwargs
        warn("torch.distributed.checkpoint read nothing: weights stay as they were made")

    def async_save(state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Future[None]:
        save(state_dict, *args, **kwargs)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    return {"save": save, "async_save": async_save, "load": load}
