"""Tables of runs: columns are the settings of a job, and a row takes as long as ``simulate`` says."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.simulator.predicted import simulate

from foretrace.cli import main
from foretrace.simulator.config import job_from
from foretrace.simulator.errors import JobError, TableError
from foretrace.simulator.recorded.one_time import RATIOS
from foretrace.simulator.table import Row
from foretrace.simulator.validate.render import SHOWN_REASONS
from foretrace.simulator.validate.runs import (
    Step,
    nearest,
    read_runs,
    run_rows,
    settings_of,
    validate_memory,
    validate_steps,
)

pytest.importorskip("numba")

RUN: dict[str, object] = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "global_batch": 16}
ROWS: Sequence[Mapping[str, object]] = (
    RUN,
    {**RUN, "tp": 4, "pp": 2, "sequence_parallel": "false", "framework.overlap_grad_reduce": "false"},
    {**RUN, "pp": 2, "layers_per_stage": "15,17", "overlap_p2p": "true"},
    {**RUN, "model": "narrow", "model.n_layers": 4, "model.hidden": 512, "model.n_heads": 8}
    | {"model.n_kv_heads": 8, "model.head_dim": 64, "model.ffn_hidden": 2048, "model.vocab": 32000},
    {**RUN, "stragglers": "3:1.25"},
    {**RUN, "sharding": "fsdp", "framework": "torchtitan", "overlap_slowdown": 1.0},
    {**RUN, "steps": 2, "document_len": 512, "ranks_per_node": 4},
)


def write(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_row_takes_as_long_as_simulate_says_of_its_settings(tmp_path: Path) -> None:
    rows = [{"id": str(at), **row, "step_time_s": 1.0} for at, row in enumerate(ROWS)]
    path = write(tmp_path / "runs.csv", rows)
    found = {row.id: row.predicted for row in validate_steps(path).rows}
    assert len(found) == len(ROWS)
    for row in read_runs(path):
        job = job_from(settings_of(row))
        assert found[row.id] == pytest.approx(simulate(job).summary["step_time_s"], rel=1e-9), row.id
    assert found["1"] != found["0"]


@pytest.mark.parametrize("changes", [{"overlap_slowdown": 1e-12}, {"steps": 2}])
def test_a_job_that_only_simulate_knows_has_a_curve_as_well(changes: dict[str, object]) -> None:
    """Settings that change nothing leave the time at every speed of the links as it is."""
    run = {**RUN, "model": "llama3.2-1b", "gpus": 16, "sharding": "fsdp", "framework": "torchtitan"}
    rows = [Row({"id": "0", "step_time_s": 1.0, **run, **more}, 0) for more in ({}, changes)]
    plain, other = (run_rows([row], 1, ratios=RATIOS)[0] for row in rows)
    assert isinstance(plain, Step)
    assert isinstance(other, Step)
    assert other.curve.step_s == pytest.approx(plain.curve.step_s, rel=1e-5)
    assert plain.curve.step_s[-1] > 1.5 * plain.curve.step_s[0]


def test_a_column_that_is_no_setting_is_refused_with_one_that_is(tmp_path: Path) -> None:
    """A misspelt setting is never taken for its default."""
    for column, near in (("micro_bach", "micro_batch"), ("model.hiden", "model.hidden"), ("hardware", "")):
        path = write(tmp_path / "runs.csv", [{**RUN, column: 1, "step_time_s": 1.0}])
        with pytest.raises(TableError, match=rf"'{column}' is no setting.*{near}.*docs/accuracy.md") as found:
            validate_steps(path)
        assert ("did you mean" in str(found.value)) == bool(near)
    with pytest.raises(TableError, match="no column step_time_s"):
        validate_steps(write(tmp_path / "runs.csv", [RUN]))
    with pytest.raises(TableError, match="no column of peak_allocated_gb"):
        validate_memory(write(tmp_path / "runs.csv", [RUN]))


@pytest.mark.parametrize(
    ("column", "cell", "says"),
    [
        ("tp", "two", "tp='two': a number is needed"),
        ("tp", "1.5", "whole number"),
        ("fp8", "perhaps", "true or false"),
        ("tp", "3", "heads"),
        ("cluster", "abacus", "no cluster 'abacus'"),
        ("framework.host_work", "-1", "not negative"),
        ("layers_per_stage", "a,b", "a list of whole numbers"),
        ("step_time_s", "0", "above zero"),
        ("step_time_s", "nan", "a number is needed"),
        ("step_time_s", "", "step_time_s is not given"),
    ],
)
def test_a_cell_that_cannot_be_is_a_failure(tmp_path: Path, column: str, cell: str, says: str) -> None:
    path = write(tmp_path / "runs.csv", [{"id": "odd", **RUN, "step_time_s": 1.0, column: cell}])
    (failed,) = validate_steps(path).failures
    assert failed.id == "odd"
    assert says in failed.reason


def test_files_stand_beside_the_table(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('base = "dgx-h100"\ndevice = "h200-sxm"\n', encoding="utf-8")
    path = write(tmp_path / "runs.csv", [{**RUN, "cluster": "mine.toml", "step_time_s": 1.0}])
    (row,) = validate_steps(path).rows
    assert row.what.endswith("8 h200-sxm")


def test_rows_that_do_not_count_are_scored_apart(tmp_path: Path) -> None:
    rows = [{**RUN, "id": name, "counts": counts, "assumed": "a; b", "step_time_s": 1.0}
            for name, counts in (("in", "true"), ("out", "false"))]  # fmt: skip
    found = validate_steps(write(tmp_path / "runs.csv", rows)).document()
    assert (found["predicted"], found["rest_rows"]) == (1, 1)
    assert found["rest_score"] == found["score"]
    assert found["assumed"] == {"a": 2, "b": 2}


def test_times_in_another_unit_are_suspected(tmp_path: Path) -> None:
    (one,) = validate_steps(write(tmp_path / "runs.csv", [{**RUN, "step_time_s": 1.0}])).rows
    path = write(tmp_path / "runs.csv", [{**RUN, "step_time_s": 1000 * one.predicted}])
    text = CliRunner().invoke(main, ["validate", "steps", str(path)])
    assert "off by 1,000 times: is step_time_s in seconds?" in text.stdout


def test_many_reasons_are_cut_short_and_counted(tmp_path: Path) -> None:
    rows = [{**RUN, "cluster": f"abacus-{at}", "step_time_s": 1.0} for at in range(SHOWN_REASONS + 5)]
    text = CliRunner().invoke(main, ["validate", "steps", str(write(tmp_path / "many.csv", rows))])
    assert text.stdout.count("no cluster 'abacus-") == SHOWN_REASONS
    assert "5 not predicted for other reasons" in text.stdout


def test_the_memory_of_a_rank_is_that_of_its_stage(tmp_path: Path) -> None:
    row = {**RUN, "pp": 2, "peak_allocated_gb": 20.0, "peak_reserved_gb": 21.0}
    rows = [{**row, "id": "a", "rank": rank} for rank in ("0", "7", "")]
    path = write(tmp_path / "memory.csv", rows)
    found = [one.predicted for one in validate_memory(path).rows if one.family.endswith("allocated")]
    assert found[0] != found[1]
    assert found[2] == max(found)
    printed = CliRunner().invoke(main, ["validate", "memory", str(path), "--json"])
    assert json.loads(printed.stdout)["score"] > 0


def job(**settings: object) -> Any:
    return job_from({**RUN, **settings})


def test_documents_of_a_packed_sequence_do_not_see_each_other() -> None:
    """Attention alone gets shorter, the shorter the documents are."""
    found = [simulate(job(seq_len=8192, document_len=size)).summary for size in (0, 4096, 512)]
    times = [one["step_time_s"] for one in found]
    assert times[0] > times[1] > times[2]
    assert len({one["peak_memory_bytes"] for one in found}) == 1
    with pytest.raises(JobError, match="document_len=9000: from 2 tokens to the 8192"):
        job(seq_len=8192, document_len=9000)


def test_fewer_ranks_on_a_node_leave_it_earlier() -> None:
    """Eight ranks on one node, or on two of which half is idle; a full node is what there is without."""
    whole, same, half = (simulate(job(tp=8, ranks_per_node=n)).summary["step_time_s"] for n in (0, 8, 4))
    assert whole == same < half
    for wrong, says in ((9, "a node of dgx-h100 has 8 GPUs"), (-1, "from 0 on")):
        with pytest.raises(JobError, match=says):
            job(ranks_per_node=wrong)
    with pytest.raises(JobError, match="give one of them"):
        job(ranks_per_node=4, placement="spread")


def test_cells_that_are_empty_leave_the_default() -> None:
    assert settings_of(Row({"tp": "", "pp": "2", "fp8": "", "model.hidden": ""}, 1)) == {"pp": 2}


def test_the_nearest_row_is_the_job_itself_or_what_differs_least_in_words(tmp_path: Path) -> None:
    rows = [{"id": str(at), **row, "step_time_s": 10.0} for at, row in enumerate(ROWS)]
    rows.append({"id": "none", **RUN, "model": "no-such-model", "step_time_s": 1.0})
    path = write(tmp_path / "runs.csv", rows)
    for row in read_runs(path)[: len(ROWS) - 2]:
        job = job_from(settings_of(row))
        found = nearest(job, path)
        assert not found.differs
        own = simulate(job_from({**settings_of(read_runs(path)[int(found.id)])})).summary["step_time_s"]
        assert found.predicted_s == pytest.approx(own)
    other = nearest(job_from({**RUN, "gpus": 16, "recompute": "full"}), path)
    assert (other.id, set(other.differs)) == (
        "0",
        {"recompute none for full", "GPUs 8 for 16", "micro-batches 2 for 1"},
    )
    assert "10 s, predicted" in other.words
    nothing = write(tmp_path / "nothing.csv", rows[-1:])
    with pytest.raises(TableError, match="no row of it describes a run that is possible"):
        nearest(job_from(RUN), nothing)


def test_simulate_shows_the_nearest_measured_row_of_a_table_that_is_given(tmp_path: Path) -> None:
    path = write(tmp_path / "runs.csv", [{"id": "mine", **RUN, "step_time_s": 2.0}])
    words = "simulate --model llama3-8b --cluster dgx-h100 --gpus 8 --global-batch 16 --no-picture"
    said = CliRunner().invoke(main, [*words.split(), "--measured", str(path)]).stdout
    assert f"nearest measured row of {path}: mine, llama3-8b dp8 zero1 mbs 1, 8 h100-sxm: 2 s" in said
    found = json.loads(CliRunner().invoke(main, [*words.split(), "--measured", str(path), "--json"]).stdout)
    assert found["nearest"]["predicted_s"] == pytest.approx(found["step_time_s"])
    missing = CliRunner().invoke(main, [*words.split(), "--measured", str(tmp_path / "none.csv")])
    assert missing.exit_code == 2
