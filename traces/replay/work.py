"""The spans of a run as columns, with the communication that they take part in: what a replay is made of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from foretrace.traces.analysis.activity import PASSES
from foretrace.traces.analysis.communications import communications
from foretrace.traces.columns import BoolArray, Int64Array, factorized, int64, is_one_of, labels, occurrence
from foretrace.traces.errors import RunError
from foretrace.traces.replay.alike import Colours, Meetings, first_of_each
from foretrace.traces.run import Run

MOST_SPANS: Final = 4_000_000  # spans that are played: more need over 4 GB of memory


@dataclass(frozen=True, slots=True)
class Work:
    """The spans of all steps as columns; times in ns, shape ``(n_spans,)``.

    Of ranks that do the same, ``traces.replay.alike``, only the first has spans.
    """

    weight: Int64Array  # how many ranks have each span
    # where each span belongs
    rank: Int64Array
    step: Int64Array
    stage: Int64Array
    # position of a pass or transfer; -1 unknown
    microbatch: Int64Array
    chunk: Int64Array
    layer: Int64Array
    what: Int64Array  # index into ``names``: kind of pass, or operation and axis of a communication
    names: tuple[str, ...]  # what the spans are
    # as recorded
    start_ns: Int64Array
    end_ns: Int64Array
    # of the channel of the communication that a span takes part in, -1 if none; ``code`` is which of its
    # communications it is
    slot: Int64Array
    code: Int64Array
    instance: Int64Array  # number of that communication, -1 if none
    # duration; of a communication, from the last arrival to the end, which may be negative
    work_ns: Int64Array
    is_communication: BoolArray  # whether it moves data
    is_transfer: BoolArray  # whether it moves data from one stage to another
    like: Int64Array  # number that spans share which do the same work: operation, part of the model, size


def collected(run: Run, meetings: Meetings, colour: Colours) -> tuple[Work, BoolArray]:
    """Return the spans of *run* as columns, sorted by rank, step and start; and which are passes.

    Only the first rank of each *colour* is looked at.

    Steps in which a pass does not say its place are left out: before its first step, PyTorch's pipeline
    sends one through to learn the shapes of what stages exchange.

    Raises:
        RunError: there is no other step, or more spans than can be played.
    """
    first, _ = first_of_each(colour)
    n_spans = sum(run.once(len, run.stored_ranks[place]) for place in first.tolist())
    if n_spans > MOST_SPANS:
        raise RunError(
            f"{run.path}: {n_spans:,} spans of ranks of which no two do the same: too many to play"
        )
    table, line = _told(pa.concat_tables(_chosen(run, meetings, colour)).unify_dictionaries())
    if not line.any():
        raise RunError(
            f"{run.path}: its passes do not say their micro-batch, so that it cannot be played again; "
            "what-if needs a pipeline run"
        )
    start = int64(table, "start_ns")
    end = start + int64(table, "duration_ns")
    communication = is_one_of(table, "category", ("collective", "p2p"))
    slot, code = int64(table, "slot"), int64(table, "code")
    instance = np.full(len(slot), -1, np.int64)
    instance[slot >= 0] = factorized(int64(table, "met")[slot >= 0], code[slot >= 0])
    what, names = _what(table)
    work = Work(
        weight=int64(table, "weight"),
        slot=slot,
        code=code,
        rank=int64(table, "rank"),
        step=int64(table, "step"),
        stage=int64(table, "stage"),
        microbatch=int64(table, "microbatch"),
        chunk=int64(table, "virtual_stage"),
        layer=int64(table, "layer"),
        what=what,
        names=names,
        start_ns=start,
        end_ns=end,
        instance=instance,
        work_ns=end - _begun(start, instance),
        is_communication=communication,
        is_transfer=is_one_of(table, "category", ("p2p",)),
        like=_like(table, what, line),
    )
    return work, line


_NEEDED: Final = (
    *("rank", "stream", "category", "kind", "name", "start_ns", "duration_ns", "step", "microbatch", "layer"),
    *("stage", "virtual_stage", "axis", "peer", "size_bytes"),
)


def _chosen(run: Run, meetings: Meetings, colour: Colours) -> list[pa.Table]:
    """Return the spans of the first rank of each colour, with their weight and what they take part in."""
    joined, tables = communications(run, by_step=True), []
    for place, weight in sorted(zip(*map(np.ndarray.tolist, first_of_each(colour)), strict=True)):
        part, table = joined.of(run.stored_ranks[place]), run.spans([run.stored_ranks[place]], _NEEDED)
        known = part.slot >= 0
        columns = {name: np.full(table.num_rows, -1, np.int64) for name in ("slot", "code", "met")}
        columns["slot"][part.rows] = part.slot
        columns["code"][part.rows[known]] = joined.code(part)[known]
        met = meetings.channels(colour, place).view(np.int64)
        columns["met"][part.rows[known]] = met[part.slot[known]]
        columns["weight"] = np.full(table.num_rows, weight)
        for name, values in columns.items():
            table = table.append_column(name, pa.array(values))
        tables.append(_sorted(table))
    return tables


def _sorted(table: pa.Table) -> pa.Table:
    """Return the spans of a rank in which a step works or moves data, by step and start."""
    chosen = is_one_of(table, "category", ("compute", "collective", "p2p", "host", "copy"))
    chosen &= (int64(table, "step") >= 0) & ~is_one_of(table, "stream", ("idle",))
    rows = np.flatnonzero(chosen)
    return table.take(rows[np.lexsort((int64(table, "start_ns")[rows], int64(table, "step")[rows]))])


def _told(table: pa.Table) -> tuple[pa.Table, BoolArray]:
    """Return the spans of the steps whose passes all say their place, and which spans are passes.

    Passes without a stage are those of a recording without a pipeline: what they wait for is not known.
    """
    line = is_one_of(table, "kind", PASSES) & is_one_of(table, "category", ("compute",))
    is_untold = (int64(table, "microbatch") < 0) | (int64(table, "stage") < 0)
    untold = np.unique(int64(table, "step")[line & is_untold])
    told = ~np.isin(int64(table, "step"), untold)
    return (table, line) if told.all() else (table.filter(told), line[told])


def _begun(start: Int64Array, instance: Int64Array) -> Int64Array:
    """Return when each span begins its work: a communication when the last of its ranks has started it."""
    begun = start.copy()
    joined = instance >= 0
    latest = np.full(int(instance.max(initial=-1)) + 1, np.iinfo(np.int64).min)
    np.maximum.at(latest, instance[joined], start[joined])
    begun[joined] = latest[instance[joined]]
    return begun


def _what(table: pa.Table) -> tuple[Int64Array, tuple[str, ...]]:
    """Return what each span is: its kind, with the axis of a collective, the direction of a transfer."""
    kinds, kind_names = labels(table, "kind")
    axes, axis_names = labels(table, "axis")
    codes, spelled = labels(table, "name")
    p2p = is_one_of(table, "category", ("p2p",))
    rank, peer = int64(table, "rank"), int64(table, "peer")
    upward = (peer > rank) == is_one_of(table, "kind", ("send",))
    said = np.array([_DIRECTIONS.get(name.partition("-")[0], 0) for name in spelled], np.int64)[codes]
    direction = np.where(p2p, np.where(said > 0, said, np.where(upward, 1, 2)), 0)
    key = factorized(direction, kinds, np.where(p2p, 0, axes))
    _, first = np.unique(key, return_index=True)
    names = []
    for row in first.tolist():
        more = ("", "forward", "backward")[direction[row]] or axis_names[axes[row]]
        names.append(f"{kind_names[kinds[row]]} {more}".strip())
    return _numbered(key, names)


_DIRECTIONS: Final = {"forward": 1, "activations": 1, "backward": 2, "gradients": 2}
"""First words in the names of transfers that say their direction: 1 to the next stage, 2 back."""


def _numbered(key: Int64Array, names: list[str]) -> tuple[Int64Array, tuple[str, ...]]:
    """Return *key* with numbers of equal *names* made one, and the names."""
    distinct = tuple(dict.fromkeys(names))
    return np.array([distinct.index(name) for name in names], np.int64)[key], distinct


def _like(table: pa.Table, what: Int64Array, line: BoolArray) -> Int64Array:
    """Return a number that spans share which do the same: in each layer, the n-th of a name in a pass.

    Names count without their digits, so that layers are alike. Communication is alike if it is as large.
    """
    codes, names = labels(table, "name")
    plain = [re.sub(r"\d+", "#", name) for name in names]
    distinct = list(dict.fromkeys(plain))
    part = np.array([distinct.index(name) for name in plain], np.int64)[codes]
    layer = int64(table, "layer")
    part = np.where(line & (layer[line] >= 0).any(), part, -1)  # passes that are one span each are alike
    place = ("rank", "step", "microbatch", "virtual_stage")
    nth = occurrence(factorized(*(int64(table, name) for name in place), what, part, layer))
    size = np.where(is_one_of(table, "category", ("collective", "p2p")), int64(table, "size_bytes"), 0)
    return factorized(what, part, np.where(part >= 0, nth, 0), size)


def by_place(work: Work) -> list[Int64Array]:
    """Return the rows of each rank in each step, by start."""
    key = factorized(work.rank, work.step)
    first = np.flatnonzero(np.diff(key, prepend=-1))
    return [np.arange(a, b) for a, b in zip(first, np.append(first[1:], len(key)), strict=True)]
