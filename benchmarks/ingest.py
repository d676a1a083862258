"""From Kineto files to a breakdown: agreement with Holistic Trace Analysis, time and memory of both.

    python benchmarks/ingest.py --hta-python VENV/bin/python TRACE...

TRACE is a file or a folder with the ranks of one run. VENV is a virtual environment of its own:

    python -m venv VENV && VENV/bin/pip install HolisticTraceAnalysis==0.5.0

Each tool runs in processes of its own, first theirs, then ours, on the same files, thrice where that is
short; the middle one is shown. Time and memory are of the first question, the libraries' loading included;
then it is asked again in the same process. Without --hta-python only ours is measured; --repeat 20 makes one
file 20 times as long first.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from foretrace.traces.report.format import format_share

LARGEST_EXACT = 8_000_000
"""Stored bytes of a file that is added up a second time, exactly and slowly."""

ROOT = Path(__file__).resolve().parents[1]

PEAK = """
import re
def own_peak():  # ru_maxrss would count the process that started this one, too
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\\s*(\\d+)", status.read())[1]) * 1024
"""
"""How much memory a process has held at most, itself."""

THEIRS = """
import json, resource, sys, time
begun = time.perf_counter()
from hta.trace_analysis import TraceAnalysis
ranks = json.loads(sys.argv[1])
def asked():
    analyzer = TraceAnalysis(trace_files={int(rank): path for rank, path in ranks.items()}, trace_dir="",
                             include_last_profiler_step=True)
    parts = analyzer.get_temporal_breakdown(visualize=False)
    overlap = analyzer.get_comm_comp_overlap(visualize=False)
    rows = [{name: float(value) for name, value in row.items()} for row in parts.to_dict("records")]
    shared = {int(row["rank"]): float(row["comp_comm_overlap_pctg"]) for row in overlap.to_dict("records")}
    return {"rows": rows, "overlap": shared}
"""
"""What HTA is asked: breakdown and overlap, from file to figures, the last step included."""

OURS = """
import json, resource, sys, time
begun = time.perf_counter()
from foretrace.tracer.ingest.ingest import ingest
from foretrace.traces.analysis.device_time import device_times
from foretrace.traces.analysis.metrics import breakdown
from foretrace.traces.store import open_run
def asked():
    ingest(sys.argv[2:], sys.argv[1])
    run = open_run(sys.argv[1])
    breakdown(run)
    return {"rows": [{name: getattr(row, name) for name in row.__slots__} for row in device_times(run)]}
"""
"""What we are asked: the same figures, and our own breakdown beside."""

ANSWER = """
found = asked()
found["seconds"] = time.perf_counter() - begun
found["cpu_seconds"] = sum(sum(resource.getrusage(who)[:2]) for who in (0, -1))
found["peak_bytes"] = max(own_peak(), resource.getrusage(-1).ru_maxrss * 1024)
if found["seconds"] < LOADED_BELOW_S:
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        asked()
        times.append(time.perf_counter() - begun)
    found["loaded_seconds"] = sorted(times)[1]
print("FOUND" + json.dumps(found))
"""
"""Asks once in a fresh process, the libraries' loading included, and thrice more, which need none."""

