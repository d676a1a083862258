"""Starts a rehearsal again with made-up choices of experts if the script reads what its routers choose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretrace.tracer.rehearse.errors import RehearsalError, UnroutedError
from foretrace.tracer.rehearse.ranks.scratch import emptied
from foretrace.tracer.rehearse.values.choosing import EVEN
from foretrace.tracer.rehearse.values.loads import Loads
from foretrace.traces.rehearsal import Rehearsal

Acting = Callable[..., Rehearsal]
"""Rehearses with a load of experts; takes, as ``asks``, whether it is to end where choices are read."""


def with_choices(act: Acting, load: float | Loads, folder: Path) -> Rehearsal:
    """Rehearse with a *load*, and with made-up choices of experts if the script reads them.

    For an even load the choices are made up evenly. If that is not possible, the script gets the answers that
    it gets about other choices, and this is reported.

    Args:
        act: runs the rehearsal.
        load: of experts, as ``loads.parsed`` returns it.
        folder: in which ranks write their results; it is emptied before a rehearsal starts again.

    Raises:
        RehearsalError: the script cannot be rehearsed, or reads choices although the load is one number.
    """
    try:
        return act(load, asks=not isinstance(load, Loads))
    except UnroutedError as error:
        asker = str(error)
    if isinstance(load, Loads) or load != 1.0:
        raise RehearsalError(
            f"{asker} needs which experts are chosen, which --expert-load {load} does not say: give zipf:S "
            "or the share of each expert"
        )
    emptied(folder)
    try:
        found, how = act(EVEN, asks=False), f"rehearsed as with --expert-load {EVEN.text}"
    except RehearsalError as error:
        why = str(error)
        emptied(folder)
        found, how = act(load, asks=False), f"made up, because --expert-load {EVEN.text} ends with: {why}"
    return replace(found, notes=(*found.notes, f"{asker} needs which experts are chosen: {how}"))


def check_choices(load: float | Loads, outcomes: Iterable[Mapping[str, Any]]) -> None:
    """Raise RehearsalError if *load* is a shape, and no rank of *outcomes* has made a choice of experts."""
    if isinstance(load, Loads) and not any(one["n_choices"] for one in outcomes):
        n = len(load.shares)
        asked = f"among {n} experts" if n else "of experts (topk, max or argmax in a module named so)"
        raise RehearsalError(f"--expert-load {load.shown}: the script makes no choice {asked}")
