"""Runs a command whose compiled hooks are built with a sanitizer, and tells which reports are about them.

    python benchmarks/sanitized.py address pytest tests/tracer/test_native_faults.py
    python benchmarks/sanitized.py leak foretrace record -- torchrun --nproc-per-node 2 examples/train_ddp.py
    python benchmarks/sanitized.py thread pytest tests/tracer/test_native_transfers.py

``address`` looks for undefined behaviour, too. Only the hooks are built so: Python, torch and gloo are as
they are, and what is reported of them alone is counted, and no more. Of ``thread`` that means that what torch
synchronises by its own counters of references is not seen: hence the suppressions below. The exit status is
that of the command, or 1 where something is reported of the hooks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from foretrace.tracer.native.build import NAME, SWITCH
from foretrace.tracer.native.compiler import FLAGS, tools

SANITIZERS = {
    "address": ("-fsanitize=address,undefined -fno-sanitize=vptr", ["libasan.so", "libubsan.so"]),
    "leak": ("-fsanitize=address", ["libasan.so"]),
    "thread": ("-fsanitize=thread", ["libtsan.so"]),
}
"""What the compiler is told, and the libraries that have to be in a process before Python. Types that torch
hides cannot be compared, so that ``vptr`` is left out."""

OPTIONS = {  # torch has operators of its own to allocate and to free
    "address": "detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0",
    "leak": "detect_leaks=1:exitcode=0:alloc_dealloc_mismatch=0:detect_odr_violation=0",
    "thread": "exitcode=0:ignore_noninstrumented_modules=1:report_signal_unsafe=0:history_size=4",
}

OURS = (f"{NAME}-", "foretrace::")
"""What a report of the hooks says: their library, or the functions in it."""

SUPPRESSIONS = """
# Counters of references that torch, which is not built so, counts down, and what it frees then.
race:c10::intrusive_ptr
race:c10::ivalue::Future
"""


def environment(sanitizer: str, folder: Path) -> dict[str, str]:
    """Return an environment in which hooks are built with *sanitizer*, which writes to *folder*."""
    flags, libraries = SANITIZERS[sanitizer]
    compiler, _ = tools()
    preloaded = [_found(str(compiler), name) for name in [*libraries, "libstdc++.so.6"]]
    suppressions = folder / "suppressions"
    suppressions.write_text(SUPPRESSIONS)
    log = f"log_path={folder / 'report'}"
    undefined = f"print_stacktrace=1:halt_on_error=1:{log}"
    return {
        **os.environ,
        SWITCH: "1",
        FLAGS: f"-g -O1 -fno-omit-frame-pointer {flags}",
        "LD_PRELOAD": " ".join(preloaded),
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": f"{OPTIONS.get(sanitizer, '')}:{log}",
        "TSAN_OPTIONS": f"{OPTIONS['thread']}:{log}:suppressions={suppressions}",
        "UBSAN_OPTIONS": undefined,
    }


def _found(compiler: str, library: str) -> str:
    """Return where *compiler* has a library."""
    done = subprocess.run(
        [compiler, f"-print-file-name={library}"], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


def parted(report: str) -> list[str]:
    """Return the single reports in what one process has written, or its leaks."""
    marks = ("==================", "Direct leak", "Indirect leak")
    found: list[list[str]] = [[]]
    for line in report.splitlines():
        if line.startswith(marks):
            found.append([])
        found[-1].append(line)
    return [text for lines in found if len(lines) > 1 and (text := "\n".join(lines))]


def main() -> int:
    sanitizer, *command = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="sanitized-") as name:
        folder = Path(name)
        status = subprocess.run(command, env=environment(sanitizer, folder), check=False).returncode
        reports = [
            one for path in folder.glob("report.*") for one in parted(path.read_text(errors="replace"))
        ]
    ours = [one for one in reports if any(mark in one for mark in OURS)]
    for one in ours:
        print(one)
    print(f"{len(ours)} reports of the hooks, {len(reports) - len(ours)} of others")
    return status or bool(ours)


if __name__ == "__main__":
    sys.exit(main())