LOADED_BELOW_S = 15
"""What takes longer is asked once: loading is no part of it worth telling."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--hta-python", type=Path)
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    for path in args.traces:
        with tempfile.TemporaryDirectory() as scratch:
            files = sorted(path.glob("*.json*")) if path.is_dir() else [path]
            if args.repeat > 1:
                files = [repeated(files[0], args.repeat, Path(scratch))]
            show(path, files, args.hta_python, Path(scratch))


def show(path: Path, files: list[Path], hta_python: Path | None, scratch: Path) -> None:
    """Print what both tools say about *files*."""
    size = sum(file.stat().st_size for file in files)
    theirs = {} if hta_python is None else typical(hta_python, THEIRS, json.dumps(ranks_of(files)))
    ours = typical(Path(sys.executable), OURS, str(scratch / "run"), *map(str, files))
    print(f"{path.name}: {len(files)} files, {size / 1e6:.1f} MB stored")
    if "rows" not in ours:
        print(f"  ours: {ours['error']}")
        return
    print(f"  ours: {figures(ours)}")
    if len(files) == 1 and size < LARGEST_EXACT:
        print(
            "  ours differs from exact arithmetic by "
            f"{format_share(from_exact(files[0], ours), '.4f')} of the window"
        )
    if hta_python is None:
        return
    if "rows" not in theirs:
        print(f"  HTA: fails: {theirs['error']}")
        return
    faster, smaller = theirs["seconds"] / ours["seconds"], theirs["peak_bytes"] / ours["peak_bytes"]
    busier = theirs["cpu_seconds"] / ours["cpu_seconds"]
    print(f"  HTA: {figures(theirs)}")
    print(f"  HTA takes {faster:.1f} x the time, {busier:.1f} x the CPU time, {smaller:.1f} x the memory")
    if "loaded_seconds" in theirs and "loaded_seconds" in ours:
        print(
            f"  and {theirs['loaded_seconds'] / ours['loaded_seconds']:.1f} x the time once both are loaded"
        )
    for line in differences(theirs, ours):
        print(f"  {line}")


def figures(found: dict[str, Any]) -> str:
    """Return time and memory of one tool."""
    loaded = f" ({found['loaded_seconds']:.3f} s once loaded)" if "loaded_seconds" in found else ""
    return (
        f"{found['seconds']:.2f} s{loaded}, {found['cpu_seconds']:.2f} s of CPU, "
        f"{found['peak_bytes'] / 1e6:.0f} MB"
    )


def from_exact(file: Path, ours: dict[str, Any]) -> float:
    """Return how far idle and compute are from unions of the intervals in *file*, in decimal arithmetic."""
    opener = gzip.open if file.name.endswith(".gz") else open
    with opener(file, "rb") as stream:
        document = json.loads(stream.read(), parse_float=Decimal)
    device = [e for e in document["traceEvents"] if e.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}]
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in device]
    computing = [s for e, s in zip(device, spans, strict=True)
                 if e["cat"] == "kernel" and not e["name"].startswith("nccl")]  # fmt: skip
    window = max(end for _, end in spans) - min(start for start, _ in spans)
    (row,) = ours["rows"]
    idle_off = abs(float(window - covered(spans)) * 1000 - row["idle_ns"])
    compute_off = abs(float(covered(computing)) * 1000 - row["compute_ns"])
    return float(max(idle_off, compute_off) / row["window_ns"])


def covered(spans: list[tuple[Any, Any]]) -> Any:
    """Return the length of the union of *spans*."""
    total, until = 0, None
    for start, end in sorted(spans):
        total += max(end - (start if until is None else max(start, until)), 0)
        until = end if until is None else max(until, end)
    return total


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[str]:
    """Yield, figure by figure, the largest difference over ranks, as a share of the window."""
    own = {row["rank"]: row for row in ours["rows"]}
    pairs = {"idle": ("idle_time(us)", "idle_ns"), "compute": ("compute_time(us)", "compute_ns")}
    pairs["not compute"] = ("non_compute_time(us)", "other_ns")
    for name, (their_key, our_key) in pairs.items():
        off = []
        for row in theirs["rows"]:
            rank = own[int(row["rank"])]
            off.append(abs(row[their_key] * 1000 - rank[our_key]) / rank["window_ns"])
        yield f"{name}: differs by at most {format_share(max(off), '.4f')} of the window"
    shared = []
    for rank, percent in theirs["overlap"].items():
        row = own[int(rank)]
        if row["communication_ns"] and percent == percent:  # noqa: PLR0124 - NaN
            shared.append(abs(percent / 100 - row["overlap_ns"] / row["communication_ns"]))
    yield (
        f"overlap: differs by at most {format_share(max(shared), '.4f')} of the communication"
        if shared
        else "overlap: HTA has none"
    )


def typical(python: Path, script: str, *args: str) -> dict[str, Any]:
    """Return the answer of middle time of three processes; of one where it takes long, or fails."""
    answers = [asked(python, script, *args)]
    while len(answers) < 3 and answers[0].get("seconds", LOADED_BELOW_S) < LOADED_BELOW_S:
        answers.append(asked(python, script, *args))
    return sorted(answers, key=lambda answer: answer.get("seconds", 0))[len(answers) // 2]


def asked(python: Path, script: str, *args: str) -> dict[str, Any]:
    """Run *script* in a process of its own and return what it found."""
    done = subprocess.run(
        [str(python), "-c", f"{PEAK}{script}LOADED_BELOW_S = {LOADED_BELOW_S}{ANSWER}", *args],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    found = re.search(r"FOUND(.*)", done.stdout)
    if found is None:
        lines = done.stderr.strip().splitlines() or ["no answer"]
        return {"error": lines[-1][:160]}
    answer: dict[str, Any] = json.loads(found[1])
    return answer


def ranks_of(files: list[Path]) -> dict[str, str]:
    """Return the rank of each file, as its header says: HTA wants to be told."""
    found = {}
    for place, file in enumerate(files):
        reader = gzip.open if file.name.endswith(".gz") else open
        with reader(file, "rb") as stream:
            said = re.search(rb'"distributedInfo":[^}]*?"rank": (\d+)', stream.read(1 << 20))
        found[str(int(said[1]) if said else place)] = str(file)
    return found


def repeated(file: Path, times: int, folder: Path) -> Path:
    """Write *times* copies of the events of *file*, later and with other numbers, to one file."""
    begun = time.perf_counter()
    data = gzip.decompress(file.read_bytes()) if file.name.endswith(".gz") else file.read_bytes()
    key = b'"traceEvents": [\n'
    start, stop = data.index(key) + len(key), data.rindex(b"\n  ]")
    body = data[start:stop]
    moments = [int(found) for found in re.findall(rb'"ts": (\d+)', body)]
    shift = max(moments) - min(moments) + 1_000_000
    target = folder / f"{times}x.json"
    with target.open("wb") as out:
        out.write(data[:start] + body)
        for copy in range(1, times):
            later = increased(body, rb'("ts": )', copy * shift)
            later = increased(later, rb'("(?:External id|correlation)": )', copy * 10**6)
            out.write(b",\n" + increased(later, rb"(ProfilerStep#)", copy * 1000))
        out.write(data[stop:])
    print(f"{target.stat().st_size / 1e6:,.1f} MB made of {file.name} in {time.perf_counter() - begun:.0f} s")
    return target


def increased(data: bytes, before: bytes, by: int) -> bytes:
    """Add *by* to every whole number that stands behind *before*."""
    return re.sub(before + rb"(\d+)", lambda found: found[1] + str(int(found[2]) + by).encode(), data)


if __name__ == "__main__":
    main()
