"""The verb serves, says where, and ends on Ctrl-C."""

import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]

TELLS_OF_ITS_END = """\
import atexit, runpy, sys
atexit.register(print, "torn down while threads compile", file=sys.stderr)
runpy.run_module("foretrace", run_name="__main__", alter_sys=True)
"""
"""Says when the interpreter is finalized, which a thread in the midst of compiling may turn into SIGABRT."""


def test_serve_says_where_it_is_and_ends_when_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-c", TELLS_OF_ITS_END, "serve", str(tmp_path), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as served:
        assert served.stdout is not None
        said = served.stdout.readline() + served.stdout.readline() + served.stdout.readline()
        (address,) = set(re.findall(r"http://127\.0\.0\.1:\d+/", said))
        with urllib.request.urlopen(address, timeout=20) as answer:
            assert b"nothing here yet" in answer.read()
        with urllib.request.urlopen(f"{address}plan", timeout=20) as answer:
            assert b'data-mode="plan"' in answer.read()
        served.send_signal(signal.SIGINT)
        _, errors = served.communicate(timeout=60)
    assert served.returncode == 0
    assert errors == ""


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "foretrace", "serve", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
