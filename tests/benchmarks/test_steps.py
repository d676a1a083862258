"""Validation of steps: our own simulation scores nothing, failures count, orders are found."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import validate
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from measured.jobs import model_of, size_class, step_job
from measured.judge import (
    COLUMNS,
    Step,
    choices,
    errors,
    kendall_tau,
    regret,
    run_rows,
    translate,
    validate_steps,
)
from measured.table import Row, read_table
from tests.simulator.predicted import simulate

from foretrace.cli import main
from foretrace.simulator.config import job_from
from foretrace.simulator.recorded.one_time import Curve
from foretrace.simulator.validate.runs import Step as Timed
from foretrace.simulator.validate.runs import read_runs, settings_of
from foretrace.simulator.validate.runs import run_rows as run_product
from foretrace.simulator.validate.runs import validate_steps as validate_table

pytest.importorskip("numba")

LLAMA = {
    "id": "dense",
    "source_group": "here",
    "model": "small",
    "arch": "llama",
    "layers": 8,
    "hidden": 1024,
    "heads": 16,
    "kv_heads": 4,
    "head_dim": 64,
    "ffn_hidden": 4096,
    "gated": "true",
    "vocab": 32000,
    "tied_emb": "false",
    "seq_len": 2048,
    "precision": "bf16",
    "hardware": "H100-SXM-80GB",
    "interconnect": "NVLink4",
    "gpus_per_node": 8,
    "world_size": 8,
    "tp": 2,
    "pp": 1,
    "dp": 4,
    "cp": 1,
    "ep": 1,
    "sp": "true",
    "sharding": "zero1",
    "micro_batch": 1,
    "global_batch": 16,
    "virtual_pp": 1,
    "recompute": "none",
    "schedule": "none",
    "framework": "Megatron-LM",
    "spec_level": "A",
    "check_flags": "",
    "experts": "",
    "step_time_s": 1.0,
    "task": "pretrain",
}
"""A small dense model on one node."""

ROWS: Sequence[Mapping[str, object]] = (
    LLAMA,
    {**LLAMA, "id": "fsdp", "tp": 1, "dp": 8, "sharding": "fsdp2"},
    {**LLAMA, "id": "pipeline", "tp": 1, "pp": 4, "dp": 2, "schedule": "1f1b"},
    {**LLAMA, "id": "interleaved", "tp": 1, "pp": 4, "dp": 2, "virtual_pp": 2},
    {**LLAMA, "id": "moe", "tp": 1, "dp": 8, "ep": 8, "experts": 8, "top_k": 2, "moe_ffn_hidden": 4096},
    {**LLAMA, "id": "unstated", "recompute": "", "spec_level": "B"},
    {**LLAMA, "id": "stressed", "tp": 16, "dp": 1, "world_size": 16, "check_flags": "stress: far apart"},
    {**LLAMA, "id": "slow", "check_flags": "slow mode"},
)


def write(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def own() -> list[dict[str, object]]:
    """Return ``ROWS`` as measured by ourselves."""
    found = run_rows([Row(row, number) for number, row in enumerate(ROWS)], 1)
    steps = [one for one in found if isinstance(one, Step)]
    assert len(steps) == len(ROWS), found
    return [{**row, "step_time_s": step.scored.predicted} for row, step in zip(ROWS, steps, strict=True)]


def test_a_table_of_our_own_steps_scores_nothing(tmp_path: Path, own: list[dict[str, object]]) -> None:
    found = validate_steps(write(tmp_path / "own.csv", own), calibrate=True).document()
    assert found["rows"] == len(ROWS)
    assert found["failures"] == 0
    for key in ("score", "stress_score", "incomplete_score", "with_slow_score", "calibrated_score"):
        assert found[key] == pytest.approx(0, abs=1e-9), key
    assert set(found["score_by_class"]) == {"DP/TP+DP", "FSDP", "3D", "MoE"}
    assert found["kendall_tau"] == pytest.approx(1)
    assert found["regret_median"] == 0
    assert found["assumed"] == {"recompute not stated: none": 1}


def test_a_step_takes_as_long_as_simulate_says() -> None:
    for number, one in enumerate(ROWS[:5]):
        (found,) = run_rows([Row(one, number)], 1)
        assert isinstance(found, Step)
        step_s = simulate(step_job(Row(one, number)).job, only_figures=True).summary["step_time_s"]
        assert found.scored.predicted == pytest.approx(step_s, rel=1e-9)


def test_rows_that_do_not_count_stay_out_of_the_score(tmp_path: Path, own: list[dict[str, object]]) -> None:
    apart = {"stressed": 2.0, "unstated": 3.0, "slow": 4.0}
    rows = [
        {**row, "step_time_s": float(str(row["step_time_s"])) * apart.get(str(row["id"]), 1)} for row in own
    ]
    found = validate_steps(write(tmp_path / "apart.csv", rows)).document()
    assert found["score"] == pytest.approx(0, abs=1e-9)
    assert found["stress_score"] == pytest.approx(math.log(2))
    assert found["incomplete_score"] == pytest.approx(math.log(3))
    assert found["with_slow_score"] == pytest.approx(0, abs=1e-9)  # the median of its family does not see it
    assert (found["stress_rows"], found["slow_rows"]) == (1, 1)
    assert "calibrated_score" not in found


def test_what_cannot_be_run_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    broken: list[dict[str, object]] = [
        {**LLAMA, "id": "deep", "pp": 16, "dp": 1, "tp": 1, "world_size": 16},
        {**LLAMA, "id": "abacus", "hardware": "abacus"},
        {**LLAMA, "id": "unmeasured", "step_time_s": ""},
        {**LLAMA, "id": "partly", "recompute": "every second Tuesday"},
    ]
    found = validate_steps(write(tmp_path / "broken.csv", [LLAMA, *broken]))
    assert [one.id for one in found.failures] == ["deep", "abacus", "unmeasured", "partly"]
    assert found.document()["rows"] == 5
    reasons = " ".join(one.reason for one in found.failures)
    for word in ("pp=16", "abacus", "step_time_s is not given", "every second Tuesday"):
        assert word in reasons


@pytest.mark.parametrize(
    ("measured", "says"),
    [("3 s", "a number is needed"), ("nan", "not given"), ("0", "above zero"), ("-3", "above zero")],
)
def test_a_time_that_is_none_is_a_failure(tmp_path: Path, measured: str, says: str) -> None:
    path = write(tmp_path / "times.csv", [LLAMA, {**LLAMA, "id": "wrong", "step_time_s": measured}])
    (failed,) = validate_steps(path).failures
    assert failed.id == "wrong"
    assert says in failed.reason


def test_processes_find_what_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(row, number) for number, row in enumerate(ROWS)]
    alone = run_rows(rows, 1)
    monkeypatch.setattr("foretrace.simulator.validate.runs.ALONE", 0)
    told: list[int] = []
    assert run_rows(rows, 2, told.append) == alone
    assert sum(told) == len(rows)


def test_a_batch_that_does_not_fill_micro_batches_is_scaled() -> None:
    step = step_job(Row({**LLAMA, "global_batch": 18}, 1))
    assert step.job.global_batch in (16, 20)
    assert step.share == pytest.approx(18 / step.job.global_batch)
    assert any("global batch" in words for words in step.assumed)


@pytest.mark.parametrize(
    ("n_gpus", "expected"),
    [(8, "1-8 GPUs"), (9, "9-128 GPUs"), (1024, "129-1,024 GPUs"), (1025, "over 1,024 GPUs")],
)
def test_sizes(n_gpus: int, expected: str) -> None:
    assert size_class(Row({"world_size": n_gpus}, 1)) == expected


def test_ranks_are_spread_evenly_over_the_racks() -> None:
    rack = {"hardware": "GB200-NVL72", "gpus_per_node": 4, "world_size": 128, "tp": 1, "dp": 128}
    step = step_job(Row({**LLAMA, **rack, "global_batch": 128}, 1))
    assert step.network.placement[63] == 63
    assert step.network.placement[64] == 72


# Kendall's tau-b by hand: pairs (1,2) (1,3) (1,4) agree, (2,3) is turned round, (2,4) (3,4) agree: 4 of 6.
@pytest.mark.parametrize(
    ("predicted", "measured", "tau"),
    [
        ([1, 2, 3, 4], [1, 3, 2, 4], 4 / 6),
        ([1, 2, 3], [3, 2, 1], -1),
        ([1, 1, 2], [1, 2, 3], 2 / math.sqrt(2 * 3)),
        ([1, 1, 1], [1, 2, 3], None),
    ],
)
def test_kendall_tau(predicted: list[float], measured: list[float], tau: float | None) -> None:
    assert kendall_tau(predicted, measured) == (None if tau is None else pytest.approx(tau))


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=8, unique=True))
def test_tau_and_regret_of_the_truth(measured: list[float]) -> None:
    assert kendall_tau([2 * one for one in measured], measured) == pytest.approx(1)
    assert regret([2 * one for one in measured], measured) == 0
    assert kendall_tau([-one for one in measured], measured) == pytest.approx(-1)


def test_regret_is_what_the_wrong_choice_costs() -> None:
    assert regret([1.0, 2.0, 3.0], [12.0, 10.0, 20.0]) == pytest.approx(0.2)
    assert regret([1.0, 1.0, 3.0], [12.0, 10.0, 20.0]) == pytest.approx(0.1)


def test_orders_are_compared_inside_a_group_only(own: list[dict[str, object]]) -> None:
    rows = [Row(row, number) for number, row in enumerate(own)]
    steps = [one for one in run_rows(rows, 1) if isinstance(one, Step)]
    assert choices(steps)["choice_groups"] == 1  # the one on 16 GPUs is alone
    none = choices(steps[:2])
    assert (none["choice_groups"], none["kendall_tau"], none["regret_median"]) == (0, None, None)
    assert none["choices"] == []
    (group,) = choices(steps)["choices"]
    assert (group["source"], group["regret"], group["chosen"]) == ("here", 0, group["fastest"])
    assert choices(steps)["choices_by_source"]["here"]["groups"] == 1


def test_a_layout_measured_again_is_no_further_choice(own: list[dict[str, object]]) -> None:
    steps = [
        one for one in run_rows([Row(row, at) for at, row in enumerate(own)], 1) if isinstance(one, Step)
    ]
    later = [replace(one, scored=replace(one.scored, measured=1.1 * one.scored.measured)) for one in steps]
    assert choices([*steps, *later])["choice_groups"] == choices(steps)["choice_groups"]
    assert choices([*steps[:2], *later[:2]])["choice_groups"] == 0


def test_errors_are_logarithms_of_measured_over_predicted(own: list[dict[str, object]]) -> None:
    steps = [
        one for one in run_rows([Row(row, at) for at, row in enumerate(own)], 1) if isinstance(one, Step)
    ]
    twice = [replace(one.scored, measured=2 * one.scored.predicted) for one in steps]
    found = errors((row, "source", "gpu", [0.1]) for row in twice)
    assert len(found) == len(steps)
    assert [one["off"] for one in found] == pytest.approx([math.log(2)] * len(steps))
    assert all(one["elsewhere"] == [0.1] for one in found)


@given(st.floats(0.0, 6.0))
def test_a_curve_is_homogeneous(ratio: float) -> None:
    curve = Curve((1.0, 1.1, 1.4, 2.4, 4.6))
    assert curve.at(compute=2, communication=2 * ratio) == pytest.approx(2 * curve.at(communication=ratio))


def test_the_command_prints_the_keys(
    tmp_path: Path, own: list[dict[str, object]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write(tmp_path / "own.csv", own))
    validate.main(["steps", path, "--calibrate", "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert {
        *("score", "score_by_class", "rows", "failures", "stress_score", "kendall_tau", "regret_median"),
        *("calibrated_score", "worst", "score_by_gpu", "score_by_size"),
    } <= set(document)
    validate.main(["steps", path])
    assert "Kendall tau 1.00" in capsys.readouterr().out


def test_another_table_is_refused(tmp_path: Path) -> None:
    path = str(write(tmp_path / "other.csv", [{"id": 1, "colour": "red"}]))
    with pytest.raises(SystemExit, match="no column model"):
        validate.main(["steps", path])


NOTED: Sequence[Mapping[str, object]] = (
    {"task": "sft", "notes": "packed SQuAD"},
    {"notes": '{"cuda_graph_impl": "full_iteration"}', "sharding": "SHARD_GRAD_OP"},
    {"precision": "FP8_CS", "recompute": "every 2nd layer", "comm_overlap": "no --overlap-grad-reduce"},
    {"task": "qlora", "notes": "rank 64", "hardware": "A100, 8x200 Gb/s RoCE", "world_size": 16, "dp": 8},
    {"layers": 14, "tp": 1, "pp": 4, "virtual_pp": 4, "dp": 2, "notes": "type:transformer|embedding"},
    {"layers": 10, "tp": 1, "pp": 4, "virtual_pp": 2, "dp": 2},
    {
        "experts": 8,
        "top_k": 2,
        "moe_ffn_hidden": 4096,
        "tp": 1,
        "pp": 2,
        "dp": 4,
        "ep": 2,
        "virtual_pp": 2,
        "notes": '{"moe_a2a_overlap": true} capacity factor 1.25',
    },
    {
        "hardware": "GB200-NVL72",
        "gpus_per_node": 4,
        "world_size": 128,
        "tp": 1,
        "dp": 128,
        "global_batch": 128,
    },
)
"""What words, notes and recipes of published rows say, each on top of the plain row."""


def test_translated_rows_take_as_long_as_simulate_says_of_their_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a translated table has the score of the published one."""
    rows = [*ROWS, *({**LLAMA, "id": f"noted {at}", **noted} for at, noted in enumerate(NOTED))]
    path, folder = str(write(tmp_path / "published.csv", rows)), tmp_path / "translated"
    validate.main(["steps", path, "--write", str(folder), "--json"])
    published = json.loads(capsys.readouterr().out)
    table = folder / "published.csv"
    found = CliRunner().invoke(main, ["validate", "steps", str(table), "--json"])
    assert found.exit_code == 0, found.output
    translated = json.loads(found.stdout)
    assert (translated["score"], translated["failures"]) == (published["score"], published["failures"])
    assert translated["failures"] == 0
    assert translated["rest_rows"] == 3
    assert len(list(folder.glob("*.toml"))) == 1
    times = {row["id"]: row["predicted"] for row in validate_table(table).document(100)["worst"]}
    for row in read_runs(table):
        if row.id in times:
            step_s = simulate(job_from(settings_of(row)), only_figures=True).summary["step_time_s"]
            assert step_s == pytest.approx(times[row.id], rel=1e-9), row.id


