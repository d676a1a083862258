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
from typing import Any, Final, NamedTuple

from foretrace.tracer.operators import dtype_name, tensor_bytes
from foretrace.tracer.rehearse.tape.calls import Call, tensors_in, total_bytes
from foretrace.traces.rehearsal import ALIGNED_BYTES

# One operation on a device, and functions that all formulas of operators share.


class Work(NamedTuple):
    """One operation on a device, in the columns of ``traces.rehearsal.WORKS``."""

    name: str  # operator, e.g. ``"aten.mm"``
    kind: str  # ``"gemm"``, ``"attention"``, ``"attention_backward"`` or ``"memory"``
    shapes: str  # of operands and results, for display
    dtype: str  # of the operands
    flops: int  # floating-point operations over all members of a batch
    bytes_moved: int  # device memory read and written, each operand once
    # of a product ``(m, k) @ (k, n)``; of attention queries, keys and head width; m, of element-wise work,
    # elements that are addressed one by one
    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = 1  # members of a batched product; heads over all sequences of an attention
    v_dim: int = 0  # width of a value head
    causal: bool = False  # attention skips what a causal mask hides
    kernels: int = 1  # on the device
    # whether there is a formula for the operator; else only the bytes of its operands are known
    is_known: bool = True
    rows: tuple[int, ...] = ()  # of each expert of a grouped product, empty if unknown
    # the dimension split among experts: ``"m"``, ``"n"`` or ``"k"``; its own field is the mean
    along: str = ""
    # whether the rows of all matrices begin at addresses from which tensor cores can read; of element-wise
    # work, whether it goes through memory in order
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
    """Return whether each row of *matrix*, or of those of a batch, is aligned; or columns if contiguous."""
    if min(matrix.shape[-2:]) < 2:
        return True
    width = matrix.element_size()
    return all(stride * width % ALIGNED_BYTES == 0 for stride in matrix.stride() if stride > 1)


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


# Bytes of device memory that an operator reads and writes, if it is neither a product nor attention.


def traffic(call: Call) -> int:
    """Return the bytes that *call* reads and writes."""
    return _TRAFFIC.get(call.name, _operands)(call)


def _operands(call: Call) -> int:
    """Every operand is read once, every result is written once; a tensor changed in place counts as both."""
    written = tensors_in(call.named.get("out"))
    # By identity: a tensor that is given twice is read once.
    read = {id(tensor): tensor for tensor in tensors_in(call.args)}
    for tensor in written:
        read.pop(id(tensor), None)
    results = tensors_in(call.out) or written
    if not results and call.name.endswith("_"):  # foreach operators in place return nothing
        results = tensors_in(call.args[0])
    return total_bytes(read.values()) + total_bytes(results)


def _written(call: Call) -> int:
    return total_bytes(tensors_in(call.out) or tensors_in(call.args[:1]))


def _copied(call: Call) -> int:
    """The first operand is written and not read."""
    return total_bytes(tensors_in(call.args[1:])) + total_bytes(tensors_in(call.args[0]))


def _filled(call: Call) -> int:
    """The operand is copied first, and the copy is filled where a mask says (TensorAdvancedIndexing.cpp)."""
    return _operands(call) + 2 * total_bytes(tensors_in(call.out))


def _picked(call: Call) -> int:
    """Only the selected elements of the first operand are read."""
    return 2 * total_bytes(tensors_in(call.out)) + total_bytes(tensors_in(call.args[1:]))


def _put(call: Call) -> int:
    """Values are read, and written to their places; if they are added, these places are read before.

    An operator that is not in place first copies its whole first operand.
    """
    named = call.named
    put = next((named[name] for name in ("values", "source", "src") if name in named), None)
    places = tensors_in([named.get("indices"), named.get("index")])
    n_times = 3 if "add" in call.name or named.get("accumulate") else 2
    whole = 0 if call.name.endswith("_") else 2 * tensor_bytes(call.args[0])
    return n_times * total_bytes(tensors_in(put)) + total_bytes(places) + whole


