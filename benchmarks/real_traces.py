"""Holds what is read from real traces against a plain sum over the events of the same files.

    python benchmarks/real_traces.py ../shared/real_traces/fresh ../shared/real_traces/hta > table.md

The sum knows nothing of the reader: it decodes a file with ``json`` in decimal arithmetic, assigns kernels to
steps by the correlation of their launches, and adds up unions of intervals. The causes of idle time are held
against the idle time of the sum.

    python benchmarks/real_traces.py --hta PYTHON --tracelens PYTHON ../shared/real_traces > table.md

holds idle and compute time of the device, from its first event to its last, against Holistic Trace Analysis
and TraceLens (each the Python of an environment that has it: ``pip install HolisticTraceAnalysis``, ``pip
install git+https://github.com/AMD-AGI/TraceLens``), each of which reads all files in one process, as we do.
"""

from __future__ import annotations

import argparse
import bisect
import gzip
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.ingest import ingest
from foretrace.traces.analysis.gaps import gaps
from foretrace.traces.analysis.metrics import averaged_steps
from foretrace.traces.analysis.windows import windows
from foretrace.traces.columns import int64, is_one_of
from foretrace.traces.reader import open_run
from foretrace.traces.report.format import format_share

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "mtia_ccp_events")
HOST = ("cuda_runtime", "cuda_driver", "mtia_runtime")
ROUNDING_NS = 1_000
"""Some times are floats of microseconds since 1970, in steps of 0.25 µs: a reader of floats rounds them."""

