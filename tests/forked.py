"""Scripts of Python that need not load torch: a process that has splits itself for each of them."""

import atexit
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretrace.tracer.launch import SITE
from foretrace.tracer.record import RUN_VARIABLE

SERVER = Path(__file__).parent / "preloaded.py"


class Part:
    """A process that was split off, with what ``subprocess.Popen`` has of it.

    Args:
        args: the command that it stands for.
        number: its number.
        server: the process that it was split off.
    """

    def __init__(self, args: Sequence[str], number: int, server: "Preloaded") -> None:
        self.args, self._number, self._server = args, number, server
        self.returncode: Any = None  # a number when it has ended

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait until it has ended, at most *timeout* seconds; return its output and its errors."""
        if self.returncode is None:
            self.returncode = self._server.ended(self._number, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        output, errors = (path.read_text() for path in self._server.outputs(self._number))
        return output, errors

    def poll(self) -> Any:
        """Return how it has ended, None if it has not."""
        if self.returncode is None:
            self.returncode = self._server.ended(self._number, 0.0)
        return self.returncode

    def terminate(self) -> None:
        """As `kill`."""
        self.kill()

    def kill(self) -> None:
        """End it, if it has not ended."""
        if self.returncode is None:
            self._server.say({"number": self._number})


class Preloaded:
    """The process that has loaded torch; it starts when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._n_parts = 0
        self._codes: dict[int, int] = {}

    def run(self, command: Sequence[str], env: Mapping[str, str], cwd: Path | None = None) -> Part:
        """Start *command*, of which ``runs`` is true, in *env*, in *cwd*, by default the present folder."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._n_parts += 1
        output, errors = self.outputs(self._n_parts)
        told = {"number": self._n_parts, "env": dict(env), "cwd": str(cwd or Path.cwd())}
        told["site"] = str(SITE) if RUN_VARIABLE in env else None
        self.say(told | {"output": str(output), "errors": str(errors)} | _parsed(command))
        return Part(command, self._n_parts, self)

    def _start(self) -> None:
        read, write = os.pipe()
        self._folder = tempfile.TemporaryDirectory()
        env = {**os.environ, "PYTHONPATH": str(SERVER.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER), str(write)], stdin=subprocess.PIPE, pass_fds=(write,), env=env
        )
        os.close(write)
        self._said = os.fdopen(read, "rb", buffering=0)

    def say(self, words: Mapping[str, Any]) -> None:
        """Tell it *words*."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps(words).encode() + b"\n")
            self._process.stdin.flush()

    def outputs(self, number: int) -> tuple[Path, Path]:
        """Return where the part of this number writes its output and its errors."""
        return Path(self._folder.name, f"{number}.out"), Path(self._folder.name, f"{number}.err")

    def ended(self, number: int, timeout_s: float) -> int | None:
        """Return how the part of this number has ended; None if it has not after *timeout_s*."""
        until = time.monotonic() + timeout_s
        while number not in self._codes:
            if not select.select([self._said], [], [], max(until - time.monotonic(), 0))[0]:
                return None
            line = self._said.readline()
            if not line:
                raise RuntimeError("the process that has loaded torch is gone")
            part, code = map(int, line.split())
            self._codes[part] = code
        return self._codes[number]

    def end(self) -> None:
        """End it, and what was split off."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()
            self._said.close()
            self._folder.cleanup()
        self._process = None


def runs(command: Sequence[str]) -> bool:
    """Return whether a process that has loaded torch can be *command*.

    Not on a machine with GPUs: who has looked for them cannot be split. Only Linux tells when a part ends.
    """
    if command[0] != sys.executable or Path("/dev/nvidiactl").exists() or not hasattr(os, "pidfd_open"):
        return False
    told = _parsed(command)
    return told["source"] is not None or str(told["argv"][0]).endswith(".py")


def _parsed(command: Sequence[str]) -> dict[str, Any]:
    """Return the arguments, the source, if it is given, and what to do with warnings of *command*."""
    words, ways = [*command[1:]], []
    while words[0] == "-W":
        ways.append(words[1])
        del words[:2]
    source = words.pop(1) if words[0] == "-c" else None
    return {"argv": words, "source": source, "warnings": ways}


PRELOADED = Preloaded()
atexit.register(PRELOADED.end)
