"""Plans as CSV, in the compute-only format of ``torch.distributed.pipelining``; and whether one can run.

One row per rank, one cell per action: stage, kind, micro-batch, as in ``2F0``. Empty cells, with which torch
marks idle slots, mean nothing here: a plan says in which order, not when. Two actions that torch overlaps,
``(0F8;7B0)OVERLAP_F_B``, are one after the other in the plan; ``read_pairs`` says which these are.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from foretrace.door import counted, read_text
from foretrace.simulator.errors import ScheduleError
from foretrace.simulator.schedules.actions import Action, Plan, holders
from foretrace.traces.writer import write_atomically

_ACTION: Final = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR: Final = re.compile(r"\((.*)\)OVERLAP_F_B")


def write_csv(path: str | Path, plan: Plan, pairs: Collection[Action] = ()) -> None:
    """Write *plan* to *path*; the forwards in *pairs* together with the backward after each.

    Raises RunError if the file cannot be written.
    """
    text = io.StringIO()
    csv.writer(text).writerows(_cells(actions, pairs) for actions in plan)
    write_atomically(Path(path), text.getvalue())


def _cells(actions: Sequence[Action], pairs: Collection[Action]) -> Iterator[str]:
    """Yield the cells of a row."""
    rest = iter(actions)
    for action in rest:
        # A pair takes the action behind it along: the row goes on after both.
        yield f"({action};{next(rest)})OVERLAP_F_B" if action in pairs else str(action)


def read_pairs(path: str | Path) -> frozenset[Action]:
    """Return the forwards of the plan in *path* that run together with the backward after them.

    Raises ScheduleError if the file cannot be read, a cell is not an action, or a pair is not one of F and B.
    """
    found = set()
    for rank, row in enumerate(_rows(path)):
        for cell in row:
            if pair := _PAIR.fullmatch(cell.strip()):
                both = tuple(_row(path, rank, [cell]))
                if [action.kind for action in both] != ["F", "B"]:
                    raise ScheduleError(f"schedule {path}, rank {rank}: {pair[0]} is not a pair of F and B")
                found.add(both[0])
    return frozenset(found)


def read_csv(path: str | Path, n_ranks: int | None = None, n_microbatches: int | None = None) -> Plan:
    """Return the plan in the file *path*, checked.

    *n_ranks*: ranks that the plan must have; None: any. *n_microbatches*: micro-batches that it must have;
    None: any. Raises ScheduleError if the file cannot be read, a cell is not an action, or the plan has other
    sizes or cannot be carried out.
    """
    plan = tuple(tuple(_row(path, n, row)) for n, row in enumerate(_rows(path)))
    found = {a.microbatch for actions in plan for a in actions}
    for what, wanted, n in (("ranks", n_ranks, len(plan)), ("micro-batches", n_microbatches, len(found))):
        if wanted not in (None, n):
            raise ScheduleError(f"schedule {path} is for {n} {what}, the job has {wanted}")
    try:
        check(plan, read_pairs(path))
    except ScheduleError as error:
        raise ScheduleError(f"schedule {path}: {error}") from None
    return plan


def _rows(path: str | Path) -> list[list[str]]:
    """Return the rows of *path* that are not empty. Raises ScheduleError if it cannot be read."""
    try:
        text = read_text(path, ScheduleError)
        return [row for row in csv.reader(io.StringIO(text, newline="")) if any(row)]
    except csv.Error as error:
        raise ScheduleError(f"schedule {path} cannot be read: {error}") from None


def _row(path: str | Path, rank: int, cells: list[str]) -> Iterator[Action]:
    for cell in cells:
        pair = _PAIR.fullmatch(cell.strip())
        for text in pair[1].split(";") if pair else [cell]:
            if not text.strip():
                continue
            match = _ACTION.fullmatch(text.strip())
            stage, microbatch = (counted(match[1]), counted(match[3])) if match else (-1, -1)
            if match is None or stage < 0 or microbatch < 0:
                raise ScheduleError(
                    f"schedule {path}, rank {rank}: {text!r} is not an action; "
                    "it is stage, one of F B I W, and micro-batch, e.g. 2F0"
                )
            yield Action(match[2], stage, microbatch)


def check(plan: Plan, pairs: Collection[Action] = ()) -> None:
    """Check that *plan* takes every micro-batch forward and back through every stage, and can be carried out.

    A forward in *pairs* begins together with the action after it, when both have what they need. Raises
    ScheduleError if a micro-batch misses a stage, or goes through it twice; a rank waits for ever.
    """
    counts = Counter(action for actions in plan for action in actions)
    n_stages = 1 + max((action.stage for action in counts), default=-1)
    microbatches = sorted({action.microbatch for action in counts})
    if not counts:
        raise ScheduleError("the plan has no actions")
    for stage in range(n_stages):
        for microbatch in microbatches:
            own = {kind: counts[Action(kind, stage, microbatch)] for kind in "FBIW"}
            if own not in ({"F": 1, "B": 1, "I": 0, "W": 0}, {"F": 1, "B": 0, "I": 1, "W": 1}):
                done = ", ".join(f"{kind} {n} times" for kind, n in own.items() if n) or "nothing"
                raise ScheduleError(
                    f"stage {stage} does {done} with micro-batch {microbatch}; once F, and once B or I and W"
                )
    spans(plan, dict.fromkeys("FBIW", 0), pairs)


def spans(plan: Plan, takes: Mapping[str, int], pairs: Collection[Action] = ()) -> list[tuple[int, int]]:
    """Return when each rank starts and ends: it works in order, and waits for what an action needs.

    *takes*: how long by kind of action; messages take nothing. *pairs*: as in ``check``. Raises ScheduleError
    if ranks do not get to the end.
    """
    holder = holders(plan)
    n_stages = 1 + max(action.stage for actions in plan for action in actions)
    done: dict[Action, int] = {}  # when it ended; a full backward counts as "I"
    cursor, free = [0] * len(plan), [0] * len(plan)
    starts: dict[int, int] = {}
    waiting = set(range(len(plan)))
    while waiting:
        # In any order: a rank is asked again whenever a neighbour has made something.
        rank = waiting.pop()
        while cursor[rank] < len(plan[rank]):
            action = plan[rank][cursor[rank]]
            kind, stage, microbatch = action
            inputs = _inputs(action, n_stages)
            if action in pairs:
                # A pair begins as one: what the backward needs has to be there for the forward, too.
                inputs += _inputs(plan[rank][cursor[rank] + 1], n_stages)
            ready = [done.get(one) for one in inputs]
            if None in ready:
                break
            start = max([free[rank], *filter(None, ready)])
            starts.setdefault(rank, start)
            free[rank] = start + takes[kind]
            done[Action("I", stage, microbatch) if kind == "B" else action] = free[rank]
            cursor[rank] += 1
            # Only neighbours of the stage can wait for this.
            for beside in (stage - 1, stage + 1):
                if (other := holder.get((beside, microbatch), rank)) != rank:
                    waiting.add(other)
    for rank, actions in enumerate(plan):
        if cursor[rank] < len(actions):
            raise ScheduleError(f"rank {rank} waits for ever to begin {actions[cursor[rank]]}")
    return [(starts[rank], end) for rank, end in enumerate(free)]


def _inputs(action: Action, n_stages: int) -> tuple[Action, ...]:
    """Return what must be done before *action*, with a full backward called ``"I"``."""
    kind, stage, microbatch = action
    if kind == "F":
        return (Action("F", stage - 1, microbatch),) if stage else ()
    if kind == "W":
        return (Action("I", stage, microbatch),)
    own = Action("F", stage, microbatch)
    return (own, Action("I", stage + 1, microbatch)) if stage < n_stages - 1 else (own,)
