"""Times the kernels of a transformer on this machine: products in three layouts, attention, norm, optimizer.

Rows have the columns of a table of kernels, so that ``foretrace validate kernels`` reads what is written.
On a GPU events on the stream are the clock, on a processor its own; the same cases run on both, in sizes that
suit.
"""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Final

import numpy as np

from foretrace.door import own_table, shaped
from foretrace.tracer.errors import RecordError, need_torch

MIN_S: Final = 0.25  # least time spent on one figure, so that a busy moment of the machine does not decide it

FAST: Final = 0.25
"""Quantile of a computation's times: half of the quiet half, as others may use the machine, too."""

BURST_S: Final = 0.005
"""Length of a burst on a GPU: longer than a launch, shorter than its power limit takes to lower the clock."""

BURSTS: Final = 7  # bursts of which the middle one counts
PAUSE_S: Final = 0.05  # pause before a burst, in which a GPU cools and its clock recovers

Run = Callable[[], Any]


def seconds(run: Run, at_least_s: float = MIN_S) -> float:
    """Return the time of *run* when the machine is left to it: the lower quartile of many times."""
    run()
    times: list[float] = []
    while sum(times) < at_least_s or len(times) < 5:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return sorted(times)[int(len(times) * FAST)]


def burst_s(run: Run, device: str, at_least_s: float = MIN_S) -> float:
    """Return the time of *run* in short bursts with pauses between them."""
    if device == "cpu":
        return seconds(run, at_least_s)
    run()
    once = _events_s(run, 3)
    n = max(1, int(BURST_S / once))
    found = []
    for _ in range(BURSTS):
        time.sleep(PAUSE_S)
        found.append(_events_s(run, n))
    return median(found)


def sustained_s(run: Run, device: str, for_s: float) -> float:
    """Return the time of *run* under lasting load: the mean over the second half of *for_s*."""
    once = max(burst_s(run, device, for_s / 10), 1e-9)
    n = max(1, int(for_s / 2 / once))
    timed = _wall_s if device == "cpu" else _events_s
    timed(run, n)
    return timed(run, n)


def _wall_s(run: Run, n: int) -> float:
    began = time.perf_counter()
    for _ in range(n):
        run()
    return (time.perf_counter() - began) / n


def _events_s(run: Run, n: int) -> float:
    """Return the time of one of *n* calls on the device, from events before the first and after the last."""
    import torch

    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    began.record()
    for _ in range(n):
        run()
    ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended)) / 1e3 / n


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return slope and intercept of ``y = slope x + intercept``, least squares of the relative error.

    The intercept is at least 0; where the fit would make it negative, the line goes through the origin.
    """
    x, y = np.array(points).T
    slope, intercept = np.polyfit(x, y, 1, w=1 / y)
    return (slope, intercept) if intercept >= 0 else ((x / y).sum() / ((x / y) ** 2).sum(), 0.0)


WIDTHS: Final[Mapping[str, int]] = {"fp32": 4, "fp16": 2, "bf16": 2}

LAYOUTS: Final = ("fwd", "bwd_grad_act", "bwd_grad_w")
"""Products of a linear layer: output, gradient of the input, gradient of the weight."""

TINY: Final = 256  # elements of an operation that is so small that launching it takes longer than running it
CHAIN: Final = 200  # tiny operations in a row


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is timed."""

    tokens: tuple[int, ...]  # rows of products and norms
    linears: tuple[tuple[int, int], ...]  # input and output features of the matrices of a layer
    squares: tuple[int, ...]  # sides of square products
    sequences: tuple[int, ...]  # tokens per sequence in attention, one sequence at a time
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int  # width of norms
    ffn_hidden: int  # width of gates
    params: int  # parameters that the optimizer updates
    stream: int  # elements that memory bandwidth is measured on


SIZES: Final[Mapping[str, Sizes]] = {
    device: shaped(Sizes, timed) for device, timed in own_table("tracer/bench/sizes.toml").items()
}
"""Sizes by device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel that was timed: the columns of a table of kernels. Zero where a column does not apply."""

    hardware: str = ""
    kernel: str
    dtype: str
    direction: str = "fwd"
    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = 1
    seq: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    causal: bool = False
    impl: str = "torch"
    time_us: float = 0.0
    tflops: float = 0.0
    gb_per_s: float = 0.0
    load: str = ""
    notes: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """What to time."""

    row: Kernel  # row of the table of kernels, still without its time
    flops: float  # FLOPs of one kernel
    moved: float  # bytes that it reads and writes
    prepare: Callable[[], Run]  # allocates operands and returns what to run
    repeats: int = 1  # kernels in one run


