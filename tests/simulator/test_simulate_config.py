"""Settings: read, checked, overridden, written back."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.cli import main
from foretrace.door import parse
from foretrace.simulator.config import job_from, job_settings, read_config, write_config
from foretrace.simulator.errors import ConfigError, JobError, ModelError, SimulationError
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.settings import CONVENTIONS, KINDS, SHAPE, TABLES
from foretrace.simulator.sharding import SHARDINGS
from foretrace.simulator.simulate import simulate
from foretrace.simulator.variation import Variation

RUN_TOML = """
[model]
name = "llama2-7b"

[cluster]
name = "dgx-h100"
gpus = 16

[layout]
tp = 2
pp = 2

[batch]
global_batch = 64
seq_len = 4096

[schedule]
name = "gpipe"

[training]
sharding = "fsdp"
sequence_parallel = false
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_of_tables_is_a_job(tmp_path: Path) -> None:
    job = job_from(read_config(written(tmp_path, RUN_TOML)))
    assert job.model == load_model("llama2-7b")
    assert job.cluster.n_gpus == 16
    assert job.layout.degrees == {"pp": 2, "dp": 4, "cp": 1, "tp": 2, "ep": 1}
    assert (job.global_batch, job.micro_batch, job.seq_len) == (64, 1, 4096)
    assert (job.schedule, job.sharding, job.sequence_parallel) == ("gpipe", "fsdp", False)


def test_a_flat_file_is_the_same(tmp_path: Path) -> None:
    flat = read_config(written(tmp_path, 'model = "llama2-7b"\ncluster = "dgx-h100"\nglobal_batch = 4'))
    assert flat == {"model": "llama2-7b", "cluster": "dgx-h100", "global_batch": 4}
    assert job_from(flat).cluster.n_gpus == 1


def test_every_setting_has_a_place_in_a_table() -> None:
    placed = [name for keys in TABLES.values() for name in keys.values()]
    assert sorted([*placed, CONVENTIONS, SHAPE]) == sorted(KINDS)
    assert list(TABLES["variation"]) == [field.name for field in fields(Variation)]


@settings(deadline=None)
@given(
    st.fixed_dictionaries(
        {"model": st.just("llama2-7b"), "cluster": st.just("dgx-h100"), "global_batch": st.just(16)},
        optional={
            "tp": st.sampled_from([1, 2]),
            "pp": st.sampled_from([1, 4]),
            "dp": st.sampled_from([1, 8]),
            "micro_batch": st.sampled_from([1, 2]),
            "sharding": st.sampled_from(sorted(SHARDINGS)),
            "sequence_parallel": st.booleans(),
            "flash_attention": st.booleans(),
            "steps": st.integers(1, 3),
            "schedule": st.just("interleaved-1f1b"),
            "virtual_stages": st.sampled_from([1, 2]),
            "overlap_p2p": st.booleans(),
            "deallocate_outputs": st.booleans(),
        },
    )
)
def test_settings_of_a_job_make_the_same_job_again(given_settings: dict[str, Any]) -> None:
    job = job_from(given_settings)
    assert job_from(job_settings(job)) == job


def test_written_settings_are_read_back(tmp_path: Path) -> None:
    original = job_settings(job_from(read_config(written(tmp_path, RUN_TOML))))
    assert read_config(written(tmp_path, write_config(original))) == original


def test_paths_are_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('base = "llama2-7b"\nn_layers = 4\n', encoding="utf-8")
    found = read_config(written(tmp_path, 'model = "mine.toml"\ncluster = "dgx-h100"\nglobal_batch = 1'))
    assert job_from(found).model.n_layers == 4


def test_text_in_toml_is_escaped(tmp_path: Path) -> None:
    tricky = {"model": 'a\\b"c\né.toml'}
    assert read_config(written(tmp_path, write_config(tricky))) == tricky


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("global_bacth = 3", r"unknown key 'global_bacth'; did you mean global_batch\?"),
        ("[layuot]\ntp = 2", r"unknown table \[layuot\]; did you mean layout\?"),
        ("[layout]\ntpp = 2", r"unknown key 'tpp' in \[layout\]; did you mean tp\?"),
        ("[layout]\ntp = true", "layout.tp = True: must be a whole number"),
        ("tp = 2.0", "tp = 2.0: must be a whole number"),
        ("[model]\nname = 7", 'model.name = 7: must be text, in "quotes"'),
        ("sequence_parallel = 1", "sequence_parallel = 1: must be true or false"),
        ("tp = 2\n[layout]\ntp = 4", "tp is given twice, the second time as layout.tp"),
        ("tp = ", "is not TOML"),
        (f"tp = {10**30}", "tp is a whole number of more than 64 bits"),
        (f"seq_len = {-(2**31)}", "at most 2,147,483,647"),
        ('model = "a\\u0000b"', "the character NUL"),
        (f"layers_per_stage = {'[' * 3000}", "cannot be read: more than 64"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        read_config(written(tmp_path, text))
    assert str(tmp_path / "run.toml") in str(raised.value)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_config(tmp_path / "none.toml")
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not text"):
        read_config(tmp_path / "run.toml")


@pytest.mark.parametrize("name", ["model", "cluster", "global_batch"])
def test_what_is_missing_is_named(name: str) -> None:
    complete = {"model": "llama2-7b", "cluster": "dgx-h100", "global_batch": 1}
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        job_from({key: value for key, value in complete.items() if key != name})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 2**31 - 1}, "at most 1,000,000 are simulated"),
        ({"global_batch": 8 * 10**8}, "at most 1,000,000 are simulated"),
        ({"seq_len": 2**31 - 1}, "a shorter seq_len"),
    ],
)
def test_what_no_timeline_holds_is_refused_before_it_is_made(given: dict[str, int], message: str) -> None:
    small = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "global_batch": 8}
    with pytest.raises(SimulationError, match=message):
        simulate(job_from({**small, **given}))


