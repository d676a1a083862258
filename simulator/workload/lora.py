"""Low-rank adapters beside frozen matrices: what they add to a layer, and what 4-bit weights cost.

``y = x W + (x A) B`` with A of ``(n_in, r)`` and B of ``(r, n_out)``; W is frozen, so that it has no weight
gradient. References: Hu et al. 2021, arXiv:2106.09685; Dettmers et al. 2023, arXiv:2305.14314 (QLoRA).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from foretrace.simulator.job import Job
from foretrace.simulator.models.model import Linear
from foretrace.simulator.workload.ops import DTYPE_BYTES, Op, gemm, memory, weight_gradient

NF4_BITS: Final = 4 + 8 / 64 + 32 / (64 * 256)
"""Bits of a quantised weight: 4, a scale of 8 per block of 64, and a scale of 32 per 256 of those.

Double quantisation, Dettmers et al. 2023, section 3: 0.127 bits beside the four.
"""


class Adapter(NamedTuple):
    """Operations of an adapter, beside those of its matrix."""

    forward: tuple[Op, ...] = ()
    dgrad: tuple[Op, ...] = ()
    weights: tuple[Op, ...] = ()


def adapter(job: Job, name: str, linear: Linear, n_tokens: int) -> Adapter:
    """Return the adapter of *linear* for *n_tokens* tokens: two thin products each way, and two sums."""
    dtype, rank, width = job.precision, job.lora_rank, DTYPE_BYTES[job.precision]
    down, up = linear._replace(n_out=rank), linear._replace(n_in=rank)
    sums = {"gradient": 3 * n_tokens * linear.n_in * width, "result": 3 * n_tokens * linear.n_out * width}
    return Adapter(
        forward=(
            gemm(f"{name}.lora_a", n_tokens, rank, linear.n_in, dtype),
            gemm(f"{name}.lora_b", n_tokens, linear.n_out, rank, dtype),
            memory(f"{name}.lora.sum", sums["result"], dtype),
        ),
        dgrad=(
            gemm(f"{name}.lora_b.dgrad", n_tokens, rank, linear.n_out, dtype),
            gemm(f"{name}.lora_a.dgrad", n_tokens, linear.n_in, rank, dtype),
            memory(f"{name}.lora.dgrad.sum", sums["gradient"], dtype),
        ),
        weights=tuple(
            weight_gradient(f"{name}.{part}.wgrad", n_tokens, one, dtype, sum_dtype=job.gradient_dtype)
            for part, one in (("lora_b", up), ("lora_a", down))
        ),
    )


def adapter_params(job: Job, linear: Linear) -> int:
    """Return the parameters that adaptation adds beside *linear*."""
    return job.lora_rank * (linear.n_in + linear.n_out)


def adapted(job: Job, linears: Iterable[Linear]) -> dict[str, Any]:
    """Return ``linears``, ``adapters`` and ``matrices`` of a block that has *linears*."""
    each = tuple(linears)
    return {
        "linears": each,
        "adapters": sum(adapter_params(job, linear) for linear in each),
        "matrices": sum(linear.n_in * linear.n_out for linear in each),
    }


def dequantised(job: Job, name: str, n_params: int) -> tuple[Op, ...]:
    """Return the kernel that makes 16-bit weights of 4-bit ones before each use; nothing if they are not.

    Reference: bitsandbytes ``dequantize_4bit`` in ``MatMul4Bit``, forward and backward.
    """
    if not job.quantized_base:
        return ()
    moved = round(n_params * (NF4_BITS / 8 + DTYPE_BYTES[job.precision]))
    return (memory(f"{name}.dequantise", moved, job.precision),)
