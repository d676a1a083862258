"""Begins a rehearsal anew where the script reads what its routers choose: with choices that are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tracer.rehearse.errors import RehearsalError, UnroutedError
from tracer.rehearse.ranks.scratch import emptied
from tracer.rehearse.values.choosing import EVEN
from tracer.rehearse.values.loads import Loads
from traces.rehearsal import Rehearsal

Acting = Callable[..., Rehearsal]
"""Rehearses with a load of experts; takes, as ``asks``, whether it is to end where choices are read."""


def with_choices(act: Acting, load: float | Loads, folder: Path) -> Rehearsal:
    """Rehearse with a *load*, and with choices of experts if the script reads them.

    Even loads are those of choices which are made up evenly. Where these cannot be made up, the script is
    told what it is told of other choices, and that is said.

    Args:
        act: rehearses.
        load: of experts, as ``loads.parsed`` returns it.
        folder: in which ranks leave what they know; it is emptied before a rehearsal begins anew.

    Raises:
        RehearsalError: the script cannot be rehearsed, or reads choices although the load is one number.
    """
    try:
        return act(load, asks=not isinstance(load, Loads))
    except UnroutedError as error:
        asker = str(error)
    if isinstance(load, Loads) or load != 1.0:
        raise RehearsalError(
            f"{asker} needs which experts are chosen, of which --expert-load {load} says nothing: give it a "
            "shape, zipf:S or the share of each expert"
        )
    emptied(folder)
    try:
        found, how = act(EVEN, asks=False), f"rehearsed as with --expert-load {EVEN.text}"
    except RehearsalError as error:
        why = str(error)
        emptied(folder)
        found, how = act(load, asks=False), f"told without, for --expert-load {EVEN.text} ends in: {why}"
    return replace(found, notes=(*found.notes, f"{asker} needs which experts are chosen: {how}"))


def check_choices(load: float | Loads, outcomes: Iterable[Mapping[str, Any]]) -> None:
    """Raise RehearsalError if *load* is a shape, and no rank of *outcomes* has made a choice of experts."""
    if isinstance(load, Loads) and not any(one["n_choices"] for one in outcomes):
        n = len(load.shares)
        asked = f"among {n} experts" if n else "of experts (topk, max or argmax in a module named so)"
        raise RehearsalError(f"--expert-load {load.shown}: the script makes no choice {asked}")
