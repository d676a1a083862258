"""No verb runs what somebody has put into the folder that it is started in, whatever it is called."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from tests.fuzzing import command_of, undamaged

from foretrace.cli import VERBS

ALL_IN_ONE_PROCESS = """
import json, socketserver, sys
from foretrace.cli import main
socketserver.BaseServer.serve_forever = lambda self: None
for words in json.loads(sys.argv[1]):
    try:
        main(words, prog_name="foretrace")
    except SystemExit as ended:
        print(f"ended with {ended.code}:", *words, file=sys.stderr)
"""
"""Is started as the installed command is; ``python -m`` imports from the current folder by itself."""

TRAINING = """
import torch, numpy, random
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""

OTHERS = (
    *("serve --port 0", "model list", "model show gpt2", "model check gpt2 124M"),
    *("record -o recorded {python} {script}", "rehearse --world-size 1 -o rehearsed {script}"),
    "topology check {cluster}",
)
"""Verbs that the fuzzer does not run, or on what another verb has written."""

REFUSED = (
    *("topology detect -o .", "bench clock --processes 1"),
    *("bench kernels --against none", "bench collectives --against none"),
)
"""Verbs that measure for long; tests/tracer/test_bench_world.py starts the processes of all of them."""


def leaves() -> Iterator[str]:
    """Yield every verb that does something, of one word or two."""
    for verb in VERBS:
        command = command_of(verb)
        yield from (
            (f"{verb} {part}" for part in command.commands) if isinstance(command, click.Group) else (verb,)
        )


@pytest.mark.usefixtures("planted")
def test_no_verb_imports_anything_from_the_folder_it_is_started_in(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    script, started = tmp_path / "elsewhere" / "train.py", tmp_path / "elsewhere" / "command.py"
    script.write_text(TRAINING)
    started.write_text(ALL_IN_ONE_PROCESS)
    cluster = Path(__file__).parent / "corpus" / "example.cluster.toml"
    others = [one.format(python=sys.executable, script=script, cluster=cluster).split() for one in OTHERS]
    refused = [one.split() for one in REFUSED]
    tried = {
        verb: next(
            words for words in (*others, *undamaged(), *refused) if words[: len(verb.split())] == verb.split()
        )
        for verb in leaves()
    }
    command = [sys.executable, str(started), json.dumps([*tried.values()])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if line.startswith("ended with ")]
    expected = [f"ended with {2 if words in refused else 0}: {' '.join(words)}" for words in tried.values()]
    assert said == expected, done.stderr
