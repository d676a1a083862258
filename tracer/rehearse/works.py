"""What an operator of PyTorch is to a GPU: a matrix product, attention, or memory traffic, with its size.

Pure functions of shapes; importing this module does not import torch. A tensor here is anything with
``shape``, ``dtype``, ``nbytes``, ``numel()`` and ``element_size()``. FLOPs are those that are executed: two
per multiply-add, half of the scores under a causal mask; element-wise arithmetic counts as none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from tracer.operators import dtype_name, tensor_bytes
from tracer.rehearse.calls import Call, tensors_in, total_bytes
from tracer.rehearse.decompositions import DECOMPOSITIONS
from tracer.rehearse.traffic import traffic


class Work(NamedTuple):
    """One operation on a device, in the columns of ``traces.rehearsal.WORKS``.

    Attributes:
        name: operator, e.g. ``"aten.mm"``.
        kind: ``"gemm"``, ``"attention"``, ``"attention_backward"`` or ``"memory"``.
        shapes: of operands and results, for people.
        dtype: of the operands.
        flops: floating-point operations over all members of a batch.
        bytes_moved: device memory read and written, each operand once.
        m, n, k: of a product ``(m, k) @ (k, n)``; of attention queries, keys and head width.
        batch: members of a batched product; heads over all sequences of an attention.
        v_dim: width of a value head.
        causal: attention skips what a causal mask hides.
        kernels: on the device.
        is_known: whether the formula is that of the operator, not only the bytes of its operands.
        rows: of each expert of a grouped product, none if nobody knows them.
        along: the dimension that they are dealt out of: ``"m"``, ``"n"`` or ``"k"``; its own is their mean.
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


KNOWN_NAMESPACES: Final = frozenset({"aten", "prims", "fsdp", "_dtensor", "rngprims"})
"""Operators of PyTorch itself; others are custom kernels, of which only the operands are known."""

SILENT: Final = frozenset(
    {
        "aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided",
        "aten.detach", "aten.detach_", "aten.alias", "aten.lift_fresh", "aten.set_", "aten.resize_",
        "aten._unsafe_view", "aten._reshape_alias", "aten.is_same_size", "aten.sym_size", "aten.sym_stride",
        "aten.sym_numel", "aten.sym_storage_offset", "aten.is_pinned", "aten._pin_memory",
        "aten.record_stream", "aten._has_same_storage_numel", "aten.equal", "aten._nested_tensor_size",
        "aten.requires_grad_", "aten.unsqueeze_", "aten.squeeze_", "aten.transpose_", "aten.t_",
        "aten.as_strided_", "prims.device_put", "aten.split_with_sizes", "aten.unsafe_split", "aten.chunk",
    }
)  # fmt: skip
"""Operators that launch no kernel although they are not declared as views."""

TENSORS_PER_LAUNCH: Final = 64
"""Tensors that one launch of a multi-tensor kernel takes: 110 to 30, by the number of lists
(``depth_to_max_tensors`` in ATen/native/cuda/MultiTensorApply.cuh)."""

ELEMENTS_PER_LAUNCH: Final = 65536 * 320
"""Elements that one launch takes at most: ``kChunkSize * depth_to_max_blocks`` of the same file."""

GROUPED: Final = frozenset({"aten._grouped_mm", "aten._scaled_grouped_mm", "aten._scaled_grouped_mm_v2"})
"""Operators that multiply for every expert at once, told by ``offs`` where the rows of each end."""

_AT_ONCE: Final = ("bf16", "fp8")
"""Types of operands for which there is one kernel for all experts."""

BACKWARD_PRODUCTS: Final = 5
"""Matrix products of a fused attention backward; a forward has two (FlashAttention-2, arXiv:2307.08691)."""


def work_of(call: Call) -> Work:
    """Return what *call* is to the device."""
    special = _PRODUCTS.get(call.name)
    if special is not None:
        return special(call)
    if "attention" in call.name and call.name.startswith("aten._"):
        return _attention(call)
    bytes_moved = traffic(call)
    everything = [*tensors_in(call.args), *tensors_in(call.out)]
    return Work(
        name=call.name,
        kind="memory",
        shapes=_shapes(call),
        dtype=_dtype(everything),
        flops=0,
        bytes_moved=bytes_moved,
        kernels=_launches(call),
        is_known=call.name.partition(".")[0] in KNOWN_NAMESPACES and call.name not in DECOMPOSITIONS,
    )