MEASURED = Path(os.environ.get("FORETRACE_MEASURED", Path(__file__).parents[3] / "shared" / "measured"))


@pytest.mark.parametrize("table", ["steps.csv", "steps_fresh.csv"])
def test_every_measured_row_is_a_job_that_simulate_makes_of_its_settings(table: str, tmp_path: Path) -> None:
    """Nothing is known of a row but settings: the job of its columns is the one read out of its words.

    What is simulated is a function of the job alone. The fastest row of each framework shows it.
    """
    if not (MEASURED / table).exists():
        pytest.skip(f"{MEASURED / table} is not here")
    rows = read_table(MEASURED / table, COLUMNS)
    translated, failed = translate(rows, tmp_path)
    assert not failed
    jobs = {at: job_from(settings_of(row)) for at, row in translated.items()}
    for at, job in jobs.items():
        meant = step_job(rows[at]).job
        assert replace(job, cluster=meant.cluster) == meant, rows[at].id
    shortest: dict[str, int] = {}
    for at, job in sorted(jobs.items(), key=lambda item: -item[1].layout.world_size * item[1].n_microbatches):
        shortest[job.framework] = at
    for at in shortest.values():
        (timed,) = run_product([translated[at]], 1)
        assert isinstance(timed, Timed)
        step_s = simulate(jobs[at], only_figures=True).summary["step_time_s"]
        assert step_s == pytest.approx(timed.scored.predicted, rel=1e-9), rows[at].id


