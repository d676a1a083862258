"""Makes programs fast: a template per kind of action, copied once per micro-batch by NumPy.

A ``Template`` is the tasks of one action (a forward, a backward, an optimizer step) with dependencies among
themselves. ``ProgramBuilder.place`` puts one behind what its rank does already; ``build`` turns all that was
placed into the arrays of a ``Program``, numbers the communications and joins their participants.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from foretrace.simulator.builder.instances import Answers, Message, communications
from foretrace.simulator.builder.template import COMPUTE, COPY, DP, DP_COPIES, HOST, STREAMS, Task, Template
from foretrace.simulator.builder.template_arrays import TemplateArrays, Waits, gathered
from foretrace.simulator.program import Int32Array, Int64Array, Label, Program

__all__ = [
    "COMPUTE",
    "COPY",
    "DP",
    "DP_COPIES",
    "HOST",
    "STREAMS",
    "Place",
    "ProgramBuilder",
    "Task",
    "Template",
]


class Place(NamedTuple):
    """Where the tasks of an action belong in the timeline.

    Attributes:
        stage, virtual_stage, microbatch: as in the timeline.
    """

    stage: int = -1
    virtual_stage: int = -1
    microbatch: int = -1


NOWHERE: Final = Place()
"""Place of tasks that belong to no action."""


class _Placed(NamedTuple):
    """A template at its place in the program: that of its first action, and of its second."""

    arrays: TemplateArrays
    rank: int
    step: int
    first: Place
    second: Place


class ProgramBuilder:
    """Collects placed templates and makes a program of them.

    Args:
        costs: what a communication costs and which group carries it.
    """

    def __init__(self, costs: Answers) -> None:
        self._costs = costs
        self._labels: dict[Label, int] = {}
        self._messages: dict[Message, int] = {}
        self._arrays: dict[int, tuple[Template, TemplateArrays]] = {}
        self._placed: list[_Placed] = []

    def place(
        self,
        template: Template,
        rank: int,
        at: Place = NOWHERE,
        *,
        step: int = 0,
        second: Place | None = None,
    ) -> None:
        """Put *template* behind all that *rank* does so far. Place ranks one after the other.

        Args:
            template: tasks of an action, or of two.
            rank: who does them.
            at: where those of the first action belong.
            step: optimizer step.
            second: where those of the second action belong.
        """
        if id(template) not in self._arrays:
            self._arrays[id(template)] = (template, TemplateArrays(template, self._labels, self._messages))
        arrays = self._arrays[id(template)][1]
        if arrays.n:
            self._placed.append(_Placed(arrays, rank, step, at, second or at))

    def build(self) -> Program:
        """Return the program of everything that was placed."""
        numbers: dict[int, int] = {}
        which = [numbers.setdefault(id(placed.arrays), len(numbers)) for placed in self._placed]
        written = list({id(placed.arrays): placed.arrays for placed in self._placed}.values())
        sizes = np.array([placed.arrays.n for placed in self._placed], np.int64)
        source = gathered([arrays.n for arrays in written], which, sizes)

        def column(field: str, dtype: type[np.generic]) -> Any:
            parts = [getattr(arrays, field) for arrays in written]
            return np.concatenate([np.empty(0, dtype), *parts])[source]

        rank, step = (
            np.repeat(np.array([placed[at] for placed in self._placed], np.int32), sizes) for at in (1, 2)
        )
        stage, virtual_stage, microbatch = self._places(sizes, column("part", np.int32))
        batch = step.astype(np.int64) << 32 | (microbatch + 1)
        found = communications(rank, column("message", np.int32), batch, list(self._messages), self._costs)
        dep_start, deps = self._dependencies(sizes)
        return Program(
            rank=rank,
            stream=column("stream", np.int32),
            label=column("label", np.int32),
            duration_ns=column("duration_ns", np.int64),
            microbatch=microbatch,
            layer=column("layer", np.int32),
            stage=stage,
            virtual_stage=virtual_stage,
            step=step,
            flops=column("flops", np.int64),
            bytes_moved=column("bytes_moved", np.int64),
            memory_bound=column("memory_bound", np.int32),
            dep_start=dep_start,
            deps=deps,
            streams=STREAMS,
            labels=tuple(self._labels),
            uneven=tuple(sorted(self._costs.uneven)),
            **found._asdict(),
        )

    def _places(self, sizes: Int64Array, part: Int32Array) -> Iterator[Int32Array]:
        """Yield stage, virtual stage and micro-batch of every task."""
        firsts, seconds = (
            np.array([placed[at] for placed in self._placed], np.int32).reshape(-1, 3) for at in (3, 4)
        )
        for first, second in zip(firsts.T, seconds.T, strict=True):
            own = np.repeat(first, sizes)
            yield np.where(part, np.repeat(second, sizes), own) if (first != second).any() else own

    def _dependencies(self, sizes: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the dependencies of all tasks as CSR, each once and in order.

        What a template waits for outside of itself lies as far before it as the last time in most cases, so
        that few different ones have to be worked out.
        """
        offsets = np.cumsum(sizes) - sizes
        waits = Waits()
        which = [
            waits.case(placed.arrays, placed.rank, offset)
            for placed, offset in zip(self._placed, offsets.tolist(), strict=True)
        ]
        found = waits.found
        empty = np.empty(0, np.int64)
        counts = np.concatenate([empty, *(counts for counts, _ in found)])
        deps = np.concatenate([empty, *(deps for _, deps in found)])
        n_edges = np.array([len(deps) for _, deps in found], np.int64)[which] if which else empty
        dep_start = np.zeros(int(sizes.sum()) + 1, np.int64)
        np.cumsum(counts[gathered([len(counts) for counts, _ in found], which, sizes)], out=dep_start[1:])
        own_deps = deps[gathered([len(deps) for _, deps in found], which, n_edges)]
        return dep_start, own_deps + np.repeat(offsets, n_edges)
