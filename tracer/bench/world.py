"""Measures the network and the clocks of a world of processes: torchrun's, or one that is started here.

Run as ``python -m tracer.bench.world WHAT BACKEND OPTIONS RESULT [FILE]`` on every rank; rank 0 writes the
result. Ranks meet by the *FILE*, which needs no port, or where a launcher says.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from foretrace.tracer.clock import machine_id, now_ns, synchronise
from foretrace.tracer.errors import RecordError

COARSE_NS: Final = 100_000
"""Uncertainty from which on spans of two ranks are not to be ordered: a small collective takes less."""


def measure_clocks(pause_s: float) -> dict[str, Any]:
    """Return offset, uncertainty and drift of each rank's clock to that of rank 0.

    Every rank is measured as if it had a machine of its own. Ranks on one machine share a clock, so that
    what is measured of them is the error of the measurement itself.

    Args:
        pause_s: seconds between the two measurements whose difference is the drift.
    """
    import torch.distributed as dist

    first = _measured("first")
    time.sleep(pause_s)
    second = _measured("second")
    mine = {
        "host": socket.gethostname(),
        "machine": machine_id(),
        "offset_ns": second["offset_ns"],
        "uncertainty_ns": second["uncertainty_ns"],
        "drift_ppb": (second["offset_ns"] - first["offset_ns"]) * 1e9 / max(second["at"] - first["at"], 1),
        "drift_uncertainty_ppb": (first["uncertainty_ns"] + second["uncertainty_ns"])
        * 1e9
        / max(second["at"] - first["at"], 1),
    }
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    rows = []
    for rank, row in enumerate(found):
        shared = row.pop("machine") == machine_id()
        is_coarse = not shared and row["uncertainty_ns"] > COARSE_NS
        rows.append({"rank": rank, **row, "shares_clock": shared, "is_coarse": is_coarse})
    return {"ranks": rows}


def _measured(name: str) -> dict[str, int]:
    """Return offset and uncertainty of this rank's clock, measured now."""
    import torch.distributed as dist

    from foretrace.tracer import internals

    rank = dist.get_rank()
    store = dist.PrefixStore(f"foretrace-bench/{name}", internals.default_store())
    clock = synchronise(store, rank, dist.get_world_size(), machine=f"rank {rank}")
    return {"offset_ns": clock.offset_ns, "uncertainty_ns": clock.uncertainty_ns, "at": now_ns()}


NAMES: Final = {"collectives": "collectives", "clock": "clocks", "machine": "this machine"}
"""What is measured, in words."""

TIMEOUT_S: Final = 600
"""How long processes that are started here may take; some 20 s on a machine that does nothing else."""


def is_launched() -> bool:
    """Whether a launcher has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def measured(what: str, *, processes: int, backend: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what rank 0 found; None on the other ranks of a launcher.

    Args:
        what: ``"collectives"`` or ``"clock"``.
        processes: how many to start here, unless a launcher has started this one.
        backend: ``"gloo"``, ``"nccl"``, or empty for what suits the machine.
        options: arguments of the measurement.

    Raises:
        RecordError: torch is missing, or a process failed.
    """
    if not is_launched():
        return started(what, backend, options, processes)
    chosen = _backend(what, backend, int(os.environ.get("LOCAL_WORLD_SIZE", processes)))
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        main([what, chosen, json.dumps(options), str(result)])
        return json.loads(result.read_text(encoding="utf-8")) if result.exists() else None


def started(
    what: str, backend: str, options: Mapping[str, Any], n: int, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return what rank 0 of *n* processes of this machine found, which run to their end.

    Args:
        what: ``"machine"``, or as `measured` takes it, like *backend* and *options*.
        backend: as above.
        options: as above.
        n: how many processes.
        env: environment variables to add.

    Raises:
        RecordError: torch is missing, or a process failed.
    """
    chosen = _backend(what, backend, n)
    with tempfile.TemporaryDirectory() as scratch:
        result, meeting = (str(Path(scratch) / name) for name in ("result.json", "meeting"))
        _run([what, chosen, json.dumps(options), result, meeting], n, env or {})
        found: dict[str, Any] = json.loads(Path(result).read_text(encoding="utf-8"))
        return found


def main(arguments: Sequence[str]) -> None:
    """Join the world, measure, and write on rank 0 what was found."""
    import torch
    import torch.distributed as dist

    what, backend, options, result, *meeting = arguments
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(1)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    found_by: dict[str, Any] = {}
    if meeting:
        found_by = {"init_method": f"file://{meeting[0]}"}
        found_by |= {name.lower(): int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")}
    dist.init_process_group(backend, device_id=device, **found_by)  # else a barrier guesses the GPU
    try:
        found = _measure(what, json.loads(options))
        if dist.get_rank() == 0:
            document = {
                "torch": str(torch.__version__),
                "backend": backend,
                "n_ranks": dist.get_world_size(),
                **found,
            }
            Path(result).write_text(json.dumps(document), encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _measure(what: str, options: Mapping[str, Any]) -> dict[str, Any]:
    from foretrace.tracer.bench import collectives, machine

    measures: Mapping[str, Callable[..., dict[str, Any]]] = {
        "clock": measure_clocks,
        "collectives": collectives.measure,
        "machine": machine.measure,
    }
    return measures[what](**options)


def _backend(what: str, wanted: str, n_local: int) -> str:
    """Return the wanted backend, by default NCCL if each local process has a GPU; raises RecordError."""
    if find_spec("torch") is None:
        raise RecordError(f"measuring {NAMES[what]} needs torch: pip install torch")
    import torch

    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "nccl" and n_gpus < n_local:
        raise RecordError(f"backend nccl needs a GPU for each of {n_local} processes: torch sees {n_gpus}")
    return wanted or ("nccl" if n_gpus >= n_local else "gloo")


def _run(arguments: Sequence[str], n: int, env: Mapping[str, str]) -> None:
    """Run *n* processes of one world on this machine to their end. Raises RecordError if one fails."""
    root = str(Path(__file__).parents[3])
    base = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    base["PYTHONPATH"] = os.pathsep.join(filter(None, [root, base.get("PYTHONPATH", "")]))
    base |= {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "foretrace.tracer.bench.world", *arguments],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(n)
    ]
    try:
        said = [process.communicate(timeout=TIMEOUT_S)[1] for process in processes]
    except subprocess.TimeoutExpired:
        raise RecordError(f"the processes did not come to an end within {TIMEOUT_S} s") from None
    finally:
        for process in processes:
            process.kill()
    for process, errors in zip(processes, said, strict=True):
        if process.returncode:
            last = (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
            raise RecordError(f"a measuring process failed: {last}")


if __name__ == "__main__":
    main(sys.argv[1:])
