"""A verb that is killed at any moment leaves what was there or what it writes; the next one, nothing else."""

import os
import subprocess
import sys
from pathlib import Path

from tests.fuzzing import CORPUS

N_KILLS = os.environ.get("FORETRACE_KILLS", "9")

SCRIPT = """
import os, random, shutil, signal, sys, time
from pathlib import Path
from click.testing import CliRunner
from foretrace.cli import main
from foretrace.traces.store import open_run

JOB = "simulate --model gpt2 --cluster dgx-h100 --gpus 8 --global-batch 8 --seq-len 64"
KINETO = f"ingest {sys.argv[1]}/kineto.trace.json -o out/it"
VERBS = [
    (f"{JOB} --steps 100 -o out/it", f"{JOB} --steps 101 -o out/it"),
    (KINETO, KINETO.replace("kineto", "called")),
    *((f"{verb} -o out/it{end}", f"{verb.replace('one', 'two')} -o out/it{end}") for verb, end in (
        ("report one", ".html"), ("export one", ".csv"), ("export one", ".pftrace"),
    )),
    tuple(f"topology draw dgx-h100 --gpus {n} -o out/it.svg" for n in (8, 16)),
    ("calibrate two --model gpt2 --cluster dgx-h100 -o out/it.toml",) * 2,
]

def do(words):
    done = CliRunner().invoke(main, words.split())
    assert done.exit_code == 0, (words, done.output)

def state():
    (found,) = Path("out").glob("it*")
    return found.read_bytes() if found.is_file() else open_run(found).spans()

def begin():
    shutil.rmtree("out", ignore_errors=True)
    os.mkdir("out")

do(f"{JOB} --steps 6 -o one")
do(f"{JOB} --steps 9 -o two")
random.seed(0)
n_killed, written = 0, {}
for number in range(int(sys.argv[2])):
    before, words = VERBS[number % len(VERBS)]
    for one in (words, before):
        if one == before or one not in written:
            begin()
            since = time.perf_counter()
            do(one)
            written[one] = state()
            took_s = time.perf_counter() - since
    states = [written[words], written[before]]
    child = os.fork()
    if not child:
        CliRunner().invoke(main, words.split())
        os._exit(0)
    time.sleep(random.uniform(0, took_s))
    os.kill(child, signal.SIGKILL)
    n_killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert state() in states, words
    do(words)
    assert state() == states[0], words
    assert len(os.listdir("out")) == 1, (words, os.listdir("out"))
print(n_killed)
"""


def test_a_verb_that_is_killed_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(CORPUS), N_KILLS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= int(N_KILLS) // 2
