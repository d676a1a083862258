"""The picture in a terminal says of every slice what the rank does for most of it."""

import pytest

from foretrace.traces.analysis.metrics import breakdown
from foretrace.traces.run import Run
from foretrace.traces.text_picture import LEAST_WIDTH, picture


@pytest.mark.parametrize("name", ["pipeline_run", "many_ranks_run", "fsdp_run", "recorded_pipeline_run"])
@pytest.mark.parametrize("width", [LEAST_WIDTH, 80, 150, 2000])
def test_rows_are_as_wide_as_asked_and_explained(
    name: str, width: int, request: pytest.FixtureRequest
) -> None:
    run: Run = request.getfixturevalue(name)
    found = picture(run, width)
    assert found is not None
    letters = {piece.text for piece, _ in found.legend} | {" "}
    for line in found.lines:
        text = "".join(piece.text for piece in line.pieces)
        assert len(text) == width
        assert set(text) <= letters
    assert len(found.lines) <= 16


def test_shares_of_letters_are_shares_of_the_step(pipeline_run: Run) -> None:
    found = picture(pipeline_run, 1536)
    assert found is not None
    rows = [row for row in breakdown(pipeline_run) if row.step == 0]
    for line, row in zip(found.lines, rows, strict=True):
        text = "".join(piece.text for piece in line.pieces)
        assert text.count("·") / len(text) == pytest.approx(row.shares["bubble"], abs=0.02)
        assert text.count("F") > 0


def test_too_narrow_a_terminal_gets_none(pipeline_run: Run) -> None:
    assert picture(pipeline_run, LEAST_WIDTH - 1) is None
