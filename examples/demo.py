"""The whole loop on this machine: record one small job, calibrate on it, predict two others, record, compare.

Before that it predicts a step of 512 GPUs, which takes no GPU at all. Runs the commands that a user would
type, and prints each one. Without a GPU for every process the recorded runs talk over gloo, with enough of
them over NCCL.

    python examples/demo.py --output demo
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import click

from foretrace.traces.report.format import format_share

EXAMPLES = Path(__file__).resolve().parent
MODEL = EXAMPLES / "tiny-llama.json"
STEPS = 12
SEQ_LEN = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallRun:
    """A training script to record here, and the flags that describe the same run to the simulator."""

    name: str
    title: str
    script: str
    script_flags: tuple[str, ...]
    simulate_flags: tuple[str, ...]


def small_runs(n_processes: int) -> list[SmallRun]:
    """Return the runs of the demo: one to calibrate on, then two that are predicted."""
    shape = ("--seq-len", str(SEQ_LEN))
    replicas = ("--micro-batch", "4", "--global-batch", str(4 * n_processes), *shape)
    return [
        SmallRun(
            name="ddp",
            title=f"a small Llama under DDP on {n_processes} processes",
            script="train_ddp.py",
            script_flags=("--micro-batch", "4", *shape),
            simulate_flags=("--sharding", "ddp", *replicas),
        ),
        SmallRun(
            name="fsdp2",
            title="the same model under FSDP2",
            script="train_fsdp2.py",
            script_flags=("--micro-batch", "4", *shape),
            simulate_flags=("--sharding", "fsdp", *replicas),
        ),
        SmallRun(
            name="pipeline",
            title=f"the same model as a pipeline of {n_processes} stages, 1F1B",
            script="train_pp.py",
            script_flags=("--schedule", "1f1b", "--micro-batch", "1", "--microbatches", "8", *shape),
            simulate_flags=(
                *("--pp", str(n_processes), "--schedule", "1f1b", "--sharding", "ddp"),
                *("--micro-batch", "1", "--global-batch", "8", *shape),
            ),
        ),
    ]


@click.command()
@click.option(
    "--output", type=click.Path(path_type=Path, file_okay=False), default=Path("demo"), show_default=True
)
def main(output: Path) -> None:
    """Run the demo; its runs and reports go to OUTPUT."""
    output.mkdir(parents=True, exist_ok=True)
    started, load = time.monotonic(), os.getloadavg()[0]
    n_processes = min(4, max(2, os.cpu_count() or 2))

    heading("1. Predict: one step of Llama-3-70B on 512 H100s, TP 8 x PP 4 x DP 16")
    big = predict_big(output)
    heading("2. Measure this machine, to predict on it")
    machine = output / "this-machine.toml"
    foretrace("topology", "detect", "--processes", str(n_processes), "-o", machine)
    first, *others = small_runs(n_processes)
    heading(f"3. Record {first.title}, and calibrate on it")
    calibration = calibrate(first, n_processes, machine, output)
    found = []
    for number, run in enumerate(others, start=4):
        heading(f"{number}. Predict, record and compare: {run.title}")
        found.append(predict_and_record(run, n_processes, machine, calibration, output))
    conclude(big, found, output, time.monotonic() - started, load)


def predict_big(output: Path) -> dict[str, Any]:
    """Simulate the 512-GPU step and write its report."""
    flags = (
        "--model llama3-70b --cluster dgx-h100 --gpus 512 --tp 8 --pp 4 --global-batch 1024 --seq-len 8192"
    )
    run = fresh(output / "llama3-70b-512")
    return foretrace("simulate", *flags.split(), "-o", run, "--report", run.with_suffix(".html"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run that was predicted, then recorded.

    Attributes:
        run: what it was.
        comparison: what ``compare`` says of prediction and recording.
        noise: by which part of their median the recorded steps differ, between the quartiles.
    """

    run: SmallRun
    comparison: dict[str, Any]
    noise: float


def calibrate(run: SmallRun, n_processes: int, machine: Path, output: Path) -> Path:
    """Record *run* here and fit the constants of *machine* to it; return the file of factors."""
    recorded, _ = record(run, n_processes, output)
    calibration = output / "calibration.toml"
    foretrace("calibrate", recorded, *where(machine, n_processes), *run.simulate_flags, "-o", calibration)
    return calibration