def _dtype(tensors: Sequence[Any]) -> str:
    """Return the type of the first floating-point tensor, else of the first."""
    floating = [tensor for tensor in tensors if tensor.dtype.is_floating_point]
    return dtype_name((floating or list(tensors))[0]) if tensors else ""


def _shapes(call: Call) -> str:
    """Return the shapes of operands and results in a few words."""

    def words(values: Any) -> str:
        shapes = ["x".join(map(str, tensor.shape)) or "1" for tensor in tensors_in(values)]
        shown = ", ".join(shapes[:4])
        return f"{shown}, {len(shapes) - 4} more" if len(shapes) > 4 else shown

    return f"{words(call.args)} -> {words(call.out)}"


def _launches(call: Call) -> int:
    """Return the kernels of *call*: one, unless it goes over lists of tensors."""
    if "_foreach_" not in call.name and "_fused_adam" not in call.name:
        return 1
    first = next((a for a in call.args if isinstance(a, list | tuple) and a), ())
    n_elements = sum(int(tensor.numel()) for tensor in first)
    return max(-(-len(first) // TENSORS_PER_LAUNCH), -(-n_elements // ELEMENTS_PER_LAUNCH), 1)


def _product(
    call: Call, operand: Any, shape: tuple[int, int, int], *, batch: int = 1, extra_bytes: int = 0
) -> Work:
    m, n, k = shape
    width = operand.element_size()
    out = next(iter(tensors_in(call.out)))
    moved = ((m * k + k * n) * width + m * n * out.element_size()) * batch + extra_bytes
    return Work(
        name=call.name,
        kind="gemm",
        shapes=_shapes(call),
        dtype=dtype_name(operand),
        flops=2 * m * n * k * batch,
        bytes_moved=moved,
        m=m,
        n=n,
        k=k,
        batch=batch,
    )


def _mm(call: Call) -> Work:
    a, b = call.args[:2]
    return _product(call, a, (a.shape[0], b.shape[1], a.shape[1]))


def _addmm(call: Call) -> Work:
    bias, a, b = call.args[:3]
    return _product(call, a, (a.shape[0], b.shape[1], a.shape[1]), extra_bytes=tensor_bytes(bias))


def _bmm(call: Call) -> Work:
    first = 0 if call.name == "aten.bmm" else 1
    a, b = call.args[first : first + 2]
    return _product(call, a, (a.shape[1], b.shape[2], a.shape[2]), batch=a.shape[0])


def _distances(call: Call) -> Work:
    """Distances of all pairs of rows: the product of both, each with columns of squares and of ones."""
    a, b = call.args[:2]
    shape = (a.shape[-2], b.shape[-2], a.shape[-1] + 2)
    return _product(call, a, shape, batch=prod(a.shape[:-2]))


def _recurrent(call: Call) -> Work:
    """A layer of an LSTM over its tokens: a product by all weights at each, one after the other.

    Twice that in a backward. Each step launches a product and what is made of it; the inputs of all steps are
    multiplied at once, which is one launch more (the standard algorithm of cuDNN).
    """
    x, to_gates, again = call.args[:3]
    passes = 2 if "backward" in call.name else 1
    first, second = (1, 0) if call.named["batch_first"] else (0, 1)
    n_steps, rows = x.shape[first], x.shape[second]
    shape = (rows, to_gates.shape[0], to_gates.shape[1] + again.shape[1])
    found = _product(call, x, shape, batch=n_steps * passes)
    return found._replace(kernels=(2 * n_steps + 1) * passes)


def _grouped(call: Call) -> Work:
    """Products of experts: rows of the one operand are dealt out over the members of the other.

    As the call says, or evenly. One kernel in bf16 and fp8, and a product for each of the experts in
    other types (``_grouped_mm_fallback`` in ATen/native/GroupedMMUtils.h). Weights of an expert without rows
    are not read, its gradients are written all the same.
    """
    a, b = call.args[:2]
    members = next(t.shape[0] for t in (b, a, *tensors_in(call.out)) if len(t.shape) == 3)
    sides = {"m": a.shape[-2], "n": b.shape[-1], "k": a.shape[-1]}
    along = {(2, 3): "m", (3, 2): "n", (2, 2): "k"}.get((len(a.shape), len(b.shape)), "")
    total = sides.get(along, 0)
    flops = 2 * prod(sides.values()) * (1 if along else members)
    if along:
        sides[along] = max(total // members, 1)
    found = _product(call, a, (sides["m"], sides["n"], sides["k"]), batch=members)._replace(
        flops=flops, kernels=1 if dtype_name(a) in _AT_ONCE else members
    )
    rows = rows_between(call.ends, members, total) if along else ()
    if not rows:
        return found
    width, out_width = a.element_size(), next(iter(tensors_in(call.out))).element_size()
    each = [{**sides, along: n} for n in rows]
    read = sum(s["k"] * (s["m"] + s["n"]) for s in each if s[along])
    written = sum(s["m"] * s["n"] for s in each)
    return found._replace(bytes_moved=read * width + written * out_width, rows=rows, along=along)


def rows_between(ends: Sequence[int], members: int, total: int) -> tuple[int, ...]:
    """Return the rows of each of *members* from where each of them *ends*; none if *total* are too few.

    >>> rows_between([3, 3, 4], 3, 5)
    (3, 0, 1)
    """
    rows = tuple(after - before for before, after in pairwise((0, *ends)))
    return rows if len(rows) == members and min(rows) >= 0 and sum(rows) <= total else ()


def _convolution(call: Call) -> Work:
    """A convolution as the matrix product that it is; a backward has one per gradient that is asked for.

    Its matrix of neighbourhoods is never in memory: operands are read once. A transposed one has a product
    for each element of its input, not of its result.
    """
    named = call.named
    weight, data = named["weight"], named["input"]
    backward = "grad_output" in named
    result = named["grad_output"] if backward else next(iter(tensors_in(call.out)))
    over = data if named["transposed"] else result
    asked = sum(map(bool, named.get("output_mask", (True,))[:2])) if backward else 1
    rows = over.shape[0] * prod(over.shape[2:]) * asked
    all_of_them = _product(call, data, (rows, weight.shape[0], prod(weight.shape[1:])))
    moved = total_bytes([data, weight, result]) * asked
    return all_of_them._replace(bytes_moved=moved, kernels=asked)


_PRODUCTS: Final[Mapping[str, Callable[[Call], Work]]] = MappingProxyType(
    {
        "aten.mm": _mm,
        "aten._int_mm": _mm,
        "aten._scaled_mm": _mm,
        "aten._scaled_mm_v2": _mm,
        "aten._euclidean_dist": _distances,
        "aten.mkldnn_rnn_layer": _recurrent,
        "aten.mkldnn_rnn_layer_backward": _recurrent,
        "aten.addmm": _addmm,
        "aten.bmm": _bmm,
        "aten.baddbmm": _bmm,
        **dict.fromkeys(GROUPED, _grouped),
        "aten.convolution": _convolution,
        "aten.convolution_backward": _convolution,
    }
)


def _attention(call: Call) -> Work:
    """Fused attention, forward or backward, over tensors of shape (batch, heads, tokens, width)."""
    backward = "backward" in call.name
    q, k, v = call.args[1:4] if backward else call.args[:3]
    n_seen = q.shape[-2] * k.shape[-2]
    causal = bool(call.named.get("is_causal", False))
    if causal:
        n_seen //= 2
    heads = prod(q.shape[:-2])
    flops = 2 * heads * n_seen * (q.shape[-1] + v.shape[-1])
    moved = total_bytes([q, k, v]) + tensor_bytes(q) // q.shape[-1] * v.shape[-1]
    return Work(
        name=call.name,
        kind="attention_backward" if backward else "attention",
        shapes=_shapes(call),
        dtype=dtype_name(q),
        flops=flops * BACKWARD_PRODUCTS // 2 if backward else flops,
        bytes_moved=2 * moved if backward else moved,
        m=q.shape[-2],
        n=k.shape[-2],
        k=q.shape[-1],
        batch=heads,
        v_dim=v.shape[-1],
        causal=causal,
    )
