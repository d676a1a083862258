"""ASTRA-sim's workload as text, which SimAI's generator (AICB) writes too: degrees, and layers with sizes.

The first line has the kind of parallelism and degrees by name, the second the number of layers, and each
other line a layer with its times and collectives, as in astra-sim/workload/Workload.cc of ASTRA-sim 1.0 and
workload_generator/SimAI_training_workload_generator.py of aliyun/aicb.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from foretrace.door import counted
from foretrace.simulator.configs.rules import Leave, Read, Reading
from foretrace.simulator.errors import ConfigError

_SENT: Final = ("ALLREDUCE", "ALLGATHER", "REDUCESCATTER", "ALLTOALL")


def _trains(value: Any) -> Leave:
    if not str(value).startswith("HYBRID_TRANSFORMER"):
        raise ValueError("HYBRID_TRANSFORMER: a workload of another kind is no training of a transformer")
    return Leave("layers of a transformer, which --model says")


def _layers(value: Any) -> Leave:
    if not isinstance(value, int):
        raise ValueError("layers of several names: those of one name alone are a benchmark, no training")
    return Leave("times and sizes follow from --model, --seq-len and --micro-batch here")


READERS: Final[Mapping[str, Read]] = MappingProxyType({"layers": _layers, "trains": _trains})
"""Readers of its own, by heading of ``astra.toml``."""


def workload(text: str) -> dict[str, Any] | None:
    """Return the settings in *text* by name, None if it is no such workload."""
    first, _, rest = text.strip().partition("\n")
    policy, *pairs = first.replace(":", " ").split() or [""]
    n_layers, _, layers = rest.partition("\n")
    if counted(n_layers.strip()) < 0 or not any(kind in layers for kind in (*_SENT, "NONE")):
        return None
    found: dict[str, Any] = {"policy": policy} | dict(zip(pairs[::2], pairs[1::2], strict=False))
    names = {line.split()[0] for line in layers.splitlines() if line.strip()}
    return found | {"layers": counted(n_layers.strip()) if len(names) > 1 else names.pop()}


def finish(reading: Reading, given: Mapping[str, Any]) -> None:
    """Ask for what older workloads do not say. Nothing tells which framework one imitates.

    Raises:
        ConfigError: neither the file nor a flag says how many GPUs there are.
    """
    if "gpus" not in reading.facts and not {"gpus", "dp"} & set(given):
        raise ConfigError(f"{reading.where}: it does not say how many GPUs there are: --gpus")
    if reading.facts.get("virtual_stages", 1) > 1:
        reading.assume("schedule", "interleaved-1f1b", "vpp stages per rank")
