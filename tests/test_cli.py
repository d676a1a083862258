"""The front door: help, lazy imports, and what a user's mistakes look like."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import foretrace
from foretrace import cli
from foretrace.simulator.flags import flag_of
from foretrace.simulator.settings import LISTED

SIMULATE = (
    "simulate --model llama3-8b --cluster dgx-h100 --gpus 16 --tp 2 --pp 2 --global-batch 32 --seq-len 2048 "
    "--framework megatron"
).split()


Ended = subprocess.CompletedProcess[str]


def start(*args: str, env: Mapping[str, str] | None = None) -> Ended:
    """Run the command as a user does, in a process of its own."""
    command = [sys.executable, "-m", "foretrace", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=120)


def run(*args: str) -> Ended:
    """Run the command in this process, where everything is loaded."""
    found = CliRunner().invoke(cli.main, args)
    return Ended(args, found.exit_code, found.stdout, found.stderr)


def assert_one_line(result: Ended, *words: str) -> None:
    """The mistake is told in one line that holds *words*, with exit status 2 and nothing on stdout."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("Error: ")
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize("words", ["topology list >&-", "topology draw dgx-h100 -o it.html <&- >&- 2>&-"])
def test_a_stream_that_is_closed_leads_nowhere(words: str, tmp_path: Path) -> None:
    """A file that is opened has the lowest number that is free: it must not become the output."""
    command = ["sh", "-c", f"{sys.executable} -m foretrace {words}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(file.read_text().endswith("</html>\n") for file in tmp_path.iterdir())


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    trace = Path(__file__).parent / "corpus" / "kineto.trace.json"
    words = f"rmdir {tmp_path}/here && {sys.executable} -m foretrace ingest {trace} -o taken"
    (tmp_path / "here").mkdir()
    done = subprocess.run(
        ["sh", "-c", words], capture_output=True, text=True, check=False, cwd=tmp_path / "here"
    )
    assert_one_line(done, "the current folder is gone")


def test_help_lists_every_verb_and_imports_no_engine() -> None:
    code = (
        "import sys\nfrom foretrace import cli\n"
        "from click.testing import CliRunner\n"
        "result = CliRunner().invoke(cli.main, ['--help'])\n"
        "assert result.exit_code == 0, result.output\n"
        "assert all(verb in result.output for verb in cli.VERBS)\n"
        "for verb in ('simulate', 'memory', 'config', 'goodput', 'calibrate'):\n"
        "    assert CliRunner().invoke(cli.main, [verb, '--help']).exit_code == 0, verb\n"
        "    assert CliRunner().invoke(cli.main, [verb, '--no-such-flag']).exit_code == 2, verb\n"
        "heavy = {'torch', 'numpy', 'pyarrow', 'simpy', 'networkx', 'plotly'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_verb_stands_below_one_heading() -> None:
    assert sorted(sum(cli.SECTIONS.values(), ())) == sorted(cli.VERBS)
    shown = CliRunner().invoke(cli.main, ["--help"], terminal_width=80).output
    assert all(f"\n{heading}:\n" in shown for heading in cli.SECTIONS)


def commands_of(verb: str) -> Iterator[tuple[list[str], click.Command]]:
    """Yield the words and the command of *verb*, then of its parts."""
    context = click.Context(cli.main)
    found = cli.main.get_command(context, verb)
    assert found is not None
    yield [verb], found
    if isinstance(found, click.Group):
        yield from (([verb, name], part) for name, part in found.commands.items())


@pytest.mark.parametrize("verb", sorted(cli.VERBS))
def test_every_verb_and_every_option_explains_itself(verb: str) -> None:
    for words, command in commands_of(verb):
        shown = CliRunner().invoke(cli.main, [*words, "--help"], terminal_width=80)
        assert shown.exit_code == 0, shown.output
        assert "Usage:" in shown.output
        assert [p.name for p in command.params if isinstance(p, click.Option) and not p.help] == []


@pytest.mark.parametrize("verb", sorted(cli.VERBS))
def test_no_flag_takes_a_number_that_a_document_could_not_hold(verb: str) -> None:
    numbers = click.types.IntParamType | click.types.FloatParamType
    for _, command in commands_of(verb):
        for param in command.params:
            for text in ("nan", "inf", str(-(10**26)), str(10**26)):
                convert: Any = param.type.convert
                whole = isinstance(param.type, click.types.IntParamType)
                if isinstance(param.type, numbers) and (whole or text in ("nan", "inf")):
                    with pytest.raises(click.BadParameter):
                        convert(text, param, None)


@pytest.mark.parametrize("verb", ["bench", "topology", "validate"])
def test_what_a_part_of_a_verb_does_fits_on_its_line(verb: str) -> None:
    shown = CliRunner().invoke(cli.main, [verb, "--help"], terminal_width=80).output
    parts = shown.partition("Commands:")[2].strip().splitlines()
    assert len(parts) == len(list(commands_of(verb))) - 1
    assert [line for line in parts if "..." in line] == []


@pytest.mark.parametrize("verb", ["simulate", "memory", "config", "calibrate"])
def test_settings_of_a_job_stand_below_headings_and_what_the_verb_writes_before_them(verb: str) -> None:
    shown = CliRunner().invoke(cli.main, [verb, "--help"]).output
    own, *sections = shown.partition("\nOptions:\n")[2].split("\n\n")
    assert "--json" in own
    assert re.findall(r"^  (?! )[^-].*", own, re.MULTILINE) == []  # options alone, no arguments
    assert "--tp" not in own
    headings = [section.partition("\n")[0] for section in sections]
    assert headings == [f"{heading}:" for heading in LISTED]
    for section, rows in zip(sections, LISTED.values(), strict=True):
        names = [flag_of(name) for name in rows]
        assert [name for name in names if not re.search(rf"^  {name}\b", section, re.MULTILINE)] == []


def examples(text: str) -> list[list[str]]:
    """Return the commands in a help text, as a shell splits them, without what they launch or write to."""
    lines = text.replace("\\\n", " ").splitlines()
    split = [shlex.split(line) for line in lines if line.startswith("      foretrace ")]
    return [one[1 : one.index("--")] if "--" in one else one[1:] for one in split]


@pytest.mark.parametrize("verb", sorted(cli.VERBS))
def test_examples_in_help_texts_are_commands_that_a_shell_takes(verb: str) -> None:
    for words, _ in commands_of(verb):
        shown = CliRunner().invoke(cli.main, [*words, "--help"], terminal_width=80).output
        assert all(len(line) <= 80 for line in shown.splitlines())
        for example in examples(shown):
            named = {tuple(path): command for path, command in commands_of(example[0])}
            command = named.get(tuple(example[:2])) or named[(example[0],)]
            known = {flag for option in command.params for flag in option.opts}
            assert {word for word in example if word.startswith("-")} <= known, example


def test_long_examples_go_on_behind_a_backslash() -> None:
    flags = " ".join(f"--flag-{i} value" for i in range(9))
    kept = cli.with_examples(f"Say it.\n\n    For example: foretrace x {flags}\n\nfor all of them")
    assert kept.startswith("Say it.\n\nFor example:\n\n\b\n    foretrace x --flag-0 value")
    assert examples(kept.replace("\b\n", "  ")) == [["x", *flags.split()]]
    assert kept.endswith("value\n\nfor all of them")


@pytest.mark.parametrize("name", foretrace.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(foretrace, name) is not None


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = foretrace.simulat  # type: ignore[attr-defined]  # which a type checker sees, too


def test_simulating_never_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch must not be imported')\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"from foretrace import cli; cli.main({[*SIMULATE, '--json']!r})"
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
        assert_one_line(start("simulat"), "no verb 'simulat': did you mean simulate?")
        assert_one_line(run("zzz"), "no verb 'zzz': one of simulate, rehearse")

    def test_unknown_part_of_a_verb(self) -> None:
        assert_one_line(run("validate", "setps"), "'setps'", "steps", "validate --help")

    def test_unknown_option(self) -> None:
        assert_one_line(run(*SIMULATE, "--tensor-parallel", "8"), "--tensor-parallel", "simulate --help")

    def test_batch_that_does_not_divide(self) -> None:
        assert_one_line(run(*SIMULATE, "--global-batch", "33"), "33", "32")

    def test_tp_that_does_not_divide_the_heads(self) -> None:
        args = "simulate --model llama3-8b --cluster dgx-h100 --gpus 6 --tp 6 --global-batch 32".split()
        assert_one_line(run(*args), "tp=6")

    def test_output_in_a_file_that_is_in_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        result = run(*SIMULATE, "-o", str(tmp_path / "file" / "run"))
        assert_one_line(result, "file")

    @pytest.mark.parametrize(
        "words",
        [
            ["analyze", "NAMELESS"],
            [*SIMULATE, "-o", "NAMELESS/run"],
            ["record", "-o", "NAMELESS/run", "--", "true"],
            ["rehearse", "--world-size", "2", "-o", "NAMELESS/run", "--", "script.py"],
        ],
    )
    def test_a_path_that_is_not_utf8(self, words: list[str], tmp_path: Path) -> None:
        """Arrow takes UTF-8 alone; Linux takes anything."""
        nameless = tmp_path / "\udcff"
        nameless.mkdir()
        (tmp_path / "script.py").touch()
        if "rehearse" in words:
            pytest.importorskip("torch")
        words = [word.replace("NAMELESS", str(nameless)) for word in words]
        result = run(*[str(tmp_path / word) if word == "script.py" else word for word in words])
        assert_one_line(result, "its path is not UTF-8 text")
        assert list(nameless.iterdir()) == []


@pytest.mark.parametrize("words", [[], ["validate"], ["topology"]])
def test_a_command_without_a_verb_shows_its_help_on_lines_of_their_own(words: list[str]) -> None:
    done = CliRunner().invoke(cli.main, words)
    assert done.exit_code == (2 if cli._NO_WORDS else 0)  # click 8.1 ends well
    assert done.output == CliRunner().invoke(cli.main, [*words, "--help"]).output


@pytest.mark.parametrize("words", [["topology", "list"], ["topology", "list", "--json"], ["--help"]])
def test_a_full_disk_behind_the_output_is_one_line(words: list[str]) -> None:
    if not Path("/dev/full").is_char_device():
        pytest.skip("needs /dev/full")
    command = [sys.executable, "-m", "foretrace", *words]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "Error: cannot write the output: No space left on device\n")


def test_output_that_the_terminal_cannot_show_is_escaped() -> None:
    done = start(*SIMULATE, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xb5s" in done.stdout


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


def test_a_finished_run_with_a_missing_rank_is_refused_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    assert run(*SIMULATE, "--ranks", "all", "-o", str(out)).returncode == 0
    (out / "spans" / "rank-00003.arrow").unlink()
    for words in (["analyze", str(out)], ["compare", str(out), str(out)], ["report", str(out)]):
        assert_one_line(run(*words), "rank 3 of 16", "--partial")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    result = run("analyze", str(out), "--partial", "--json")
    assert result.returncode == 0, result.stderr
    assert any("rank 3" in warning for warning in json.loads(result.stdout)["warnings"])


@pytest.mark.parametrize("begun", [False, True])
def test_ctrl_c_ends_a_command_with_130_and_without_a_word(tmp_path: Path, *, begun: bool) -> None:
    """While its libraries are loaded, and while a verb works."""
    code = (
        "import os, signal, sys, foretrace.cli as cli\n"
        "from foretrace.__main__ import main\n"
        "stop = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        + ("import foretrace.traces.reader as at; at.open_run = stop\n" if begun else "cli._module = stop\n")
        + f"sys.argv[1:] = ['analyze', {str(tmp_path)!r}]\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode in (130, -signal.SIGINT)  # which a shell calls 130, too
    assert (done.stdout, done.stderr.strip()) == ("", "")
