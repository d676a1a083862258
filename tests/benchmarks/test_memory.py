"""Validation of memory: rows become jobs, figures are told apart, failed and completed runs are counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import validate
from click.testing import CliRunner
from measured.jobs import job_of, model_of, with_shapes
from measured.memory import validate_fit, validate_memory
from measured.table import Row

from foretrace.cli import main
from foretrace.simulator.errors import TableError
from foretrace.simulator.memory.ranks import rank_memories
from foretrace.simulator.memory.states import reserved_bytes
from foretrace.simulator.validate.runs import figure_bytes

STEP = {
    "id": "s1",
    "model": "llama3-70b cut to 12 layers",
    "arch": "llama",
    "layers": 12,
    "hidden": 8192,
    "heads": 64,
    "kv_heads": 8,
    "ffn_hidden": 28672,
    "gated": "true",
    "vocab": 128256,
    "hardware": "B200",
    "framework": "Megatron-LM",
    "recompute": "none",
    "precision": "bf16",
    "sp": "true",
    "seq_len": 4096,
    "tp": 2,
    "pp": 1,
    "dp": 4,
    "micro_batch": 1,
    "global_batch": 16,
    "sharding": "zero1",
    "world_size": 8,
}
MEMORY = {
    **{name: STEP[name] for name in ("model", "layers", "hidden", "hardware", "precision", "seq_len")},
    **{name: STEP[name] for name in ("tp", "pp", "dp", "micro_batch", "sharding", "world_size", "recompute")},
    "step_id": "s1",
    "source_group": "simumax",
    "rank": "0",
    "kind": "allocated / reserved",
    "peak_allocated_gb": 65.15,
    "peak_reserved_gb": 67.02,
    "peak_nvidia_smi_gb": "",
    "cp": 1,
    "ep": 1,
    "peak_unspecified_gb": "",
}


def row(**changes: object) -> Row:
    return Row({**STEP, **changes}, 1)


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    lines = [",".join(rows[0]), *(",".join(str(value) for value in row.values()) for row in rows)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    write(tmp_path / "steps.csv", [dict(STEP)])
    unknown = {**MEMORY, "step_id": "", "model": "another", "layers": 3}
    return write(tmp_path / "memory.csv", [dict(MEMORY), unknown])


def test_each_figure_of_a_row_is_held_against_its_own_kind(tables: Path) -> None:
    """Measured on 8 B200 under Megatron-LM, published by MooreThreads/SimuMax 1.2: within 4 %."""
    found, _ = validate_memory(tables, None, tables.parent)
    assert [scored.family.split()[-1] for scored in found.rows] == ["allocated", "reserved"]
    assert all(abs(scored.log_ratio) < 0.04 for scored in found.rows)
    assert [failed.reason for failed in found.failures] == ["heads is not given"]


def test_nvidia_smi_shows_more_than_is_reserved_than_is_allocated() -> None:
    job = job_of(row())
    memory = rank_memories(job)[0]
    sizes = [figure_bytes(job, memory, kind) for kind in ("allocated", "reserved", "nvidia_smi")]
    assert sizes == sorted(set(sizes))
    assert sizes[2] - sizes[1] == reserved_bytes(job)


def test_a_row_without_a_step_takes_shape_but_no_layout_from_a_run_of_its_model() -> None:
    like = Row({**STEP, "tp": 8, "micro_batch": 7}, 1)
    bare = Row({name: MEMORY[name] for name in ("model", "layers", "hidden", "tp")}, 2)
    (full,) = with_shapes([bare], [like])
    assert full.integer("heads") == 64
    assert full.integer("tp") == 2
    assert full.text("micro_batch") == ""


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"sharding": "fsdp2(zero3)"}, "sharding", "fsdp"),
        ({"sharding": "none(DDP)"}, "sharding", "ddp"),
        ({"sharding": "zero1(group 8)"}, "sharding", "zero1"),
        ({"recompute": "selective (op)"}, "recompute", "selective"),
        ({"precision": "mxfp8"}, "precision", "bf16"),
        ({"framework": "nanotron v0.5"}, "framework", "nanotron"),
        ({"framework": "Megatron-DeepSpeed", "precision": "fp16"}, "fp32_gradients", False),
        ({"sharding": "zero1(group 2)", "shard_group": 2}, "shard_ranks", 2),
        ({"framework": "InternEvo"}, "fp32_gradients", False),
        ({"global_batch": 15}, "global_batch", 16),
    ],
)
def test_what_tables_write_becomes_a_setting(change: dict[str, object], field: str, value: object) -> None:
    assert getattr(job_of(row(**change)), field) == value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sharding": "magic"}, "sharding 'magic'"),
        ({"recompute": "see notes"}, "recompute 'see notes'"),
        ({"precision": "int4"}, "precision 'int4'"),
        ({"arch": "moe-mla"}, "latent attention"),
        ({"model": "another", "vocab": ""}, "vocab is not given"),
    ],
)
def test_what_cannot_be_understood_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(TableError, match=message):
        job_of(row(**change))


def test_latent_attention_comes_from_the_preset_that_the_name_begins_with() -> None:
    model = model_of(row(model="deepseek-v3 cut to 4 layers", arch="moe-mla", layers=4, moe_layers=3))
    assert (model.n_layers, model.n_dense_layers, model.kv_lora_rank) == (4, 1, 512)


def test_failed_and_completed_runs_are_counted(tables: Path, tmp_path: Path) -> None:
    """A run with 512 sequences per micro-batch cannot have fitted; one with a throughput did run."""
    shape = {name: STEP[name] for name in ("layers", "hidden", "ffn_hidden", "vocab", "seq_len")}
    one = {"id": "f1", **shape, "gpus": 8, "tp": 2, "pp": 1, "dp": 4, "zero": 1, "micro_batch": 512}
    runs = [
        {**one, "grad_acc": 4, "tokens_per_s_per_gpu": ""},
        {**one, "id": "f2", "micro_batch": 1, "grad_acc": 4, "tokens_per_s_per_gpu": ""},
        {**one, "id": "f3", "micro_batch": 1, "grad_acc": 4, "tokens_per_s_per_gpu": 5000},
        {**one, "id": "f4", "pp": 16, "grad_acc": 4, "tokens_per_s_per_gpu": ""},
    ]
    found, _ = validate_fit(write(tmp_path / "failed_runs.csv", runs), None, None, tmp_path)
    assert found.confusion == {
        "completed": {"fits": 2, "tight": 0, "under_half": 2, "does_not_fit": 0},
        "failed": {"fits": 1, "tight": 0, "under_half": 1, "does_not_fit": 1},
    }
    assert found.score == pytest.approx(0.25)
    assert len(found.failures) == 2


@pytest.mark.parametrize("kind", ["memory", "fit"])
def test_the_command_prints_one_object_and_the_verb_the_same_score(
    tables: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tables
    if kind == "fit":
        failed = {**STEP, "zero": 1, "grad_acc": 4, "tokens_per_s_per_gpu": ""}
        path = write(tmp_path / "failed.csv", [failed, {**failed, "id": "s2", "micro_batch": 512}])
    folder = tmp_path / "translated"
    validate.main([kind, str(path), "--write", str(folder), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == kind
    found = CliRunner().invoke(main, ["validate", kind, str(folder / path.name), "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["score"] == document["score"]
    assert CliRunner().invoke(main, ["validate", kind, str(folder / path.name)]).exit_code == 0
    validate.main([kind, str(path)])
    assert "score" in capsys.readouterr().out


def test_columns_say_sizes_and_a_preset_of_that_width_what_no_column_says() -> None:
    cells = {
        "model": "GPT OSS 120B",
        "arch": "moe",
        "layers": "36",
        "hidden": "2880",
        "heads": "64",
        "kv_heads": "8",
        "head_dim": "64",
        "ffn_hidden": "2880",
        "vocab": "200064",
        "gated": "true",
        "experts": "128",
        "top_k": "4",
        "moe_ffn_hidden": "2880",
        "moe_layers": "36",
    }
    found = model_of(Row(cells, 1))
    assert (found.vocab, found.window, found.mlp_bias) == (200064, 128, True)
    other = model_of(Row({**cells, "hidden": "4096"}, 1))
    assert (other.hidden, other.window, other.mlp_bias) == (4096, 0, False)


def test_a_preset_fills_in_what_a_row_of_it_leaves_out() -> None:
    assert model_of(row(vocab="", ffn_hidden="")) == model_of(row())
