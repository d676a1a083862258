"""Times the kernels of a transformer on this machine: products in three layouts, attention, norm, optimizer.

Rows have the columns of a table of kernels, so that ``foretrace validate kernels`` reads what is written.
On a GPU events on the stream are the clock, on a processor its own; the same cases run on both, in sizes that
suit.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from foretrace.tracer.bench.cases import SIZES, WIDTHS, Case, Kernel, Sizes, cases
from foretrace.tracer.errors import RecordError
from foretrace.tracer.timing import burst_s, sustained_s

DEVICES: Final = ("cpu", "cuda")

CPU_S: Final = 0.1
"""Least time spent on a kernel on a processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What was measured, and on what.

    Attributes:
        hardware: what the device calls itself.
        device: ``"cpu"`` or ``"cuda"``.
        torch: version of torch.
        threads: threads of a processor that computed.
        memory_bytes: memory of the device.
        kernels: every kernel with its time.
    """

    hardware: str
    device: str
    torch: str
    threads: int
    memory_bytes: int
    kernels: Sequence[Kernel]

    def describe(self) -> dict[str, Any]:
        """Return everything in plain JSON types."""
        return asdict(self)


def bench(
    device: str,
    dtype: str,
    *,
    lasting_s: float = 1.0,
    threads: int = 1,
    sizes: Sizes | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Bench:
    """Time every kernel on *device*.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        dtype: type of the elements of products and attention.
        lasting_s: for how long a product is repeated under lasting load; 0 for bursts only.
        threads: threads of a processor that compute; many wait for each other where others use it too.
        sizes: what is timed; by default what suits the device.
        tell: told what is about to be timed.

    Raises:
        RecordError: torch is not installed, there is no such device, or it runs out of memory.
    """
    _check(device, dtype)
    import torch

    name, memory_bytes = _identity(device)
    chosen = sizes or SIZES[device]
    found: list[Kernel] = []
    with _threads(threads):
        for case in cases(chosen, device, dtype):
            tell(f"{case.row.kernel} {case.row.direction}")
            try:
                found += _measured(case, device, name, lasting_s if _is_large(case, chosen) else 0.0)
            except torch.OutOfMemoryError as error:
                raise RecordError(f"{name} has too little memory for {case.row.kernel}: {error}") from None
    return Bench(
        hardware=name,
        device=device,
        torch=str(torch.__version__),
        threads=threads,
        memory_bytes=memory_bytes,
        kernels=found,
    )


def write_table(measured: Bench, path: Path) -> None:
    """Write the rows as a CSV table with an id each."""
    rows = [{"id": f"bench-{at:03}", **asdict(one)} for at, one in enumerate(measured.kernels, start=1)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({key: "" if value == 0 else value for key, value in row.items()} for row in rows)


def _check(device: str, dtype: str) -> None:
    if find_spec("torch") is None:
        raise RecordError("timing kernels needs torch: pip install torch")
    import torch

    if device not in DEVICES or (device == "cuda" and not torch.cuda.is_available()):
        there = ", ".join(one for one in DEVICES if one == "cpu" or torch.cuda.is_available())
        raise RecordError(f"device {device!r}: torch sees {there} here")
    if dtype not in WIDTHS:
        raise RecordError(f"dtype {dtype!r}: one of {', '.join(WIDTHS)}")


def _identity(device: str) -> tuple[str, int]:
    """Return what the device calls itself, and its memory."""
    import torch

    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        return str(properties.name), int(properties.total_memory)
    return "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def _threads(n: int) -> Iterator[None]:
    """Let torch compute with *n* threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _measured(case: Case, device: str, name: str, lasting_s: float) -> Iterator[Kernel]:
    """Yield *case* as timed in bursts, and under lasting load if *lasting_s* is not 0."""
    run = case.prepare()
    yield _timed(case, burst_s(run, device, CPU_S) / case.repeats, name, "burst")
    if lasting_s:
        yield _timed(case, sustained_s(run, device, lasting_s) / case.repeats, name, "sustained")


def _is_large(case: Case, sizes: Sizes) -> bool:
    """Return whether lasting load is worth measuring: products of all tokens."""
    return case.row.kernel == "gemm" and case.row.m * case.row.n * case.row.k >= max(sizes.tokens) * min(
        n_in * n_out for n_in, n_out in sizes.linears
    )


def _timed(case: Case, time_s: float, hardware: str, how: str) -> Kernel:
    row = case.row
    return replace(
        row,
        hardware=hardware,
        time_us=time_s * 1e6,
        tflops=case.flops / time_s / 1e12,
        gb_per_s=case.moved / time_s / 1e9,
        load=how,
    )
