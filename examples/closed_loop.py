"""The closed loop on this machine: record one layout, calibrate on it, predict others, record them, compare.

Two processes train a small Llama under DDP. Its recording calibrates the simulator. With those constants
other layouts (FSDP2, tensor parallelism, a pipeline) and a deeper model are predicted, and recorded.
Everything is recorded in turns, so that the noise between runs of the same thing is known: an error below it
means nothing. What others do on the machine meanwhile is measured, too: with ``--others 0.1`` a recording
waits until they use less than a tenth of the processor, and is made again if they used more after all.

    python examples/closed_loop.py --output closed-loop
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import click

from foretrace.traces.report.format import format_share

EXAMPLES = Path(__file__).resolve().parent
MODEL = EXAMPLES / "tiny-llama.json"
TRIES = 6
LOOK_S = 2.0
WAIT_S = 3.0


@dataclass(frozen=True, slots=True)
class Run:
    """A training to record.

    Attributes:
        name: of its recordings.
        title: for people.
        script: beside this file.
        layers: of the model; 0 for as many as its file says.
    """

    name: str
    title: str
    script: str
    layers: int = 0


RUNS = (
    Run("ddp", "DDP", "train_ddp.py"),
    Run("deeper", "DDP, 12 layers instead of 8", "train_ddp.py", layers=12),
    Run("fsdp2", "FSDP2", "train_fsdp2.py"),
    Run("pipeline", "pipeline, 1F1B", "train_pp.py"),
    Run("tensor", "tensor parallelism", "train_tp.py"),
)
"""The first one calibrates."""


@click.command()
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), default=Path("closed-loop"))
@click.option("--turns", type=click.IntRange(min=1), default=3, help="Recordings of each. [default: 3]")
@click.option("--steps", type=click.IntRange(min=10), default=16, help="Steps of each. [default: 16]")
@click.option("--others", type=click.FloatRange(0, 1), default=1.0, help="Share they may use. [default: 1]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(output: Path, turns: int, steps: int, others: float, *, as_json: bool) -> None:
    """Record, calibrate, predict, compare; recordings and predictions go to OUTPUT."""
    output.mkdir(parents=True, exist_ok=True)
    used = []
    for turn in range(turns):
        for run in RUNS:
            used.append(record(run, output, turn, steps, others))
    calibration = output / "calibration.toml"
    first = output / f"{RUNS[0].name}-0"
    found = foretrace("calibrate", "--undisturbed", str(first), "-o", str(calibration))
    rows = [compared(run, output, turns, calibration) for run in RUNS]
    if as_json:
        click.echo(json.dumps({"calibration": found, "runs": rows, "others": used}))
        return
    click.echo(f"{'':30}{'measured':>10}{'noise':>9}{'catalogue':>12}{'calibrated':>13}")
    for row in rows:
        click.echo(
            f"{row['title']:30}{row['measured_s'] * 1e3:7.0f} ms{format_share(row['noise']):>9}"
            f"{format_share(row['error_before'], '+.1f'):>12}{format_share(row['error_after'], '+.1f'):>13}"
        )
    click.echo("noise: how far turns are from their mean, on average; errors: predicted / measured - 1")
    click.echo(
        f"others used {format_share(mean(used), '.0f')} of the processor meanwhile, "
        f"{format_share(max(used), '.0f')} at most"
    )


def record(run: Run, output: Path, turn: int, steps: int, others: float) -> float:
    """Record *run* with two processes; return the share of the processor that others used meanwhile."""
    used = 1.0
    for _ in range(TRIES):
        while others < 1 and share_of_others(lambda: time.sleep(LOOK_S)) > others:
            time.sleep(WAIT_S)
        used = share_of_others(lambda: record_once(run, output, turn, steps))
        if used <= others:
            break
    return used


def share_of_others(work: Callable[[], object]) -> float:
    """Return the share of all processors that others used while *work* was done."""
    before, own_before, began = busy_s(), own_s(), time.monotonic()
    work()
    elapsed_s = (time.monotonic() - began) * (os.cpu_count() or 1)
    return max((busy_s() - before) - (own_s() - own_before), 0.0) / elapsed_s


def busy_s() -> float:
    """Return the processor time that all processes of the machine have used since it started."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq, *_ = (int(field) for field in fields)
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """Return the processor time of this process and of all that it has started and that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def record_once(run: Run, output: Path, turn: int, steps: int) -> None:
    """Record *run* with two processes."""
    path = output / f"{run.name}-{turn}"
    if path.exists():
        shutil.rmtree(path)
    config = MODEL
    if run.layers:
        shape = json.loads(MODEL.read_text(encoding="utf-8"))
        config = output / f"{run.name}.json"
        config.write_text(json.dumps(shape | {"num_hidden_layers": run.layers}), encoding="utf-8")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(EXAMPLES / run.script), "--config", str(config), "--steps", str(steps)]
    foretrace("record", "-o", str(path), "--", *launch, *script)


def compared(run: Run, output: Path, turns: int, calibration: Path) -> dict[str, Any]:
    """Return how long a step of *run* took, how much that varies, and how far off predictions are."""
    times_s = [undisturbed_s(output / f"{run.name}-{turn}") for turn in range(turns)]
    measured_s = median(times_s)
    like = ("simulate", "--like", str(output / f"{run.name}-0"))
    before = foretrace(*like)["step_time_s"]
    after = foretrace(*like, "--calibration", str(calibration), "-o", str(output / f"{run.name}-predicted"))[
        "step_time_s"
    ]
    return {
        "name": run.name,
        "title": run.title,
        "measured_s": measured_s,
        "turns_s": times_s,
        "noise": mean(abs(time_s / mean(times_s) - 1) for time_s in times_s),
        "error_before": before / measured_s - 1,
        "error_after": after / measured_s - 1,
    }


def undisturbed_s(path: Path) -> float:
    """Return the median over the faster half of the steps: what others on the machine slow least."""
    steps = sorted(
        step["step_time_s"] for step in foretrace("analyze", str(path))["steps"] if step["averaged"]
    )
    return float(median(steps[: (len(steps) + 1) // 2]))


def foretrace(verb: str, *words: str) -> dict[str, Any]:
    """Run one foretrace command with ``--json`` and return its answer; end the example if it fails."""
    path = os.pathsep.join(filter(None, [str(EXAMPLES.parent / "src"), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, "-m", "foretrace", verb, "--json", *words],
        capture_output=True,
        text=True,
        check=False,
        env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path},
    )
    if result.returncode:
        click.echo(result.stderr, err=True)
        sys.exit(f"closed loop: foretrace {verb} ended with status {result.returncode}")
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


if __name__ == "__main__":
    main()
