"""The letters of the picture in a terminal are the shares of the step."""

from collections import Counter
from pathlib import Path

import pytest
from tests.simulator.predicted import simulate

from foretrace.simulator.config import job_from
from foretrace.traces.info import RunInfo
from foretrace.traces.report.cells import rank_step
from foretrace.traces.report.kinds import Kinds, Labels
from foretrace.traces.run import Run
from foretrace.traces.store import open_run, write_run
from foretrace.traces.text_picture import LEAST_WIDTH, picture
from foretrace.traces.timeline import timeline


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


def test_the_step_that_is_drawn_is_the_typical_one(tmp_path: Path) -> None:
    """Not the first of a recording, which warms up."""
    lengths = (90, 10, 11, 12)
    starts = [sum(lengths[:step]) for step in range(4)]
    table = {
        "rank": [0] * 8,
        "step": [0, 1, 2, 3] * 2,
        "category": ["step"] * 4 + ["compute"] * 4,
        "kind": ["step"] * 4 + ["forward"] * 4,
        "start_ns": starts * 2,
        "duration_ns": [*lengths, *lengths],
    }
    info = RunInfo(origin="recorded", world_size=1)
    found = picture(open_run(write_run(tmp_path / "run", info, timeline(table))), 80)
    assert found is not None
    assert found.length == "11 ns"


@pytest.mark.parametrize("name", ["pipeline_run", "many_ranks_run", "recorded_pipeline_run", "dualpipe"])
@pytest.mark.parametrize("width", [66, 150])
def test_letters_are_the_shares_of_the_step(name: str, width: int, request: pytest.FixtureRequest) -> None:
    """Of a picture of 80 columns, too, in which no pass has the room of a letter."""
    run: Run = dualpipe() if name == "dualpipe" else request.getfixturevalue(name)
    found = picture(run, width)
    assert found is not None
    kinds = Kinds((run,))
    labels = Labels(kinds)
    parts: Counter[str] = Counter()
    for rank in run.stored_ranks:
        for kind, ns in rank_step(run, rank, 0, labels, labels.of_rank(run, rank)).parts_ns():
            entry = kinds.entries[kind]
            parts[entry["label"]] += ns
    said = {words.rpartition(" %")[0].rpartition(" ")[0]: piece.text for piece, words in found.legend}
    text = "".join(piece.text for line in found.lines for piece in line.pieces)
    whole = len(text) - text.count(" ")
    for letter in set(said.values()):
        names = [label for label, other in said.items() if other == letter]
        stated = sum(parts[label] for label in names) / parts.total()
        assert text.count(letter) / whole == pytest.approx(stated, abs=0.02), names
    works = {
        kinds.entries[kind]["label"]
        for kind, entry in enumerate(kinds.entries)
        if entry["group"] == "compute"
    }
    assert {label for label in parts if label in works} <= set(said)


def dualpipe() -> Run:
    job = {"model": "deepseek-v2-lite", "cluster": "dgx-h100", "gpus": 32, "pp": 4, "ep": 8}
    return simulate(job_from({**job, "schedule": "dualpipe", "seq_len": 2048, "global_batch": 80})).run


def test_what_is_too_short_for_a_letter_has_one_all_the_same(tmp_path: Path) -> None:
    columns: dict[str, object] = {
        "rank": [0] * 4, "category": ["step", *["compute"] * 3],
        "kind": ["step", "forward", "optimizer", "backward"],
        "stream": ["step", *["compute"] * 3], "start_ns": [0, 0, 400_000, 400_001],
        "duration_ns": [1_000_000, 400_000, 1, 599_999], "step": [0] * 4,
    }  # fmt: skip
    run = open_run(write_run(tmp_path / "run", RunInfo(origin="recorded", world_size=1), timeline(columns)))
    found = picture(run, 40)
    assert found is not None
    text = "".join(piece.text for piece in found.lines[0].pieces)
    assert (text.count("F"), text.count("O"), text.count("B")) in {(16, 1, 23), (15, 1, 24)}
    assert [words for _, words in found.legend] == ["Forward 40.0 %", "Backward 60.0 %", "Optimizer 0.0 %"]


def test_too_narrow_a_terminal_gets_none(pipeline_run: Run) -> None:
    assert picture(pipeline_run, LEAST_WIDTH - 1) is None
