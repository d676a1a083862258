"""Writes ``simulator/intervals.toml``, the errors that predictions carry, from what ``validate`` printed.

python benchmarks/validate.py steps steps.csv --json > steps.json
python benchmarks/validate.py memory memory.csv --json > memory.json
python benchmarks/intervals.py steps.json memory.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from measured.judge import LIKELY

FILE: Final = Path(__file__).parents[1] / "simulator" / "intervals.toml"


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", type=Path)
    parser.add_argument("memory", type=Path)
    parser.add_argument("--output", type=Path, default=FILE)
    args = parser.parse_args()
    steps, memory = (json.loads(path.read_text(encoding="utf-8")) for path in (args.steps, args.memory))
    args.output.write_text("\n".join(lines(steps["errors"], memory["errors"])), encoding="utf-8")


def lines(steps: Mapping[str, Any], memory: Mapping[str, Any]) -> Iterable[str]:
    """Yield the lines of the file."""
    yield "# Written by benchmarks/intervals.py. Measured over predicted: shares of the prediction between"
    yield "# which the figure of 8 in 10 runs lies, each family of runs counting the same."
    yield f"level = {LIKELY[1] - LIKELY[0]:.1f}"
    for kind, classes in (("step_time", steps), ("memory", memory)):
        for name, found in classes.items():
            yield ""
            yield f'[{kind}."{name}"]'
            yield from (f"{key} = {round(value, 4)}" for key, value in found.items())
    yield ""


if __name__ == "__main__":
    main()
