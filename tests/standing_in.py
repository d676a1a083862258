"""Stands in for Python where one that has loaded torch splits itself: ``standing_in.py ADDRESS WORD...``.

It hands over what it was given (arguments, environment, folder, open files), passes signals on, and ends as
the other one does; if this one is killed, so is the other. Where the other cannot do what is asked, this one
becomes Python itself. Processors stand for GPUs in parts of another process, as that begins while torch is
loaded, if there is one.
"""

import json
import os
import resource
import signal
import socket
import sys
from typing import Any

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)

ON_CPU = "FORETRACE_ON_CPU"  # of foretrace.tracer.process, which would take long to import


def parsed(words: list[str]) -> dict[str, Any] | None:
    """Return what Python is to do with *words*, None if another has to do it."""
    rest, flags, warnings = [*words], set(), []
    while rest and (rest[0] in {"-u", "-P"} or rest[0].startswith("-W")):
        flag = rest.pop(0)
        if flag.startswith("-W"):
            warnings.append(flag[2:] or rest.pop(0))
        flags.add(flag)
    if len(rest) > 1 and rest[0] in {"-c", "-m"}:
        how = rest[0]
        what = rest.pop(1)
    elif rest and rest[0].endswith(".py") and os.path.isfile(rest[0]):  # noqa: PTH113 - loads no pathlib
        how, what = "file", rest[0]
    else:
        return None
    return {"how": how, "what": what, "argv": rest, "flags": sorted(flags), "warnings": warnings}


def main(address: str, words: list[str]) -> None:
    """Have the process that listens at *address* do *words*; end as what it has split off."""
    told, address = parsed(words), address + os.environ.get(ON_CPU, "")
    if told is None or not os.path.exists(address):  # noqa: PTH110
        os.execv(sys.executable, [sys.executable, *words])
    files = [number for number in range(3, 256) if _is_open(number)]
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        for passed_on in PASSED_ON:
            signal.signal(passed_on, lambda sent, _: server.sendall(bytes([sent])))
        folder = os.getcwd()  # noqa: PTH109
        told |= {"words": words, "env": dict(os.environ), "cwd": folder, "files": [0, 1, 2, *files]}
        socket.send_fds(server, [b"\n"], told["files"])
        server.sendall(json.dumps(told).encode() + b"\n")
        for number in files:
            os.close(number)
        status = int(server.makefile().readline() or 255)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
