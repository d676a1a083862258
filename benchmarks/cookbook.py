"""Runs the commands of docs/cookbook.md and writes what they print into it.

python benchmarks/cookbook.py [NAME ...]
"""

from __future__ import annotations

import argparse
import re
import shlex
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

from click.testing import CliRunner

from foretrace.cli import main as foretrace

PAGE = Path(__file__).parents[1] / "docs" / "cookbook.md"
LINES = 16
"""Lines of an output that the page keeps."""

COMMANDS = {
    "zero": "advise --model llama2-7b --cluster dgx-a100 --gpus 4 --seq-len 4096 --global-batch 32",
    "bubble": "bubble --stages 32 --micro-batches 8,16,32,64 --schedule 1f1b,interleaved-1f1b,zb-h1",
    "layout": "search --model llama3-405b --cluster dgx-h100 --gpus 2048 --global-batch 2048 --seq-len 8192 "
    "--tp 8 --pp 16,32,64 --micro-batch 1 --schedule 1f1b,zb-v --sharding zero1 --recompute none --top 3 "
    "--why 3",
    "all-reduce": 'topology cost a100-ethernet all_reduce "141 GB" --gpus 256',
    "all-reduce-rdma": 'topology cost a100-roce100.toml all_reduce "141 GB" --gpus 256',
    "gpt3": "simulate --model gpt3-175b --cluster dgx-a100 --gpus 1024 --tp 8 --pp 16 --global-batch 1536 "
    "--recompute full --no-picture",
}
"""The command of each question."""

FILE = re.compile(r"^```toml\n# (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""A file that the page shows: its name in a comment, then what is in it."""


def printed(command: str, page: str) -> str:
    """Return what *command* prints beside the files that *page* shows.

    Raises:
        RuntimeError: it fails.
    """
    runner = CliRunner(env={"COLUMNS": "110"})
    with TemporaryDirectory() as folder, chdir(folder):
        for name, text in FILE.findall(page):
            Path(name).write_text(text, encoding="utf-8")
        done = runner.invoke(foretrace, shlex.split(command))
    if done.exit_code:
        raise RuntimeError(f"{command}: {done.output}")
    return done.stdout


def filled(page: str, name: str, output: str) -> str:
    """Return *page* with *output* between the markers of *name*."""
    lines = [line.rstrip() for line in output.rstrip().splitlines()]
    kept = lines if len(lines) <= 2 * LINES else [*lines[:LINES], "..."]
    text = "\n".join([f"<!-- {name} -->", "", "```", f"$ foretrace {COMMANDS[name]}", *kept, "```", ""])
    pattern = re.compile(rf"<!-- {name} -->.*?<!-- /{name} -->", re.DOTALL)
    return pattern.sub(lambda _: f"{text}\n<!-- /{name} -->", page)


def main() -> None:
    """Run what is named, or everything, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[[], *COMMANDS])
    names = parser.parse_args().names or list(COMMANDS)
    page = PAGE.read_text(encoding="utf-8")
    for name in names:
        page = filled(page, name, printed(COMMANDS[name], page))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
