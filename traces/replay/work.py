"""The spans of a run as columns, with the communication that they take part in: what a replay is made of."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice, pairwise
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.traces.analysis.activity import PASSES
from foretrace.traces.analysis.communications import Communications, communications
from foretrace.traces.columns import (
    BoolArray,
    Int64Array,
    bounds,
    factorized,
    int64,
    is_one_of,
    labels,
    occurrence,
)
from foretrace.traces.errors import RunError
from foretrace.traces.replay.waves import Edges, FloatArray, Graph
from foretrace.traces.run import Run

MOST_SPANS: Final = 4_000_000  # spans that are played: more need over 4 GB of memory


@dataclass(frozen=True, slots=True)
class Work:
    """The spans of all steps as columns; times in ns, shape ``(n_spans,)``.

    Of ranks that do the same, ``traces.replay.work``, only the first has spans.
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

    Steps in which a pass does not say its place are left out: before its first step, PyTorch's pipeline sends
    one through to learn the shapes of what stages exchange. Raises RunError: there is no other step, or more
    spans than can be played.
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
    start, end = bounds(table)
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


# Ranks that do the same in a replay, so that one of them is played for all.
#
# Two ranks start and end their spans at the same times if their own work is the same, and if whoever they
# meet does the same in turn. Such ranks are found by refinement: each has a colour, at first by its own work;
# then by its colour and those of all that it meets, channel by channel, until no two of one colour can be
# told apart. Every sum and maximum of the replay is then the same number for all ranks of a colour, and the
# replay of one rank of each is that of all, to the last digit.

Colours = NDArray[np.uint64]

