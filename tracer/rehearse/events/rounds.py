"""Steps that are not alike: those that warm up are in no answer, and may do what those that are kept do not.

A script that generates texts and learns from them in several steps generates in the first of these alone. Its
second step, which is kept by default, is a small part of what a round takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from traces.rehearsal import WHAT

if TYPE_CHECKING:
    from tracer.rehearse.session import RehearsalSession

ALIKE: Final = 2.0
"""Below so many times the FLOPs of another a step is like it: evaluations differ, and lengths of batches."""

UNLIKE: Final = (
    "steps are not alike: step {step}, not in the answer, has {ratio:.2g} times the FLOPs of {kept}: "
    "where the script does other work now and then, as generation, keep whole rounds (--warmup, --steps)"
)
"""What is said of a step before those that are kept."""


class Rounds:
    """Holds the steps that warm up against those that are kept.

    Args:
        session: the rehearsal.
    """

    def __init__(self, session: RehearsalSession) -> None:
        self._session = session
        self._flops: dict[int, int] = {}

    def step_ended(self) -> None:
        """A step is over, and still written down; after the last one it is said whether they are alike."""
        session = self._session
        step, first = session.position.step - 1, session.warmup
        self._flops[step] = self._of(step)
        kept = [flops for at, flops in self._flops.items() if at >= first]
        before = {at: flops for at, flops in self._flops.items() if at < first}
        mean = sum(kept) / max(len(kept), 1)
        if len(kept) < session.n_steps or not before or not mean:
            return
        most = max(before, key=before.__getitem__)
        ratio = before[most] / mean
        if ratio >= ALIKE:
            which = f"step {first}" if len(kept) == 1 else f"each of steps {first} to {step}"
            session.warn(UNLIKE.format(step=most, ratio=ratio, kept=which))

    def _of(self, step: int) -> int:
        """Return the FLOPs of *step*, which is written down."""
        tables = self._session.tape.tables()
        what, items, places = (tables.events[name].to_numpy() for name in ("what", "item", "place"))
        steps = np.array(tables.places["step"].to_pylist(), np.int64)
        mine = items[(what == WHAT.index("op")) & (steps[places] == step)]
        return int(tables.works["flops"].to_numpy()[mine].sum())
