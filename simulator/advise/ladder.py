"""Climbs the ways to train a model on some GPUs, from the simplest to the last resort, each computed.

The order is that of the tables which practitioners go by: replicate, then shard more and more, then compute
again what was kept, then move to the host, then train less of the model, then cut the model itself. Every
rung stands for a few jobs. It is represented by the fastest job that fits or, if measurements could not tell
the two apart, by one that leaves more room; if no job fits, by the one that comes closest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from foretrace.simulator.advise.ways import MODEL_PARALLEL, WAYS, Settings, Way
from foretrace.simulator.errors import EngineError, SimulationError
from foretrace.simulator.job import Job
from foretrace.simulator.memory.ranks import RankMemory, rank_memories
from foretrace.simulator.models.model import Model
from foretrace.simulator.search.best import cheapest
from foretrace.simulator.search.space import Space
from foretrace.simulator.search.ties import difference
from foretrace.simulator.simulate import simulate
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.errors import TopologyError
from foretrace.traces.errors import TraceError
from foretrace.traces.layout import Layout

MOST_SEQUENCES: Final = 64
"""Largest micro-batch that is tried."""

_NOT_POSSIBLE: Final = (SimulationError, TopologyError, TraceError)

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """The outcome of one way to train.

    Attributes:
        way: the way of training.
        job: the job that represents it; None if none is possible.
        ranks: its memory.
        summary: what ``simulate`` says; None where it does not fit.
        note: why there is no job.
    """

    way: Way
    job: Job | None = None
    ranks: tuple[RankMemory, ...] = ()
    summary: dict[str, Any] | None = field(default=None, compare=False)
    note: str = ""

    @property
    def fullest(self) -> RankMemory:
        """Memory of the fullest rank."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    @property
    def fits(self) -> bool:
        """Whether a job of this way fits."""
        return self.summary is not None

    @property
    def missing_bytes(self) -> int:
        """Bytes that a device lacks; negative where some are left."""
        return self.fullest.peak_bytes - self.job.cluster.device.memory_bytes if self.job else 0

    @property
    def slack_bytes(self) -> int:
        """Bytes that the caching allocator keeps beside tensors if it can; it frees them before it fails."""
        if self.job is None:
            return 0
        held = self.fullest.peak_bytes - self.fullest.items["reserved"]
        return round(held * self.job.profile.allocator_slack)

    @property
    def host_bytes(self) -> int:
        """Bytes that the memory of a node has to hold because they are not on its devices."""
        if self.job is None or self.job.offload == "none":
            return 0
        kept = max(rank_memories(replace(self.job, offload="none")), key=lambda rank: rank.peak_bytes)
        moved = sum(kept.items[name] - self.fullest.items[name] for name in kept.items if name != "buffers")
        return max(moved, 0) * min(self.job.cluster.gpus_per_node, self.job.cluster.n_gpus)

    @property
    def is_tight(self) -> bool:
        """Whether it fits only with less than the allocator likes to keep."""
        return self.fits and -self.missing_bytes < self.slack_bytes

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, 0 where it does not fit."""
        return float(self.summary["tokens_per_s"]) if self.summary else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What advice is asked for.

    Attributes:
        model, cluster: what to train on what.
        global_batch: sequences per optimizer step.
        seq_len: tokens per sequence.
        framework: whose conventions hold for data parallelism and sharding.
        micro_batch: sequences per micro-batch; 0: the fastest that fits.
        precision: dtype of compute.
        kernels: element-wise work of sharded ways, ``"fused"`` as torch.compile does it, or ``"eager"``.
    """

    model: Model
    cluster: Cluster
    global_batch: int
    seq_len: int
    framework: str = "torchtitan"
    micro_batch: int = 0
    precision: str = "bf16"
    kernels: str = "fused"

    def job(self, **settings: Any) -> Job:
        """Return a job of this question."""
        given: dict[str, Any] = {"layout": Layout(dp=self.cluster.n_gpus), "framework": self.framework}
        return Job(
            model=self.model,
            cluster=self.cluster,
            global_batch=self.global_batch,
            seq_len=self.seq_len,
            precision=self.precision,
            kernels=self.kernels,
            **{**given, **settings},
        )

    def micro_batches(self) -> list[int]:
        """Return sizes to try, smallest first."""
        if self.micro_batch:
            return [self.micro_batch]
        share = self.global_batch // self.cluster.n_gpus
        sizes = (1 << power for power in range(share.bit_length()))
        return [size for size in sizes if share % size == 0 and size <= MOST_SEQUENCES]


