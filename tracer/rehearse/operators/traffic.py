"""Bytes of device memory that an operator reads and writes, if it is neither a product nor attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from foretrace.tracer.operators import tensor_bytes
from foretrace.tracer.rehearse.operators.calls import Call, tensors_in, total_bytes


def traffic(call: Call) -> int:
    """Return the bytes that *call* reads and writes."""
    return _TRAFFIC.get(call.name, _operands)(call)


def _operands(call: Call) -> int:
    """Every operand is read once, every result is written once; a tensor changed in place counts as both."""
    written = tensors_in(call.named.get("out"))
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


def _gathered(call: Call) -> int:
    """Shards are copied into the buffer of an all-gather."""
    return 2 * total_bytes(tensors_in(call.args[0]))


_TRAFFIC: Final[Mapping[str, Callable[[Call], int]]] = MappingProxyType(
    {
        "aten.copy_": _copied,
        "aten._foreach_copy_": _copied,
        "aten.masked_fill": _filled,
        "aten.fill_": _written,
        "aten.zero_": _written,
        "aten._foreach_zero_": _written,
        "aten.full_like": _written,
        "aten.zeros_like": _written,
        "aten.ones_like": _written,
        "aten.new_zeros": _written,
        "aten.new_full": _written,
        "aten.normal_": _written,
        "aten.uniform_": _written,
        "aten.embedding": _picked,
        "aten.index": _picked,
        "aten.index_select": _picked,
        "aten.gather": _picked,
        "aten.index_put_": _put,
        "aten.index_put": _put,
        "aten.index_add_": _put,
        "aten.index_add": _put,
        "aten.scatter_add_": _put,
        "aten.index_copy_": _put,
        "aten.index_copy": _put,
        "aten.scatter_add": _put,
        "aten.embedding_dense_backward": _embedding_backward,
        "aten._embedding_bag": _bag,
        "aten._embedding_bag_forward_only": _bag,
        "aten._embedding_bag_backward": _bag_backward,
        "aten._embedding_bag_dense_backward": _bag_backward,
        "aten.nll_loss_forward": _one_of_each_row,
        "aten.nll_loss_backward": _written,
        "aten.native_batch_norm": _normalised,
        "aten._native_batch_norm_legit": _normalised,
        "aten.native_group_norm": _normalised,
        "aten.native_batch_norm_backward": _normalised_backward,
        "aten.native_group_norm_backward": _normalised_backward,
        "aten.native_layer_norm_backward": _normalised_backward,
        "aten._fused_adam_": _adam,
        "aten._fused_adamw_": _adam,
        "fsdp.all_gather_copy_in": _gathered,
    }
)
"""By operator, its traffic if that is not every operand and every result once."""