def _bag(call: Call) -> int:
    """A row of the table is read per index; the sums of the bags are written."""
    table, places = call.args[:2]
    row = tensor_bytes(table) // max(int(table.shape[0]), 1)
    return (
        row * int(places.numel()) + total_bytes(tensors_in(call.args[1:])) + total_bytes(tensors_in(call.out))
    )


def _bag_backward(call: Call) -> int:
    """Zeros are written; then, per index, a gradient row is read, a result row read and written."""
    out = tensors_in(call.out)
    row = total_bytes(out) // max(int(out[0].shape[0]), 1)
    return 3 * row * int(call.args[1].numel()) + total_bytes(tensors_in(call.args)) + total_bytes(out)


def _embedding_backward(call: Call) -> int:
    """Zeros are written; then, per token, a gradient row is read, a result row read and written."""
    return 3 * tensor_bytes(call.args[0]) + tensor_bytes(call.args[1]) + total_bytes(tensors_in(call.out))


def _normalised(call: Call) -> int:
    """A norm over many elements reads its input once for mean and variance, and once more to apply them.

    A batch norm that does not train knows mean and variance already.
    """
    again = 0 if call.named.get("training") is False else tensor_bytes(call.args[0])
    return _operands(call) + again


def _normalised_backward(call: Call) -> int:
    """Gradient and input are read for two sums over them, and once more for the gradient of the input.

    A row of a layer norm fits into a multiprocessor and is read once. Its sums over all rows, for weight and
    bias, are a separate kernel (``layer_norm_kernel.cu``).
    """
    named = call.named
    needs_sums = named.get("train", True) and ("layer" not in call.name or any(named["output_mask"][1:]))
    again = total_bytes(tensors_in([named["grad_out"], named["input"]])) if needs_sums else 0
    return _operands(call) + again


def _adam(call: Call) -> int:
    """Parameters, gradients and two moments are read; all but the gradients are written."""
    lists = [tensors_in(value) for value in call.args[:4]]
    return (
        sum(map(total_bytes, lists)) + total_bytes(lists[0]) + total_bytes(lists[2]) + total_bytes(lists[3])
    )


def _one_of_each_row(call: Call) -> int:
    """The loss reads one logit of each row."""
    return 2 * total_bytes(tensors_in(call.args[1:2])) + total_bytes(tensors_in(call.out))


WARP_ROW: Final = 1024
"""Elements of the longest row that one warp holds in its registers for a softmax."""

BLOCK_BYTES: Final = 48 << 10
"""Memory that a block shares unless it asks for more."""


def _softmax(call: Call) -> int:
    """A row is read once if it stays on the chip, else for its maximum, its sum, the result (SoftMax.cu)."""
    of, dim = call.args[:2]
    row, width = int(of.shape[dim]), of.element_size()
    stays = row <= WARP_ROW or (row * width % ALIGNED_BYTES == 0 and row * width < BLOCK_BYTES)
    return (1 if stays else 3) * tensor_bytes(of) + total_bytes(tensors_in(call.out))


def _gathered(call: Call) -> int:
    """Shards are copied into the buffer of an all-gather."""
    return 2 * total_bytes(tensors_in(call.args[0]))


_TRAFFIC: Final[Mapping[str, Callable[[Call], int]]] = MappingProxyType(
    {
        f"aten.{name}": traffic
        for traffic, names in {
            _copied: "copy_ _foreach_copy_",
            _filled: "masked_fill",
            _written: "fill_ zero_ _foreach_zero_ full_like zeros_like ones_like new_zeros new_full normal_ "
            "uniform_ nll_loss_backward",
            _picked: "embedding index index_select gather",
            _put: "index_put_ index_put index_add_ index_add scatter_add_ index_copy_ index_copy scatter_add",
            _embedding_backward: "embedding_dense_backward",
            _bag: "_embedding_bag _embedding_bag_forward_only",
            _bag_backward: "_embedding_bag_backward _embedding_bag_dense_backward",
            _one_of_each_row: "nll_loss_forward",
            _normalised: "native_batch_norm _native_batch_norm_legit native_group_norm",
            _normalised_backward: "native_batch_norm_backward native_group_norm_backward "
            "native_layer_norm_backward",
            _adam: "_fused_adam_ _fused_adamw_",
            _softmax: "_softmax _log_softmax",
        }.items()
        for name in names.split()
    }
    | {"fsdp.all_gather_copy_in": _gathered}
)
"""By operator, its traffic if that is not every operand and every result once."""


