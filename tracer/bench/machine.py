"""Times products, memory, attention and gloo in one of the processes that are the devices of a machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, Final

from foretrace.tracer.bench.kernels import line, seconds

GEMM_SHAPES: Final = ((512, 256, 256), (512, 704, 256), (256, 704, 512), (512, 2048, 256), (1024, 1024, 1024))
"""Products (m, n, k) that are timed: those of a small transformer, and one large enough for the peak."""

SIZES_BYTES: Final = (1 << 10, 1 << 14, 1 << 17, 1 << 19, 1 << 21, 1 << 23, 1 << 25)
"""Whole-array sizes at which communication is timed, 1 KiB to 32 MiB."""

LINKS: Final = 32
"""Products, each followed by a sum, in the chain of tiny operations."""

OPERATIONS_PER_LINK: Final = 4
"""Operations of the model per link of the chain: product and sum forward, and two products backward."""


def measure(n_computing: int) -> dict[str, Any]:
    """Return what each of the first *n_computing* processes computes, and the times of communication.

    They compute at once, as they share caches and memory, and all of them communicate afterwards.
    """
    import torch.distributed as dist

    rank, n_processes = dist.get_rank(), dist.get_world_size()
    computed: list[Any] = [None] * n_processes
    dist.all_gather_object(computed, _compute() if rank < n_computing else None)
    times_s = _communicate(rank, n_processes)
    return {"compute": [one for one in computed if one is not None], "times_s": times_s}


def _compute() -> dict[str, float]:
    """Return the fields of ``tracer.detect.Compute``, measured in this process."""
    times = {shape: _gemm_s(*shape) for shape in GEMM_SHAPES}
    flops = {(m, n, k): 2 * m * n * k for m, n, k in GEMM_SHAPES}
    peak = max(flops[shape] / times[shape] for shape in GEMM_SHAPES)
    slope, latency_s = line([(flops[shape], times[shape]) for shape in GEMM_SHAPES])
    bandwidth = _bandwidth()
    forward, backward = _attention(peak)
    return {
        "peak_flops_per_s": peak,
        "gemm_efficiency": min(1.0, 1 / (slope * peak)),
        "gemm_latency_s": latency_s,
        "memory_bytes_per_s": bandwidth,
        "memory_fraction": min(1.0, _small_bandwidth() / bandwidth),
        "operation_s": _operation_s(),
        "attention_forward": min(1.0, forward),
        "attention_backward": min(1.0, backward),
    }


def _gemm_s(m: int, n: int, k: int) -> float:
    import torch

    a, b = torch.randn(m, k), torch.randn(k, n)
    return seconds(lambda: a @ b)


def _bandwidth() -> float:
    """Return bytes per second of an operation in place on 64 MB, read and write counted."""
    import torch

    x = torch.zeros(16_000_000)
    return float(2 * x.nbytes / seconds(lambda: x.add_(1)))


def _small_bandwidth() -> float:
    """Return bytes per second where a small model does no products: its optimizer and what is element-wise.

    Tensors are those of a Llama of hidden size 256 with 8 layers on 512 tokens, and none of them is in a
    cache when its turn comes. Operands are counted once: AdamW reads parameter, gradient and two moments and
    writes all but the gradient.
    """
    optimizer_bytes, optimizer_s = _optimizer()
    passes_bytes, passes_s = _element_wise()
    return (optimizer_bytes + passes_bytes) / (optimizer_s + passes_s)


def _optimizer() -> tuple[int, float]:
    """Return bytes moved and time of a step of AdamW."""
    import torch

    shapes = ([(256, 256)] * 2 + [(128, 256)] * 2 + [(704, 256)] * 3) * 8 + [(2048, 256)] * 2
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters)
    return 7 * sum(p.nbytes for p in parameters), seconds(optimizer.step)


def _element_wise() -> tuple[int, float]:
    """Return bytes moved and time of norms, residuals and gates, forward and backward."""
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
    return 8 * per_layer, seconds(layers)


def _operation_s() -> float:
    """Return the time of one tiny operation of a model, forward or backward."""
    import torch

    layers = torch.nn.ModuleList(torch.nn.Linear(16, 16, bias=False) for _ in range(LINKS))
    x = torch.randn(4, 16, requires_grad=True)

    def chain() -> None:
        y = x
        for layer in layers:
            y = y + layer(y)
        y.sum().backward()

    return seconds(chain) / (LINKS * OPERATIONS_PER_LINK)


def _attention(peak: float) -> tuple[float, float]:
    """Return the efficiency of causal attention, forward and backward, over *peak* FLOP/s."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    shape = heads, tokens, width = 8, 512, 32
    q, k, v = (torch.randn(1, *shape, requires_grad=True) for _ in range(3))

    def forward() -> Any:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    forward_s = seconds(forward)
    both_s = seconds(lambda: forward().sum().backward())
    product = 2 * heads * tokens * tokens * width / 2  # half of the scores are masked
    return 2 * product / (forward_s * peak), 5 * product / (max(both_s - forward_s, 1e-9) * peak)


def _communicate(rank: int, n_processes: int) -> dict[str, dict[int, list[float]]]:
    """Return the times of gloo operations by kind, number of ranks and ``SIZES_BYTES``."""
    import torch.distributed as dist

    found: dict[str, dict[int, list[float]]] = {}
    for n_ranks in sorted({2, n_processes}):
        group = dist.new_group(list(range(n_ranks)))
        for kind in ("all_reduce", "all_gather", "reduce_scatter", *(["p2p"] if n_ranks == 2 else [])):
            dist.barrier()
            if rank < n_ranks:
                times = [_communication_s(kind, size, rank, n_ranks, group) for size in SIZES_BYTES]
                found.setdefault(kind, {})[n_ranks] = times
        dist.barrier()
    return found


def _communication_s(kind: str, size_bytes: int, rank: int, n_ranks: int, group: Any) -> float:
    """Return the median time of one operation on a whole array of *size_bytes*, over *n_ranks*."""
    run = _operation(kind, size_bytes // 4, rank, n_ranks, group)
    repeats = 31 if size_bytes < 1 << 20 else 9
    times = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    share = 0.5 if kind == "p2p" else 1.0  # there and back
    return median(times[2:]) * share


def _operation(kind: str, n_elements: int, rank: int, n_ranks: int, group: Any) -> Callable[[], Any]:
    """Return a function that does one operation and waits for it."""
    import torch
    import torch.distributed as dist

    whole, part = torch.zeros(n_elements), torch.zeros(n_elements // n_ranks)

    def there_and_back() -> None:
        for sender in (0, 1):
            if rank == sender:
                dist.send(whole, 1 - rank, group=group)
            else:
                dist.recv(whole, 1 - rank, group=group)

    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole[: part.numel() * n_ranks], part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(
            part, whole[: part.numel() * n_ranks], group=group
        ),
        "p2p": there_and_back,
    }[kind]
