"""Data loaders: how many rows they deliver in a step, and whether a loader has no batch at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tracer.inputs import tensors_inside

AGAIN: Final = (
    "the model processes the {rows:,} rows of a step {n} times, as a discriminator or a model of several "
    "views does: throughput counts them once"
)


class Loaded:
    """Counts the rows that each loader delivers in a step.

    Args:
        position: where the training is.
    """

    def __init__(self, position: Any) -> None:
        self._position = position
        self._given: dict[int, dict[int, tuple[int, int]]] = {}  # by step and loader: rows of a batch, of all

    def note(self, loader: int, batch: Any) -> None:
        """Count a *batch* of the loader with the number *loader*: the rows of its first tensor."""
        shape: Any = getattr(next(tensors_inside([batch]), None), "shape", ())
        if not len(shape):
            return
        of_step = self._given.setdefault(self._position.step, {})
        rows, in_all = of_step.get(loader, (int(shape[0]), 0))
        of_step[loader] = (rows, in_all + int(shape[0]))

    def once(self, job: Mapping[str, Any], step: int) -> int:
        """Return the rows of a *step* if several passes of the model use the same rows, else 0.

        Passes use the same rows if there are more passes than batches as large as the model's input. Passes
        over tokens are all counted: the two texts of a pair may be in one batch, or in two of one loader.

        Args:
            job: what is known of the model's input and passes, as ``RunInfo.job`` has it.
            step: number of the step.
        """
        shape = job.get("input_shape") or []
        has_tokens = len(shape) == (3 if job.get("input_is_embedded") else 2)
        if not shape or has_tokens or "n_microbatches" in job:
            return 0
        given = self._given.get(step, {}).values()
        most = max((in_all for rows, in_all in given if rows == shape[0]), default=0)
        return most if most < shape[0] * job.get("forwards_per_step", 1) else 0


def without_batches(loader: Any) -> str:
    """Return a note if a ``DataLoader`` has no batch for this rank, else nothing.

    A loader over a stream of unknown length counts as one that has batches.
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
