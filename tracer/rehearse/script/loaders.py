"""Loaders: how many rows they give in a step, and those that have nothing to train on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tracer.inputs import tensors_inside

AGAIN: Final = (
    "the model takes the {rows:,} rows of a step {n} times, as a discriminator or one of several views does: "
    "throughput counts them once"
)


class Loaded:
    """Counts the rows that each loader gives in a step.

    Args:
        position: where the training is.
    """

    def __init__(self, position: Any) -> None:
        self._position = position
        self._given: dict[int, dict[int, tuple[int, int]]] = {}  # by step and loader: rows of a batch, of all

    def note(self, loader: int, batch: Any) -> None:
        """The *loader* of this number gives a *batch*: its rows are those of the first tensor in it."""
        shape: Any = getattr(next(tensors_inside([batch]), None), "shape", ())
        if not len(shape):
            return
        of_step = self._given.setdefault(self._position.step, {})
        rows, in_all = of_step.get(loader, (int(shape[0]), 0))
        of_step[loader] = (rows, in_all + int(shape[0]))

    def once(self, job: Mapping[str, Any], step: int) -> int:
        """Return the rows of a *step* where passes of the model of *job* take the same ones; 0 where none do.

        Passes take the same rows if there are more of them than batches that are as large as the model's
        input. Of tokens every pass counts: texts of a pair lie in two batches of one loader, or in one.
        """
        shape = job.get("input_shape") or []
        has_tokens = len(shape) == (3 if job.get("input_is_embedded") else 2)
        if not shape or has_tokens or "n_microbatches" in job:
            return 0
        given = self._given.get(step, {}).values()
        most = max((in_all for rows, in_all in given if rows == shape[0]), default=0)
        return most if most < shape[0] * job.get("forwards_per_step", 1) else 0


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
