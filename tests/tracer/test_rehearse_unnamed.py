"""Meshes without names: how parameters are cut tells which axis they serve, and so who shares rows."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse, rows_and_tokens
from tests.tracer.unnamed import ROWS

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.training import UNNAMED
from foretrace.traces.layout import Layout

SCRIPT, RANKS = Path(__file__).parent / "unnamed.py", 4


@pytest.mark.parametrize(
    ("way", "layout", "shares", "is_said"),
    [
        ("tp", Layout(tp=RANKS), 1, True),
        ("cut", Layout(tp=RANKS), RANKS, True),
        ("dp", Layout(dp=RANKS), RANKS, False),
        ("dp2", Layout(dp=RANKS), RANKS, False),
        ("columns", None, None, False),
    ],
)
def test_matrices_cut_by_columns_are_of_tensor_parallelism(
    tmp_path: Path, way: str, layout: Layout | None, shares: int | None, is_said: bool
) -> None:
    """Its ranks work on the same rows, unless these come cut; those of FSDP have rows of their own.

    Also where those are made a part of all rows by the script, or where FSDP cuts by columns.
    """
    found = rehearse(Asked(command=(str(SCRIPT), way), world_size=RANKS, ranks=(0,), samples=0), tmp_path)
    assert found.layout == layout
    assert rows_and_tokens(found)[0] == (None if shares is None else ROWS * shares)
    assert (UNNAMED in found.notes) == is_said
