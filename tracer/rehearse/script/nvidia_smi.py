"""Replaces ``nvidia-smi`` on a machine without a driver. It runs by itself and imports nothing of foretrace.

    python nvidia_smi.py ASKED N_GPUS [arguments of nvidia-smi]

It creates the file ASKED, so that the rehearsal knows that it was called. Fields are those of
``nvidia-smi --help-query-gpu``, with the units that nvidia-smi prints.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

NAME = "NVIDIA H100 80GB HBM3"
MEMORY_MIB = 81559
"""Memory that nvidia-smi reports for an H100."""

UNITS = {"memory": "MiB", "utilization": "%", "power": "W", "clocks": "MHz"}
"""Units of fields by the first part of their names."""


def answer(told: Sequence[str], n_gpus: int) -> str:
    """Return the output for *n_gpus* idle GPUs, with 0 for everything that a driver measures."""
    flags = dict(word.partition("=")[::2] for word in told)
    if "-L" in flags or "--list-gpus" in flags:
        return "\n".join(f"GPU {index}: {NAME} (UUID: GPU-{index})" for index in range(n_gpus))
    fields = [field.strip() for field in flags.get("--query-gpu", "").split(",") if field.strip()]
    if not fields:
        return "" if any(word.startswith("--query") for word in told) else f"{n_gpus} x {NAME}, no driver"
    style = flags.get("--format", "csv").split(",")
    lines = [] if "noheader" in style else [", ".join(fields)]
    for index in range(n_gpus):
        values = [_value(field, index, n_gpus, with_units="nounits" not in style) for field in fields]
        lines.append(", ".join(values))
    return "\n".join(lines)


def _value(field: str, index: int, n_gpus: int, *, with_units: bool) -> str:
    known = {
        "name": NAME,
        "gpu_name": NAME,
        "uuid": f"GPU-{index}",
        "gpu_uuid": f"GPU-{index}",
        "index": str(index),
        "count": str(n_gpus),
        "compute_cap": "9.0",
        "memory.total": str(MEMORY_MIB),
        "memory.free": str(MEMORY_MIB),
    }
    unit = UNITS.get(field.split(".", maxsplit=1)[0], "") if with_units else ""
    return f"{known.get(field, '0')} {unit}".rstrip()


if __name__ == "__main__":
    Path(sys.argv[1]).touch()
    print(answer(sys.argv[3:], int(sys.argv[2])))  # noqa: T201 - it is a program
