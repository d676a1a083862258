"""The front door: help, lazy imports, and what a user's mistakes look like."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import foretrace

SIMULATE = (
    "simulate --model llama3-8b --cluster dgx-h100 --gpus 16 --tp 2 --pp 2 --global-batch 32 --seq-len 2048"
).split()


def run(
    *args: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, in a process of its own."""
    command = [sys.executable, "-m", "foretrace", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env, timeout=120)


def assert_one_line(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """The mistake is told in one line that holds *words*, with exit status 2 and nothing on stdout."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("Error: ")
    for word in words:
        assert word in lines[0]


def test_help_lists_every_verb_and_imports_no_engine() -> None:
    code = (
        "import sys, foretrace\n"
        "from click.testing import CliRunner\n"
        "result = CliRunner().invoke(foretrace.main, ['--help'])\n"
        "assert result.exit_code == 0, result.output\n"
        "assert all(verb in result.output for verb in foretrace.VERBS)\n"
        "heavy = {'torch', 'numpy', 'pyarrow', 'simpy', 'networkx', 'plotly'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("verb", sorted(foretrace.VERBS))
def test_every_verb_explains_itself(verb: str) -> None:
    result = run(verb, "--help")
    assert result.returncode == 0, result.stderr
    assert "Usage:" in result.stdout


@pytest.mark.parametrize("name", foretrace.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(foretrace, name) is not None


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = foretrace.simulat


def test_simulating_never_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch must not be imported')\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"import foretrace; foretrace.main({[*SIMULATE, '--json']!r})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_simulate_json_holds_the_promised_keys() -> None:
    result = run(*SIMULATE, "--json")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    promised = (
        "step_time_s tokens_per_s_per_gpu mfu peak_memory_bytes fits bubble_fraction exposed_comm_fraction "
        "world_size n_spans engine warnings"
    )
    assert set(promised.split()) <= set(answer)
    assert answer["world_size"] == 16
    assert 0 < answer["mfu"] < 1
    assert 0 <= answer["bubble_fraction"] < 1


class TestMistakes:
    """One line each: what is wrong, the value, what would work."""

    def test_unknown_verb(self) -> None:
        assert_one_line(run("simulat"), "no verb 'simulat'", "simulate")

    def test_unknown_option(self) -> None:
        assert_one_line(run(*SIMULATE, "--tensor-parallel", "8"), "--tensor-parallel", "simulate --help")

    def test_layout_that_does_not_fill_the_gpus(self) -> None:
        assert_one_line(run(*SIMULATE, "--dp", "3"), "12", "16", "dp=4")

    def test_unknown_model(self) -> None:
        assert_one_line(run(*SIMULATE, "--model", "llama3-70"), "llama3-70b")

    def test_unknown_cluster(self) -> None:
        assert_one_line(run(*SIMULATE, "--cluster", "dgx-h10"), "dgx-h100")

    def test_batch_that_does_not_divide(self) -> None:
        assert_one_line(run(*SIMULATE, "--global-batch", "33"), "33", "32")

    def test_tp_that_does_not_divide_the_heads(self) -> None:
        args = "simulate --model llama3-8b --cluster dgx-h100 --gpus 6 --tp 6 --global-batch 32".split()
        assert_one_line(run(*args), "tp=6")

    def test_foreign_file(self, tmp_path: Path) -> None:
        foreign = tmp_path / "notes.arrow"
        foreign.write_text("not a timeline")
        assert_one_line(run("analyze", str(foreign)), "notes.arrow")

    def test_missing_run(self, tmp_path: Path) -> None:
        assert_one_line(run("analyze", str(tmp_path / "nowhere")), "nowhere")

    def test_output_that_is_not_a_run_is_left_alone(self, tmp_path: Path) -> None:
        precious = tmp_path / "precious"
        precious.mkdir()
        (precious / "thesis.tex").write_text("mine")
        assert_one_line(run(*SIMULATE, "-o", str(precious)), "precious")
        assert [path.name for path in precious.iterdir()] == ["thesis.tex"]

    def test_output_in_a_file_that_is_in_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        result = run(*SIMULATE, "-o", str(tmp_path / "file" / "run"))
        assert_one_line(result, "file")


def test_analyze_works_alike_on_a_run_it_was_given(tmp_path: Path) -> None:
    out = tmp_path / "run"
    made = run(*SIMULATE, "-o", str(out))
    assert made.returncode == 0, made.stderr
    result = run("analyze", str(out), "--json")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["world_size"] == 16
    for row in answer["ranks"]:
        assert abs(sum(row["shares"].values()) - 1) < 1e-9


def test_a_finished_run_with_a_missing_rank_is_refused_unless_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(*SIMULATE, "--ranks", "all", "-o", str(out)).returncode == 0
    (out / "spans" / "rank-00003.arrow").unlink()
    for words in (["analyze", str(out)], ["compare", str(out), str(out)], ["report", str(out)]):
        assert_one_line(run(*words, cwd=tmp_path), "rank 3 of 16", "--partial")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    result = run("analyze", str(out), "--partial", "--json")
    assert result.returncode == 0, result.stderr
    assert any("rank 3" in warning for warning in json.loads(result.stdout)["warnings"])