_ODD: Final = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""Multipliers of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), which spreads numbers over 64 bits."""


class Meetings:
    """Who meets whom: the channels of each stored rank, and the slot in which it has each of them.

    Args:
        joined: communications of a run.
        ranks: its stored ranks.
    """

    def __init__(self, joined: Communications, ranks: tuple[int, ...]) -> None:
        channels = [joined.of(rank).channels for rank in ranks]
        counts = [len(own) for own in channels]
        self._n_channels = len(joined.channels)
        self._channel = np.concatenate(channels)
        self._who = np.repeat(np.arange(len(ranks)), counts)
        self._slot = np.concatenate([np.arange(n, dtype=np.uint64) for n in counts])
        self._at = np.cumsum([0, *counts])

    def refined(self, colour: Colours) -> Colours:
        """Return the coarsest colours, finer than *colour*, of which equal ones meet equal ones."""
        n = len(np.unique(colour))
        while True:
            met = np.zeros_like(colour)
            # A sum does not depend on the order in which a rank meets others.
            np.add.at(met, self._who, spread(self._met(colour)[self._channel], self._slot))
            colour = spread(colour, met)
            if (n_colours := len(np.unique(colour))) == n:
                return colour
            n = n_colours

    def channels(self, colour: Colours, place: int) -> Colours:
        """Return by slot of the rank at *place* what tells its channel from others, by refined colours."""
        return self._met(colour)[self._channel[self._at[place] : self._at[place + 1]]]

    def _met(self, colour: Colours) -> Colours:
        """Return by channel who takes part in which slot."""
        met = np.zeros(self._n_channels, np.uint64)
        np.add.at(met, self._channel, spread(colour[self._who], self._slot))
        return met


def coloured(run: Run) -> tuple[Meetings, Colours]:
    """Return who meets whom in *run*, and the colours of its stored ranks in a replay of what it recorded."""
    joined = communications(run, by_step=True)
    meetings = Meetings(joined, run.stored_ranks)
    numbers = [number_of(run.like(part.rank), part.slot, _upward(run, part.rank)) for part in joined]
    return meetings, meetings.refined(np.array(numbers, np.uint64))


def first_of_each(colour: Colours) -> tuple[NDArray[np.intp], Int64Array]:
    """Return the place of the first rank of each colour, by colour, and how many ranks have it."""
    _, first, count = np.unique(colour, return_index=True, return_counts=True)
    return first, count.astype(np.int64)


def _upward(run: Run, rank: int) -> NDArray[np.bool_]:
    """Return which spans are transfers with a higher rank: it may say in which direction they go."""
    table = run.spans([rank], ["category", "peer"])
    return is_one_of(table, "category", ("p2p",)) & (int64(table, "peer") > rank)


def number_of(*values: object) -> int:
    """Return 64 bits that are the same for equal *values*, and hardly ever for others."""
    whole = blake2b(digest_size=8)
    for value in values:
        whole.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
        whole.update(b"|")
    return int.from_bytes(whole.digest(), "little")


def spread(one: Colours, other: Colours) -> Colours:
    """Return 64 bits for each pair of numbers, different ones for different pairs but by a rare accident."""
    mixed = one * _ODD[0] + (other + np.uint64(1)) * _ODD[1]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _ODD[1]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _ODD[2]
    spread_out: Colours = mixed ^ (mixed >> np.uint64(31))
    return spread_out


# What each span of a pipeline step depends on, rank by rank.
#
# - Forward and backward passes of a rank run in their recorded order; so do the spans that a pass is made of.
# - A pass needs the transfer that brings its input, a send follows its pass, and a receive can be posted
#   after the pass before of its direction; transfers of one direction keep their order. When the recording
#   posted it is kept apart: a replay with the recorded delays waits for that, too.
# - Collectives before the first pass precede it; what follows the last pass runs in its recorded order.
# - Any other span follows what had ended on its rank when it began, and precedes the next part of a pass:
#   reductions of gradients do not, they precede what follows the last pass.

FORWARD: Final = ("forward",)  # kinds of compute that send their result to the next stage

BACKWARD: Final = ("backward", "backward_input")
"""Kinds of compute that send their result to the stage before."""

REDUCTIONS: Final = ("all_reduce dp", "reduce_scatter dp")
"""Collectives that no pass waits for: only the optimizer does."""


class Pairs:
    """Spans, and what each of them depends on."""

    def __init__(self) -> None:
        self._found: list[tuple[Int64Array, Int64Array]] = []

    def add(self, after: Sequence[int] | Int64Array, before: Sequence[int] | Int64Array) -> None:
        """Note that each of the spans *after* depends on the one of *before* at its place."""
        self._found.append((np.asarray(after, np.int64), np.asarray(before, np.int64)))

    def in_order(self, rows: Sequence[int] | Int64Array) -> None:
        """Note that each of *rows* depends on the one before it."""
        self.add(rows[1:], rows[:-1])

    def joined(self) -> tuple[Int64Array, Int64Array]:
        """Return all of them: what depends, and on what."""
        none = np.empty(0, np.int64)
        after, before = zip((none, none), *self._found, strict=True)
        return np.concatenate(after), np.concatenate(before)


class _Pass(NamedTuple):
    """One pass: first and last span, ``forward``, ``backward`` or neither, micro-batch and model chunk."""

    first: int
    last: int
    direction: str
    microbatch: int
    chunk: int


def dependencies(work: Work, rows: Int64Array, line: BoolArray, needs: Pairs, posted: Pairs) -> None:
    """Add to *needs* what the spans of one rank in one step depend on, to *posted* what receives come after.

    Args:
        work: spans of the run.
        rows: rows of one rank in one step.
        line: which spans of the run are parts of passes.
        needs: dependencies.
        posted: after what each receive was posted.
    """
    spans = rows[line[rows]]
    needs.in_order(spans)
    passes = _passes(work, spans)
    by_name: defaultdict[str, list[int]] = defaultdict(list)
    transfers = rows[work.is_transfer[rows]]
    for row in transfers.tolist():
        by_name[work.names[work.what[row]]].append(row)
    for direction in ("forward", "backward"):
        own = [one for one in passes if one.direction == direction]
        _receives(work, by_name[f"recv {direction}"], own, needs)
        _sends(work, by_name[f"send {direction}"], own, needs)
    _first_receive(by_name["recv backward"], passes, needs)
    if len(spans):
        _others(work, rows[~line[rows] & ~work.is_transfer[rows]], spans, needs)
    receives = np.array([*by_name["recv forward"], *by_name["recv backward"]], np.int64)
    ended = np.maximum.accumulate(work.end_ns[spans])
    at = np.searchsorted(ended, work.start_ns[receives], side="right") - 1
    posted.add(receives[at >= 0], spans[at[at >= 0]])


def _passes(work: Work, spans: Int64Array) -> list[_Pass]:
    """Return the passes that *spans* make: neighbours of one direction, micro-batch and chunk are one."""
    if not len(spans):
        return []
    names = np.array([_direction(name) for name in work.names])[work.what[spans]]
    microbatch, chunk = work.microbatch[spans], work.chunk[spans]
    is_new = np.ones(len(spans), np.bool_)
    is_new[1:] = (names[1:] != names[:-1]) | (microbatch[1:] != microbatch[:-1]) | (chunk[1:] != chunk[:-1])
    if not (work.layer[spans] >= 0).any():  # whole passes, one span each
        is_new[:] = True
    first = np.flatnonzero(is_new)
    last = np.append(first[1:], len(spans)) - 1
    return [
        _Pass(int(spans[a]), int(spans[b]), str(names[a]), int(microbatch[a]), int(chunk[a]))
        for a, b in zip(first.tolist(), last.tolist(), strict=True)
    ]


def _direction(name: str) -> str:
    return "forward" if name in FORWARD else "backward" if name in BACKWARD else name


def _belonging(work: Work, transfers: list[int], own: list[_Pass], *, skip: int) -> list[int]:
    """Return the place in *own* of the pass of each transfer: by micro-batch, else in order after *skip*."""
    place: dict[tuple[int, int], list[int]] = defaultdict(list)
    for at, one in enumerate(own):
        place[one.microbatch, one.chunk].append(at)
        # A transfer may not say its chunk: then the micro-batch tells, if it has only one pass.
        if one.chunk >= 0:
            place[one.microbatch, -1].append(at)
    found = []
    for number, row in enumerate(transfers):
        named = place.get((int(work.microbatch[row]), int(work.chunk[row])), [])
        found.append(named[0] if len(named) == 1 else number + skip)
    return found


def _receives(work: Work, receives: list[int], own: list[_Pass], needs: Pairs) -> None:
    missing = max(len(own) - len(receives), 0)  # the first stage receives nothing
    skip = missing if missing < len(own) else 0
    belonging = list(zip(receives, _belonging(work, receives, own, skip=skip), strict=True))
    fed = [(own[at].first, row) for row, at in belonging if at < len(own)]
    needs.add([first for first, _ in fed], [row for _, row in fed])
    later = [(row, own[at - 1].last) for row, at in belonging if 0 < at <= len(own)]
    needs.add([row for row, _ in later], [last for _, last in later])
    needs.in_order(receives)


def _sends(work: Work, sends: list[int], own: list[_Pass], needs: Pairs) -> None:
    belonging = zip(sends, _belonging(work, sends, own, skip=0), strict=True)
    sent = [(row, own[at].last) for row, at in belonging if at < len(own)]
    needs.add([row for row, _ in sent], [last for _, last in sent])
    needs.in_order(sends)


def _first_receive(receives: list[int], passes: list[_Pass], needs: Pairs) -> None:
    """Post the first receive of a gradient during the pass before the first backward one, not at once."""
    place = next((at for at, one in enumerate(passes) if one.direction == "backward"), 0)
    if receives and place >= 2:
        needs.add([receives[0]], [passes[place - 2].last])


def _others(work: Work, rest: Int64Array, spans: Int64Array, needs: Pairs) -> None:
    """Connect what is neither pass nor transfer: before the first pass, after the last, or between."""
    begin, end = work.start_ns[spans], work.end_ns[spans]
    ended = int(np.argmax(end))
    start = work.start_ns[rest]
    tail = rest[start >= begin[ended]]
    needs.in_order(np.append(rest[start < begin[0]], spans[0]))
    needs.in_order(np.append(spans[ended], tail))
    between = rest[(start >= begin[0]) & (start < begin[ended])]
    after = np.searchsorted(np.maximum.accumulate(end), work.start_ns[between], side="right") - 1
    needs.add(between[after >= 0], spans[after[after >= 0]])
    reduces = np.isin(work.what[between], [work.names.index(one) for one in REDUCTIONS if one in work.names])
    for what in np.unique(work.what[between[reduces]]).tolist():
        alike = between[reduces & (work.what[between] == what)]
        needs.in_order(np.append(alike, tail[:1]))
    until = np.searchsorted(begin, work.end_ns[between])
    precedes = ~reduces & (until < len(spans))
    needs.add(spans[until[precedes]], between[precedes])


# Plays a step in which only some ranks take as long as they did, each with those alike played once.
#
# Where one rank of hundreds is singled out, the others still fall into a few kinds: those that meet it, those
# that meet these, and so on. All ranks have one of few *forms*: what depends on what is the same in each, and
# who meets whom. So the forms are one small graph, in which every rank of every scenario is a column.

AT_ONCE: Final = 1 << 25
"""Times that are held at a time, of all chains in all columns: 256 MB in each of two arrays."""


class _Graph(NamedTuple):
    """Ranks of different colours, and the scenarios in which they have these."""

    nodes: Int64Array  # of a rank of each colour, which rank is played in its place
    forms: Int64Array  # of each of them
    met: list[Colours]  # for each of them by slot, what tells its channel from others
    recorded: list[int]  # for each of them its place in a scenario, -1 if it is ideal
    # what is played where ranks are as recorded, and the places of the questions it answers
    scenarios: dict[tuple[int, ...], list[int]]


class _Column(NamedTuple):
    """One rank in one scenario: which, how long its chains take, and what tells its channels from others."""

    scenario: int
    chain_ns: FloatArray
    met: Colours


class Parts:
    """Scenarios in which some ranks are as recorded, and all others ideal.

    Args:
        replay: of a run.
        actual: duration of each of its spans, in ns.
        ideal: the same if all spans were like others that do the same.
    """

    def __init__(self, replay: Replay, actual: FloatArray, ideal: FloatArray) -> None:
        self._replay, self._actual, self._ideal = replay, actual, ideal
        first, _ = first_of_each(replay.colour)
        order = np.argsort(first)  # spans are by rank
        node = np.empty(len(first), np.int64)
        node[order] = np.arange(len(first))
        self._node = node[np.unique(replay.colour, return_inverse=True)[1]]
        ranks = replay.ranks[first[order]]  # some may have no work
        self._at = np.append(np.searchsorted(replay.work.rank, ranks), len(actual))
        forms = np.array([self._shape(one) for one in range(len(first))], np.uint64)
        dressed = [number_of(int(form), ideal[self._rows(one)]) for one, form in enumerate(forms)]
        self._shapes = np.array(dressed, np.uint64)[self._node]
        self._form_graph(replay.meetings.refined(forms[self._node]))
        self._kept: dict[tuple[int, bool], FloatArray] = {}  # chains of a rank, ideal or as recorded

    def means_s(self, chosen: Sequence[BoolArray]) -> FloatArray:
        """Return the mean time of a step, in s, in each scenario: which stored ranks are as recorded."""
        graphs: dict[bytes, _Graph] = {}
        for question, ranks in enumerate(chosen):
            self._ask(graphs, question, ranks)
        found = np.zeros(len(chosen))
        for together in self._batches(graphs.values()):
            self._answer(together, found)
        return found

    def means_of_spans_s(self, chosen: Iterable[BoolArray]) -> FloatArray:
        """Return the mean time of a step, in s, in each scenario: which spans are as recorded."""
        nodes = np.unique(self._node, return_index=True)[1].tolist()
        met = [self._replay.meetings.channels(self._replay.colour, place) for place in nodes]
        n_columns = int(np.bincount(self._form[nodes]).max())
        found: list[float] = []
        left = iter(chosen)
        while together := list(islice(left, max(self._most() // n_columns, 1))):
            columns: list[list[_Column]] = [[] for _ in self._first[1:]]
            for number, mask in enumerate(together):
                span_ns = np.where(mask, self._actual, self._ideal)
                for node, form in enumerate(self._form[nodes].tolist()):
                    columns[form].append(_Column(number, self._chains_ns(node, form, span_ns), met[node]))
            found += self._mean_s(columns)
        return np.array(found)

    def _most(self) -> int:
        """Return how many columns are held at a time."""
        return max(AT_ONCE // len(self._forms.head), 1)

    def _shape(self, node: int) -> int:
        """Return a number that ranks share that differ in the durations of their spans at most."""
        rows, work = self._rows(node), self._replay.work
        of_spans = (values[rows] for values in (work.slot, work.code, self._replay.step))
        return number_of(*of_spans, *self._edges(node))

    def _rows(self, node: int) -> slice:
        return slice(int(self._at[node]), int(self._at[node + 1]))

    def _edges(self, node: int) -> tuple[Int64Array, Int64Array]:
        """Return the dependencies of the spans of *node*, counted from its first."""
        rows, edges = self._rows(node), self._replay.free
        own = slice(*np.searchsorted(edges.after, (rows.start, rows.stop)))
        return edges.after[own] - rows.start, edges.before[own] - rows.start

    def _form_graph(self, form: Colours) -> None:
        """Put together the graph of one rank of each of the forms, which ranks have in order."""
        work = self._replay.work
        _, first, self._form = np.unique(form, return_index=True, return_inverse=True)
        rows = [self._rows(node) for node in self._node[first].tolist()]
        sizes = [one.stop - one.start for one in rows]
        self._first = np.cumsum([0, *sizes])
        edges = [np.array(self._edges(int(node))) for node in self._node[first]]
        moved = [one + begin for one, begin in zip(edges, self._first.tolist(), strict=False)]
        slot, code, step = (
            np.concatenate([values[one] for one in rows])
            for values in (work.slot, work.code, self._replay.step)
        )
        form_of = np.repeat(np.arange(len(rows)), sizes)
        joins = slot >= 0
        met = [self._replay.meetings.channels(form, place) for place in first.tolist()]
        channel = np.concatenate(
            [own[work.slot[one][work.slot[one] >= 0]] for own, one in zip(met, rows, strict=True)]
        )
        instance = np.full(len(slot), -1, np.int64)
        instance[joins] = factorized(channel.view(np.int64), code[joins])
        self._forms = Graph(len(slot), Edges(*np.concatenate(moved, axis=1)), instance, apart=True)
        self._key = form_of * len(self._replay.steps) + step
        head, (wave, place) = self._forms.head, self._forms.wave_of()
        meets = np.flatnonzero(instance[head] >= 0)
        meets = meets[np.lexsort((slot[head[meets]], instance[head[meets]], wave[meets]))]
        room = np.cumsum(np.diff(instance[head[meets]], prepend=-1) != 0)
        bounds = np.flatnonzero(np.diff(wave[meets], prepend=-1))
        room -= np.repeat(room[bounds], np.diff(bounds, append=len(room)))
        sides = np.stack([room, form_of[head[meets]], slot[head[meets]], place[meets]], axis=1)
        self._sides = {
            int(wave[meets[low]]): sides[low:high].tobytes()
            for low, high in pairwise([*bounds.tolist(), len(room)])
        }

    def _ask(self, graphs: dict[bytes, _Graph], question: int, ranks: BoolArray) -> None:
        """Add a question to the graph of its kind."""
        recorded = np.unique(self._node[ranks])
        place = np.where(ranks, np.searchsorted(recorded, self._node), -1)
        colour = self._replay.meetings.refined(spread(self._shapes, (place + 1).astype(np.uint64)))
        distinct, first = np.unique(colour, return_index=True)
        graph = graphs.get(key := distinct.tobytes())
        if graph is None:
            met = [self._replay.meetings.channels(colour, one) for one in first.tolist()]
            graph = graphs[key] = _Graph(self._node[first], self._form[first], met, place[first].tolist(), {})
        graph.scenarios.setdefault(tuple(recorded.tolist()), []).append(question)

    def _batches(self, graphs: Iterable[_Graph]) -> Iterator[list[tuple[_Graph, tuple[int, ...]]]]:
        """Yield scenarios that are played at once: as many as have room."""
        batch: list[tuple[_Graph, tuple[int, ...]]] = []
        n_columns = np.zeros(len(self._first) - 1, np.int64)
        for graph in graphs:
            count = np.bincount(graph.forms, minlength=len(n_columns))
            for scenario in graph.scenarios:
                if batch and (n_columns + count).max() > self._most():
                    yield batch
                    batch, n_columns = [], np.zeros_like(n_columns)
                batch.append((graph, scenario))
                n_columns += count
        yield batch

    def _chains_ns(self, node: int, form: int, span_ns: FloatArray) -> FloatArray:
        """Return the duration of each chain of *node*, of those of its spans."""
        _, order, bounds = self._forms.chains(slice(self._first[form], self._first[form + 1]))
        total: FloatArray = np.add.reduceat(span_ns[self._rows(node)][order - self._first[form]], bounds)
        return total

    def _answer(self, scenarios: Sequence[tuple[_Graph, tuple[int, ...]]], found: FloatArray) -> None:
        """Play some scenarios beside each other, and write down the answers."""
        columns: list[list[_Column]] = [[] for _ in self._first[1:]]
        for number, (graph, said) in enumerate(scenarios):
            for node, form, met, place in zip(*graph[:4], strict=True):
                played = int(node) if place < 0 else said[place], place < 0
                if played not in self._kept:
                    span_ns = self._ideal if place < 0 else self._actual
                    self._kept[played] = self._chains_ns(played[0], int(form), span_ns)
                columns[form].append(_Column(number, self._kept[played], met))
        for (graph, said), seconds in zip(scenarios, self._mean_s(columns), strict=True):
            found[graph.scenarios[said]] = seconds

    def _mean_s(self, columns: Sequence[Sequence[_Column]]) -> list[float]:
        """Return the mean time of a step in each scenario."""
        steps = self._replay.first_ns
        last = self._played(columns, np.tile(steps, len(columns))).reshape(len(columns), len(steps), -1)
        times = np.full((len(steps), columns[0][-1].scenario + 1), -np.inf)
        for form, own in enumerate(columns):
            for at, column in enumerate(own):
                np.maximum(times[:, column.scenario], last[form, :, at], out=times[:, column.scenario])
        mean: list[float] = ((times - steps[:, None]).mean(axis=0) / 1e9).tolist()
        return mean

    def _played(self, columns: Sequence[Sequence[_Column]], first_ns: Int64Array) -> FloatArray:
        """Return when the last span of each form and step ends in each column of the form."""
        width = max(map(len, columns))
        chain_ns = np.zeros((len(self._forms.head), width))
        for form, own in enumerate(columns):
            mine, _, _ = self._forms.chains(slice(self._first[form], self._first[form + 1]))
            np.stack([one.chain_ns for one in own], axis=1, out=chain_ns[mine, : len(own)])
        met = [
            (np.array([one.scenario for one in own]), np.stack([one.met for one in own])) for own in columns
        ]
        seats: dict[bytes, tuple[Int64Array, Int64Array, Int64Array]] = {}

        def meet(wave: int, start: FloatArray) -> None:
            if (sides := self._sides.get(wave)) is None:
                return
            if sides not in seats:  # waves are few that differ in more than their times
                seats[sides] = _seats(np.frombuffer(sides, np.int64).reshape(-1, 4), met, width)
            order, begin, group = seats[sides]
            if len(order):
                flat = start.reshape(-1)
                flat[order] = np.maximum.reduceat(flat[order], begin)[group]

        return self._forms.played_apart(chain_ns, first_ns, self._key, meet)


def _seats(
    sides: Int64Array, met: Sequence[tuple[Int64Array, NDArray[np.uint64]]], width: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return which times of a wave are of ranks that meet, where each meeting begins, and which is whose.

    Args:
        sides: of communications: number, form, slot, place in the wave; shape ``(n, 4)``.
        met: by form the scenario of each column, and by slot what tells its channel from others.
        width: columns of the wave.
    """
    parts = [
        np.stack([place * width + np.arange(len(met[form][0])), np.full(len(met[form][0]), room)]).astype(
            np.int64
        )
        for room, form, _, place in sides.tolist()
    ]
    place, room = np.concatenate(parts, axis=1)
    scenario = np.concatenate([met[form][0] for _, form, _, _ in sides.tolist()])
    channel = np.concatenate([met[form][1][:, slot] for _, form, slot, _ in sides.tolist()])
    group = factorized(room, scenario, channel.view(np.int64))
    some = np.flatnonzero(np.bincount(group)[group] > 1)
    order = some[np.argsort(group[some], kind="stable")]
    begin = np.flatnonzero(np.diff(group[order], prepend=-1))
    return place[order], begin, np.repeat(np.arange(len(begin)), np.diff(begin, append=len(order)))


