"""Micro-batches of a pipeline stage that repeat earlier ones: their events are copied, they are not run.

Of each stage, the first three micro-batches of a step are run, and the last. If the third issues what the
second did, event by event and byte by byte, those between are assumed to do the same. The first differs: it
gathers parameters and creates gradients; so may the last. A stage that differs otherwise is run in full.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from foretrace.tracer import internals
from foretrace.tracer.lane import NOBODY
from foretrace.tracer.rehearse.device.memory import Change
from foretrace.tracer.rehearse.errors import UnlikeError
from foretrace.tracer.rehearse.state import State
from foretrace.tracer.rehearse.tape.tape import Tape
from foretrace.traces.rehearsal import COMMUNICATION, MARK, WAIT, WAIT_MARK

# Segments of what a rank issues, in a form in which two can be compared and one can be repeated. Two equal
# segments differ only in numbers: those of events, marks, collectives and the micro-batch, and the memory
# in use when they began.

Rows = npt.NDArray[np.int64]

Owned = tuple[str, int]
"""A storage of a micro-batch: the part that made it, and the how manyth of that part it was."""

OwnChange = tuple[str, Owned | None, int, str, int]
"""What happened to which storage, its bytes, their category, and the stream that they are of."""


class Result(NamedTuple):
    """A tensor that remains after a segment."""

    # of it
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    device: Any
    requires_grad: bool  # whether it does
    owned: Owned | None  # the storage that it lies in, None if that was there before


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What one call has issued."""

    # its events; shape ``(n, 6)``, columns of ``traces.rehearsal.EVENTS``, numbers relative to the beginning:
    # events waited for, marks, and bytes in use
    rows: Rows
    n_marks: int  # marks that it made
    changes: tuple[OwnChange, ...]  # of memory: what, which storage, bytes, category, stream
    results: tuple[Result | None, ...]  # what it leaves behind
    forwards: int  # calls of models from outside in it
    told: Mapping[str, int]  # what the script was told, and how often
    is_closed: bool  # it waits for nothing, and frees nothing, that others have made, and transfers nothing

    def frees(self, owned: Owned) -> bool:
        """Whether it frees a storage of its micro-batch."""
        return any(what == "free" and name == owned for what, name, *_ in self.changes)

    def does_the_same(self, other: Segment, tape: Tape) -> bool:
        """Whether *other* is this again, of another micro-batch."""
        if self.rows.shape != other.rows.shape or self.n_marks != other.n_marks:
            return False
        ours, theirs = (_without_numbers(one.rows, tape) for one in (self, other))
        return (
            bool(np.array_equal(ours, theirs))
            and self.changes == other.changes
            and self.results == other.results
            and self.told == other.told
        )


def relative_rows(rows: Rows, first: int, first_mark: int, base_bytes: int) -> tuple[Rows, bool]:
    """Return *rows* with numbers relative to their beginning, and whether none points before it.

    Args:
        rows: events; shape ``(n, 6)``.
        first: number of the first.
        first_mark: marks before it.
        base_bytes: memory in use before it.
    """
    found, what = rows.copy(), rows[:, 0]
    found[what == WAIT, 4] -= first
    found[(what == MARK) | (what == WAIT_MARK), 1] -= first_mark
    found[:, 5] -= base_bytes
    marks = (what == MARK) | (what == WAIT_MARK)
    is_closed = bool((found[what == WAIT, 4] >= 0).all() and (found[marks, 1] >= 0).all())
    return found, is_closed


def _without_numbers(rows: Rows, tape: Tape) -> Rows:
    """Return relative *rows* with neither micro-batches nor numbers of collectives."""
    found = rows.copy()
    found[found[:, 0] == COMMUNICATION, 4] = 0
    found[:, 2] = tape.moved(found[:, 2], 1)  # any that is there
    return found