def cases(sizes: Sizes, device: str, dtype: str) -> Iterator[Case]:
    """Yield everything that is timed."""
    for tokens in sizes.tokens:
        for n_in, n_out in sizes.linears:
            yield from (product(device, dtype, (tokens, n_in, n_out), layout) for layout in LAYOUTS)
    yield from (product(device, dtype, (side, side, side), "fwd") for side in sizes.squares)
    for seq in sizes.sequences:
        yield from (attention(sizes, device, dtype, seq, direction) for direction in ("fwd", "bwd"))
    tokens = max(sizes.tokens)
    yield from (_norm(device, dtype, tokens, sizes.hidden, direction) for direction in ("fwd", "bwd"))
    yield _activation(device, dtype, tokens, sizes.ffn_hidden)
    yield stream(device, sizes.stream)
    yield _optimizer(device, sizes.params)
    yield _launch(device)


def _tensor(device: str, dtype: str, *shape: int, grad: bool = False) -> Any:
    import torch

    kinds = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    return torch.randn(shape, device=device, dtype=kinds[dtype]).requires_grad_(grad)


def product(device: str, dtype: str, shape: tuple[int, int, int], layout: str) -> Case:
    """A product of a linear layer, as autograd calls it: ``x W^T``, ``dy W`` or ``dy^T x``."""
    tokens, n_in, n_out = shape
    m, n, k = {
        "fwd": (tokens, n_out, n_in),
        "bwd_grad_act": (tokens, n_in, n_out),
        "bwd_grad_w": (n_out, n_in, tokens),
    }[layout]

    def prepare() -> Run:
        x, dy, w = (
            _tensor(device, dtype, *sides) for sides in ((tokens, n_in), (tokens, n_out), (n_out, n_in))
        )
        return {
            "fwd": lambda: x @ w.T,
            "bwd_grad_act": lambda: dy @ w,
            "bwd_grad_w": lambda: dy.T @ x,
        }[layout]

    moved = (m * k + k * n + m * n) * WIDTHS[dtype]
    row = Kernel(kernel="gemm", dtype=dtype, direction=layout, m=m, n=n, k=k)
    return Case(row, 2.0 * m * n * k, moved, prepare)


def attention(sizes: Sizes, device: str, dtype: str, seq: int, direction: str) -> Case:
    """Causal attention of a sequence, ``scaled_dot_product_attention``; the masked half is not counted."""

    def prepare() -> Run:
        import torch
        from torch.nn.functional import scaled_dot_product_attention as attend

        counts = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
        q, k, v = (_tensor(device, dtype, 1, n, seq, sizes.head_dim, grad=True) for n in counts)

        def forward() -> Any:
            return attend(q, k, v, is_causal=True, enable_gqa=True)

        if direction == "fwd":
            return forward
        out = forward()
        gradient = _tensor(device, dtype, *out.shape)
        return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    # Forward has two products, backward five: it computes the scores again.
    passes = 1.0 if direction == "fwd" else 2.5
    flops = passes * 2 * sizes.heads * seq * seq * sizes.head_dim
    # Query and output have all heads, key and value those of keys.
    operands = 2 * seq * (sizes.heads + sizes.kv_heads) * sizes.head_dim * WIDTHS[dtype]
    row = Kernel(
        kernel="attention",
        dtype=dtype,
        direction=direction,
        seq=seq,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        causal=True,
        impl="SDPA",
    )
    return Case(row, flops, operands * (1 if direction == "fwd" else 2), prepare)


def _norm(device: str, dtype: str, tokens: int, hidden: int, direction: str) -> Case:
    """RMSNorm as torch has it: two passes over its input forward, three backward."""

    def prepare() -> Run:
        import torch
        from torch.nn.functional import rms_norm

        x = _tensor(device, dtype, tokens, hidden, grad=True)
        weight = _tensor(device, dtype, hidden, grad=True)
        if direction == "fwd":
            return lambda: rms_norm(x, (hidden,), weight)
        out = rms_norm(x, (hidden,), weight)
        gradient = _tensor(device, dtype, tokens, hidden)
        return lambda: torch.autograd.grad(out, (x, weight), gradient, retain_graph=True)

    passes = 2 if direction == "fwd" else 3
    row = Kernel(kernel="norm", dtype=dtype, direction=direction, m=tokens, n=hidden)
    return Case(row, 0.0, passes * tokens * hidden * WIDTHS[dtype], prepare)


