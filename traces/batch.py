"""How many rows and tokens a step of all ranks trains on: a product whose factors have evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

UNTOLD: Final = "the rehearsal does not tell: rehearse the script again, or give --tokens-per-step"
"""Why the batch of a rehearsal is unknown that was written before batches were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows and tokens of a step, over all ranks.

    Attributes:
        rows: rows of the model's input, None if unknown.
        tokens: tokens in them, 0 if the input has none, None if unknown.
        equation: the product, with the evidence of its factors in brackets; empty if unknown.
        unknown: why it is unknown; empty if it is known.
    """

    rows: int | None = None
    tokens: int | None = None
    equation: str = ""
    unknown: str = ""

    @property
    def words(self) -> str:
        """What a person reads: the equation with its result, or why there is none."""
        if self.unknown:
            return f"tokens/step unknown: {self.unknown}"
        name, total = ("tokens", self.tokens) if self.tokens else ("rows", self.rows)
        return f"{name}/step = {self.equation} = {total:,}"

    @property
    def job(self) -> dict[str, Any]:
        """The entry of ``RunInfo.job`` that `batch_in` reads."""
        return {"batch": asdict(self)}


def batch_in(job: Mapping[str, Any]) -> Batch:
    """Return the batch that the settings *job* of a rehearsal, or of its simulation, have noted."""
    noted = job.get("batch")
    return Batch(**noted) if isinstance(noted, Mapping) else Batch(unknown=UNTOLD)


def stated(n_tokens: int) -> Batch:
    """Return the batch of which the user has stated the tokens."""
    return Batch(tokens=n_tokens, equation="--tokens-per-step")


def told(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch that *job* has noted in the keys of a JSON document, nothing if it has noted none."""
    if "batch" not in job:
        return {}
    found = batch_in(job)
    return {"tokens_per_step": found.tokens, "rows_per_step": found.rows, "batch": found.words}