Interval = tuple[int, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, help="trace files, or folders of them")
    for tool in TOOLS:
        parser.add_argument(f"--{tool}", type=Path, metavar="PYTHON", help=f"of an environment with {tool}")
    args = parser.parse_args()
    files = [one for path in args.paths for one in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    if pythons := {tool: python for tool in TOOLS if (python := getattr(args, tool)) is not None}:
        beside(pythons, [one for one in files if one.name.endswith((".json", ".json.gz"))])
        return
    print(
        "| file | steps: windows, ms | by the sum | kernels of each | by the sum | busy | by the sum | "
        "idle less its causes, ns | read and analysed, s |\n|---|---|---|---|---|---|---|---|---|"
    )
    worst = 0
    for file in files:
        if file.name.endswith((".json", ".json.gz")):
            line, off = compared(file)
            print(line, flush=True)
            worst = max(worst, off)
    sys.exit(worst > 0)


READS = """
import contextlib, io, json, resource, sys, time, warnings
warnings.simplefilter("ignore")
for path in sys.stdin.read().split():
    begun = time.process_time()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            found = read(path)
    except BaseException as error:
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:60]}
    most = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print("FOUND" + json.dumps(found | {"s": time.process_time() - begun, "most_kb": most}), flush=True)
"""
"""What a tool's ``read`` says of the device of each file that stdin names, in µs, or how it fails."""

OURS = """
import tempfile
from foretrace.tracer.ingest.ingest import ingest
from foretrace.traces.analysis.device_time import device_times
from foretrace.traces.reader import open_run
def read(path):
    with tempfile.TemporaryDirectory() as scratch:
        ingest([path], f"{scratch}/run")
        device = device_times(open_run(f"{scratch}/run"))[0]
        return {"idle": device.idle_ns / 1e3, "compute": device.compute_ns / 1e3}
"""

TOOLS = {
    "hta": """
from hta.trace_analysis import TraceAnalysis
def read(path):
    one = TraceAnalysis(trace_files={0: path}, trace_dir="", include_last_profiler_step=True)
    row = one.get_temporal_breakdown(visualize=False).to_dict("records")[0]
    return {name: float(row[f"{name}_time(us)"]) for name in ("idle", "compute")}
""",
    "tracelens": """
from TraceLens import TreePerfAnalyzer
def read(path):
    table = TreePerfAnalyzer.from_file(path, include_unlinked_kernels=True).get_df_gpu_timeline()
    us = dict(zip(table["type"], 1e3 * table["time ms"]))
    return {"idle": us["idle_time"], "compute": us["computation_time"]}
""",
}


RULED = {"hta": "idle", "tracelens": "compute"}
"""What of each tool differs from ours for reasons that ``by_rules`` has."""


def by_rules(tool: str, events: list[dict[str, Any]]) -> int:
    """Return what *tool* would say of *events* if the reasons why it differs are right, in ns.

    Both read times as floats of microseconds, which since 1970 go in steps of 0.25. TraceLens counts setting
    of memory as compute. HTA counts all that has a stream as a kernel, waits and operators of the host, too;
    it rounds begins up and ends down to microseconds where any time has more digits; and of several steps it
    leaves out what nothing launched.
    """
    if tool == "tracelens":
        kinds = ("kernel", "gpu_memset", "mtia_ccp_events")
        found = [_floats(e) for e in events if e.get("cat") in kinds and "nccl" not in e["name"].lower()]
        spans = [(round(1000 * Decimal(a)), round(1000 * Decimal(b))) for a, b in found]
        return covered(spans, _around(spans))
    own = [e for e in events if isinstance(e.get("args", {}).get("stream"), int) and e["args"]["stream"] >= 0]
    steps = {e["name"] for e in events if re.fullmatch(r"ProfilerStep#\d+", str(e["name"]))}
    if len(steps) > 1:
        launched = {e["args"].get("correlation") for e in events if e.get("cat") in HOST} - {None}
        own = [e for e in own if e["args"].get("correlation") in launched]
    # Whole microseconds stay what they are.
    spans = [(1000 * math.ceil(a), 1000 * math.floor(b)) for a, b in map(_floats, own)]
    window = _around(spans)
    return window[1] - window[0] - covered(spans, window)


def _floats(event: dict[str, Any]) -> tuple[float, float]:
    start = float(event["ts"])
    return start, start + float(event["dur"])


def _around(spans: list[Interval]) -> Interval:
    return min((a for a, _ in spans), default=0), max((b for _, b in spans), default=0)


def beside(pythons: dict[str, Path], files: list[Path]) -> None:
    """Print a table of idle and compute time, ours and those of each tool, with what they differ by."""
    names = "\n".join(map(str, files))
    read: dict[str, list[dict[str, Any]]] = {}
    for tool, python in {"ours": Path(sys.executable), **pythons}.items():
        command = [str(python), "-c", TOOLS.get(tool, OURS) + READS]
        done = subprocess.run(command, input=names, capture_output=True, text=True, check=False)
        read[tool] = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("FOUND")]
    less = {
        what: [
            f"{tool} less {of}"
            for tool in pythons
            for of in ("ours", "its rules")[: 1 + (RULED[tool] == what)]
        ]
        for what in ("idle", "compute")
    }
    heads = ["file", "idle, ms", *less["idle"], "compute, ms", *less["compute"], "CPU s", *pythons]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for at, file in enumerate(files):
        name = file.name.removesuffix(".gz").removesuffix(".json")
        ours = read["ours"][at]
        events = events_of(file)
        ruled = {tool: by_rules(tool, events) for tool in pythons}
        cells = []
        for what in ("idle", "compute"):
            cells.append(f"{ours[what] / 1e3:.3f}" if what in ours else "none")
            for tool in pythons:
                said = read[tool][at].get(what) if what in ours else None
                cells.append("" if said is None else f"{(said - ours[what]) / 1e3:+.3f}")
                if RULED[tool] == what:
                    cells.append("" if said is None else f"{(said * 1e3 - ruled[tool]) / 1e6:+.3f}")
        cells.append(f"{ours['s']:.2f}")
        cells += [one.get("error", f"{one['s']:.2f}") for one in (read[tool][at] for tool in pythons)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    most = [f"{tool} {own[-1]['most_kb'] / 1e3:,.0f} MB" for tool, own in read.items()]
    print(f"\nMost memory of the process that read all files: {', '.join(most)}.")


def compared(file: Path) -> tuple[str, int]:
    """Return the line of *file*, and whether something in it differs."""
    name = file.name.removesuffix(".gz").removesuffix(".json")
    with tempfile.TemporaryDirectory() as scratch:
        begun = time.perf_counter()
        try:
            ingest([file], f"{scratch}/run")
        except IngestError as error:
            return f"| {name} | refused: {str(error).removeprefix(str(file))} ||||||||", 0
        ours = read(Path(scratch) / "run")
        took = time.perf_counter() - begun
    theirs = summed(file)
    if theirs is None:
        return f"| {name} | no device |||||||| {took:.2f} |", 0
    cells = [", ".join(f"{ns / 1e6:.3f}" for ns in side["windows"]) for side in (ours, theirs)] + [
        ", ".join(f"{n:,}" for n in side["kernels"]) for side in (ours, theirs)
    ]
    busy = [format_share(side["busy_ns"] / sum(side["windows"]), ".3f") for side in (ours, theirs)]
    uncaused = sum(theirs["windows"]) - theirs["busy_ns"] - ours["caused_ns"]
    off = [abs(a - b) for a, b in zip(ours["windows"], theirs["windows"], strict=True)]
    differs = ours["kernels"] != theirs["kernels"] or max([*off, abs(uncaused)]) > ROUNDING_NS
    return f"| {name} | {' | '.join([*cells, *busy])} | {uncaused:,} | {took:.2f} |", int(bool(differs))


def read(path: Path) -> dict[str, Any]:
    """Return what the run says."""
    run = open_run(path)
    own = [window for window in windows(run) if window.rank == run.stored_ranks[0]]
    table = run.spans()
    kernel = is_one_of(table, "category", ("compute", "collective", "p2p"))
    step = int64(table, "step")
    averaged = averaged_steps(run)
    kept = [window for window in own if window.step in averaged]
    device = is_one_of(table, "category", ("compute", "collective", "p2p", "copy"))
    start = int64(table, "start_ns")[device].tolist()
    spans = list(zip(start, (np.array(start) + int64(table, "duration_ns")[device]).tolist(), strict=True))
    return {
        "windows": [window.duration_ns for window in kept],
        "kernels": [int((kernel & (step == window.step)).sum()) for window in kept],
        "busy_ns": sum(covered(spans, (window.start_ns, window.end_ns)) for window in kept),
        "caused_ns": sum(round(row["total_s"] * 1e9) for row in gaps(run)),
    }


def summed(file: Path) -> dict[str, Any] | None:
    """Return the same of the events of *file*; None if it has no device."""
    events = events_of(file)
    device = [e for e in events if e.get("cat") in DEVICE]
    if not device:
        return None
    launched = {e["args"].get("correlation"): ns(e["ts"]) for e in events if e.get("cat") in HOST}
    steps = sorted(
        (ns(e["ts"]), ns(e["ts"]) + ns(e["dur"]), int(found[1]))
        for e in events
        if e.get("cat") == "user_annotation" and (found := re.fullmatch(r"ProfilerStep#(\d+)", e["name"]))
    )
    spans = [(ns(e["ts"]), ns(e["ts"]) + ns(e["dur"])) for e in device]
    if not steps:
        window = min(a for a, _ in spans), max(b for _, b in spans)
        n_kernels = sum(not e["cat"].startswith("gpu_mem") for e in device)
        return {"windows": [window[1] - window[0]], "kernels": [n_kernels], "busy_ns": covered(spans, window)}
    hosts = [start for start, _, _ in steps]
    calls = [launched.get(e.get("args", {}).get("correlation")) for e in device]
    by_launch = sum(call is not None for call in calls) >= len(calls) / 2
    place = [
        bisect.bisect(hosts, call) - 1 if call is not None else None
        for call in (calls if by_launch else [a for a, _ in spans])
    ]
    edges = [*hosts, max(steps[-1][1], *(b for (_, b), k in zip(spans, place, strict=True) if k is not None))]
    if by_launch and len(steps) > 1:
        took: Counter[Any] = Counter()
        for e, (a, b) in zip(device, spans, strict=True):
            is_compute = not e["cat"].startswith("gpu_mem") and "nccl" not in e["name"]
            took[e["args"].get("stream")] += (b - a) * is_compute
        main = took.most_common(1)[0][0]
        ended: defaultdict[int, int] = defaultdict(int)
        for e, (_, b), k in zip(device, spans, place, strict=True):
            if e["args"].get("stream") == main:
                ended[-1 if k is None else k] = max(ended[-1 if k is None else k], b)
        for k in range(len(steps)):
            edges[k] = max([edges[k], *(b for other, b in ended.items() if other < k)])
    kernels = Counter(k for e, k in zip(device, place, strict=True) if not e["cat"].startswith("gpu_mem"))
    kept = [k for k in range(len(steps)) if kernels[k] and edges[k + 1] > edges[k]]
    lengths = [edges[k + 1] - edges[k] for k in kept]
    if len(kept) > 2 and lengths[0] > max(*lengths[1:], 1.05 * sorted(lengths[1:])[(len(lengths) - 2) // 2]):
        kept, lengths = kept[1:], lengths[1:]
    return {
        "windows": lengths,
        "kernels": [kernels[k] for k in kept],
        "busy_ns": sum(covered(spans, (edges[k], edges[k + 1])) for k in kept),
    }


def events_of(file: Path) -> list[dict[str, Any]]:
    """Return the events of a *file* of Kineto or rocprofv3 that last, times in decimal arithmetic."""
    opener = gzip.open if file.name.endswith(".gz") else open
    with opener(file, "rb") as stream:
        document = json.loads(stream.read(), parse_float=Decimal)
    document = document if isinstance(document, dict) else {}
    events = document.get("traceEvents", ())
    if "rocprofiler-sdk-tool" in document:
        (process,) = document["rocprofiler-sdk-tool"]
        names = {one["kernel_id"]: one["formatted_kernel_name"] for one in process["kernel_symbols"]}
        times = [
            (one["dispatch_info"]["kernel_id"], one["start_timestamp"], one["end_timestamp"])
            for one in process["buffer_records"]["kernel_dispatch"]
        ]
        return [
            {
                "cat": "kernel",
                "name": names[what],
                "args": {},
                "ts": Decimal(a) / 1000,
                "dur": Decimal(b - a) / 1000,
            }
            for what, a, b in times
        ]
    return [e for e in events if isinstance(e, dict) and e.get("ph") == "X"]


def ns(us: Any) -> int:
    """Return microseconds of a file as nanoseconds."""
    return int((Decimal(us) * 1000).to_integral_value())


def covered(spans: list[Interval], window: Interval) -> int:
    """Return how much of *window* any of *spans* covers."""
    total, until = 0, window[0]
    for start, end in sorted(spans):
        total += max(min(end, window[1]) - max(start, until), 0)
        until = max(until, end)
    return total


if __name__ == "__main__":
    main()
