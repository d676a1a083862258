"""Closes the loop on real traces: calibrates on each, predicts it, and holds the prediction against it.

    python benchmarks/trace_loop.py ../shared/real_traces
    python benchmarks/trace_loop.py TraceLens/tests/traces --across

A class of operators as a whole takes what it took, for its factor is fitted to that. What is tested is the
step that comes of it (what overlaps, what the host holds up), and operators that were held back: half of the
distinct ones of a class, predicted by the other half, the worse of both ways. Prints the table of
docs/calibration.md; parts and classes below 5 % of a step are left out.

``--across``: of models that were traced on two machines (AMD-AGI/TraceLens, tests/traces, folders h100 and
mi300), what the trace of one says of the other, before anything is fitted.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

from foretrace.simulator.recorded.calibrate import Calibrated, Error
from foretrace.simulator.recorded.operators import PAUSES, UNKNOWN, UNTOLD, calibrate_traced
from foretrace.simulator.rehearsed.run import simulate_rehearsal
from foretrace.topologies.catalog import load_cluster
from foretrace.tracer.ingest.ingest import ingest
from foretrace.traces.report.format import format_share
from foretrace.traces.store import open_run

MI250 = str(Path(__file__).parent / "tables" / "one_mi250x.toml")
TRACES = (
    ("fresh/h100_eager_qwen1.5_0.5b.json.gz", "dgx-h100", "Qwen1.5-0.5B, H100"),
    ("fresh/h100_eager_timesformer.json.gz", "dgx-h100", "TimeSformer, H100"),
    ("fresh/h100_eager_vit_nsfw.json.gz", "dgx-h100", "ViT, H100"),
    ("fresh/h100_eager_bert_small.json.gz", "dgx-h100", "BERT, H100"),
    ("tracelens/mi300x8_rank0_resnet_ddp_rccl.json.gz", "mi300x", "ResNet, DDP, MI300X"),
    ("param_dlrm_v100x8/kineto", "dgx1-v100", "DLRM, 8 V100"),
    ("fresh/mi250_minitoy_train_rocm6.2.json.gz", MI250, "MLP, MI250"),
)
"""File, machine, and what it is. Other files with a device say no shapes, or too much of their time is spent
in operators of unknown work: they are refused."""

AS_IT_TOOK = (UNKNOWN, UNTOLD, PAUSES)
"""Parts that nothing predicts: they are taken from the trace as they are."""

LEAST_SHARE = 0.05  # of a step, from which on a part is held against the trace


def closed(path: Path, machine: str, folder: Path) -> Calibrated:
    """Return the calibration on the trace at *path*, and how far the prediction of it is off."""
    run = folder / path.name
    ingest([path], run, explain=True)
    return calibrate_traced(open_run(run), lambda n: load_cluster(machine, n))


def worst(found: Calibrated) -> Error:
    """Return the part of the step that is off most, of those that matter and are predicted."""
    step, *parts = found.errors
    return max(
        (
            one
            for one in parts
            if one.measured_s >= LEAST_SHARE * step.measured_s and one.name not in AS_IT_TOOK
        ),
        key=lambda one: abs(one.off_after),
    )


def percent(off: float) -> str:
    """Return a deviation as the tables of docs write it."""
    return format_share(off, "+.0f" if abs(off) >= 0.095 else "+.1f").replace("-", "−")


def across(root: Path) -> None:
    """Print how far off one machine's trace is about another machine, of files of one name in two folders."""
    print(
        "| model | from H100 | on MI300X | off | from MI300X | on H100 | off |\n|---|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted((root / "h100").glob("*.json.gz")):
            sides = []
            for name, machine, other in (("h100", "dgx-h100", "mi300x"), ("mi300", "mi300x", "dgx-h100")):
                (home := Path(folder) / name).mkdir(exist_ok=True)
                own = closed(root / name / path.name, machine, home)
                elsewhere = simulate_rehearsal(home / path.name, partial(load_cluster, other))
                sides.append((own.errors[0].measured_s, elsewhere.summary["step_time_s"]))
            (here_s, there_guessed_s), (there_s, here_guessed_s) = sides
            cells = [path.name.partition("__")[0]]
            for guessed_s, measured_s in ((there_guessed_s, there_s), (here_guessed_s, here_s)):
                off = percent(guessed_s / measured_s - 1)
                cells += [f"{1e3 * guessed_s:.3g} ms", f"{1e3 * measured_s:.3g} ms", off]
            print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print the table of all traces below the folder that is given."""
    root = Path(sys.argv[1])
    if "--across" in sys.argv:
        across(root)
        return
    columns = ("trace", "step", "off", "catalogue", "worst part", "held back", "as it took")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    with tempfile.TemporaryDirectory() as folder:
        for name, machine, what in TRACES:
            found = closed(root / name, machine, Path(folder))
            step, part = found.errors[0], worst(found)
            of_class = {one.name: one.measured_s for one in found.errors}
            held = [
                f"{kind} {percent(one.off_after)}"
                for one in found.operators
                if of_class.get(kind := one.name.partition(",")[0], 0.0) >= LEAST_SHARE * step.measured_s
            ]
            cells = [
                what,
                f"{1e3 * step.measured_s:.3g} ms",
                percent(step.off_after),
                percent(step.off_before),
            ]
            taken = [
                f"{one.name.partition(' with ')[0]} {percent(one.measured_s / step.measured_s).lstrip('+')}"
                for one in found.errors
                if one.name in AS_IT_TOOK and one.measured_s >= LEAST_SHARE * step.measured_s
            ]
            cells += [percent(part.off_after), ", ".join(held) or "—", ", ".join(taken) or "—"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