def _activation(device: str, dtype: str, tokens: int, width: int) -> Case:
    """``silu(gate) * up`` in two kernels: five passes over the output."""

    def prepare() -> Run:
        from torch.nn.functional import silu

        gate, up = (_tensor(device, dtype, tokens, width) for _ in range(2))
        return lambda: silu(gate) * up

    row = Kernel(kernel="activation", dtype=dtype, m=tokens, n=width, notes="two kernels")
    # The first kernel reads and writes once, the product reads twice and writes once.
    return Case(row, 0.0, 5 * tokens * width * WIDTHS[dtype], prepare)


def stream(device: str, n_elements: int) -> Case:
    """``x + 1`` in place: one read and one write of every element."""

    def prepare() -> Run:
        x = _tensor(device, "fp32", n_elements)
        return lambda: x.add_(1)

    row = Kernel(kernel="stream", dtype="fp32", m=n_elements, n=1)
    return Case(row, 0.0, 2 * n_elements * WIDTHS["fp32"], prepare)


def _optimizer(device: str, n_params: int) -> Case:
    """AdamW, fused, in fp32: parameter, gradient and two moments are read, all but the gradient written."""

    def prepare() -> Run:
        import torch

        parameter = torch.nn.Parameter(_tensor(device, "fp32", n_params))
        parameter.grad = _tensor(device, "fp32", n_params)
        step: Run = torch.optim.AdamW([parameter], fused=True).step
        return step

    row = Kernel(kernel="optimizer", dtype="fp32", m=n_params, n=1, notes="fused AdamW")
    return Case(row, 0.0, 7 * n_params * WIDTHS["fp32"], prepare)


def _launch(device: str) -> Case:
    """A tiny operation, one of many in a row: what it costs to launch it."""

    def prepare() -> Run:
        x = _tensor(device, "fp32", TINY)

        def chain() -> None:
            for _ in range(CHAIN):
                x.add_(1)

        return chain

    row = Kernel(kernel="launch", dtype="fp32", m=TINY, n=1, notes=f"one of {CHAIN} in a row")
    return Case(row, 0.0, 2 * TINY * WIDTHS["fp32"], prepare, repeats=CHAIN)


DEVICES: Final = ("cpu", "cuda")

CPU_S: Final = 0.1  # least time spent on a kernel on a processor


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What was measured, and on what."""

    hardware: str  # what the device calls itself
    device: str  # ``"cpu"`` or ``"cuda"``
    torch: str  # version of torch
    threads: int  # threads of a processor that computed
    memory_bytes: int  # memory of the device
    kernels: Sequence[Kernel]  # every kernel with its time


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


def table_text(measured: Bench) -> str:
    """Return the rows as a CSV table with an id each."""
    rows = [{"id": f"bench-{at:03}", **asdict(one)} for at, one in enumerate(measured.kernels, start=1)]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows({key: "" if value == 0 else value for key, value in row.items()} for row in rows)
    return text.getvalue()


def _check(device: str, dtype: str) -> None:
    need_torch("timing kernels")
    import torch

    if device not in DEVICES or (device == "cuda" and not torch.cuda.is_available()):
        there = ", ".join(one for one in DEVICES if one == "cpu" or torch.cuda.is_available())
        raise RecordError(f"device {device!r}: torch sees {there} here")
    if dtype not in WIDTHS:
        raise RecordError(f"dtype {dtype!r}: one of {', '.join(WIDTHS)}")


def _identity(device: str) -> tuple[str, int]:
    import torch

    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        return str(properties.name), int(properties.total_memory)
    return "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def _threads(n: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _measured(case: Case, device: str, name: str, lasting_s: float) -> Iterator[Kernel]:
    run = case.prepare()
    yield timed(case, burst_s(run, device, CPU_S) / case.repeats, name, "burst")
    if lasting_s:
        yield timed(case, sustained_s(run, device, lasting_s) / case.repeats, name, "sustained")


def _is_large(case: Case, sizes: Sizes) -> bool:
    """Return whether lasting load is worth measuring: products of all tokens."""
    return case.row.kernel == "gemm" and case.row.m * case.row.n * case.row.k >= max(sizes.tokens) * min(
        n_in * n_out for n_in, n_out in sizes.linears
    )


def timed(case: Case, time_s: float, hardware: str, how: str) -> Kernel:
    """Return the row of *case*, which took *time_s*."""
    row = case.row
    return replace(
        row,
        hardware=hardware,
        time_us=time_s * 1e6,
        tflops=case.flops / time_s / 1e12,
        gb_per_s=case.moved / time_s / 1e9,
        load=how,
    )
