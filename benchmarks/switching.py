"""Answers of other simulators beside ours, from their own files.

    python benchmarks/switching.py --simumax DIR --calculon DIR --primus DIR --aicb DIR [--measured TABLE]
    python benchmarks/switching.py --astra DIR --nccl TABLE

DIR is a clone of MooreThreads/SimuMax, calculon-ai/calculon, AMD-AGI/Primus or aliyun/aicb. A row is one run
that was measured: what was measured, what they say of it, and what foretrace makes of the same files; with
a table of measured runs, the nearest of those too. SimuMax publishes its answers; Calculon is run
(``calculon/llm/validation.py``, table 5 of arXiv:2205.05198, A100). Primus and AICB have none to compare
with: of every file of theirs it is counted whether it is read, and why not. ASTRA-sim is run, too: DIR is a
clone in which its analytical network was built (``build/astra_analytical/build.sh -t congestion_unaware``),
TABLE what nccl-tests measured, in the columns gpu, op, n, bytes and us. Times of collectives within a node
are such measurements here, which ours then gives back: what is shown is that the same files mean the same.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any, Final, NamedTuple

import click
from pyarrow import parquet as pq

from foretrace.simulator.config import job_from
from foretrace.simulator.configs.read import read_files
from foretrace.simulator.configs.rules import UNKNOWN
from foretrace.simulator.errors import SimulationError
from foretrace.simulator.rehearsed.run import simulate_rehearsal
from foretrace.simulator.simulate import simulate
from foretrace.simulator.validate.runs import nearest
from foretrace.topologies.catalog import load_cluster
from foretrace.tracer.ingest.ingest import ingest
from foretrace.traces.errors import TraceError
from foretrace.traces.report.format import format_share

TABLE_5_S = {
    "megatron-22B": {"full": 1.42, "seqsel": 1.10},
    "gpt3-175B": {"full": 18.13, "seqsel": 13.75},
    "turing-530B": {"full": 49.05, "seqsel": 37.83},
    "megatron-1T": {"full": 94.42, "seqsel": 71.49},
}
"""Seconds per iteration, Korthikanti et al. 2022, arXiv:2205.05198, table 5."""

RUN_CALCULON = """
import json, sys, logging, calculon
from calculon.llm.llm import Llm
from calculon.system import System
app, execution, system = (calculon.io.read_json_file(path) for path in sys.argv[1:])
model = Llm(Llm.Application(app), logging.getLogger())
machine = System(system)
model.compile(machine, Llm.Execution.from_json(execution))
model.run(machine)
print(json.dumps(model.get_stats_json(False)["total_time"]))
"""


class Row(NamedTuple):
    """One run: what it is, and its seconds as measured, as the other simulator says, and as we do."""

    run: str
    measured_s: float
    theirs_s: float
    ours_s: float
    near: str = ""


def _ours(files: list[Path], table: Path | None, **given: Any) -> tuple[float, str]:
    """Return the time of a step, and the nearest measured row of *table* in words."""
    job = job_from({**read_files(files, given).settings, **given})
    near = nearest(job, table) if table else None
    words = f"{near.what}: {format_share(near.predicted_s / near.measured_s - 1, '+.1f')}" if near else ""
    return float(simulate(job).summary["step_time_s"]), words


def _calculon(folder: Path, python: str, table: Path | None) -> Iterator[Row]:
    system = folder / "systems" / "a100_80g.json"
    for model, kinds in TABLE_5_S.items():
        for kind, measured_s in kinds.items():
            app = folder / "models" / f"{model}.json"
            execution = folder / "validation" / "seqsel" / "tab5" / f"{model}_{kind}.json"
            files = (path.resolve() for path in (app, execution, system))
            command = [python, "-c", RUN_CALCULON, *map(str, files)]
            told = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout
            ours = _ours([execution, app], table, cluster="dgx-a100")
            yield Row(f"{model} {kind}", measured_s, float(told), *ours)


def _simumax(folder: Path, table_of: Path | None) -> Iterator[Row]:
    table = json.loads((folder / "docs" / "b200" / "b200_release_v1.2_summary.json").read_text())
    for row in table["rows"]:
        files = _files_of(folder, row)
        if files is None:
            continue
        with tempfile.TemporaryDirectory() as made:
            both = []
            for name, settings in files.items():
                both.append(Path(made) / f"{name}.json")
                both[-1].write_text(json.dumps(settings))
            ours = _ours(both, table_of, cluster="dgx-b200")
        yield Row(row["case"], row["real_ms"] / 1e3, row["perf_ms"] / 1e3, *ours)


def _files_of(folder: Path, row: dict[str, Any]) -> dict[str, Any] | None:
    """Return strategy and model of a row, None where the strategy is in none of its files."""
    numbers = dict(re.findall(r"(tp|pp|dp|ep|cp)(\d+)", row["case"]))
    axes = ("ep", "pp", "dp") if "ep" in numbers else ("tp", "pp", "dp")
    name = "_".join(f"{axis}{numbers.get(axis, 1)}" for axis in axes)
    path = folder / "configs" / "strategy" / f"{name}_mbs1.json"
    if not path.exists() or "cp" in numbers or row["vp_size"] > 1:
        return None
    model = folder / "configs" / "models" / f"{row['model'].replace('deepseek-v', 'deepseekv')}.json"
    if not model.exists():
        return None
    strategy = json.loads(path.read_text()) | {"micro_batch_num": row["mbc"], "overlap_grad_reduce": False}
    shape = json.loads(model.read_text()) | {"layer_num": row["layer_num"]}
    if "expert_num" in shape:
        shape["dense_layers"] = 1  # as their examples cut these models
    return {"strategy": strategy | {"enable_recompute": False}, "model": shape}


def _primus(folder: Path) -> Iterator[tuple[list[Path], dict[str, Any]]]:
    """Yield each training with the file of its model, of 8 GPUs as the files are for."""
    models = folder / "primus" / "configs" / "models" / "megatron"
    for path in sorted((folder / "examples" / "megatron" / "configs").rglob("*.yaml")):
        named = re.search(
            r"^ +model: *(?:\$\{\w+:)?([\w./-]+?)\}?(\.yaml)?\s*$", path.read_text(), re.MULTILINE
        )
        beside = models / f"{named.group(1).removesuffix('.yaml')}.yaml" if named else None
        yield [path, *([beside] if beside and beside.is_file() else [])], {"cluster": "mi325x", "gpus": 8}


def _aicb(folder: Path) -> Iterator[tuple[list[Path], dict[str, Any]]]:
    """Yield each workload; what it does not say is the same for all."""
    given = {"cluster": "dgx-a100", "gpus": 32, "model": "llama2-7b", "global_batch": 32}
    for path in sorted((folder / "workload" / "simAI").rglob("*.txt")):
        yield [path], given


ASTRA_NETWORKS = {
    4: "inputs/network/hgx_h100_4gpu.yml",
    8: "examples/network/analytical/HGX-H100-validated.yml",
}
"""Their H100s, by number."""


NO_TEST: Final = {
    "ASTRA-sim": "The times of collectives within a node are these measurements themselves: that foretrace "
    "agrees with them says that it reads the graphs, and nothing of its predictions."
}
"""What to know of a table before it is taken for a comparison of predictions."""


def _astra(folder: Path, nccl: Path) -> Iterator[Row]:
    """Yield each collective of their examples on their H100s: a Chakra graph for each rank."""
    network = pq.read_table(nccl).to_pylist()
    found = {(row["op"], row["n"], row["bytes"]): row["us"] for row in network if row["gpu"] == "h100_sxm"}
    examples = folder / "examples"
    for n, machine in ASTRA_NETWORKS.items():
        for graphs in sorted((examples / "workload" / "microbenchmarks").glob(f"*/{n}npus_1MB")):
            op = graphs.parent.name
            # Of a gather nccl-tests and we say the size of the whole, a graph what a rank gives.
            size = (1 << 20) * (n if op == "all_gather" else 1)
            said = subprocess.run(
                [
                    next((folder / "build").rglob("bin/AstraSim_Analytical_Congestion_Unaware")),
                    f"--workload-configuration={graphs / op}",
                    f"--system-configuration={examples}/system/native_collectives/HGX-H100-validated.json",
                    f"--remote-memory-configuration={examples}/remote_memory/analytical/no_memory_expansion.json",
                    f"--network-configuration={folder / machine}",
                ],
                capture_output=True,
                text=True,
                check=True,
            )
            cycles = re.search(r"sys\[0\] finished, (\d+) cycles", said.stdout)
            with tempfile.TemporaryDirectory() as run:
                ingest([graphs], run)
                ours = simulate_rehearsal(run, lambda gpus: load_cluster("dgx-h100", gpus)).info.summary
            yield Row(
                f"{op}, {n} H100, {size >> 20} MiB",
                found[op.replace("all_to_all", "alltoall"), n, size] / 1e6,
                int(cycles[1]) / 1e9 if cycles else 0.0,
                ours["step_time_s"],
                "",
            )


def _read(name: str, found: Iterator[tuple[list[Path], dict[str, Any]]]) -> None:
    """Print how many files are read, how many describe a job, and why others do not."""
    counts, reasons, unknown = Counter[str](), Counter[str](), Counter[str]()
    for files, given in found:
        counts["files"] += 1
        try:
            read = read_files(files, given)
            counts["read"] += 1
            unknown.update(
                one["key"]
                for file in read.describe()
                for one in file["ignored"]
                if one["reason"].startswith(UNKNOWN)
            )
            job_from({**read.settings, **given})
            counts["a job"] += 1
        except (SimulationError, TraceError) as error:
            reasons[re.sub(r"^[^ ]*(, [^ ]*)*: (?=[a-z-])", "", str(error)).partition(";")[0][:90]] += 1
    print(f"{name}: " + ", ".join(f"{number} {what}" for what, number in counts.items()))
    print("| not a job, because | files |\n|---|---|")
    for reason, number in reasons.most_common():
        print(f"| {reason} | {number} |")
    print(f"unknown keys: {', '.join(unknown) or 'none'}\n")


def _seconds(s: float) -> str:
    return f"{s:.3f} s" if s >= 0.1 else f"{s * 1e6:.1f} µs"


@click.command()
@click.option("--simumax", type=click.Path(exists=True, path_type=Path))
@click.option("--calculon", type=click.Path(exists=True, path_type=Path))
@click.option("--primus", type=click.Path(exists=True, path_type=Path))
@click.option("--aicb", type=click.Path(exists=True, path_type=Path))
@click.option("--astra", type=click.Path(exists=True, path_type=Path))
@click.option("--nccl", type=click.Path(exists=True, path_type=Path), help="Table of nccl-tests.")
@click.option("--measured", type=click.Path(exists=True, path_type=Path), help="Table of measured runs.")
@click.option("--python", default=sys.executable, help="A Python that has what Calculon needs, as pandas.")
def main(  # noqa: PLR0917 - flags
    simumax: Path | None,
    calculon: Path | None,
    primus: Path | None,
    aicb: Path | None,
    astra: Path | None,
    nccl: Path | None,
    measured: Path | None,
    python: str,
) -> None:
    """Print the tables, and mean absolute errors of both."""
    for name, rows in (
        ("SimuMax", simumax and _simumax(simumax, measured)),
        ("Calculon", calculon and _calculon(calculon, python, measured)),
        ("ASTRA-sim", astra and nccl and _astra(astra, nccl)),
    ):
        if not rows:
            continue
        found = list(rows)
        near = " nearest measured row, predicted |" if measured and any(row.near for row in found) else ""
        print(
            f"| {name}: run | measured | {name} | foretrace |{near}\n|---|---|---|---|" + "---|" * bool(near)
        )
        for row in found:
            both = " | ".join(
                f"{_seconds(s)} ({format_share(s / row.measured_s - 1, '+.1f')})"
                for s in (row.theirs_s, row.ours_s)
            )
            print(f"| {row.run} | {_seconds(row.measured_s)} | {both} |" + (f" {row.near} |" if near else ""))
        errors = [
            mean(abs(getattr(row, of) / row.measured_s - 1) for row in found) for of in ("theirs_s", "ours_s")
        ]
        print(f"| mean of {len(found)} | | {format_share(errors[0])} | {format_share(errors[1])} |\n")
        if name in NO_TEST:
            print(f"{NO_TEST[name]}\n")
    for name, files in (("Primus", primus and _primus(primus)), ("AICB", aicb and _aicb(aicb))):
        if files:
            _read(name, files)


if __name__ == "__main__":
    main()
