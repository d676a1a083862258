"""One operation on a device, and functions that all formulas of operators share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from foretrace.tracer.operators import dtype_name
from foretrace.tracer.rehearse.operators.calls import Call, tensors_in
from foretrace.traces.rehearsal import ALIGNED_BYTES


class Work(NamedTuple):
    """One operation on a device, in the columns of ``traces.rehearsal.WORKS``.

    Attributes:
        name: operator, e.g. ``"aten.mm"``.
        kind: ``"gemm"``, ``"attention"``, ``"attention_backward"`` or ``"memory"``.
        shapes: of operands and results, for display.
        dtype: of the operands.
        flops: floating-point operations over all members of a batch.
        bytes_moved: device memory read and written, each operand once.
        m, n, k: of a product ``(m, k) @ (k, n)``; of attention queries, keys and head width; m, of
            element-wise work, elements that are addressed one by one.
        batch: members of a batched product; heads over all sequences of an attention.
        v_dim: width of a value head.
        causal: attention skips what a causal mask hides.
        kernels: on the device.
        is_known: whether there is a formula for the operator; else only the bytes of its operands are known.
        rows: of each expert of a grouped product, empty if unknown.
        along: the dimension split among experts: ``"m"``, ``"n"`` or ``"k"``; its own field is the mean.
        aligned: whether the rows of all matrices begin at addresses from which tensor cores can read; of
            element-wise work, whether it goes through memory in order.
    """

    name: str
    kind: str
    shapes: str
    dtype: str
    flops: int
    bytes_moved: int
    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = 1
    v_dim: int = 0
    causal: bool = False
    kernels: int = 1
    is_known: bool = True
    rows: tuple[int, ...] = ()
    along: str = ""
    aligned: bool = True


def dtype_of(tensors: Sequence[Any]) -> str:
    """Return the dtype of the first floating-point tensor, else of the first tensor."""
    floating = [tensor for tensor in tensors if tensor.dtype.is_floating_point]
    return dtype_name((floating or list(tensors))[0]) if tensors else ""


def shapes_of(call: Call) -> str:
    """Return the shapes of operands and results as short text."""

    def words(values: Any) -> str:
        shapes = ["x".join(map(str, tensor.shape)) or "1" for tensor in tensors_in(values)]
        shown = ", ".join(shapes[:4])
        return f"{shown}, {len(shapes) - 4} more" if len(shapes) > 4 else shown

    return f"{words(call.args)} -> {words(call.out)}"


def is_aligned(matrix: Any) -> bool:
    """Return whether each row of *matrix* is aligned, or each column if columns are contiguous."""
    if min(matrix.shape) < 2:
        return True
    return bool(max(matrix.stride()) * matrix.element_size() % ALIGNED_BYTES == 0)


def product(
    call: Call, operand: Any, shape: tuple[int, int, int], *, batch: int = 1, extra_bytes: int = 0
) -> Work:
    """Return the work of ``(m, k) @ (k, n)``, *shape* ``(m, n, k)``, in the dtype of *operand*."""
    m, n, k = shape
    width = operand.element_size()
    out = next(iter(tensors_in(call.out)))
    moved = ((m * k + k * n) * width + m * n * out.element_size()) * batch + extra_bytes
    return Work(
        name=call.name,
        kind="gemm",
        shapes=shapes_of(call),
        dtype=dtype_name(operand),
        flops=2 * m * n * k * batch,
        bytes_moved=moved,
        m=m,
        n=n,
        k=k,
        batch=batch,
    )
