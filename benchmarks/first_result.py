"""How long a user waits: from starting the process to the answer on the screen.

    python benchmarks/first_result.py [--repeat N] [--json]

Each command runs in a process of its own. Wall time depends on what else the machine does, so that
processor time and the largest resident memory stand beside it. The first case starts with an empty cache of
compiled code, as on the day of installation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
STEP: Final = (
    *(
        "simulate",
        "--model",
        "llama3-70b",
        "--cluster",
        "dgx-h100",
        "--gpus",
        "512",
        "--tp",
        "8",
        "--pp",
        "4",
    ),
    *("--global-batch", "1024", "--seq-len", "8192", "--json"),
)
CASES: Final[dict[str, tuple[str, ...]]] = {
    "foretrace --help": ("--help",),
    "llama3-8b on 8 GPUs": (
        *("simulate", "--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "8"),
        *("--global-batch", "64", "--json"),
    ),
    "llama3-70b on 512 GPUs": STEP,
    "the same, event engine": (*STEP, "--engine", "event"),
    "the same, every rank written": (*STEP, "--ranks", "all", "-o", "{scratch}/run"),
}


def main() -> None:
    """Run every command and print a table or one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as empty:
        rows = [
            {"case": "llama3-70b on 512 GPUs, nothing compiled yet", **run(STEP, {"NUMBA_CACHE_DIR": empty})}
        ]
    for name, command in CASES.items():
        runs = [run(command, {}) for _ in range(args.repeat)]
        rows.append({"case": name, **{key: median(one[key] for one in runs) for key in runs[0]}})
    if args.json:
        print(json.dumps({"repeat": args.repeat, "cases": rows}))
        return
    print(f"{'command':46} {'wall s':>7} {'CPU s':>7} {'MB':>6}")
    for row in rows:
        print(
            f"{row['case']:46} {row['wall_s']:>7.2f} {row['cpu_s']:>7.2f} {row['peak_rss_bytes'] / 1e6:>6.0f}"
        )


def run(command: tuple[str, ...], environment: dict[str, str]) -> dict[str, Any]:
    """Return wall time, processor time and memory of one command."""
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [part.replace("{scratch}", scratch) for part in command]
        begin = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "foretrace", *arguments],
            stdout=subprocess.DEVNULL,
            env={**os.environ, **environment},
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - begin
    if status:
        raise SystemExit(f"foretrace {' '.join(arguments)} failed")
    return {
        "wall_s": wall_s,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_rss_bytes": usage.ru_maxrss * 1024,
    }


if __name__ == "__main__":
    main()
