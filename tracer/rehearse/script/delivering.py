"""Batches of ``torch.utils.data.DataLoader`` in a rehearsal: made in this process, then fake."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import functools
import inspect
import weakref
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.rehearse.operators import jagged
from foretrace.tracer.rehearse.script import loaders

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

_WORKERS: Final = frozenset(
    {"num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"}
    | {"pin_memory", "pin_memory_device"}
)
"""Arguments about worker processes, of which a rehearsal has none."""


class _Iterators:
    """Iterators over the batches of loaders, and what is known of each.

    Attributes:
        pins: whether the batches of a loader, or of an iterator, are in pinned memory.
        owners: the number of the loader of an iterator.
        drawn: the places of the samples of its next batch.
        asked: counts loaders without batches that are asked for some.
    """

    def __init__(self) -> None:
        self.pins: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self.owners: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.drawn: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.asked = loaders.AskedInVain()


def install(session: RehearsalSession) -> None:
    """Load data as the script does, in this process; of batches, only small integers stay known."""
    iterators = _Iterators()
    _make_loaders(session, iterators)
    _give_batches(session, iterators)


def _make_loaders(session: RehearsalSession, iterators: _Iterators) -> None:
    """Make loaders without processes of their own, and note what they iterate with."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils.data import DataLoader

    loader: Any = DataLoader
    made, iterated = loader.__init__, loader.__iter__
    positions = list(inspect.signature(made).parameters)[1:]

    @functools.wraps(made)  # libraries that copy a loader read its signature
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        names = dict(zip(positions, args, strict=False)) | kwargs
        iterators.pins[self] = bool(names.get("pin_memory"))
        made(self, **{name: value for name, value in names.items() if name not in _WORKERS})

    def iterate(self: Any) -> Any:
        with unset_fake_temporarily():
            found = iterated(self)
        if said := loaders.without_batches(self):
            session.warn(said)
            iterators.asked.again(said)
        iterators.pins[found], iterators.owners[found] = iterators.pins.get(self, False), id(self)
        session.trainings.loaded.dealt[id(self)] = loaders.dealt_by(self)
        session.trainings.loaded.lacking[id(self)] = loaders.uneven_of(self)
        return found

    loader.__init__, loader.__iter__ = init, iterate


def _give_batches(session: RehearsalSession, iterators: _Iterators) -> None:
    """Give batches as fake tensors, and note which samples they are."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils import _pytree
    from torch.utils.data import dataloader

    anywhere: Any = dataloader._BaseDataLoaderIter
    following, draws = anywhere.__next__, anywhere._next_index

    def next_index(self: Any) -> Any:
        found = draws(self)
        if isinstance(found, list | tuple):
            iterators.drawn[self] = found
        return found

    def next_batch(self: Any) -> Any:
        session.host.doing.is_loading = True
        try:
            with unset_fake_temporarily():
                batch = following(self)
                iterators.asked.given()
                owner = iterators.owners.get(self, 0)
                session.trainings.loaded.note(owner, batch, iterators.drawn.pop(self, None))
        finally:
            session.host.doing.is_loading = False
        is_pinned = bool(iterators.pins.get(self)) and torch.cuda.is_available()
        faked = functools.partial(_loaded, session, is_pinned=is_pinned)
        return _pytree.tree_map_only(torch.Tensor, faked, batch)

    anywhere.__next__, anywhere._next_index = next_batch, next_index


def _loaded(session: RehearsalSession, tensor: Any, *, is_pinned: bool) -> Any:
    """Return the fake tensor for *tensor* of a batch, in pinned memory if the loader *is_pinned*."""
    if tensor.is_nested:
        parts = functools.partial(_loaded, session, is_pinned=is_pinned)
        return jagged.of_parts(tensor, parts, parts)
    found = session.host.faked(tensor)
    return session.host.pin(found) if is_pinned and session.host.holds(found) else found
