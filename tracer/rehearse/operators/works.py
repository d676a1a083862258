"""The work of PyTorch operators on a GPU: a matrix product, attention, or memory traffic, with its size.

Pure functions of shapes; importing this module does not import torch. A tensor here is anything with
``shape``, ``dtype``, ``nbytes``, ``numel()`` and ``element_size()``. FLOPs are those that are executed: two
per multiply-add, half of the scores under a causal mask; element-wise arithmetic counts as none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Final

from foretrace.tracer.operators import dtype_name, tensor_bytes
from foretrace.tracer.rehearse.operators.attended import VARLEN, attention
from foretrace.tracer.rehearse.operators.calls import Call, tensors_in, total_bytes
from foretrace.tracer.rehearse.operators.decompositions import DECOMPOSED
from foretrace.tracer.rehearse.operators.traffic import traffic
from foretrace.tracer.rehearse.operators.work import Work, dtype_of, is_aligned, product, shapes_of

KNOWN_NAMESPACES: Final = frozenset({"aten", "prims", "fsdp", "_dtensor", "rngprims"})
"""Namespaces of PyTorch itself; other operators are custom kernels, of which only the operands are known."""

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
"""Tensors per launch of a multi-tensor kernel: 110 to 30, by the number of lists
(``depth_to_max_tensors`` in ATen/native/cuda/MultiTensorApply.cuh)."""

ELEMENTS_PER_LAUNCH: Final = 65536 * 320
"""Most elements per launch: ``kChunkSize * depth_to_max_blocks`` of the same file."""

GROUPED: Final = frozenset({"aten._grouped_mm", "aten._scaled_grouped_mm", "aten._scaled_grouped_mm_v2"})
"""Operators that multiply for all experts at once; ``offs`` says where the rows of each expert end."""

BY_NUMBERS: Final = GROUPED | frozenset(VARLEN)
"""Operators whose work depends on the values of operands, not only on shapes."""

_AT_ONCE: Final = ("bf16", "fp8")
"""Dtypes of operands for which there is one kernel for all experts."""


def work_of(call: Call) -> Work:
    """Return the work of *call* on the device."""
    special = _PRODUCTS.get(call.name)
    if special is not None:
        return special(call)
    if "attention" in call.name and call.name.startswith("aten._"):
        return attention(call)
    bytes_moved = traffic(call)
    everything = [*tensors_in(call.args), *tensors_in(call.out)]
    return Work(
        name=call.name,
        kind="memory",
        shapes=shapes_of(call),
        dtype=dtype_of(everything),
        flops=0,
        bytes_moved=bytes_moved,
        kernels=_launches(call),
        is_known=call.name.partition(".")[0] in KNOWN_NAMESPACES,
    )


def _launches(call: Call) -> int:
    """Return the kernels that *call* launches: one, unless it works on lists of tensors."""
    if "_foreach_" not in call.name and "_fused_adam" not in call.name:
        return 1
    first = next((a for a in call.args if isinstance(a, list | tuple) and a), ())
    n_elements = sum(int(tensor.numel()) for tensor in first)
    return max(-(-len(first) // TENSORS_PER_LAUNCH), -(-n_elements // ELEMENTS_PER_LAUNCH), 1)


def _mm(call: Call) -> Work:
    a, b = call.args[:2]
    found = product(call, a, (a.shape[0], b.shape[1], a.shape[1]))
    return found._replace(aligned=all(map(is_aligned, (a, b, *tensors_in(call.out)))))


def _addmm(call: Call) -> Work:
    bias, a, b = call.args[:3]
    found = product(call, a, (a.shape[0], b.shape[1], a.shape[1]), extra_bytes=tensor_bytes(bias))
    return found._replace(aligned=all(map(is_aligned, (a, b, *tensors_in(call.out)))))


def _bmm(call: Call) -> Work:
    first = 0 if call.name == "aten.bmm" else 1
    a, b = call.args[first : first + 2]
    return product(call, a, (a.shape[1], b.shape[2], a.shape[2]), batch=a.shape[0])


def _distances(call: Call) -> Work:
    """Distances of all pairs of rows: a product of both, with two more columns (squares and ones)."""
    a, b = call.args[:2]
    shape = (a.shape[-2], b.shape[-2], a.shape[-1] + 2)
    return product(call, a, shape, batch=prod(a.shape[:-2]))


def _recurrent(call: Call) -> Work:
    """All layers of a recurrent network: a product of each token with all weights, one token after the other.

    A backward takes twice that. Each token of a layer launches a product and an element-wise kernel; the
    inputs of all its tokens are multiplied at once, which is one more launch (the standard algorithm of
    cuDNN). Layers may differ in width: the shape is that of the mean.
    """
    named = call.named
    x, sizes = named["input"], named["batch_sizes"]
    matrices = [weight for weight in named["weight"] if len(weight.shape) == 2]
    n_steps = len(sizes) or x.shape[1 if named["batch_first"] else 0]
    n_tokens, n_weights = prod(x.shape[:-1]), sum(prod(weight.shape) for weight in matrices)
    passes, gates = 2 if "backward" in call.name else 1, matrices[0].shape[0]
    layers = named["num_layers"] * (2 if named["bidirectional"] else 1)
    shape = (n_tokens // n_steps, gates, round(n_weights / (gates * layers)))
    found = product(call, x, shape, batch=n_steps * layers * passes)
    return found._replace(
        flops=2 * n_tokens * n_weights * passes, kernels=(2 * n_steps + 1) * layers * passes
    )


def _grouped(call: Call) -> Work:
    """Products of experts: the rows of one operand are split among the matrices of the other.

    They are split as the call says, or evenly if that is unknown. In bf16 and fp8 this is one kernel, in
    other dtypes one product per expert (``_grouped_mm_fallback`` in ATen/native/GroupedMMUtils.h). The
    weights of an expert without rows are not read, but its gradients are written.
    """
    a, b = call.args[:2]
    members = next(t.shape[0] for t in (b, a, *tensors_in(call.out)) if len(t.shape) == 3)
    sides = {"m": a.shape[-2], "n": b.shape[-1], "k": a.shape[-1]}
    along = {(2, 3): "m", (3, 2): "n", (2, 2): "k"}.get((len(a.shape), len(b.shape)), "")
    total = sides.get(along, 0)
    flops = 2 * prod(sides.values()) * (1 if along else members)
    if along:
        sides[along] = max(total // members, 1)
    found = product(call, a, (sides["m"], sides["n"], sides["k"]), batch=members)._replace(
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
    """Return the rows of each of *members* experts from their *ends*; nothing if they need more than *total*.

    >>> rows_between([3, 3, 4], 3, 5)
    (3, 0, 1)
    """
    rows = tuple(after - before for before, after in pairwise((0, *ends)))
    return rows if len(rows) == members and min(rows) >= 0 and sum(rows) <= total else ()


def _convolution(call: Call) -> Work:
    """A convolution as a matrix product; a backward has one product per requested gradient.

    The matrix of neighbourhoods is never in memory: operands are read once. The rows of the product are the
    pixels of the result, or of the input if the convolution is transposed. Groups are the members of a batch.
    """
    named = call.named
    groups = int(named.get("groups", 1))
    weight, data = named["weight"], named["input"]
    backward = "grad_output" in named
    result = named["grad_output"] if backward else next(iter(tensors_in(call.out)))
    over = data if named["transposed"] else result
    asked = sum(map(bool, named.get("output_mask", (True,))[:2])) if backward else 1
    rows = over.shape[0] * prod(over.shape[2:]) * asked
    shape = (rows, weight.shape[0] // groups, prod(weight.shape[1:]))
    all_of_them = product(call, data, shape, batch=groups)
    moved = total_bytes([data, weight, result]) * asked
    return all_of_them._replace(bytes_moved=moved, kernels=asked)


_PRODUCTS: Final[Mapping[str, Callable[[Call], Work]]] = MappingProxyType(
    {
        "aten.mm": _mm,
        "aten._int_mm": _mm,
        "aten._scaled_mm": _mm,
        "aten._scaled_mm_v2": _mm,
        "aten._euclidean_dist": _distances,
        "aten._cudnn_rnn": _recurrent,
        "aten._cudnn_rnn_backward": _recurrent,
        "aten.addmm": _addmm,
        "aten.bmm": _bmm,
        "aten.baddbmm": _bmm,
        **DECOMPOSED,
        **dict.fromkeys(GROUPED, _grouped),
        "aten.convolution": _convolution,
        "aten.convolution_backward": _convolution,
    }
)