def changes_of(log: list[Change], kind: str, owned: dict[int, Owned]) -> tuple[tuple[OwnChange, ...], bool]:
    """Return what happened to memory in the part *kind* of a micro-batch, and whether all of it was its own.

    Args:
        log: what happened.
        kind: of the part.
        owned: storages of the micro-batch by number; those that this part has made are added.
    """
    found, n_made = [], 0
    for what, number, n_bytes, category, stream in log:
        if what == "add":
            owned[number], n_made = (kind, n_made), n_made + 1
        found.append((what, owned.get(number), n_bytes, category, stream))
    return tuple(found), all(name is not None for _, name, *_ in found)


N_RUN: Final = 3
"""Micro-batches of a stage that are run before others may be repeated: one to begin, two to compare."""

Part = tuple[int, str]
"""Stage and kind of a call, a key of ``LANE_KINDS``."""

LANE_KINDS: Final = {
    "F": "forward",
    "L": "forward",  # the loss
    "B": "backward",
    "I": "backward_input",
    "W": "backward_weight",
}
"""What a call is to the lane: what comes after it depends on that."""


class Repeats:
    """Decides which micro-batches are run, and copies the events of the others."""

    def __init__(self, session: State) -> None:
        import torch

        fake_tensor = internals.fake_tensor()

        self._session, self._torch, self._kind, self._is_off = session, torch, fake_tensor, False
        self._second: dict[Part, Segment] = {}
        self._known: dict[Part, Segment] = {}
        self._owned: dict[tuple[int, int], dict[int, Owned]] = {}
        self._tokens: dict[tuple[int, int], dict[Owned, int]] = {}
        self._differs: set[int] = set()
        self._orphans: dict[tuple[int, int], list[int]] = {}

    def install(self) -> None:
        """Wrap the methods of stages and schedules, around the wrappers of the recorder."""
        base, schedule = internals.pipeline_stage(), internals.pipeline_schedule()
        outputs: dict[str, Callable[[Any, int, Any], Any]] = {
            "F": lambda stage, at, out: out if isinstance(out, tuple | list) and len(out) > 1 else [out],
            "B": lambda stage, at, out: stage.bwd_cache.get(at, ()),
            "W": lambda stage, at, out: (),
        }
        names = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
        for name, (kind, left) in zip(names, outputs.items(), strict=True):
            self._wrap(base, name, kind, left)
        self._wrap_loss(schedule)
        internals.on_custom_actions(self._turn_off)

    def _turn_off(self) -> None:
        """Run all: actions of the script's own may be in threads that wait for each other."""
        self._is_off = True

    def _start(self, stage: int) -> None:
        """Begin the micro-batches of *stage*, or end it: nothing is known of them, and nothing is left."""
        for key in [key for key in self._tokens if key[0] == stage]:
            for token in self._tokens[key].values():
                self._session.memory.free(token)
        known: Any = (self._second, self._known, self._owned, self._tokens, self._orphans)
        for found in known:
            for key in [key for key in found if key[0] == stage]:
                del found[key]
        self._differs.discard(stage)

    def _wrap(self, base: Any, name: str, kind: str, left: Callable[[Any, int, Any], Any]) -> None:
        original = getattr(base, name)

        def method(stage: Any, /, *args: Any, **kwargs: Any) -> Any:
            is_full = kwargs.get("full_backward", args[2] if len(args) > 2 else True)
            part = "I" if kind == "B" and not is_full else kind
            microbatch = int(args[0] if args else next(iter(kwargs.values())))

            def run() -> Any:
                return original(stage, *args, **kwargs)

            if self._is_repeated(stage, part, microbatch):
                results = self._again((stage.stage_index, part), microbatch)
                return self._finish(stage, part, microbatch, results)
            return self._run(stage, part, microbatch, run, lambda out: left(stage, microbatch, out))

        setattr(base, name, method)

    def _wrap_loss(self, schedule: Any) -> None:
        original = schedule._maybe_compute_loss

        def method(
            this: Any, /, stage: Any, output: Any, target: Any, microbatch: int, *args: Any, **kwargs: Any
        ) -> Any:
            def run() -> Any:
                return original(this, stage, output, target, microbatch, *args, **kwargs)

            if not stage.is_last or this._loss_fn is None:
                return run()
            if self._is_repeated(stage, "L", microbatch):
                this._internal_losses += self._again((stage.stage_index, "L"), microbatch)
                return None
            return self._run(stage, "L", microbatch, run, lambda _: this._internal_losses[-1:])

        schedule._maybe_compute_loss = method

    def _is_repeated(self, stage: Any, kind: str, microbatch: int) -> bool:
        """Whether a call is one to repeat: what the forward of a micro-batch is decides about all of it."""
        if self._is_off:
            return False
        key = (stage.stage_index, microbatch)
        if kind != "F":
            return key in self._tokens
        if microbatch == 0:
            self._start(stage.stage_index)
            weakref.finalize(stage, self._start, stage.stage_index)
        n = internals.n_chunks(stage)
        if not N_RUN <= microbatch < n - 1 or (stage.stage_index, kind) not in self._known:
            return False
        if stage.stage_index in self._differs or stage.dw_builder is not None:
            return False
        self._tokens[key] = {}
        self._session.warn(
            f"of {n} micro-batches of a stage the first {N_RUN} and the last were run; the others are like "
            "the third, which did what the second did (--every-microbatch runs them)"
        )
        return True

    def _run(
        self, stage: Any, kind: str, microbatch: int, run: Callable[[], Any], left: Callable[[Any], Any]
    ) -> Any:
        """Run a call; hold what it issues against what the micro-batch before it issued."""
        is_last = microbatch == internals.n_chunks(stage) - 1 and kind == "F"
        if self._is_off or not (1 <= microbatch < N_RUN or is_last):
            return run()
        session, part = self._session, (stage.stage_index, kind)
        tape, memory = session.tape, session.memory
        first, marks, base, forwards = tape.next_number, tape.n_marks, memory.total, session.forwards
        told, memory.log, on_host = Counter(session.stated.told), [], session.host.memory.total
        try:
            out = run()
        finally:
            log, memory.log = memory.log, None
        owned = self._owned.setdefault((stage.stage_index, microbatch), {})
        rows, is_closed = relative_rows(tape.rows_from(first), first, marks, base)
        changes, is_own = changes_of(log, kind, owned)
        sends = any(
            tape.message(item).peer >= 0 for what, item in rows[:, :2].tolist() if what == COMMUNICATION
        )
        results = [self._result(tensor, owned) for tensor in left(out)]
        segment = Segment(
            rows=rows,
            n_marks=tape.n_marks - marks,
            changes=changes,
            results=tuple(results),
            forwards=session.forwards - forwards,
            told=Counter(session.stated.told) - told,
            is_closed=is_closed
            and is_own
            and not sends
            and session.host.memory.total == on_host  # else what comes and goes there would be missing
            and _Odd not in map(type, results),
        )
        self._compare(part, microbatch, segment)
        return out

    def _compare(self, part: Part, microbatch: int, segment: Segment) -> None:
        """Learn from a call that was run. Raises UnlikeError if others were repeated in vain."""
        if microbatch == 1:
            self._second[part] = segment
            return
        before = self._known.get(part) or self._second.get(part)
        same = before is not None and before.does_the_same(segment, self._session.tape)
        if same and segment.is_closed:
            self._known.setdefault(part, segment)
            return
        self._differs.add(part[0])
        if any(stage == part[0] for stage, _ in self._tokens):
            raise UnlikeError(f"micro-batches of stage {part[0]} do not do the same")

    def _result(self, tensor: Any, owned: dict[int, Owned]) -> Any:
        """Describe a tensor that a call has left behind; only plain ones can be made again."""
        if tensor is None:
            return None
        if type(tensor) is not self._kind:
            return _Odd()
        number = self._session.memory.number_of(tensor.untyped_storage())
        shape, stride, device = tuple(tensor.shape), tuple(tensor.stride()), tensor.fake_device
        return Result(shape, stride, tensor.dtype, device, bool(tensor.requires_grad), owned.get(number))

    def _again(self, part: Part, microbatch: int) -> list[Any]:
        """Write down again what *part* issues; return tensors like those that it leaves behind.

        Raises:
            UnlikeError: nothing is known of it.
        """
        segment = self._known.get(part)
        if segment is None:
            raise UnlikeError(f"stage {part[0]} goes on with a micro-batch before the first ones have")
        session = self._session
        tape, memory = session.tape, session.memory
        rows = segment.rows.copy()
        what = rows[:, 0]
        # Numbers that were relative to the beginning of the segment are relative to this place now.
        rows[what == WAIT, 4] += tape.next_number
        rows[(what == MARK) | (what == WAIT_MARK), 1] += tape.n_marks
        rows[:, 5] += memory.total
        rows[:, 2] = tape.moved(rows[:, 2], microbatch)
        for at in (what == COMMUNICATION).nonzero()[0].tolist():
            rows[at, 4] = session.group_infos[tape.message(int(rows[at, 1])).group].next_collective()
        tape.n_marks += segment.n_marks
        tape.repeat(rows)
        tokens = self._tokens[part[0], microbatch]
        for change, name, n_bytes, category, stream in segment.changes:
            if name is None:
                continue
            if change == "add":
                tokens[name] = memory.hold(n_bytes, category, stream)
            elif change == "free":
                memory.free(tokens[name])
            elif memory.is_held(tokens[name]):
                memory.change(tokens[name], change, n_bytes, category, stream)
        session.lane.pop(session.lane.push(LANE_KINDS[part[1]], NOBODY))
        for token in self._orphans.pop((part[0], microbatch), []) if part[1] == "W" else ():
            memory.free(token)
        session.forwards += segment.forwards
        for sentence, n in segment.told.items():
            session.stated.told[sentence] += n
        return [self._like(result, (part[0], microbatch)) for result in segment.results]

    def _like(self, result: Result | None, key: tuple[int, int]) -> Any:
        """Return a tensor like *result*, the end of which is that of the memory that it stands for."""
        if result is None:
            return None
        with self._session.aside(), self._torch.no_grad():
            found = self._torch.empty_strided(
                result.shape, result.stride, dtype=result.dtype, device=result.device
            )
        found.requires_grad_(result.requires_grad)
        if result.owned is not None:
            weakref.finalize(found.untyped_storage(), self._let_go, key, result.owned)
        return found

    def _let_go(self, key: tuple[int, int], owned: Owned) -> None:
        """Nobody refers to a tensor any more: free its memory, unless a later part of its micro-batch does.

        The part that computes gradients of weights may be unknown yet: then it decides.
        """
        token = self._tokens.get(key, {}).get(owned)
        if token is None or any(s.frees(owned) for (stage, _), s in self._known.items() if stage == key[0]):
            return
        if (key[0], "I") in self._known and (key[0], "W") not in self._known:
            self._orphans.setdefault(key, []).append(token)
        else:
            self._session.memory.free(token)

    def _finish(self, stage: Any, kind: str, microbatch: int, results: list[Any]) -> Any:
        """Leave *stage* as a call of it leaves it; return what the call returns."""
        if kind == "F":
            stage.fwd_cache[microbatch] = (tuple(results), [])
            output = results[0] if len(results) == 1 else tuple(results)
            if stage.is_last and stage.output_chunks:
                stage.output_chunks.append(output)
            return output
        if kind in "BI":
            stage.fwd_cache.pop(microbatch)
            stage.bwd_cache[microbatch] = tuple(results)
        return None


class _Odd:
    """What a call leaves behind where that is no plain tensor."""
