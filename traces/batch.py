"""How many rows and tokens a step of all ranks trains on: a product whose factors have evidence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from foretrace.door import shaped

if TYPE_CHECKING:
    from foretrace.traces.layout import Layout

UNTOLD: Final = "the rehearsal does not tell: rehearse the script again, or give --tokens-per-step"
"""Why the batch of a rehearsal is unknown that was written before batches were."""


TOKEN_SIDES: Final = 2  # sides of an input of tokens: sequences, and their length. Embedded, it has one more.


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows and tokens of a step, over all ranks."""

    rows: int | None = None  # rows of the model's input, None if unknown
    tokens: int | None = None  # tokens in them, 0 if the input has none, None if unknown
    equation: str = ""  # the product, with the evidence of its factors in brackets; empty if unknown
    unknown: str = ""  # why it is unknown; empty if it is known

    @property
    def words(self) -> str:
        """What a person reads: the equation with its result, or why there is none.

        >>> Batch(equation="4 rows").words
        'tokens/step unknown: the run does not tell'
        """
        name, total = ("tokens", self.tokens) if self.tokens else ("rows", self.rows)
        if self.unknown or total is None:
            return f"tokens/step unknown: {self.unknown or 'the run does not tell'}"
        return f"{name}/step = {self.equation} = {total:,}"

    def widened(self, dp: int, rehearsed: int) -> Batch:
        """Return the batch of *dp* replicas, each with its share of this one, of *rehearsed*."""
        if self.unknown or dp == rehearsed:
            return self
        if any((n or 0) % rehearsed for n in (self.rows, self.tokens)):
            return Batch(unknown=f"the {rehearsed} replicas have batches of different sizes")
        rows, tokens = (n if n is None else n // rehearsed * dp for n in (self.rows, self.tokens))
        equation = f"{self.equation} / {rehearsed} × {dp} replicas"
        return replace(self, rows=rows, tokens=tokens, equation=equation)

    @property
    def job(self) -> dict[str, Any]:
        """The entry of ``RunInfo.job`` that `batch_in` reads."""
        return {"batch": asdict(self)}


def batch_in(job: Mapping[str, Any]) -> Batch:
    """Return the batch that the settings *job* of a rehearsal, or of its simulation, have noted."""
    noted = job.get("batch")
    return shaped(Batch, noted) if isinstance(noted, Mapping) else Batch(unknown=UNTOLD)


def stated(n_tokens: int) -> Batch:
    """Return the batch of which the user has stated the tokens."""
    return Batch(tokens=n_tokens, equation="--tokens-per-step")


def work_of(job: Mapping[str, Any], layout: Layout | None) -> tuple[int, str] | None:
    """Return what a step trains on, over all ranks, and its unit: ``tokens``, or ``rows`` of other input.

    A recording knows it where each rank of data parallelism has the whole model: its usual input, as often as
    it is called in a step. None: the run does not say.
    """
    batch, seq_len, shape = (job.get(name) for name in ("global_batch", "seq_len", "input_shape"))
    if isinstance(batch, int) and isinstance(seq_len, int):
        return batch * seq_len, "tokens"
    if "batch" in job:
        found = batch_in(job)
        n, unit = (found.tokens, "tokens") if found.tokens else (found.rows, "rows")
        return (n, unit) if n else None
    calls = job.get("forwards_per_step")
    if layout is None or layout.pp * layout.cp > 1 or not shape or not calls or "input_shapes" in job:
        return None
    has_tokens = len(shape) == TOKEN_SIDES + bool(job.get("input_is_embedded"))
    n = math.prod(shape[:TOKEN_SIDES]) if has_tokens else shape[0]
    return n * calls * layout.dp, "tokens" if has_tokens else "rows"


def told(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch that *job* has noted in the keys of a JSON document, nothing if it has noted none."""
    if "batch" not in job:
        return {}
    found = batch_in(job)
    return {"tokens_per_step": found.tokens, "rows_per_step": found.rows, "batch": found.words}
