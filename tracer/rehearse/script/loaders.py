"""Loaders that have nothing to train on."""

from __future__ import annotations

from typing import Any


def without_batches(loader: Any) -> str:
    """Return what to say of a ``DataLoader`` that has no batch for this rank; nothing of others.

    One over a stream, of which nobody knows the length, counts as one that has some.
    """
    try:
        if len(loader):
            return ""
        rows = len(loader.sampler)
    except (TypeError, NotImplementedError):
        return ""
    ending = (
        f", and less than a batch of {loader.batch_size} is dropped (drop_last)" if loader.drop_last else ""
    )
    return f"a DataLoader has no batch: {rows:,} rows are left for this rank{ending}"
