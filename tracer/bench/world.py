"""Measures network, clocks and processors of a world of processes: torchrun's, or one that is started here.

Run as ``python -m foretrace.tracer.bench.world WHAT BACKEND OPTIONS RESULT [FILE]`` on every rank; rank 0
writes the result. Ranks meet by the *FILE*, which needs no port, or where a launcher says.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from foretrace.tracer.bench.kernels import (
    LAYOUTS,
    SIZES,
    Case,
    Kernel,
    Run,
    attention,
    product,
    seconds,
    stream,
    timed,
)
from foretrace.tracer.clock import machine_id, now_ns, synchronise
from foretrace.tracer.errors import RecordError, need_torch
from foretrace.traces.analysis.collectives import bus_factor

PRODUCTS: Final = (
    *itertools.product(((128, 256, 256), (128, 256, 704), (512, 256, 256), (512, 256, 704)), LAYOUTS),
    ((1024, 1024, 1024), "fwd"),
)
"""Tokens, features in and out, and layouts that are timed: layers of a small transformer on one sequence and
on four, which tells what a product costs beside its arithmetic, and one large enough for the peak."""

SIZES_BYTES: Final = (1 << 10, 1 << 14, 1 << 17, 1 << 19, 1 << 21, 1 << 23, 1 << 25)
"""Whole-array sizes at which communication is timed, 1 KiB to 32 MiB."""

ATTENTION: Final = replace(SIZES["cpu"], heads=8, kv_heads=8)  # of a small transformer without shared keys

OTHER_BYTES: Final = 1 << 24  # what is worked on between two operations: more than a core's own caches

LINKS: Final = 32  # products, each followed by a sum, in the chain of tiny operations

OPERATIONS_PER_LINK: Final = 4
"""Operations of the model per link of the chain: product and sum forward, and two products backward."""


def measure_machine(n_computing: int) -> dict[str, Any]:
    """Return what each of the first *n_computing* processes computes, and the times of communication.

    They compute at once, as they share caches and memory, and all of them communicate afterwards.
    """
    import torch.distributed as dist

    rank, n_processes = dist.get_rank(), dist.get_world_size()
    computed = _gathered(_compute() if rank < n_computing else None)
    return {"kernels": [one for one in computed if one], "times_s": _communicate(rank, n_processes)}


def _compute() -> list[dict[str, Any]]:
    """Return kernels as this process runs them, in the columns of a table of kernels."""
    measured = [_elsewhere(product("cpu", "fp32", shape, layout)) for shape, layout in PRODUCTS]
    measured += [attention(ATTENTION, "cpu", "fp32", 512, direction) for direction in ("fwd", "bwd")]
    measured += [stream("cpu", 16_000_000), _optimizer(), _element_wise(), _operation()]
    return [asdict(timed(one, seconds(one.prepare()) / one.repeats, "cpu-core", "burst")) for one in measured]


def _elsewhere(case: Case) -> Case:
    """The same on operands that are in no cache when their turn comes, as those of a training."""
    n_sets = math.ceil(OTHER_BYTES / case.moved)

    def prepare() -> Run:
        runs = itertools.cycle([case.prepare() for _ in range(n_sets)])

        def run() -> Any:
            return next(runs)()

        return run

    return replace(case, prepare=prepare)


# What a small model does beside products: tensors are those of a Llama of hidden size 256 with 8 layers on
# 512 tokens, and none of them is in a cache when its turn comes. Operands are counted once: AdamW reads
# parameter, gradient and two moments and writes all but the gradient.


def _optimizer() -> Case:
    import torch

    shapes = ([(256, 256)] * 2 + [(128, 256)] * 2 + [(704, 256)] * 3) * 8 + [(2048, 256)] * 2
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    row, moved = Kernel(kernel="optimizer", dtype="fp32"), 7 * sum(p.nbytes for p in parameters)
    return Case(row, 0.0, moved, lambda: torch.optim.AdamW(parameters).step)


def _element_wise() -> Case:
    """Norms, residuals and gates, forward and backward."""
    import torch
    from torch.nn import functional

    weight = torch.ones(256, requires_grad=True)
    hidden = torch.randn(512, 256, requires_grad=True)
    gates = [torch.randn(512, 704, requires_grad=True) for _ in range(2 * 8)]

    def layers() -> None:
        x, total = hidden, torch.zeros(())
        for gate, up in zip(gates[::2], gates[1::2], strict=True):
            x = x + functional.rms_norm(x, (256,), weight)
            x = x + functional.rms_norm(x, (256,), weight)
            total = total + (functional.silu(gate) * up).sum()
        (total + x.sum()).backward()

    # Norm 2 + 3 passes, sum 3 + 3 with the one of gradients; silu 2 + 3, product 3 + 6, its sum 1 + 1.
    per_layer = 2 * 11 * hidden.nbytes + 16 * gates[0].nbytes
    return Case(Kernel(kernel="norm", dtype="fp32"), 0.0, 8 * per_layer, lambda: layers)


def _operation() -> Case:
    """A tiny operation of a model, forward or backward: one of a chain."""
    import torch

    parts = torch.nn.ModuleList(torch.nn.Linear(16, 16, bias=False) for _ in range(LINKS))
    x = torch.randn(4, 16, requires_grad=True)

    def chain() -> None:
        y = x
        for layer in parts:
            y = y + layer(y)
        y.sum().backward()

    return Case(Kernel(kernel="launch", dtype="fp32"), 0.0, 0.0, lambda: chain, LINKS * OPERATIONS_PER_LINK)


def _communicate(rank: int, n_processes: int) -> dict[str, dict[int, list[float]]]:
    import torch.distributed as dist

    found: dict[str, dict[int, list[float]]] = {}
    for n_ranks in sorted({2, n_processes}):
        group = dist.new_group(list(range(n_ranks)))
        for kind in ("all_reduce", "all_gather", "reduce_scatter", *(["p2p"] if n_ranks == 2 else [])):
            dist.barrier()
            if rank < n_ranks:
                share = 0.5 if kind == "p2p" else 1.0  # there and back
                times = [_in_training(kind, size, n_ranks, group) for size in SIZES_BYTES]
                found.setdefault(kind, {})[n_ranks] = [share * one for one in times]
        dist.barrier()
    return found


def _in_training(kind: str, size_bytes: int, n_ranks: int, group: Any) -> float:
    """Return the time of an operation as a training calls it: on tensors made for it, after other work.

    Again and again on the same ones it takes half as long, from caches that a training fills with its own.
    """
    import torch
    import torch.distributed as dist

    other_work, times = torch.zeros(OTHER_BYTES // 4), list[float]()
    for _ in range(WARM_UP + (21 if size_bytes < 1 << 20 else 9)):
        other_work += 1
        run, _ = _operation_of(kind, size_bytes, n_ranks, group)
        dist.barrier(group)
        times += _times(run, 1, n_before=0, together=False)
    return median(times[WARM_UP:])


KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")

WARM_UP: Final = 2  # calls before those that count: buffers are allocated, connections made

SLOW: Final = 1.5
"""Time over the median above which a link or rank is slow. On a machine of its own links of one kind
differ by a few percent; a link at half its width, as a retrained lane or a missing rail has it, by 2."""

LINK_BYTES: Final = 8 << 20  # message by which links are compared: large enough for bandwidth to rule
PROBE: Final = 512  # side of the matrix product by which ranks are compared


def measure_network(sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    """Return the times of all collectives at *sizes* of the whole array, of links, and of ranks.

    Args:
        sizes: bytes, as nccl-tests counts them.
        repeats: calls of each; the median counts, of links and ranks the best: what is slow is never fast.
    """
    import torch
    import torch.distributed as dist

    rows = [_collective(kind, size, repeats) for kind in KINDS for size in sizes]
    n = dist.get_world_size()  # links of neighbours, and of ranks powers of two apart
    links = [link for i in range(n.bit_length()) if 1 << i < n for link in _links(1 << i, repeats)]
    a = torch.ones(PROBE, PROBE, device=_device())
    probe_s = min(_times(lambda: a @ a, max(repeats, 9), together=False))
    ranks = _gathered({"host": socket.gethostname(), "probe_s": probe_s})
    found = {
        "collectives": rows,
        "links": links,
        "ranks": [{"rank": i, **row} for i, row in enumerate(ranks)],
    }
    _flag(found["links"], "time_s")
    _flag(found["ranks"], "probe_s")
    return found


def _collective(kind: str, size_bytes: int, repeats: int) -> dict[str, Any]:
    """Return one row: the slowest rank's median, as nccl-tests counts."""
    import torch.distributed as dist

    n = dist.get_world_size()
    run, counted = _operation_of(kind, size_bytes, n)
    times = _gathered(median(_times(run, repeats)))
    time_s = max(times)
    return {
        "kind": kind,
        "size_bytes": counted,
        "time_s": time_s,
        "busbw_bytes_per_s": counted / time_s * bus_factor(kind, n),
    }


