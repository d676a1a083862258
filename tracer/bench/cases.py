"""The kernels of a transformer that are timed: how each is set up, and what work it is.

Every case is a row of a table of kernels without its time, and a function that allocates operands and returns
what to run. Nothing is allocated until it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from foretrace.tracer.timing import Run

WIDTHS: Final[Mapping[str, int]] = {"fp32": 4, "fp16": 2, "bf16": 2}

LAYOUTS: Final = ("fwd", "bwd_grad_act", "bwd_grad_w")
"""Products of a linear layer: output, gradient of the input, gradient of the weight."""

TINY: Final = 256
"""Elements of an operation that is so small that launching it takes longer than running it."""

CHAIN: Final = 200
"""Tiny operations in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is timed.

    Attributes:
        tokens: rows of products and norms.
        linears: input and output features of the matrices of a layer.
        squares: sides of square products.
        sequences: tokens per sequence in attention, one sequence at a time.
        heads, kv_heads, head_dim: shape of attention.
        hidden, ffn_hidden: width of norms and of gates.
        params: parameters that the optimizer updates.
        stream: elements that memory bandwidth is measured on.
    """

    tokens: tuple[int, ...]
    linears: tuple[tuple[int, int], ...]
    squares: tuple[int, ...]
    sequences: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    ffn_hidden: int
    params: int
    stream: int


SIZES: Final[Mapping[str, Sizes]] = {
    # a layer of Llama 3 8B: query, key and value; output; gate and up; down
    "cuda": Sizes(
        tokens=(1024, 8192),
        linears=((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
        squares=(8192,),
        sequences=(2048, 8192),
        heads=32,
        kv_heads=8,
        head_dim=128,
        hidden=4096,
        ffn_hidden=14336,
        params=100_000_000,
        stream=256_000_000,
    ),
    # a layer of a Llama small enough for a processor
    "cpu": Sizes(
        tokens=(64, 512),
        linears=((256, 512), (256, 1408), (704, 256)),
        squares=(1024,),
        sequences=(256, 1024),
        heads=8,
        kv_heads=4,
        head_dim=32,
        hidden=256,
        ffn_hidden=704,
        params=8_000_000,
        stream=16_000_000,
    ),
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
    """What to time.

    Attributes:
        row: row of the table of kernels, still without its time.
        flops: FLOPs of one kernel.
        moved: bytes that it reads and writes.
        prepare: allocates operands and returns what to run.
        repeats: kernels in one run.
    """

    row: Kernel
    flops: float
    moved: float
    prepare: Callable[[], Run]
    repeats: int = 1


def cases(sizes: Sizes, device: str, dtype: str) -> Iterator[Case]:
    """Yield everything that is timed."""
    for tokens in sizes.tokens:
        for n_in, n_out in sizes.linears:
            yield from (_product(device, dtype, (tokens, n_in, n_out), layout) for layout in LAYOUTS)
    yield from (_product(device, dtype, (side, side, side), "fwd") for side in sizes.squares)
    for seq in sizes.sequences:
        yield from (_attention(sizes, device, dtype, seq, direction) for direction in ("fwd", "bwd"))
    tokens = max(sizes.tokens)
    yield from (_norm(device, dtype, tokens, sizes.hidden, direction) for direction in ("fwd", "bwd"))
    yield _activation(device, dtype, tokens, sizes.ffn_hidden)
    yield _stream(device, sizes.stream)
    yield _optimizer(device, sizes.params)
    yield _launch(device)


def _tensor(device: str, dtype: str, *shape: int, grad: bool = False) -> Any:
    import torch

    kinds = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    return torch.randn(shape, device=device, dtype=kinds[dtype]).requires_grad_(grad)


def _product(device: str, dtype: str, shape: tuple[int, int, int], layout: str) -> Case:
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


def _attention(sizes: Sizes, device: str, dtype: str, seq: int, direction: str) -> Case:
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

    passes = 1.0 if direction == "fwd" else 2.5
    flops = passes * 2 * sizes.heads * seq * seq * sizes.head_dim
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
    return Case(row, 0.0, 5 * tokens * width * WIDTHS[dtype], prepare)


def _stream(device: str, n_elements: int) -> Case:
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
