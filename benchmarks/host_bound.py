"""Steps that the host decides: Megatron-LM's own tests, whose models are too small to keep a GPU busy.

    git clone https://github.com/NVIDIA/Megatron-LM && python benchmarks/host_bound.py Megatron-LM

Its functional tests state their arguments and, as golden values, the time of every iteration on a node. Of
tests on H100, and there on others, whose predicted step grows by half or more if the host takes twice as
long: the ``host_work`` that would make predictions right, and how many times as long they take as on H100.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, Final

import yaml

from foretrace.simulator.config import job_from
from foretrace.simulator.configs.read import read_files
from foretrace.simulator.errors import SimulationError
from foretrace.simulator.simulate import simulate

MACHINES: Final = {"a100": "dgx-a100", "h100": "dgx-h100", "gb200": "gb200-nvl72"}
GPUS: Final = 8
VOCABULARY: Final = 50257  # of the tokenizer that tests name by its files
GROWS: Final = 1.5


def main() -> None:
    """Print what was found by machine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path, help="of NVIDIA/Megatron-LM")
    folder = parser.parse_args().checkout / "tests" / "functional_tests" / "test_cases"
    fits: dict[tuple[str, str], list[float]] = defaultdict(list)
    took_s: dict[str, dict[str, float]] = defaultdict(dict)
    stated = [path for kind in ("gpt", "moe") for path in sorted(folder.glob(f"{kind}/*/model_config.yaml"))]
    for path in stated:
        arguments = (yaml.safe_load(path.read_text("utf-8")) or {}).get("MODEL_ARGS") or {}
        case = path.parent
        measured = dict(_measured(case))
        for name, measured_s in measured.items() if "h100" in measured else ():
            once, twice = (_predicted_s(arguments, MACHINES[name], work) for work in (1.0, 2.0))
            if not once < twice / GROWS:
                continue
            kind = "experts" if "--num-experts" in arguments else "dense"
            fits[name, kind].append(1 + (measured_s - once) / (twice - once))
            took_s[name][case.name] = measured_s
    for (name, kind), found in sorted(fits.items()):
        print(f"{name}, {kind}: host_work {_spread(found)}, {len(found)} tests")
    for name in ("a100", "gb200"):
        both = took_s[name].keys() & took_s["h100"].keys()
        ratios = [took_s[name][case] / took_s["h100"][case] for case in both]
        print(f"{name}: {_spread(ratios)} times as long as h100, {len(both)} tests")


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


def _predicted_s(arguments: Mapping[str, Any], machine: str, host_work: float) -> float:
    """Return the time of a step with *arguments* on *machine*, infinity if it cannot be simulated."""
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
            job = job_from(read_files([str(script)], {"cluster": machine, "gpus": GPUS}).settings)
            conventions = {**dict(job.conventions), "host_work": host_work}
            told = replace(job, conventions=tuple(conventions.items()))
            return float(simulate(told).summary["step_time_s"])
        except (SimulationError, ValueError):
            return float("inf")


def _spread(found: list[float]) -> str:
    if len(found) < 2:
        return f"{found[0]:.2f}" if found else "-"
    low, middle, high = quantiles(found, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