def _operation_of(kind: str, size_bytes: int, n: int, group: Any = None) -> tuple[Callable[[], Any], int]:
    """Return what does one operation over *n* ranks, and the bytes of its whole array: a multiple of them."""
    import torch
    import torch.distributed as dist

    # Tensors are of float32, 4 bytes each.
    part = max(size_bytes // 4 // n, 1)
    whole, piece = torch.zeros(part * n, device=_device()), torch.zeros(part, device=_device())
    other = torch.zeros_like(whole)

    def there_and_back() -> None:
        for sender in (0, 1):
            transfer = dist.send if dist.get_rank() == sender else dist.recv
            transfer(whole, 1 - dist.get_rank(), group=group)

    runs: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, piece, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(piece, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "p2p": there_and_back,
    }
    return runs[kind], 4 * part * n


def _links(distance: int, repeats: int) -> list[dict[str, Any]]:
    """Return the time of every rank's message to the one *distance* further, all sent at once."""
    import torch
    import torch.distributed as dist

    rank, n = dist.get_rank(), dist.get_world_size()
    sent, received = (torch.zeros(LINK_BYTES // 4, device=_device()) for _ in range(2))

    def exchange() -> None:
        transfers = [
            dist.P2POp(dist.isend, sent, (rank + distance) % n),
            dist.P2POp(dist.irecv, received, (rank - distance) % n),
        ]
        works = [op.op(op.tensor, op.peer) for op in transfers] if sent.device.type == "cpu" else []
        for work in works or dist.batch_isend_irecv(transfers):
            work.wait()

    times = _gathered(min(_times(exchange, repeats)))
    return [
        {
            "receiver": receiver,
            "sender": (receiver - distance) % n,
            "distance": distance,
            "time_s": time_s,
            "bytes_per_s": LINK_BYTES / time_s,
        }
        for receiver, time_s in enumerate(times)
    ]


def _times(
    run: Callable[[], Any], repeats: int, *, n_before: int = WARM_UP, together: bool = True
) -> list[float]:
    """Return the time of each call of *run* behind *n_before*, begun by all ranks at once if *together*."""
    import torch
    import torch.distributed as dist

    found = []
    through = torch.cuda.synchronize if _device().type == "cuda" else lambda: None
    for _ in range(n_before + repeats):
        if together:
            dist.barrier()
        through()
        began = time.perf_counter()
        run()
        through()
        found.append(time.perf_counter() - began)
    return found[n_before:]


def _flag(rows: list[dict[str, Any]], column: str) -> None:
    """Mark every row that takes much longer than the middle one of its kind."""
    by_kind: dict[Any, list[float]] = {}
    for row in rows:
        by_kind.setdefault(row.get("distance"), []).append(row[column])
    for row in rows:
        row["is_slow"] = row[column] > SLOW * median(by_kind[row.get("distance")])


def _gathered(value: Any) -> list[Any]:
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _device() -> Any:
    import torch
    import torch.distributed as dist

    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


COARSE_NS: Final = 100_000
"""Uncertainty from which on spans of two ranks are not to be ordered: a small collective takes less."""


def measure_clocks(pause_s: float) -> dict[str, Any]:
    """Return offset, uncertainty and drift of each rank's clock to that of rank 0.

    Every rank is measured as if it had a machine of its own. Ranks on one machine share a clock, so that
    what is measured of them is the error of the measurement itself.

    Args:
        pause_s: seconds between the two measurements whose difference is the drift.
    """
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
    found = _gathered(mine)
    rows = []
    for rank, row in enumerate(found):
        shared = row.pop("machine") == machine_id()
        is_coarse = not shared and row["uncertainty_ns"] > COARSE_NS
        rows.append({"rank": rank, **row, "shares_clock": shared, "is_coarse": is_coarse})
    return {"ranks": rows}


def _measured(name: str) -> dict[str, int]:
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
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:  # no launcher has started it
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

    Raises RecordError: torch is missing, or a process failed.
    """
    chosen = _backend(what, backend, n)
    with tempfile.TemporaryDirectory() as scratch:
        # They meet by a file: a port that is bound and closed may be somebody else's by then.
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
    measures: Mapping[str, Callable[..., dict[str, Any]]] = {
        "clock": measure_clocks,
        "collectives": measure_network,
        "machine": measure_machine,
    }
    return measures[what](**options)


def _backend(what: str, wanted: str, n_local: int) -> str:
    """Return the wanted backend, by default NCCL if each local process has a GPU; raises RecordError."""
    need_torch(f"measuring {NAMES[what]}")
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
    with ExitStack() as kept:
        # Files, as nobody reads a pipe while another process is waited for, and a full one holds up its own.
        said = [kept.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(n)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", "foretrace.tracer.bench.world", *arguments],
                env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=said[rank],
            )
            for rank in range(n)
        ]
        try:
            for process in processes:
                process.wait(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RecordError(f"the processes did not come to an end within {TIMEOUT_S} s") from None
        finally:
            for process in processes:
                process.kill()
        for process, errors in zip(processes, said, strict=True):
            if process.returncode:
                errors.seek(0)
                last = (errors.read().strip().splitlines() or [f"exit status {process.returncode}"])[-1]
                raise RecordError(f"a measuring process failed: {last}")


if __name__ == "__main__":
    main(sys.argv[1:])
