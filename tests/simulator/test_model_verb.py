"""The verb ``foretrace model``: what it lists and shows, and with which status a check ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from foretrace.cli import main
from foretrace.simulator.models.sources import load_model, names


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["model", *words])


def told(*words: str) -> dict[str, Any]:
    """Return the object that a verb prints with ``--json``."""
    found: dict[str, Any] = json.loads(run(*words, "--json").stdout)
    return found


def test_every_preset_is_listed_with_its_counts() -> None:
    rows = {row["name"]: row for row in told("list")["models"]}
    assert sorted(rows) == names()
    assert all(row["n_params"] == load_model(name).n_params for name, row in rows.items())
    text = run("list").stdout
    assert all(f" {name} " in text for name in names())
    assert "…" not in text


def test_the_list_is_narrowed_by_words_in_names_ids_and_kinds() -> None:
    assert [row["name"] for row in told("list", "delta")["models"]] == ["qwen3-next-80b-a3b"]
    assert [row["name"] for row in told("list", "Meta-Llama", "scout")["models"]] == ["llama4-scout"]
    assert "no preset has delta and gemma" in run("list", "delta", "gemma").stdout


def test_blocks_that_are_shown_add_up_to_the_model() -> None:
    """But for embedding, head and the last norm."""
    shown = told("show", "Qwen/Qwen3-Next-80B-A3B-Instruct")
    blocks = sum(block["n_layers"] * block["params"] for block in shown["blocks"].values())
    assert blocks + (2 * 151936 + 1) * 2048 == shown["n_params"]
    assert "left out: multi-token prediction" in run("show", "qwen3-next-80b-a3b").stdout


def test_flops_are_of_no_more_tokens_than_a_model_has_positions_for() -> None:
    assert told("show", "gpt2")["seq_len"] == 1024
    assert told("show", "llama3-8b")["seq_len"] == 4096
    assert told("show", "gpt2", "--seq-len", "512")["seq_len"] == 512
    lengths = {row["name"]: row["seq_len"] for row in told("list", "--seq-len", "8192")["models"]}
    assert (lengths["gpt2"], lengths["llama3-8b"]) == (1024, 8192)
    found = run("show", "gpt2", "--seq-len", "2048")
    assert (found.exit_code, "gpt2 has positions for 1024 tokens" in found.output) == (2, True)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("llama3-8b",), 0, "agrees: +0.0000 %"),
        (("nemotron-h-8b",), 0, "8 billion, rounded"),
        (("nemotron-h-8b",), 0, "agrees within its rounding: +1.2607 %"),
        (("llama3-8b", "8.03B"), 0, "8.03 billion, rounded"),
        (("llama3-8b", "8,030,261,248"), 0, "agrees"),
        (("llama3-8b", "8.1B"), 1, "differs: -0.8610 %"),
        (("qwen3-8b", "qwen3-4b"), 1, "hidden: 4096 here, 2560 there"),
        (("gemma3-1b", "gemma2-9b"), 1, "layer 1: window+mlp here, attention+mlp there"),
    ],
)
def test_a_check_ends_with_one_where_it_differs(words: tuple[str, ...], status: int, said: str) -> None:
    result = run("check", *words)
    assert result.exit_code == status
    assert said in result.stdout
    assert told("check", *words)["agrees"] == (status == 0)


def test_a_model_is_checked_against_its_file(tmp_path: Path) -> None:
    given = {"model_type": "minimax_m2", "num_local_experts": 128}
    (tmp_path / "config.json").write_text(json.dumps(given), encoding="utf-8")
    result = run("check", "minimax-m2", str(tmp_path))
    assert result.exit_code == 1
    assert "n_experts: 256 here, 128 there" in result.stdout


def test_a_model_of_ones_own_has_no_published_count(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('base = "gpt2"\n', encoding="utf-8")
    result = run("check", str(own))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "no published count is known; give one (8.03B), or a config.json" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("show", "Qwen/Qwen3-9B"), "its config.json would work"),
        (("check", "gpt2", "0"), "0 parameters: at least 1"),
        (("check", "llama3-8b", "nothing"), "unknown model 'nothing'"),
    ],
)
def test_a_mistake_is_one_line(words: tuple[str, ...], said: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