def predict_and_record(
    run: SmallRun, n_processes: int, machine: Path, calibration: Path, output: Path
) -> Outcome:
    """Simulate *run* on the calibrated machine, then record it, and report on both."""
    simulated = fresh(output / f"{run.name}-simulated")
    flags = [*where(machine, n_processes), *run.simulate_flags, "--calibration", calibration]
    foretrace("simulate", *flags, "-o", simulated, "--report", simulated.with_suffix(".html"))
    recorded, told = record(run, n_processes, output)
    foretrace("report", recorded, "-o", recorded.with_suffix(".html"))
    foretrace("report", simulated, recorded, "-o", output / f"{run.name}-compared.html")
    steps_s = sorted(step["step_time_s"] for step in told["steps"] if step["averaged"])
    low_s, median_s, high_s = quantiles(steps_s, n=4)
    comparison = foretrace("compare", simulated, recorded)
    return Outcome(run=run, comparison=comparison, noise=(high_s - low_s) / median_s)


def record(run: SmallRun, n_processes: int, output: Path) -> tuple[Path, dict[str, Any]]:
    """Record *run* here; return where, and what ``record`` says."""
    recorded = fresh(output / f"{run.name}-recorded")
    script: list[str | Path] = [EXAMPLES / run.script, "--steps", str(STEPS), *run.script_flags]
    launch: list[str | Path] = ["torchrun", "--standalone", "--nproc-per-node", str(n_processes), *script]
    return recorded, foretrace("record", "-o", recorded, "--", *launch)


def where(machine: Path, n_processes: int) -> list[str | Path]:
    """Return the flags that say what trains on what: plain PyTorch, eager kernels, fp32."""
    return [
        *("--model", MODEL, "--cluster", machine, "--gpus", str(n_processes)),
        *("--precision", "fp32", "--framework", "torchtitan"),
    ]


def conclude(
    big: dict[str, Any], found: Sequence[Outcome], output: Path, elapsed_s: float, load: float
) -> None:
    """Print what the runs say and where the reports are. *load*: of the machine, before the demo began."""
    heading(f"What came out, after {elapsed_s:.0f} s")
    click.echo(
        f"Llama-3-70B on 512 H100s: {big['step_time_s']:.2f} s per step, "
        f"{big['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU, MFU {format_share(big['mfu'])}; "
        f"bubble {format_share(big['bubble_fraction'])}, exposed communication "
        f"{format_share(big['exposed_comm_fraction'])}; "
        f"{big['peak_memory_bytes'] / 1e9:.0f} GB at most on a GPU, "
        f"{'which fits' if big['fits'] else 'which does not fit'}."
    )
    for one in found:
        answer, title = one.comparison, one.run.title
        a_ms, b_ms = answer["a"]["step_time_s"] * 1e3, answer["b"]["step_time_s"] * 1e3
        worst = max(answer["causes"], key=lambda cause: abs(cause["difference_s"]))
        click.echo(
            f"{title[0].upper()}{title[1:]}: {a_ms:.0f} ms predicted, then {b_ms:.0f} ms recorded "
            f"({format_share(answer['ratio'] - 1, '+.0f')}; steps themselves vary by "
            f"{format_share(one.noise, '.0f')}, between quartiles); most of the difference is "
            f"{worst['name'].replace(':', ' ')} ({worst['difference_s'] * 1e3:+.0f} ms)."
        )
    if load > (n := os.cpu_count() or 1) / 2:
        click.echo(
            f"This machine was busy before (load {load:.1f} on {n} processors): what was recorded also "
            "waited for other work, which no prediction knows. A quiet machine is nearer to it."
        )
    click.echo("\nOpen in a browser:")
    for page in sorted(output.glob("*.html")):
        click.echo(f"  {page}")


def heading(text: str) -> None:
    """Print a heading."""
    click.secho(f"\n{text}", bold=True)


def fresh(path: Path) -> Path:
    """Return *path* after removing the run that an earlier demo left there."""
    if (path / "run.json").is_file() or (path / "ranks").is_dir():
        shutil.rmtree(path)
    return path


def foretrace(*args: str | Path) -> dict[str, Any]:
    """Run one foretrace command with ``--json`` and return its answer; end the demo if it fails."""
    words = [str(arg) for arg in args]
    click.secho(f"$ foretrace {shlex.join(words)}", fg="cyan")
    command = [sys.executable, "-m", "foretrace", words[0], "--json", *words[1:]]
    if words[0] == "topology":  # the option belongs to the verb below it
        command = [sys.executable, "-m", "foretrace", *words, "--json"]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment())
    if result.returncode:
        click.echo(result.stdout, err=True)
        sys.exit(f"demo: that command ended with status {result.returncode}")
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def environment() -> dict[str, str]:
    """Return the environment of the commands: this checkout importable, one thread per process."""
    path = os.pathsep.join(filter(None, [str(EXAMPLES.parent / "src"), os.environ.get("PYTHONPATH")]))
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}


if __name__ == "__main__":
    main()