# Plays the steps of a recorded pipeline again with other durations: what would the step have taken?
#
# Every span of a step begins when what it depends on has ended, after the delay that the recording shows; a
# communication moves data once its last participant has come. ``traces.replay.work`` says what depends on
# what in pipeline training.
#
# With the recorded durations and delays the recorded times come out again, to the nanosecond. Method: Lin et
# al., "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025.


class Replay:
    """The steps of a run as graphs of dependencies, of one rank for all that do the same.

    Args:
        run: a run with forward and backward passes that say their micro-batch.

    Raises:
        RunError: the run has no such passes, too many spans, or its dependencies go round in a circle.
    """

    def __init__(self, run: Run) -> None:
        self.meetings, self.colour = coloured(run)
        self.ranks = np.array(run.stored_ranks, np.int64)
        self.work, line = collected(run, self.meetings, self.colour)
        needs, posted = Pairs(), Pairs()
        for rows in by_place(self.work):
            dependencies(self.work, rows, line, needs, posted)
        after, before = needs.joined()
        self.free = Edges.of(after, before).reduced(len(self.work.start_ns))
        self._every = Edges.of(*map(np.concatenate, zip((after, before), posted.joined(), strict=True)))
        self.steps, self.step = np.unique(self.work.step, return_inverse=True)
        self.first_ns = np.full(len(self.steps), np.iinfo(np.int64).max)
        np.minimum.at(self.first_ns, self.step, self.work.start_ns)

    def delayed_ns(self, work_ns: FloatArray) -> FloatArray:
        """Return how long each step takes on its slowest rank, in every scenario.

        Spans start as late after what they depend on as recorded.

        Args:
            work_ns: duration of each span in each scenario, shape ``(n_spans, n_scenarios)``.

        Returns:
            Times in ns, shape ``(n_steps, n_scenarios)``.
        """
        n = len(self.step)
        latest = self._every.latest(n, self.work.end_ns, self.first_ns[self.step])
        graph = Graph(n, self._every, self.work.instance, chains=False)
        return graph.played(work_ns, self.first_ns, self.step, self.work.start_ns - latest)


def replay(run: Run) -> Replay:
    """Return the steps of *run* as graphs; kept with the run."""
    return run.derived(Replay)
