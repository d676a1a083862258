"""Memory on the simulated clock: a step function per rank and category."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foretrace.simulator.memory.ranks import RankMemory
from foretrace.simulator.memory.stage import FIXED
from foretrace.simulator.program import Int64Array
from foretrace.traces.timeline import MEMORY

COMPUTE: Final = pa.scalar("compute", pa.string())
"""Category of the spans looked at. With its type: Arrow looks for that of a word in other packages."""

LOOKED_AT: Final = ("kind", "rank", "step", "stage", "microbatch", "start_ns", "duration_ns")
"""Columns of a timeline that say when a micro-batch computes."""

RETURNS: Final = ("backward", "backward_weight")
"""Kinds whose end frees what the forward of the micro-batch kept."""

RECOMPUTES: Final = ("recompute", "backward", "backward_input")
"""Kinds of an action that recomputation may bring activations back for."""


class _Windows(NamedTuple):
    """First start and last end of the compute of each micro-batch; shape ``(n_windows,)``.

    ``key`` is one number per rank, step, stage and micro-batch of a timeline, in their order.
    """

    key: Int64Array
    rank: Int64Array
    step: Int64Array
    stage: Int64Array
    start_ns: Int64Array
    end_ns: Int64Array

    def of(self, rank: int) -> _Windows:
        """Return the windows of *rank*."""
        own = self.rank == rank
        return _Windows(*(values[own] for values in self))


class _Changes(NamedTuple):
    """When the bytes of a category change, and by how much; shape ``(n_changes,)``."""

    t_ns: Int64Array
    bytes: Int64Array


def memory_over_time(spans: pa.Table, memories: Mapping[int, RankMemory]) -> pa.Table:
    """Return the memory of the stored ranks over time, in the columns of ``traces.timeline.MEMORY``.

    Model states and what the device reserves are held throughout. A micro-batch holds its activations from
    the start of its forward to the end of its backward; where a forward runs together with the backward of
    another, all but a layer of them from the end of that on. What recomputation brings back is there while a
    backward runs. Gathered parameters, logits and buffers are held, at their most, from the first forward to
    the last backward of a step. ``total`` is the sum, and its maximum is ``RankMemory.peak_bytes``.
    """
    # Of all columns of a timeline these are looked at, again and again.
    spans = spans.select(LOOKED_AT).filter(pc.equal(spans["category"], COMPUTE))
    forward, recompute = (_windows(spans, kinds) for kinds in (("forward",), RECOMPUTES))
    returned = _returned(spans)
    found = []
    for rank, memory in sorted(memories.items()):
        changes = _changes(memory, forward.of(rank), recompute.of(rank), returned.of(rank))
        changes["total"] = _Changes(
            *(np.concatenate(column) for column in zip(*changes.values(), strict=True))
        )
        found += [(rank, category, _held_over_time(change)) for category, change in changes.items()]
    return _table(found) if found else MEMORY.empty_table()


def _returned(spans: pa.Table) -> _Windows:
    """Return the windows of the halves of backward after which nothing of a micro-batch is kept.

    That is the half for the weights, or the other one where a stage has no weights that are trained.
    """
    last, either = (_windows(spans, kinds) for kinds in (RETURNS, (*RETURNS, "backward_input")))
    if len(last.rank) == len(either.rank):
        return last
    # Where the half for the weights is there, its times take the place of the other's.
    has_last = np.isin(either.key, last.key)
    for of_either, of_last in ((either.start_ns, last.start_ns), (either.end_ns, last.end_ns)):
        of_either[has_last] = of_last
    return either


def _windows(spans: pa.Table, kinds: Iterable[str]) -> _Windows:
    """Return the windows of every micro-batch on every rank and stage, over spans of *kinds*."""
    chosen = spans.filter(pc.is_in(spans["kind"], pa.array(kinds, pa.string())))
    names = ("rank", "step", "stage", "microbatch")
    columns = [chosen[name].to_numpy().astype(np.int64) for name in names]
    sizes = [int((pc.max(spans[name]).as_py() or 0) + 2) for name in names]  # -1 is unknown
    start_ns = chosen["start_ns"].to_numpy()
    end_ns = start_ns + chosen["duration_ns"].to_numpy()
    key = np.zeros(len(start_ns), np.int64)
    # One number from four, as digits of a place-value system; 1 is added so that -1, unknown, is a digit,
    # too.
    for column, size in zip(columns, sizes, strict=True):
        key = key * size + column + 1
    keys, one, member = np.unique(key, return_index=True, return_inverse=True)
    first, last = np.full(len(one), np.iinfo(np.int64).max), np.zeros(len(one), np.int64)
    np.minimum.at(first, member, start_ns)
    np.maximum.at(last, member, end_ns)
    rank, step, stage, _ = (column[one] for column in columns)
    return _Windows(keys, rank, step, stage, first, last)


def _changes(
    memory: RankMemory, forward: _Windows, recompute: _Windows, returned: _Windows
) -> dict[str, _Changes]:
    """Return the changes of each category on one rank."""
    held = {name: memory.items[name] for name in FIXED if name in memory.items}
    found = {name: _Changes(np.zeros(1, np.int64), np.array([size])) for name, size in held.items()}
    stages = forward.stage.tolist()
    kept = np.array([memory.kept_bytes[stage] for stage in stages], np.int64)
    late_ns = _end_of_pair(forward, returned)
    # Without a pair that is the start, and all is kept from there.
    ahead = np.where(late_ns > forward.start_ns, [memory.ahead_bytes[stage] for stage in stages], kept)
    activations = (
        _held(forward.start_ns, returned.end_ns, ahead),
        _held(late_ns, returned.end_ns, kept - ahead),
        _held(recompute.start_ns, recompute.end_ns, memory.brought_back_bytes),
    )
    found["activations"] = _Changes(*(np.concatenate(column) for column in zip(*activations, strict=True)))
    steps = np.unique(forward.step)
    begins = np.array([forward.start_ns[forward.step == step].min() for step in steps], np.int64)
    ends = np.array([returned.end_ns[returned.step == step].max() for step in steps], np.int64)
    for name, size in memory.items.items():
        if name not in found:
            found[name] = _held(begins, ends, size)
    return found


def _end_of_pair(forward: _Windows, returned: _Windows) -> Int64Array:
    """Return when the backward ends that each forward runs together with; its own start if there is none.

    On one rank only the two of a pair compute at the same time.
    """
    order = np.argsort(returned.start_ns)
    starts, ends = returned.start_ns[order], returned.end_ns[order]
    last_before_its_end = np.searchsorted(starts, forward.end_ns) - 1
    found = np.where(last_before_its_end >= 0, ends[last_before_its_end], 0)
    return np.where(found > forward.start_ns, found, forward.start_ns)


def _held(from_ns: Int64Array, until_ns: Int64Array, size: int | Int64Array) -> _Changes:
    """Return the changes of something of *size* bytes that is there from each first time to each second."""
    each = np.broadcast_to(np.asarray(size, np.int64), len(from_ns))
    sizes = np.concatenate([each, -each])
    return _Changes(np.concatenate([from_ns, until_ns]), sizes)


def _held_over_time(changes: _Changes) -> _Changes:
    """Return the step function that *changes* add up to, from time 0: what is held from when on."""
    t_ns, member = np.unique(np.append(changes.t_ns, 0), return_inverse=True)
    sums = np.zeros(len(t_ns), np.int64)
    np.add.at(sums, member, np.append(changes.bytes, 0))
    held = np.cumsum(sums)
    # Only changes are kept, and the first value.
    keep = np.append(True, held[1:] != held[:-1])
    return _Changes(t_ns[keep], held[keep])


def _table(found: Sequence[tuple[int, str, _Changes]]) -> pa.Table:
    """Return the step functions *found* of categories on ranks as rows of a table."""
    ranks, categories, functions = zip(*found, strict=True)
    sizes = [len(function.t_ns) for function in functions]
    distinct = list(dict.fromkeys(categories))
    codes = np.array([distinct.index(category) for category in categories], np.int32)
    columns = {
        "rank": np.repeat(np.array(ranks, np.int32), sizes),
        "t_ns": np.concatenate([function.t_ns for function in functions]),
        "category": pa.DictionaryArray.from_arrays(
            pa.array(np.repeat(codes, sizes)), pa.array(distinct, pa.string())
        ),
        "bytes": np.concatenate([function.bytes for function in functions]),
    }
    return pa.table(columns, schema=MEMORY)
