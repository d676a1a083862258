"""Steps that are not alike: those that warm up are in no answer, and may do what those that are kept do not.

A script that generates texts and learns from them in several steps generates in the first of these alone. Its
second step, which is kept by default, is a small part of what a round takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from foretrace.tracer.rehearse.events.tape import OP

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

ALIKE: Final = 2.0
"""Below so many times the FLOPs of another a step is like it: evaluations differ, and lengths of batches."""

FLOPS: Final = "FLOPs"
LAUNCHES: Final = "operations"
"""What is counted of a step: texts are generated token by token, with few FLOPs for many operations."""

UNLIKE: Final = (
    "steps are not alike: step {step}, which is not kept, has {ratio:.2g} times the {what} of {kept}; if the "
    "script does other work in some steps, such as generation, keep whole rounds (--warmup, --steps)"
)
"""What is said of a step before those that are kept."""

SMALLER: Final = (
    "step {kept} has a batch of {rows:,} rows, step {step} had {before:,}, as at the end of an epoch whose "
    "data do not fill the last batch: all figures are of the small one; --warmup {next} keeps the next step"
)
"""What is said of one that is kept whose loader gave less than before."""


class Rounds:
    """Holds the steps that warm up against those that are kept.

    Args:
        session: the rehearsal.
    """

    def __init__(self, session: RehearsalSession) -> None:
        self._session = session
        self._counted: dict[int, dict[str, int]] = {}
        self._next = 0  # number of the first event of the step that comes

    def step_ended(self) -> None:
        """A step is over, and still written down; after the last one it is said whether they are alike."""
        session = self._session
        step, first = session.position.step - 1, session.kept.warmup
        self._counted[step] = self._of(step)
        kept = [counted for at, counted in self._counted.items() if at >= first]
        builds = max((at for at in session.trainings.begun if at < first), default=-1)
        before = [at for at in self._counted if builds < at < first]  # of the same training
        if len(kept) < session.kept.n_steps or not before:
            return
        which = f"step {first}" if len(kept) == 1 else f"each of steps {first} to {step}"
        for what in (FLOPS, LAUNCHES):
            most = max(before, key=lambda at: self._counted[at][what])
            mean = sum(counted[what] for counted in kept) / len(kept)
            if mean and self._counted[most][what] >= ALIKE * mean:
                ratio = self._counted[most][what] / mean
                rows = session.trainings.loaded.shrunk(first, most) if len(kept) == 1 else None
                said = UNLIKE.format(step=most, ratio=ratio, what=what, kept=which)
                if rows:
                    said = SMALLER.format(kept=first, rows=rows[0], step=most, before=rows[1], next=first + 1)
                session.warn(said)
                return

    def _of(self, step: int) -> dict[str, int]:
        """Return what is counted of *step*, which is written down: its operations without its optimizer.

        Only what was written since the step before is looked at: of many kept steps not all of them again.
        """
        tape = self._session.tape
        rows = tape.rows_from(self._next)
        places, where = np.unique(rows[:, 2], return_inverse=True)
        found = [tape.place(place) for place in places.tolist()]
        steps = np.array([place.step for place in found], np.int64)[where]
        is_own = np.array([place.kind != "optimizer" for place in found], np.bool_)[where]
        done = np.flatnonzero(steps <= step)
        self._next = tape.next_number - len(rows) + (int(done[-1]) + 1 if len(done) else 0)
        mine = (rows[:, 0] == OP) & (steps == step)
        works, counts = np.unique(rows[mine, 1], return_counts=True)
        flops = sum(
            tape.work(work).flops * n for work, n in zip(works.tolist(), counts.tolist(), strict=True)
        )
        return {FLOPS: flops, LAUNCHES: int((mine & is_own).sum())}
