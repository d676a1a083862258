"""Every layout worth considering: the degrees that fill a machine, times batches, schedules and sharding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any, Final, NamedTuple

from foretrace.simulator.builder.offload import ACTIVATIONS
from foretrace.simulator.config import of_framework
from foretrace.simulator.errors import SimulationError
from foretrace.simulator.framework import profile
from foretrace.simulator.job import RECOMPUTES, Job, counted_layers, why_not_schedule
from foretrace.simulator.models.model import Model
from foretrace.simulator.schedules import SCHEDULES
from foretrace.topologies.cluster import Cluster
from foretrace.traces.layout import Layout

ONE_STAGE: Final = "1f1b"
"""Schedule where there is no pipeline; all are the same then."""


TOKENS_OF_A_RANK: Final = 8192
"""Tokens of a sequence that context parallelism leaves a rank at least, unless asked otherwise.

Llama 3 trained on 8,192 without it and on 131,072 over 16 ranks (arXiv:2407.21783, table 4).
"""

SHARED: Final = ("zero1", "fsdp")
"""What data-parallel ranks share out where the model is cut in other ways, too."""

SHARED_ALONE: Final = ("ddp", "zero1", "zero2", "fsdp")
"""The same where nothing else is cut: one for each stage of ZeRO."""

TOKENS_PER_STEP: Final = 4 << 20
"""Tokens of a step where no batch is given: the 4 M of Llama 2 (arXiv:2307.09288, section 2.2)."""

_DEFAULTS: Final = {field.name: field.default for field in fields(Job)}


class Family(NamedTuple):
    """Jobs that are alike but for their schedule.

    *pipelines*: the schedule and the virtual stages of each.
    """

    job: Job
    pipelines: tuple[tuple[str, int | None], ...]

    def jobs(self) -> Iterator[Job]:
        """Yield each of them."""
        for schedule, virtual in self.pipelines:
            yield _by(self.job, schedule, virtual)


def _by(job: Job, schedule: str, virtual_stages: int | None) -> Job:
    """Return *job* as another schedule runs it."""
    return replace(job, schedule=schedule, virtual_stages=virtual_stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The layouts to consider: an empty choice stands for all that are possible.

    Attributes:
        cluster: the machine, used as a whole.
        global_batch: sequences per optimizer step.
        seq_len: tokens per sequence.
        tp, pp, cp, ep: parallel degrees; ``cp`` else as ``context_degrees`` has them.
        expert_tp: ranks that every expert is cut over, 0: as many as layers are; else 0 and 1.
        micro_batch: sequences per micro-batch; else powers of two.
        virtual_stages: stages per pipeline rank, where the schedule leaves it open; else those with the same
            layers in each, or powers of two where the framework does not ask for that.
        sharding: what data-parallel ranks share out; else ``SHARED`` or ``SHARED_ALONE``.
        offload: what lives in the memory of the host.
        offload_layers: of how many layers activations do, where they do at all; empty or 0: of all.
    """

    model: Model
    cluster: Cluster
    global_batch: int
    seq_len: int
    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    cp: tuple[int, ...] = ()
    ep: tuple[int, ...] = ()
    expert_tp: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = ()
    schedule: tuple[str, ...] = ("1f1b", "interleaved-1f1b", "zb-h1", "interleaved-zb", "zb-v")
    virtual_stages: tuple[int, ...] = ()
    sharding: tuple[str, ...] = ()
    offload: tuple[str, ...] = ("none",)
    offload_layers: tuple[int, ...] = ()
    recompute: tuple[str, ...] = RECOMPUTES
    others: Mapping[str, Any] = field(default_factory=dict)

    def jobs(self) -> Iterator[Job]:
        """Yield every job of the space that is possible."""
        for family in self.families():
            yield from family.jobs()

    def families(self) -> Iterator[Family]:
        """Yield every possible job of the space, those together that differ in their schedule only."""
        others = {**of_framework(self.others), **self.others}
        for layout in self._layouts():
            # Of a batch that does not divide over dp there are none.
            for micro_batch in self._micro_batches(layout.dp):
                n_microbatches = self.global_batch // (layout.dp * micro_batch)
                pipelines = tuple(self._pipelines(layout.pp, n_microbatches))
                if not pipelines:
                    continue
                shardings = self._shardings(layout)
                for sharding, recompute, (offload, n_layers) in product(
                    shardings, self.recompute, self._offloads()
                ):
                    try:
                        plain = Job(
                            model=self.model,
                            cluster=self.cluster,
                            layout=layout,
                            global_batch=self.global_batch,
                            micro_batch=micro_batch,
                            seq_len=self.seq_len,
                            schedule=ONE_STAGE,
                            sharding=sharding,
                            recompute=recompute,
                            offload=offload,
                            offload_layers=n_layers,
                            **others,
                        )
                    except SimulationError:  # this product is not possible
                        continue
                    if possible := tuple(one for one in pipelines if not why_not_schedule(plain, *one)):
                        # Replacing a field checks the whole job again, which takes longer than all else here.
                        first = plain if possible[0] == (ONE_STAGE, None) else _by(plain, *possible[0])
                        yield Family(first, possible)

    def _shardings(self, layout: Layout) -> tuple[str, ...]:
        """Return what the data-parallel ranks of *layout* may share out; of a single rank the first."""
        is_whole = layout.tp * layout.pp * layout.cp * layout.ep == 1
        some = self.sharding or (SHARED_ALONE if is_whole else SHARED)
        # A single rank shares nothing: all shardings are the same, and one of them is enough.
        return some if layout.dp * layout.cp > 1 else some[:1]

    def _offloads(self) -> Iterator[tuple[str, int]]:
        """Yield what is offloaded, and of how many layers activations are."""
        for offload in self.offload:
            travels = offload in ACTIVATIONS
            yield from ((offload, n) for n in (self.offload_layers if travels else ()) or (0,))

    def _layouts(self) -> Iterator[Layout]:
        n_gpus, model = self.cluster.n_gpus, self.model
        for tp, cp in product(
            _chosen(self.tp, _divisors(model.n_heads)), _chosen(self.cp, context_degrees(self.seq_len))
        ):
            if n_gpus % (tp * cp):
                continue
            for pp in _chosen(self.pp, range(1, model.n_layers + 1)):
                if n_gpus % (tp * cp * pp) or pp > model.n_layers:
                    continue
                dp = n_gpus // (tp * cp * pp)
                for ep, etp in product(
                    _chosen(self.ep, _divisors(model.n_experts or 1)), self._expert_tp(tp)
                ):
                    # Experts are dealt out to all ranks of a stage.
                    if (dp * cp * tp) % (ep * (etp or tp)) == 0:
                        yield Layout(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, expert_tp=etp)

    def _expert_tp(self, tp: int) -> list[int]:
        """Return the ranks to cut experts over where layers are cut over *tp*; 0: as many."""
        if not self.model.n_experts:
            return [] if any(self.expert_tp) else [0]
        # As many as layers are cut over is 0, for equal layouts to be listed once.
        return list(dict.fromkeys(0 if one == tp else one for one in self.expert_tp or (0, 1)))

    def _micro_batches(self, dp: int) -> list[int]:
        """Return sizes that divide what a data-parallel rank gets of the batch, if any do."""
        if self.global_batch % dp:
            return []
        share = self.global_batch // dp
        sizes = self.micro_batch or tuple(1 << power for power in range(share.bit_length()))
        return [size for size in sizes if share % size == 0]

    def _pipelines(self, pp: int, n_microbatches: int) -> Iterator[tuple[str, int | None]]:
        """Yield schedules with their stages per rank, those that these sizes allow."""
        if pp == 1:
            yield ONE_STAGE, None
            return
        for name in self.schedule:
            schedule = SCHEDULES[name]
            if not schedule.fits(pp, n_microbatches):
                continue
            if schedule.is_flexible:
                yield from ((name, virtual) for virtual in self._virtual_stages(pp))
            elif schedule.virtual_stages <= self.model.n_layers // pp:
                yield name, None

    def _virtual_stages(self, pp: int) -> list[int]:
        """Return stages per rank to try: where each has to have the same layers, those that divide them."""
        most = self.model.n_layers // pp
        job = {**_DEFAULTS, **self.others}
        is_even = profile(job["framework"], tuple(job["conventions"])).even_chunks
        if not is_even or job["layers_per_stage"]:
            # From 2 on: one stage per rank is a schedule of its own.
            powers = tuple(1 << power for power in range(1, most.bit_length()))
            return [virtual for virtual in self.virtual_stages or powers if virtual <= most]
        counted = counted_layers(self.model.n_layers, job["counted_ends"])
        some = self.virtual_stages or range(2, most + 1)
        return [virtual for virtual in some if virtual <= most and counted % (pp * virtual) == 0]


def context_degrees(seq_len: int) -> tuple[int, ...]:
    """Return the context-parallel degrees to try for sequences of *seq_len* tokens.

    >>> context_degrees(8192), context_degrees(131072)
    ((1,), (1, 2, 4, 8, 16))
    """
    return tuple(1 << power for power in range(max(seq_len // TOKENS_OF_A_RANK, 1).bit_length()))


def usual_batch(seq_len: int) -> int:
    """Return the sequences of a step where nobody says how many.

    >>> usual_batch(4096)
    1024
    """
    return max(1, TOKENS_PER_STEP // seq_len)


def _chosen(given: tuple[int, ...], possible: Any) -> tuple[int, ...]:
    return given or tuple(possible)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
