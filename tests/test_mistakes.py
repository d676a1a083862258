"""What a person gets wrong: whatever verb and input, one line, exit status 2, nothing written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.simulator.predicted import simulate

from foretrace import cli
from foretrace.simulator.config import job_from

SMALL = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "tp": 8, "global_batch": 8}
FLAGS = "--model llama3-8b --cluster dgx-h100 --gpus 8 --global-batch 8".split()
PATHS = {
    "simulate": "simulate {}",
    "simulate from": "simulate --model llama3-8b --cluster dgx-h100 --gpus 8 --from {}",
    "memory": "memory {}",
    "config": "config {}",
    "like": "simulate --like {}",
    "rehearsal": "simulate --cluster dgx-h100 --rehearsal {}",
    "calibration": "simulate --model llama3-8b --cluster dgx-h100 --gpus 8 --global-batch 8 --calibration {}",
    "model": "simulate --cluster dgx-h100 --global-batch 8 --model {}",
    "cluster": "simulate --model llama3-8b --global-batch 8 --cluster {}",
    "analyze": "analyze {}",
    "compare": "compare {} {}",
    "report": "report {} -o page.html",
    "export": "export {} -o spans.csv",
    "goodput": "goodput {} --tokens 1T",
    "calibrate": "calibrate {} -o cal.toml",
    "ingest": "ingest {} -o taken",
    "validate": "validate kernels {}",
    "topology check": "topology check {}",
    "topology read": "topology read {} -o mine.toml",
}
"""A command for each way in which a path gets in."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of things that are no input of any verb."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "folder" / "inside").mkdir(parents=True)
    (folder / "empty").write_bytes(b"")
    (folder / "garbage").write_bytes(bytes(range(256)) * 9)
    (folder / "żółw 😀.toml").write_text('modle = "llama3-8b"\n', encoding="utf-8")
    (folder / "no.toml").write_text("= = =")
    (folder / "bytes.toml").write_bytes(b'model = "\xff\xfe"')
    (folder / "deep.json").write_text("[" * 5000)
    (folder / "cut.json").write_text('{"a": ')
    (folder / "list.json").write_text("[1, 2]")
    (folder / "quoted.csv").write_text('"never closed\n')
    (folder / "loop").symlink_to(folder / "loop")
    run = simulate(job_from(SMALL)).write(folder / "cut run")
    spans = next((run / "spans").iterdir())
    spans.write_bytes(spans.read_bytes()[:700])
    shutil.copytree(run, folder / "newer run")
    about = folder / "newer run" / "run.json"
    about.write_text(about.read_text().replace('"format_version": 1', '"format_version": 99'))
    return folder


def assert_one_line(words: list[str]) -> None:
    found = CliRunner().invoke(cli.main, words)
    assert isinstance(found.exception, SystemExit), (words, found.exception)
    assert found.exit_code == 2, words
    assert found.stdout == "", words
    assert found.stderr.startswith("Error: "), words
    assert found.stderr.count("\n") == 1, (words, found.stderr)
    assert "errno" not in found.stderr.lower(), (words, found.stderr)
    assert found.stderr.count("aaaaaaaaaa" * 30) <= 1, (words, found.stderr)


@pytest.mark.parametrize("verb", PATHS)
def test_a_path_to_something_else(
    verb: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (*sorted(inputs.iterdir()), Path("nowhere"), Path("a" * 300), Path("/dev/null")):
        if verb == "ingest" and path.name == "cut run":
            continue  # what is left of a run is a folder of Arrow files, of which none is a trace
        assert_one_line([word.replace("{}", str(path)) for word in PATHS[verb].split()])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "flags",
    [
        ["--cluster", "dgx-h10"],
        ["--cluster", "missing.toml"],
        ["--cluster", "dgx-h100", "--calibration", "missing.toml"],
        ["--calibration", "missing.toml"],
        ["--cluster", "dgx-h100", "--report", "train.py/page.html"],
    ],
    ids=" ".join,
)
def test_a_script_is_not_run_for_a_machine_that_does_not_exist(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("open('ran', 'w')\n")
    assert_one_line(["rehearse", "--world-size", "4", *flags, "--", str(script)])
    assert list(tmp_path.iterdir()) == [script]


@pytest.mark.parametrize("number", ["-1", "0", "abc", "nan", "1e999", str(10**26), "1.5", ""])
@pytest.mark.parametrize(
    "words",
    [
        ["simulate", *FLAGS, "--seq-len"],
        ["memory", *FLAGS, "--micro-batch"],
        ["advise", "--model", "llama3-8b", "--gpus"],
        ["search", "--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus"],
        ["bubble", "--stages", "4", "--micro-batches"],
        ["topology", "show", "dgx-h100", "--gpus"],
        ["rehearse", "--cluster", "dgx-h100", "--world-size"],
    ],
    ids=lambda words: words[0],
)
def test_a_number_that_is_none_or_that_nothing_holds(words: list[str], number: str) -> None:
    assert_one_line([*words, number])