# The work of fused attention: over sequences of equal length, or over packed sequences of many lengths.

BACKWARD_PRODUCTS: Final = 5
"""Matrix products of a fused attention backward; a forward has two (FlashAttention-2, arXiv:2307.08691)."""

_FLASH: Final = ("cum_seq_q", "cum_seq_k")
_EFFICIENT: Final = ("cu_seqlens_q", "cu_seqlens_k")

VARLEN: Final = MappingProxyType(
    {
        "aten._flash_attention_forward": _FLASH,
        "aten._flash_attention_backward": _FLASH,
        "aten._efficient_attention_forward": _EFFICIENT,
        "aten._efficient_attention_backward": _EFFICIENT,
    }
)
"""Operators on tensors of shape (batch, tokens, heads, width), or (tokens, heads, width) for packed
sequences, and the arguments with the bounds of the sequences of queries and of keys."""


def attention(call: Call) -> Work:
    """Return the work of a fused attention, forward or backward."""
    backward = "backward" in call.name
    named = call.named
    q, k, v = call.args[1:4] if backward else call.args[:3]
    heads, lengths = _sequences(call, q, k) if call.name in VARLEN else _alike(q, k)
    tokens, seen_tokens = (sum(one[side] for one in lengths) for side in (0, 1))
    n_seen = sum(queries * keys for queries, keys in lengths)
    m, n = _mean(n_seen, seen_tokens), _mean(n_seen, tokens)
    # ``custom_mask_type`` is 0 without a mask; 1 and 2 are causal masks, from either corner.
    causal = bool(named.get("is_causal", named.get("custom_mask_type", 0)))
    flops = 2 * heads * (n_seen // 2 if causal else n_seen) * (q.shape[-1] + v.shape[-1])
    # The result has the rows of the queries and the width of the values.
    moved = total_bytes([q, k, v]) + tensor_bytes(q) // q.shape[-1] * v.shape[-1]
    return Work(
        name=call.name,
        kind="attention_backward" if backward else "attention",
        shapes=shapes_of(call),
        dtype=dtype_name(q),
        flops=flops * BACKWARD_PRODUCTS // 2 if backward else flops,
        bytes_moved=2 * moved if backward else moved,
        m=m,
        n=n,
        k=q.shape[-1],
        batch=round(heads * tokens / m) if m else heads,
        v_dim=v.shape[-1],
        causal=causal,
    )


def _mean(n_seen: int, tokens: int) -> int:
    """Return the length of equal sequences that have the same number of scores and of *tokens*."""
    return round(n_seen / tokens) if tokens else 0


def _alike(q: Any, k: Any) -> tuple[int, Sequence[tuple[int, int]]]:
    """Return the heads of all sequences, and queries and keys, for shape (batch, heads, tokens, width)."""
    return prod(q.shape[:-2]), [(q.shape[-2], k.shape[-2])]


def _sequences(call: Call, q: Any, k: Any) -> tuple[int, Sequence[tuple[int, int]]]:
    """Return heads, and queries and keys of each sequence: as the call says, else of equal length."""
    bounds = call.named.get(VARLEN[call.name][0])
    n_queries, n_keys, heads = prod(q.shape[:-2]), prod(k.shape[:-2]), q.shape[-2]
    if bounds is None:
        return heads * q.shape[0], [(q.shape[1], k.shape[1])]
    n_sequences = max(bounds.shape[0] - 1, 1)
    # ``ends`` has the bounds of the queries, then those of the keys.
    half = len(call.ends) // 2
    if half == n_sequences + 1:
        sides = (call.ends[:half], call.ends[half:])
        return heads, list(zip(*(tuple(b - a for a, b in pairwise(one)) for one in sides), strict=True))
    return heads, [(n_queries // n_sequences, n_keys // n_sequences)] * n_sequences


KNOWN_NAMESPACES: Final = frozenset({"aten", "prims", "fsdp", "_dtensor", "rngprims"})
"""Namespaces of PyTorch itself; other operators are custom kernels, of which only the operands are known."""

DECOMPOSES: Final = (
    *("linalg_cholesky", "cholesky_", "linalg_ldl", "linalg_lu", "_linalg_det", "_linalg_slogdet"),
    *("linalg_inv", "_linalg_solve", "linalg_solve", "triangular_solve", "linalg_qr", "geqrf", "ormqr"),
    *("linalg_householder", "linalg_lstsq", "linalg_eig", "_linalg_eig", "_linalg_svd", "linalg_matrix_exp"),
    "_fft_",
)
"""How names of matrix decompositions and Fourier transforms begin: no formula tells their time, as kernels of
theirs wait for each other far longer than they compute."""

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
        is_known=_is_known(*call.name.partition(".")[::2]),
    )


def _is_known(namespace: str, name: str) -> bool:
    """Whether the bytes of its operands tell how long an operator takes."""
    return namespace in KNOWN_NAMESPACES and not name.startswith(DECOMPOSES)


def _launches(call: Call) -> int:
    """Return the kernels that *call* launches: one, unless it works on lists of tensors."""
    if "_foreach_" not in call.name and "_fused_adam" not in call.name:
        return 1
    first = next((a for a in call.args if isinstance(a, list | tuple) and a), ())
    n_elements = sum(int(tensor.numel()) for tensor in first)
    return max(-(-len(first) // TENSORS_PER_LAUNCH), -(-n_elements // ELEMENTS_PER_LAUNCH), 1)


def _mm(call: Call) -> Work:
    *added, a, b = call.args[: 3 if call.name in {"aten.addmm", "aten.baddbmm"} else 2]
    # What is multiplied by 0 is not read.
    extra_bytes = total_bytes(added) if call.named.get("beta", 1) else 0
    shape, batch = (a.shape[-2], b.shape[-1], a.shape[-1]), a.shape[0] if len(a.shape) > 2 else 1
    found = product(call, a, shape, batch=batch, extra_bytes=extra_bytes)
    return found._replace(aligned=all(map(is_aligned, (a, b, *tensors_in(call.out)))))


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
    # Packed sequences have no dimension of time: ``batch_sizes`` has an entry per step.
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
    # The operand without a dimension of experts is split: in rows, in columns, or both along the sum.
    along = {(2, 3): "m", (3, 2): "n", (2, 2): "k"}.get((len(a.shape), len(b.shape)), "")
    total = sides.get(along, 0)
    # Two stacks of matrices are an ordinary batched product: no side is split among its members.
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
    # The third gradient is that of the bias, a sum and no product.
    asked = sum(map(bool, named.get("output_mask", (True,))[:2])) if backward else 1
    # Products of a backward count as one with that many times the rows.
    rows = over.shape[0] * prod(over.shape[2:]) * asked
    shape = (rows, weight.shape[0] // groups, prod(weight.shape[1:]))
    all_of_them = product(call, data, shape, batch=groups)
    moved = total_bytes([data, weight, result]) * asked
    return all_of_them._replace(bytes_moved=moved, kernels=asked)


_PRODUCTS: Final[Mapping[str, Callable[[Call], Work]]] = MappingProxyType(
    {
        **dict.fromkeys(("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"), _mm),
        **dict.fromkeys(("aten._int_mm", "aten._scaled_mm", "aten._scaled_mm_v2"), _mm),
        **dict.fromkeys(("aten._cudnn_rnn", "aten._cudnn_rnn_backward"), _recurrent),
        "aten._euclidean_dist": _distances,
        **dict.fromkeys(GROUPED, _grouped),
        **dict.fromkeys(("aten.convolution", "aten.convolution_backward"), _convolution),
    }
)
