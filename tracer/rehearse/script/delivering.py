"""Batches of ``torch.utils.data.DataLoader`` in a rehearsal: made in this process, then fake."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import functools
import inspect
import weakref
from typing import TYPE_CHECKING, Any

from tracer.rehearse.operators import jagged
from tracer.rehearse.script import loaders

if TYPE_CHECKING:
    from tracer.rehearse.session import RehearsalSession

_WORKERS = frozenset(
    {
        "num_workers",
        "prefetch_factor",
        "persistent_workers",
        "multiprocessing_context",
        "pin_memory",
        "timeout",
    }
    | {"pin_memory_device"}
)
"""Arguments about worker processes, of which a rehearsal has none."""


def install(session: RehearsalSession) -> None:
    """Load data as the script does, in this process; of batches, only small integers stay known."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils import _pytree
    from torch.utils.data import DataLoader, dataloader

    anywhere: Any = dataloader._BaseDataLoaderIter
    loader: Any = DataLoader
    following, made, iterated = anywhere.__next__, loader.__init__, loader.__iter__
    positions = list(inspect.signature(made).parameters)[1:]
    pins: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
    owners: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
    drawn: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
    draws, loaded, asked = anywhere._next_index, session.trainings.loaded, loaders.AskedInVain()

    @functools.wraps(made)  # libraries that copy a loader read its signature
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        names = dict(zip(positions, args, strict=False)) | kwargs
        pins[self] = bool(names.get("pin_memory"))
        made(self, **{name: value for name, value in names.items() if name not in _WORKERS})

    def iterate(self: Any) -> Any:
        with unset_fake_temporarily():
            found = iterated(self)
        if said := loaders.without_batches(self):
            session.warn(said)
            asked.again(said)
        pins[found], owners[found] = pins.get(self, False), id(self)
        return found

    def next_index(self: Any) -> Any:
        found = draws(self)
        if isinstance(found, list | tuple):
            drawn[self] = found
        return found

    def next_batch(self: Any) -> Any:
        session.host.doing.is_loading = True
        try:
            with unset_fake_temporarily():
                batch = following(self)
                asked.given()
                loaded.note(owners.get(self, 0), batch, drawn.pop(self, None))
        finally:
            session.host.doing.is_loading = False
        is_pinned = bool(pins.get(self)) and session.placement.is_met
        faked = functools.partial(_loaded, session, is_pinned=is_pinned)
        return _pytree.tree_map_only(torch.Tensor, faked, batch)

    loader.__init__, loader.__iter__, anywhere.__next__ = init, iterate, next_batch
    anywhere._next_index = next_index


def _loaded(session: RehearsalSession, tensor: Any, *, is_pinned: bool) -> Any:
    """Return the fake tensor for *tensor* of a batch, in pinned memory if the loader *is_pinned*."""
    if tensor.is_nested:
        parts = functools.partial(_loaded, session, is_pinned=is_pinned)
        return jagged.of_parts(tensor, parts, parts)
    found = session.host.faked(tensor)
    return session.host.pin(found) if is_pinned and session.host.holds(found) else found
