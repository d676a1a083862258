"""Steps that the host decides: Megatron-LM's own tests, whose models are too small to keep a GPU busy.

    git clone https://github.com/NVIDIA/Megatron-LM && python benchmarks/host_bound.py Megatron-LM

Its functional tests state their arguments and, as golden values, the time of every iteration on a node. Of
tests whose predicted step on H100 grows by half or more if the host takes twice as long: the ``host_work``,
and the time of a step beside it, that make predictions right. Tests check and log every step, so that the
second says nothing of a run. Both are medians: of slopes between pairs of tests (Theil and Sen), and of what
is left.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import yaml

from foretrace.simulator.config import job_from
from foretrace.simulator.configs.read import read_files
from foretrace.simulator.errors import SimulationError
from foretrace.simulator.simulate import simulate

MACHINES: Final = ("a100", "h100", "gb200")
KINDS: Final = ("gpt", "moe")
GPUS: Final = 8
VOCABULARY: Final = 50257  # of the tokenizer that tests name by its files
GROWS: Final = 1.5
LEAST_APART_S: Final = 1e-4


def main() -> None:
    """Print what was found by machine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path, help="of NVIDIA/Megatron-LM")
    folder = parser.parse_args().checkout / "tests" / "functional_tests" / "test_cases"
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    stated = [path for kind in KINDS for path in sorted(folder.glob(f"{kind}/*/model_config.yaml"))]
    for path in stated:
        case = yaml.safe_load(path.read_text("utf-8")) or {}
        arguments = case.get("MODEL_ARGS") or {}
        measured = dict(_measured(path.parent))
        if "h100" not in measured or case.get("MODE") == "rl":  # a step of that also generates texts
            continue
        once, twice = (_predicted_s(arguments, work) for work in (1.0, 2.0))
        if once < twice / GROWS:
            kind = ("dense", "experts")["--num-experts" in arguments]
            for machine, measured_s in measured.items():
                found[f"{machine}, {kind}"].append((host_s := twice - once, measured_s - once + host_s))
                found[machine].append((host_s, measured_s - once + host_s))
    for name, pairs in sorted(found.items()):
        slope = median((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(pairs, 2) if _apart(a, b))
        print(
            f"{name}: host_work {slope:.2f}, {1e3 * median(y - slope * x for x, y in pairs):.0f} ms a step "
            f"beside it, {len(pairs)} tests"
        )


def _measured(case: Path) -> Iterator[tuple[str, float]]:
    """Yield machines and the median time of an iteration there, in s, without the first half of them.

    Of several runs of a test the one that took least: a first run may still write and compile.
    """
    for name in MACHINES:
        found = []
        for path in case.glob(f"golden_values_*_dgx_{name}*.json"):
            text = path.read_text("utf-8")  # some are empty
            times = (json.loads(text) if text.strip() else {}).get("iteration-time", {}).get("values", {})
            steps = [time_s for time_s in times.values() if isinstance(time_s, float)]
            found += [median(steps[len(steps) // 2 :])] if steps else []
        if found:
            yield name, min(found)


def _predicted_s(arguments: Mapping[str, Any], host_work: float) -> float:
    """Return the time of a step with *arguments* on H100, infinity if it cannot be simulated."""
    stated = {key: value for key, value in arguments.items() if key.startswith("--")}
    words = [
        key if value is True else f"{key} {value}"
        for key, value in stated.items()
        if value not in (False, None) and "$" not in str(value)
    ]
    with TemporaryDirectory() as folder:
        script = Path(folder) / "train.sh"
        command = f"torchrun --nproc_per_node {GPUS} pretrain_gpt.py --vocab-size {VOCABULARY}"
        script.write_text(f"{command} {' '.join(words)}\n", "utf-8")
        try:
            job = job_from(read_files([str(script)], {"cluster": "dgx-h100", "gpus": GPUS}).settings)
            conventions = {**dict(job.conventions), "host_work": host_work}
            told = replace(job, conventions=tuple(conventions.items()))
            return float(simulate(told).summary["step_time_s"])
        except (SimulationError, ValueError):
            return float("inf")


def _apart(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether the host's times differ enough for a slope."""
    return abs(one[0] - other[0]) > LEAST_APART_S


if __name__ == "__main__":
    main()
