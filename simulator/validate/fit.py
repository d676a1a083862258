"""``foretrace validate fit``: would runs that completed have fitted, and runs that failed not?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from foretrace.simulator.errors import SimulationError, TableError
from foretrace.simulator.memory.reserved import reserved_bytes
from foretrace.simulator.validate.job import job_of
from foretrace.simulator.validate.memory import completed, figure_bytes, stage_memories
from foretrace.simulator.validate.scores import Failed, reasons
from foretrace.simulator.validate.table import Row, read_table
from foretrace.topologies.errors import TopologyError
from foretrace.traces.errors import TraceError

SHAPE: Final = ("layers", "hidden", "ffn_hidden", "vocab")
LIKE: Final = (
    *("arch", "heads", "kv_heads", "head_dim", "gated", "tied_emb", "flash_attention", "framework"),
    *("hardware", "model", "precision", "sp", "recompute"),
)
"""Columns that a failed run takes from a completed run of the same shape where its own table lacks them."""

FAR_BELOW: Final = 0.5
"""Predicted share of a device's memory below which a run has hardly failed for lack of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One run: how it ended, and what was predicted.

    Attributes:
        id: identifies the run in its table.
        what: the run in a few words.
        ran: whether it completed.
        needed_bytes: predicted peak of the fullest rank, context included, without allocator slack.
        limit_bytes: memory of the device.
        slack_bytes: what the caching allocator usually keeps beside tensors.
    """

    id: str
    what: str
    ran: bool
    needed_bytes: int
    limit_bytes: int
    slack_bytes: int = 0

    @property
    def fits(self) -> bool:
        """Whether the prediction is that it fits."""
        return self.needed_bytes <= self.limit_bytes

    @property
    def is_tight(self) -> bool:
        """Whether it fits, but without what the allocator usually keeps beside tensors."""
        return self.fits and self.needed_bytes + self.slack_bytes > self.limit_bytes

    @property
    def is_far_below(self) -> bool:
        """Whether it needs less than half of the memory: if it failed, then hardly for lack of memory."""
        return self.needed_bytes < FAR_BELOW * self.limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FitValidation:
    """Verdicts on runs that completed and runs that failed."""

    table: str
    verdicts: Sequence[Verdict]
    failures: Sequence[Failed]

    @property
    def confusion(self) -> dict[str, dict[str, int]]:
        """Counts by how runs ended and by what was predicted.

        ``tight`` and ``under_half`` are part of ``fits``: without room for the allocator's slack, and with
        less than half of the memory needed.
        """
        return {
            name: {
                "fits": sum(one.fits for one in of),
                "tight": sum(one.is_tight for one in of),
                "under_half": sum(one.is_far_below for one in of),
                "does_not_fit": sum(not one.fits for one in of),
            }
            for name, ran in (("completed", True), ("failed", False))
            for of in ([one for one in self.verdicts if one.ran is ran],)
        }

    @property
    def score(self) -> float | None:
        """Mean of the shares of wrong verdicts on completed and on failed runs; None without both.

        The label of a failed run is weak: runs fail for other reasons than memory.
        """
        shares = []
        for name, wrong in (("completed", "does_not_fit"), ("failed", "fits")):
            counts = self.confusion[name]
            if not (total := counts["fits"] + counts["does_not_fit"]):
                return None
            shares.append(counts[wrong] / total)
        return sum(shares) / len(shares)

    def wrong(self, n: int) -> list[Verdict]:
        """Return the *n* completed runs that are furthest above the limit."""
        false = [one for one in self.verdicts if one.ran and not one.fits]
        return sorted(false, key=lambda one: -one.needed_bytes / one.limit_bytes)[:n]

    def document(self, n_worst: int) -> dict[str, Any]:
        """Return everything as plain JSON types: what ``--json`` prints."""
        return {
            "kind": "fit",
            "table": self.table,
            "score": self.score,
            "rows": len(self.verdicts) + len(self.failures),
            "predicted": len(self.verdicts),
            "failures": len(self.failures),
            "failure_reasons": reasons(self.failures),
            "confusion": self.confusion,
            "worst": [
                {
                    "id": one.id,
                    "what": one.what,
                    "needed_gb": one.needed_bytes / 1e9,
                    "limit_gb": one.limit_bytes / 1e9,
                }
                for one in self.wrong(n_worst)
            ],
        }


def validate_fit(
    table: str | Path, *, ran: str | Path | None = None, steps: str | Path | None = None
) -> FitValidation:
    """Return verdicts on the failed runs in *table* and on the completed runs in *ran*.

    Args:
        table: failed runs: ``layers, hidden, ffn_hidden, vocab, seq_len, gpus, tp, pp, dp, zero, micro_batch,
            grad_acc``; what it does not say comes from a completed run of the same shape. Rows with a
            throughput ran, whatever the table calls them.
        ran: completed runs, with the columns of a table of memory; by default ``memory.csv`` beside *table*.
        steps: the table of steps; by default ``steps.csv`` beside *table*.

    Raises:
        TableError: a table cannot be read.
    """
    path = Path(table)
    failed_rows = read_table(path, ("layers", "hidden", "tp", "pp", "dp", "micro_batch"))
    beside = Path(ran) if ran is not None else path.parent / "memory.csv"
    ran_rows = completed(read_table(beside, ("tp", "pp", "dp")), beside, steps) if beside.is_file() else []
    like = _by_shape(ran_rows)
    verdicts: list[Verdict] = []
    failures: list[Failed] = []
    for row, did_run in [*_failed(failed_rows, like), *((row, True) for row in ran_rows)]:
        try:
            verdicts.append(_verdict(row, ran=did_run))
        except (SimulationError, TopologyError, TraceError) as error:
            family = "completed" if did_run else "failed"
            failures.append(Failed(id=row.id, family=family, reason=str(error)))
    return FitValidation(table=str(table), verdicts=verdicts, failures=failures)


def _by_shape(rows: Iterable[Row]) -> Mapping[tuple[str, ...], Row]:
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        found.setdefault(_shape(row), row)
    return found


def _shape(row: Row) -> tuple[str, ...]:
    """Return the shape of the model of *row*, and whether it has tensor parallelism: ``sp`` needs it."""
    return *(row.text(name) for name in SHAPE), str(row.integer("tp", 1) > 1)


def _failed(rows: Iterable[Row], like: Mapping[tuple[str, ...], Row]) -> Iterator[tuple[Row, bool]]:
    """Yield each row of failed runs as the row of a job, and whether it ran after all."""
    for row in rows:
        batch = row.integer("grad_acc", 1) * row.integer("micro_batch", 1) * row.integer("dp", 1)
        sharding = {"0": "none", "1": "zero1", "2": "zero2", "3": "zero3"}.get(row.text("zero"), "none")
        full = row.over(Row({"global_batch": batch, "sharding": sharding}, row.number))
        twin = like.get(_shape(row))
        yield full.over(twin.only(LIKE)) if twin else full, bool(row.text("tokens_per_s_per_gpu"))


def _verdict(row: Row, *, ran: bool) -> Verdict:
    if not row.text("tp") or not row.text("hardware"):
        raise TableError("layout or hardware is not given")
    stages = stage_memories(job_of(row), row.integer("virtual_pp", 1))
    job = stages[0][0]
    allocated = max(figure_bytes(job, memory, "allocated") for _, memory in stages)
    layout = " ".join(f"{axis}{degree}" for axis, degree in job.layout.degrees.items() if degree > 1)
    return Verdict(
        id=row.id,
        what=f"{job.model.name} {layout} {job.sharding} mbs {job.micro_batch}",
        ran=ran,
        needed_bytes=allocated + reserved_bytes(job),
        limit_bytes=job.cluster.device.memory_bytes,
        slack_bytes=round(allocated * job.profile.allocator_slack),
    )
