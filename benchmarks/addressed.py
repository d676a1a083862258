"""Predicts measured norms and rotary embeddings of transformers, with and without the addresses of elements.

    python benchmarks/addressed.py

Their weights, roots and angles are broadcast, and heads are transposed. The operators are those that autograd
issues, priced as in a rehearsal; nothing is fitted to these rows. Needs torch, no GPU.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foretrace.simulator.compute.timing import memory_s
from foretrace.simulator.rehearsed.works import op_of
from foretrace.simulator.workload.ops import Op
from foretrace.topologies.catalog import load_cluster
from foretrace.tracer.rehearse.tape.pricing import Pricing
from foretrace.tracer.rehearse.tape.works import Work

TABLE: Final = Path(__file__).parent / "tables" / "addressed_kernels.csv"
MACHINES: Final = {"h100-sxm": "dgx-h100", "a100-80gb": "dgx-a100"}
NO_KERNELS: Final = ("aten.empty_like", "aten.detach", "aten.new_empty_strided", "aten._unsafe_view")
N_ROWS, N_HEADS, N_KEY_HEADS, HEAD_DIM = 2048, 32, 8, 256


class Issued(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    """Collects the work of what is issued."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []
        self._pricing = Pricing(None)  # type: ignore[arg-type]  # asked of no numbers

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call *func*."""
        out, name = func(*args, **(kwargs or {})), str(func.overloadpacket)
        if not func.is_view and name not in NO_KERNELS:
            self.works.append(self._pricing.work(name, func, args, kwargs or {}, out))
        return out


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a tensor without data."""
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)


def norm(width: int) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    """Return a norm of rows of *width*, and what it has gradients of."""
    hidden, weight = made(N_ROWS, width), made(width, dtype=torch.float32)

    def forward() -> Any:
        wide = hidden.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return [weight * wide.to(hidden.dtype)]

    return forward, [hidden, weight]


def rotary(n_tokens: int) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    """Return the rotation of queries and keys of *n_tokens*, and what it has gradients of."""
    both = [made(1, n_tokens, n_heads, HEAD_DIM).transpose(1, 2) for n_heads in (N_HEADS, N_KEY_HEADS)]
    cos, sin = (torch.empty(1, 1, n_tokens, HEAD_DIM, dtype=torch.bfloat16, device="meta") for _ in range(2))

    def turned(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((-x[..., HEAD_DIM // 2 :], x[..., : HEAD_DIM // 2]), -1)

    return lambda: [x * cos + turned(x) * sin for x in both], both


def ops(row: dict[str, str]) -> Iterator[Op]:
    """Yield the operations of *row*."""
    forward, leaves = (norm if row["operation"] == "norm" else rotary)(int(row["size"]))
    with Issued() as first:
        results = forward()
    gradients = [torch.empty_like(one) for one in results]
    with Issued() as second:
        torch.autograd.grad(results, leaves, gradients)
    for work in (first if row["direction"] == "forward" else second).works:
        fields = {name: getattr(work, name, None) for name in ("rows", "along", "causal")}
        yield op_of(work._asdict() | fields, load_cluster(MACHINES[row["hardware"]]).device)


def main() -> None:
    """Print the table."""
    with TABLE.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    print("operation  direction  GPU          size  measured ms  bytes alone  with addresses")
    for row in rows:
        device, measured = load_cluster(MACHINES[row["hardware"]]).device, float(row["time_ms"])
        found = list(ops(row))
        plain = 1e3 * sum(memory_s(replace(op, addressed=()), device) for op in found) / measured
        full = 1e3 * sum(memory_s(op, device) for op in found) / measured
        label = f"{row['operation']:10} {row['direction']:10} {row['hardware']:10} {row['size']:>6}"
        print(f"{label} {measured:12.3f} {plain:12.2f} {full:15.2f}")


if __name__ == "__main__":
    main()
