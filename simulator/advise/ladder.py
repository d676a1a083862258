"""Climbs the ways to train a model on some GPUs, from the simplest to the last resort, each computed.

The order is that of the tables which practitioners go by: replicate, then shard more and more, then compute
again what was kept, then move to the host, then train less of the model, then cut the model itself. Every
rung stands for a few jobs. It is represented by the fastest job that fits or, if measurements could not tell
the two apart, by one that leaves more room; if no job fits, by the one that comes closest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from foretrace.simulator.config import of_framework
from foretrace.simulator.engine import why_not_compiled
from foretrace.simulator.errors import EngineError
from foretrace.simulator.job import Job
from foretrace.simulator.memory.ranks import RankMemory, fits, host_bytes, host_holds, rank_memories
from foretrace.simulator.memory.remedies import NOT_POSSIBLE
from foretrace.simulator.models.model import Model
from foretrace.simulator.search.describe import described, difference
from foretrace.simulator.search.found import Ranked
from foretrace.simulator.search.parts import search_parts
from foretrace.simulator.search.space import Space
from foretrace.simulator.simulate import simulate
from foretrace.simulator.summary import host_words
from foretrace.topologies.cluster import Cluster
from foretrace.traces.layout import Layout

# The ways to train a model on some GPUs, from the simplest to the last resort: which settings each tries.

LORA_RANK: Final = 16
"""Rank of adapters; Hu et al. 2021 (arXiv:2106.09685) use 1 to 64, and see little beyond 8."""

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Way:
    """A rung of the ladder.

    *key*: short name, for ``--json``. *variants*: settings to try, the first that fits is taken.
    """

    key: str
    title: str
    variants: tuple[Settings, ...]
    trains_all: bool = True


def _lora(**settings: Any) -> tuple[Settings, ...]:
    base = {"lora_rank": LORA_RANK, **settings}
    return (
        {**base, "sharding": "ddp"},
        {**base, "sharding": "ddp", "recompute": "full"},
        {**base, "sharding": "fsdp", "recompute": "full"},
    )


WAYS: Final[tuple[Way, ...]] = (
    Way("ddp", "DDP", ({"sharding": "ddp"},)),
    Way("zero1", "ZeRO-1 (optimizer states sharded)", ({"sharding": "zero1"},)),
    Way("zero2", "ZeRO-2 (gradients too)", ({"sharding": "zero2"},)),
    Way("fsdp", "FSDP (parameters too: ZeRO-3)", ({"sharding": "fsdp"},)),
    Way(
        "fsdp-selective", "FSDP + selective recomputation", ({"sharding": "fsdp", "recompute": "selective"},)
    ),
    Way("fsdp-full", "FSDP + full recomputation", ({"sharding": "fsdp", "recompute": "full"},)),
    Way(
        "offload",
        "FSDP + full recomputation + offload to the host",
        tuple(
            {"sharding": "fsdp", "recompute": "full", "offload": what}
            for what in ("optimizer", "states", "all")
        ),
    ),
    Way("lora", f"LoRA (rank {LORA_RANK}, frozen weights)", _lora(), trains_all=False),
    Way(
        "qlora",
        f"QLoRA (rank {LORA_RANK}, frozen weights in 4 bits)",
        _lora(quantized_base=True),
        trains_all=False,
    ),
)
"""The ladder, from the simplest to the last resort; each with data parallelism alone."""

SEARCHED: Final = Way("search", "the fastest of all layouts", ())
"""What ``search`` finds: tensor, context, pipeline and expert parallelism too."""


MOST_SEQUENCES: Final = 64
"""Largest micro-batch that is tried."""

LISTED: Final = 10
"""Best layouts of a search among which one is looked for that leaves room: as many as ``search`` lists."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """The outcome of one way to train.

    Attributes:
        job: the job that represents it; None if none is possible.
        summary: what ``simulate`` says; None where it does not fit.
        n_candidates: layouts that it is the best of; 0 where only micro-batches were tried.
    """

    way: Way
    job: Job | None = None
    ranks: tuple[RankMemory, ...] = ()
    summary: dict[str, Any] | None = field(default=None, compare=False)
    note: str = ""
    n_candidates: int = 0

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
        return host_bytes(self.job, self.ranks) if self.job else 0

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
    """What advice is asked for; ``search`` answers the same question with the same figures.

    Attributes:
        global_batch: sequences per optimizer step.
        seq_len: tokens per sequence.
        micro_batch: sequences per micro-batch; 0: the fastest that fits.
        others: other settings of every job, such as its framework.
        price_usd_per_gpu_hour: None if nobody knows it.
        tokens: to train on, as a person writes it; None: nobody said.
    """

    model: Model
    cluster: Cluster
    global_batch: int
    seq_len: int
    micro_batch: int = 0
    others: Mapping[str, Any] = field(default_factory=dict)
    price_usd_per_gpu_hour: float | None = None
    is_price_given: bool = False
    tokens: str | None = None

    def job(self, **settings: Any) -> Job:
        """Return a job of this question."""
        return Job(
            model=self.model,
            cluster=self.cluster,
            global_batch=self.global_batch,
            seq_len=self.seq_len,
            **{
                "layout": Layout(dp=self.cluster.n_gpus),
                **of_framework(self.others),
                **self.others,
                **settings,
            },
        )

    def space(self) -> Space:
        """Return the layouts that ``search`` considers."""
        return Space(
            model=self.model,
            cluster=self.cluster,
            global_batch=self.global_batch,
            seq_len=self.seq_len,
            micro_batch=(self.micro_batch,) if self.micro_batch else (),
            others=self.others,
        )

    def figures(self, rung: Rung) -> dict[str, Any] | None:
        """Return what ``search`` says of the layout of *rung*; None where it does not fit."""
        if rung.job is None or rung.summary is None:
            return None
        prices = {(self.cluster.name, self.cluster.n_gpus): self.price_usd_per_gpu_hour}
        return described(Ranked(job=rung.job, summary=rung.summary, cost=0.0), prices, self.tokens)

    def micro_batches(self) -> list[int]:
        """Return sizes to try, smallest first."""
        if self.micro_batch:
            return [self.micro_batch]
        share = self.global_batch // self.cluster.n_gpus
        sizes = (1 << power for power in range(share.bit_length()))
        return [size for size in sizes if share % size == 0 and size <= MOST_SEQUENCES]


def climb(question: Question, progress: Progress | None = None) -> list[Rung]:
    """Return the rung of every way, in the order of the ladder.

    Raises SimulationError if no job of the question is possible at all.
    """
    blocked: Exception | None = None
    try:
        question.job(micro_batch=question.micro_batches()[0] if question.micro_batches() else 1)
    except NOT_POSSIBLE as error:  # a batch that does not divide over all GPUs may over some degrees
        # Kept, and raised only if no way leads to a job: another layout may take a batch that this one
        # does not.
        blocked = error
    found = []
    for way in WAYS:
        if question.cluster.n_gpus == 1 and way.key in ("zero1", "zero2"):
            continue  # nobody to share with
        if progress is not None:
            progress(way.title)
        found.append(_rung(question, way))
    if question.cluster.n_gpus > 1:
        found += _searched(question, progress)
    if blocked is not None and not any(rung.job for rung in found):
        raise blocked
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
    while length > 1 and not fits(replace(one, seq_len=length)):
        length //= 2
    while length and length < job.seq_len * 64 and fits(replace(one, seq_len=2 * length)):
        length *= 2
    return length if length > 1 else 0


def _rung(question: Question, way: Way) -> Rung:
    """Return the preferred of the first variant of which any fits, or the closest to fitting."""
    closest: Rung | None = None
    note = "the batch does not divide over these GPUs"
    for settings in way.variants:
        tried = []
        for rung in _tried(question, way, settings):
            if rung.job is None or host_holds(rung.job, rung.ranks):
                tried.append(rung)
            else:
                note = host_words(rung.job, rung.host_bytes)
        fitting = [rung for rung in tried if rung.missing_bytes <= 0]
        if fitting:
            return preferred([_simulated(rung) for rung in fitting])
        for rung in tried:
            if closest is None or rung.missing_bytes < closest.missing_bytes:
                closest = rung
    return closest or Rung(way=way, note=note)


def _tried(question: Question, way: Way, settings: Settings) -> Iterator[Rung]:
    """Yield one rung per micro-batch, smallest first, up to the first that does not fit."""
    for micro_batch in question.micro_batches():
        try:
            job = question.job(micro_batch=micro_batch, **settings)
            rung = Rung(way=way, job=job, ranks=tuple(rank_memories(job)))
        except NOT_POSSIBLE:
            continue
        yield rung
        if rung.missing_bytes > 0:
            return


def _simulated(rung: Rung) -> Rung:
    if (job := rung.job) is None:
        return rung
    return replace(rung, summary=dict(simulate(job, engine=engine_of(job), covers_unsaid=False).summary))


def engine_of(job: Job) -> str:
    """Return the engine for *job* of a rung: the compiled one where a search of layouts loads it anyway."""
    return "compiled" if job.cluster.n_gpus > 1 and not why_not_compiled() else "auto"


def _searched(question: Question, progress: Progress | None) -> Iterator[Rung]:
    """Yield the fastest of all layouts; if it is tight, one that is tied with it and is not, too."""
    try:
        found = search_parts([question.space()], LISTED, progress=progress)
    except EngineError as error:
        yield Rung(way=SEARCHED, note=str(error))
        return
    smallest, n_candidates = found.counts.smallest, found.counts.n_candidates
    if not found.best:
        note = "heads, layers or batch divide over none of these degrees"
        job = smallest[0] if smallest else None
        ranks = tuple(rank_memories(job)) if job else ()
        yield Rung(way=SEARCHED, job=job, ranks=ranks, n_candidates=n_candidates, note=note)
        return
    listed = [
        Rung(way=SEARCHED, job=one.job, ranks=tuple(rank_memories(one.job)), summary=one.summary)
        for one in found.best
    ]
    yield replace(listed[0], n_candidates=n_candidates)
    if (roomy := preferred(listed)) is not listed[0]:
        yield roomy