def climb(question: Question, progress: Progress | None = None) -> list[Rung]:
    """Return the rung of every way, in the order of the ladder.

    Raises:
        SimulationError: no job of the question is possible at all.
    """
    question.job(micro_batch=question.micro_batches()[0] if question.micro_batches() else 1)
    found = []
    for way in WAYS:
        if question.cluster.n_gpus == 1 and way.key in ("zero1", "zero2"):
            continue  # nobody to share with
        if progress is not None:
            progress(f"trying {way.title}")
        found.append(_rung(question, way))
    if question.cluster.n_gpus > 1:
        if progress is not None:
            progress("searching tensor and pipeline parallelism")
        found.append(_searched(question))
    return found


def tied(rungs: Sequence[Rung]) -> list[Rung]:
    """Return those of *rungs* that measurements cannot tell from the fastest, in the order given."""
    most = max((rung.tokens_per_s for rung in rungs), default=0.0)
    return [rung for rung in rungs if rung.tokens_per_s * difference().ratio > most]


def preferred(rungs: Sequence[Rung]) -> Rung:
    """Return the fastest of *rungs*; if it is tight, the fastest of those tied with it that are not."""
    fastest = max(rungs, key=lambda rung: rung.tokens_per_s)
    if not fastest.is_tight:
        return fastest
    roomy = [rung for rung in tied(rungs) if not rung.is_tight]
    return max(roomy, key=lambda rung: rung.tokens_per_s, default=fastest)


def simplest(rungs: Sequence[Rung]) -> Rung:
    """Return the first of *rungs*, simplest first, that is tied with the fastest and leaves room.

    If none of those leaves room, the one that leaves the most.
    """
    close = tied(rungs)
    roomy = [rung for rung in close if not rung.is_tight]
    return roomy[0] if roomy else min(close, key=lambda rung: rung.missing_bytes)


def longest(rung: Rung) -> int:
    """Return the longest sequences with which *rung* fits, by doubling or halving those asked for."""
    job = rung.job
    if job is None:
        return 0
    one = replace(job, micro_batch=1)
    length = job.seq_len
    while length > 1 and not _fits(replace(one, seq_len=length)):
        length //= 2
    while length and length < job.seq_len * 64 and _fits(replace(one, seq_len=2 * length)):
        length *= 2
    return length if length > 1 else 0


def _fits(job: Job) -> bool:
    return _peak(rank_memories(job)) <= job.cluster.device.memory_bytes


def _peak(ranks: Sequence[RankMemory]) -> int:
    return max(rank.peak_bytes for rank in ranks)


def _rung(question: Question, way: Way) -> Rung:
    """Return the preferred of the first variant of which any fits, or the closest to fitting."""
    closest: Rung | None = None
    for settings in way.variants:
        tried = list(_tried(question, way, settings))
        fitting = [rung for rung in tried if rung.missing_bytes <= 0]
        if fitting:
            return preferred([_simulated(rung) for rung in fitting])
        for rung in tried:
            if closest is None or rung.missing_bytes < closest.missing_bytes:
                closest = rung
    return closest or Rung(way=way, note="the batch does not divide over these GPUs")


def _tried(question: Question, way: Way, settings: Settings) -> Iterator[Rung]:
    """Yield one rung per micro-batch, smallest first, up to the first that does not fit."""
    for micro_batch in question.micro_batches():
        try:
            job = question.job(micro_batch=micro_batch, **settings)
            rung = Rung(way=way, job=job, ranks=tuple(rank_memories(job)))
        except _NOT_POSSIBLE:
            continue
        yield rung
        if rung.missing_bytes > 0:
            return


def _simulated(rung: Rung) -> Rung:
    job = rung.job
    return rung if job is None else replace(rung, summary=dict(simulate(job).summary))


def _searched(question: Question) -> Rung:
    """Return the fastest layout that cuts the model, as Megatron-LM would run it."""
    space = Space(
        model=question.model,
        cluster=question.cluster,
        global_batch=question.global_batch,
        seq_len=question.seq_len,
        micro_batch=(question.micro_batch,) if question.micro_batch else (1, 2, 4),
        schedule=("1f1b", "interleaved-1f1b"),
        virtual_stages=(2,),
        sharding=("zero1",),
        others={"precision": question.precision},
    )
    cut = [family for family in space.families() if family.job.layout.tp * family.job.layout.pp > 1]
    try:
        found = cheapest(cut, 1)
    except EngineError as error:
        return Rung(way=MODEL_PARALLEL, note=str(error))
    if not found.best:
        if found.counts.smallest is None:
            return Rung(way=MODEL_PARALLEL, note="heads, layers or batch divide over none of these degrees")
        job = found.counts.smallest[0]
        return Rung(way=MODEL_PARALLEL, job=job, ranks=tuple(rank_memories(job)))
    best = found.best[0]
    return Rung(
        way=MODEL_PARALLEL,
        job=best.job,
        ranks=tuple(rank_memories(best.job)),
        summary=best.summary,
    )