@pytest.mark.parametrize("name", ["deep.json", "deep.toml"])
def test_a_model_that_nests_too_deep_is_a_mistake(tmp_path: Path, name: str) -> None:
    lists = "[" * 3000 + "]" * 3000  # of which Python 3.14 parses those of JSON
    (tmp_path / name).write_text(f'{{"a": {lists}}}' if name.endswith("json") else f"a = {lists}")
    with pytest.raises(ModelError, match="more than 64 tables in tables"):
        load_model(str(tmp_path / name))


def test_a_key_of_too_many_parts_is_refused_before_it_is_made(tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text(".".join(["a"] * 70) + " = 1")
    with pytest.raises(ModelError, match="more than 64 tables in tables"):
        load_model(str(tmp_path / "deep.toml"))


@pytest.mark.parametrize(
    "value", ['!!bool "abc"', '!!int ""', '!!int "-"', '!!float ""', '!!timestamp "abc"']
)
def test_a_value_that_is_not_what_its_tag_says_is_a_mistake(value: str) -> None:
    with pytest.raises(ModelError, match="a value is not what its tag says"):
        parse(f"x: {value}", "YAML", "file", ModelError)


def test_gpus_that_no_data_parallel_degree_fills_are_refused() -> None:
    common = {"model": "llama3-70b", "cluster": "dgx-h100", "global_batch": 64, "tp": 8, "pp": 4}
    with pytest.raises(JobError, match=r"500 GPUs cannot be filled .* 480 or 512 GPUs would work"):
        job_from({**common, "gpus": 500})
    with pytest.raises(JobError, match=r"8 GPUs cannot be filled .* 32 or 64 GPUs would work"):
        job_from({**common, "gpus": 8})


def test_conventions_and_settings_of_every_kind_survive_a_file(tmp_path: Path) -> None:
    job = job_from(
        {
            "model": "llama3-8b",
            "cluster": "dgx-h100",
            "gpus": 16,
            "global_batch": 32,
            "seq_len": 4096,
            "framework": "torchtitan",
            "sharding": "fsdp",
            "shard_ranks": 8,
            "fp8": True,
            "recipe": "rowwise",
            "recompute": "full",
            "recompute_every": 2,
            "checkpoint_every": 4,
            "checkpoint_bytes_per_s": 2e9,
            "conventions": {"reshard_after_forward": False, "eager": ("norm",), "host_work": 0.5},
        }
    )
    path = tmp_path / "run.toml"
    path.write_text(write_config(job_settings(job)))
    again = job_from(read_config(path))
    assert again == job
    assert again.profile.eager == ("norm",)
    assert again.profile.host_work == 0.5


def test_a_framework_decides_the_dtype_of_gradients_unless_it_is_given() -> None:
    some = {"model": "llama3-8b", "cluster": "dgx-h100", "global_batch": 8, "framework": "internevo"}
    assert not job_from(some).fp32_gradients
    assert job_from({**some, "fp32_gradients": True}).fp32_gradients


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "overlap_grad_reduce"], "KEY=VALUE"),
        (["--set", "overlap_grad_reduce=yes"], "must be true or false"),
        (["--set", "bucket_mib=many"], "must be a number"),
        (["--gpus", "-8"], "gpus = -8: at least 1"),
        (["--set", "wrapp=block"], "did you mean wrap"),
        (["--framework", "torchtitn"], "did you mean torchtitan|one of"),
    ],
)
def test_a_convention_that_cannot_be_is_refused_by_the_verb(flags: list[str], message: str) -> None:
    given = ["simulate", "--model", "llama3-8b", "--cluster", "dgx-h100", "--global-batch", "8"]
    found = CliRunner().invoke(main, [*given, *flags])
    assert found.exit_code == 2
    assert re.search(message, found.output)
    assert "Traceback" not in found.output
