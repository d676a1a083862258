"""What a person gets wrong: whatever verb and input, one line, exit status 2, nothing written."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from tests.simulator.predicted import simulate
from tests.test_cli import commands_of

from foretrace import cli
from foretrace.simulator.config import job_from
from foretrace.traces.store import write_run

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


def assert_one_line(words: list[str]) -> str:
    found = CliRunner().invoke(cli.main, words)
    assert isinstance(found.exception, SystemExit), (words, found.exception)
    assert found.exit_code == 2, words
    assert found.stdout == "", words
    assert found.stderr.startswith("Error: "), words
    assert found.stderr.count("\n") == 1, (words, found.stderr)
    assert "errno" not in found.stderr.lower(), (words, found.stderr)
    assert found.stderr.count("aaaaaaaaaa" * 30) <= 1, (words, found.stderr)
    return found.stderr


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


@pytest.mark.parametrize("words", ["bench clock", "bench collectives", "topology detect -o here.toml"])
def test_no_verb_starts_thousands_of_processes(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr("foretrace.tracer.bench.world.subprocess.Popen", lambda *a, **b: started.append(a))
    assert "100000 is not in the range" in assert_one_line([*words.split(), "--processes", "100000"])
    assert started == []


JOB = "--model gpt2 --cluster dgx-h100 --gpus 8 --global-batch 8 --seq-len 64"
OUTPUTS = {
    "simulate --output": f"simulate {JOB} --output {{}}",
    "simulate --report": f"simulate {JOB} --report {{}}",
    "rehearse --output": "rehearse --world-size 2 --output {} -- train.py",
    "rehearse --report": "rehearse --world-size 2 --cluster dgx-h100 --report {} -- train.py",
    "record --output": "record --output {} -- python train.py",
    "ingest --output": "ingest any.trace.json --output {}",
    "calibrate --output": f"calibrate {JOB} --step-time 3s --output {{}}",
    "report --output": "report run --output {}",
    "export --output": "export run --output {}",
    "config --output": "config job.run.toml --output {}",
    "search --output": f"search {JOB} --output {{}}",
    "search --report": f"search {JOB} --report {{}}",
    "bench kernels --output": "bench kernels --device cpu --output {}",
    "bench kernels --device-file": "bench kernels --device cpu --device-file {}",
    "validate steps --html": "validate steps steps.table.csv --html {}",
    "topology draw --output": "topology draw dgx-h100 --gpus 8 --output {}",
    "topology read --output": "topology read topo.wiring.txt --output {}",
    "topology detect --output": "topology detect --output {}",
}
"""A command for each flag that says where a verb is to write."""


def test_these_are_all_flags_that_say_where_to_write() -> None:
    writes = re.compile(r"\bwrite\b|new or empty", re.IGNORECASE)
    found = {
        f"{' '.join(words)} {param.opts[-1]}"
        for verb in cli.VERBS
        for words, command in commands_of(verb)
        for param in command.params
        if isinstance(param, click.Option)
        and isinstance(param.type, click.Path)
        and writes.search(param.help or "")
    }
    assert found == set(OUTPUTS)


@pytest.fixture(scope="module")
def recorded(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with input for each of the commands, and a run that counts as recorded."""
    folder = tmp_path_factory.mktemp("recorded")
    shutil.copytree(Path(__file__).parent / "corpus", folder, dirs_exist_ok=True)
    (folder / "train.py").write_text("open('ran', 'w')\n")
    simulation = simulate(job_from({**SMALL, "model": "gpt2", "tp": 1}))
    write_run(
        folder / "run", replace(simulation.info, origin="recorded"), simulation.spans, simulation.memory
    )
    (folder / "run" / "spans" / "beside.csv").write_text("a\n")
    (folder / "run" / "kineto").mkdir()
    (folder / "run" / "kineto" / "rank-00000.json.gz").write_bytes(b"recorded")
    (folder / "link.csv").symlink_to(folder / "run" / "spans" / "beside.csv")
    return folder


@pytest.mark.parametrize("flag", OUTPUTS)
def test_no_verb_writes_over_a_run(flag: str, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recorded)
    before = {path: path.read_bytes() for path in recorded.rglob("*") if path.is_file()}
    targets = ["run/spans/beside.csv", "link.csv"]
    if flag in ("calibrate --output", "config --output", "topology read --output", "topology draw --output"):
        targets += [
            str(path.relative_to(recorded)) for path in before if path.is_relative_to(recorded / "run")
        ]
    elif flag.endswith("--output"):
        targets.append("run")
    said = [assert_one_line(OUTPUTS[flag].format(target).split()) for target in targets]
    is_folder = flag in ("simulate --output", "rehearse --output", "record --output", "ingest --output")
    assert is_folder or "it is a part of a run" in said[0]
    assert {path: path.read_bytes() for path in recorded.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "flag", sorted(OUTPUTS.keys() - {"topology draw --output", "topology read --output"})
)
def test_whether_an_output_can_be_written_is_asked_before_any_work(
    flag: str, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for two verbs whose only work is to write."""
    monkeypatch.chdir(recorded)
    assert re.search(
        "nothing (was done|started|written)", assert_one_line(OUTPUTS[flag].format("train.py/x").split())
    )


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.is_char_device(), reason="needs /dev/full")
@pytest.mark.parametrize("verb", ["simulate", "search"])
def test_of_several_outputs_all_are_written_or_none(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for places in (["made/a", "/dev/full"], ["same", "same"], ["same/", "./same"]):
        found = CliRunner().invoke(
            cli.main, [verb, *JOB.split(), "--output", places[0], "--report", places[1]]
        )
        *_, said = found.stderr.splitlines()  # behind the progress of a search
        assert (found.exit_code, found.stdout) == (2, "")
        assert re.match(r"Error: (cannot write /dev/full: No space|(\./)?same would be two things)", said), (
            said
        )
        assert [path for path in tmp_path.rglob("*") if not path.is_dir() or path.name != "made"] == []
    for words in (["--output", "a", "--report", "b/page.html"], ["--report", "/dev/null"]):
        assert CliRunner().invoke(cli.main, [verb, *JOB.split(), *words]).exit_code == 0
    assert (tmp_path / "a").exists()
    assert (tmp_path / "b" / "page.html").stat().st_size > 10_000


def test_a_page_may_be_in_the_folder_of_its_run(tmp_path: Path) -> None:
    run, page = tmp_path / "run", tmp_path / "run" / "pages" / "page.html"
    words = ["simulate", *JOB.split(), "--output", str(run), "--report", str(page)]
    for _ in range(2):
        assert CliRunner().invoke(cli.main, words).exit_code == 0
    assert page.is_file()
    assert (run / "run.json").is_file()
