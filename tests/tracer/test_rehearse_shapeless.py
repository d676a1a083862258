"""Modules that learn their sizes from their first input train as those that were told them."""

from pathlib import Path
from typing import Any

import pytest
from tests.rehearsals import in_steps

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked, rehearse
from foretrace.tracer.rehearse.world.acting import Loaded
from foretrace.traces.rehearsal import RankTables, Rehearsal, read_rank, rehearsal_folder

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "shapeless.py"


def _rehearsed(kind: str, way: str, folder: Path, loaded: Loaded) -> tuple[Rehearsal, RankTables, str]:
    asked = Asked(command=(str(SCRIPT), kind, way), world_size=2, ranks=(0,), warmup=2, steps=2)
    found = rehearse(asked, folder / kind, on=loaded)
    log = rehearsal_folder(folder / kind) / "rank-00000" / "output.log"
    return found, read_rank(rehearsal_folder(folder / kind), 0), log.read_text()


def _issued(tables: RankTables) -> list[tuple[Any, ...]]:
    """Return what is issued, in order, with the memory that is in use then."""
    items = {0: tables.works.to_pylist(), 1: tables.messages.to_pylist()}
    return [
        (
            event["what"],
            items.get(event["what"], {event["item"]: None})[event["item"]],
            event["allocated_bytes"],
        )
        for event in tables.events.to_pylist()
    ]


@pytest.mark.parametrize("way", ["moved first", "moved later", "dry run", "copied", "typed"])
def test_sizes_come_of_the_first_input(way: str, tmp_path: Path, loaded: Loaded) -> None:
    """Products, convolutions and norms with their statistics; moved before they have sizes, or after.

    They keep their types, or take those that come with their sizes; are trained or not, in states or not.

    An optimizer that was made before trains them, too: they are the same objects.
    """
    (lazy, lazy_tables, lazy_said), (sized, tables, said) = (
        _rehearsed(kind, way, tmp_path, loaded) for kind in ("lazy", "sized")
    )
    assert _issued(lazy_tables) == _issued(tables)
    assert in_steps(lazy.memory) == in_steps(sized.memory)
    assert lazy_said == said


def test_a_module_without_sizes_is_not_copied_to_other_ranks(tmp_path: Path, loaded: Loaded) -> None:
    """DDP refuses it in torch's own words."""
    with pytest.raises(RehearsalError, match="Modules with uninitialized parameters can't be used with"):
        _rehearsed("lazy", "wrapped too early", tmp_path, loaded)