def test_kimi_k2_is_known_however_it_is_written() -> None:
    # 1.04 trillion parameters, 32.6 billion active: Moonshot AI 2025, arXiv:2507.20534, table 2
    model = model_of(
        Row({"model": "Kimi_K2", "arch": "moe-mla", "hidden": 7168, "heads": 64, "layers": 61}, 1)
    )
    assert model.n_params == pytest.approx(1.04e12, rel=0.02)
    assert model.kv_lora_rank == 512


@pytest.mark.parametrize(
    ("said", "name", "value"),
    [
        ({"comm_overlap": "no --overlap-grad-reduce"}, "overlap_grad_reduce", False),
        ({"notes": 'recipe {"moe_flex_dispatcher_backend": "hybridep"}'}, "expert_dispatch", "once"),
        ({"framework": "NeMo AutoModel (PyTorch) TE + DeepEP"}, "expert_dispatch", "once"),
        ({"notes": "compared with another run"}, "expert_dispatch", "copies"),
        ({"notes": '{"cuda_graph_impl": "full_iteration"}'}, "graphed", ("step",)),
        ({"notes": '{"cuda_graph_impl": "none", "cuda_graph_scope": "full_iteration"}'}, "graphed", ()),
        ({"framework": "Megatron-LM", "date": "2021"}, "overlap_grad_reduce", False),
        ({"framework": "Megatron-LM", "date": "2024"}, "overlap_grad_reduce", True),
    ],
)
def test_what_a_table_says_is_a_convention(said: dict[str, object], name: str, value: object) -> None:
    assert getattr(step_job(Row({**LLAMA, **said}, 1)).job.profile, name) == value


def test_a_recipe_that_pairs_micro_batches_has_the_combined_schedule() -> None:
    """Where its layout can: a pipeline of one stage per rank has no pairs, which is said."""
    experts = {**LLAMA, "experts": 8, "top_k": 2, "moe_ffn_hidden": 4096}
    pipeline = {**experts, "tp": 1, "pp": 2, "dp": 4, "ep": 2, "virtual_pp": 2, "schedule": "1f1b"}
    paired = {**pipeline, "notes": '{"moe_a2a_overlap": true}'}
    for row, schedule, said in (
        (pipeline, "interleaved-1f1b", 0),
        (paired, "combined-1f1b", 0),
        ({**paired, "virtual_pp": 1}, "1f1b", 1),
        ({**paired, "ep": 1}, "interleaved-1f1b", 1),
    ):
        step = step_job(Row(row, 1))
        assert (step.job.schedule, len(step.assumed)) == (schedule, said)
