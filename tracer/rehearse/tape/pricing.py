"""Finds the work of operator calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.operators import tensor_bytes
from foretrace.tracer.rehearse.state import State
from foretrace.tracer.rehearse.tape.calls import Call, tensors_in
from foretrace.tracer.rehearse.tape.works import BY_NUMBERS, GROUPED, Work, dtype_of, shapes_of, work_of
from foretrace.tracer.rehearse.words import STUB, asker
from foretrace.traces.rehearsal import CONVERSION

# fp32 products that a GPU computes in TensorFloat-32 on its tensor cores, by the settings of PyTorch.


TF32: Final = "tf32"
"""Dtype of a product whose fp32 operands are rounded to TensorFloat-32 when they are read."""

ROLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "aten.convolution": "conv",
        "aten.convolution_backward": "conv",
        "aten._cudnn_rnn": "rnn",
        "aten._cudnn_rnn_backward": "rnn",
        **dict.fromkeys(
            ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._euclidean_dist"), "matmul"
        ),
    }
)
"""The name under which PyTorch keeps the precision of an operator: two for cuDNN, one for cuBLAS."""


def is_asked(name: str) -> bool:
    """Whether the operator *name* computes in TensorFloat-32 under the present settings."""
    role = ROLES.get(name)
    return role is not None and internals.allows_tf32(role, TF32)


def rounded(work: Work) -> Work:
    """Return *work* with the dtype in which it is computed; ``is_asked`` holds for its operator."""
    return work._replace(dtype=TF32) if work.dtype == "fp32" else work


def type_of(dtype: str, name: str) -> str:
    """Return the dtype in which the operator *name* computes on operands in *dtype*."""
    return TF32 if dtype == "fp32" and is_asked(name) else dtype


# Whether an element-wise kernel goes through memory in order, or computes the address of each element.
# ATen's element-wise kernels load several elements at once where all operands and results have the same
# shape and strides and no gaps. Otherwise (a mask that is broadcast, a transposed operand that is copied)
# each element is addressed on its own (``launch_legacy_kernel`` and ``OffsetCalculator`` in
# aten/src/ATen/native/cuda/CUDALoops.cuh).

COPIES: Final = frozenset({"aten.copy_", "aten._to_copy", "aten.masked_fill", "aten.masked_fill_"})
"""Element-wise operators that torch does not tag as such."""


def is_elementwise(name: str, func: Any) -> bool:
    """Return whether the operator *name* works on each element alone, in one of ATen's kernels."""
    from torch import Tag

    return name in COPIES or (name.startswith("aten.") and Tag.pointwise in func.tags)


def unordered(args: Any, out: Any) -> int:
    """Return how many elements are addressed one by one, 0 if operands and results are in the same order.

    A tensor without dimensions is a number. Of sparse tensors nothing is known.
    """
    results = tensors_in(out)
    tensors = [one for one in (*tensors_in(args), *results) if one.dim()]
    if not results or not tensors or not all(map(_is_strided, tensors)):
        return 0
    is_alike = len({_order(one) for one in tensors}) == 1
    return 0 if is_alike and _is_dense(tensors[0]) else int(results[0].numel())


def as_laid_out(work: Work, func: Any, call: Call) -> Work:
    """Return *work* of *call*, an operator *func*; of one whose operands do not lie alike as addressed."""
    if work.kind == "memory" and is_elementwise(call.name, func) and (n := unordered(call.args, call.out)):
        return work._replace(m=n, aligned=False)
    return work


def _is_strided(tensor: Any) -> bool:
    return str(tensor.layout) == "torch.strided"


def _order(tensor: Any) -> tuple[tuple[int, int], ...]:
    """Return sizes and strides; a dimension of one element has no stride."""
    return tuple(
        (int(size), int(stride) if size > 1 else 0)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _is_dense(tensor: Any) -> bool:
    """Whether *tensor* has no gaps between its elements, nor several in one place."""
    return bool(_end(tensor.shape, tensor.stride()) == prod(tensor.shape))


def _end(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the elements of memory from the first to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


# The copies between memory layouts that cuDNN makes around convolutions on tensor cores. Tensor cores need
# images with channels innermost (NHWC). For operands in PyTorch's default layout, channels outermost, cuDNN
# copies each operand before a product (``nchwToNhwcKernel``) and the result after it
# (``nhwcToNchwKernel``), forward and backward. Sources for how often each copy runs: tensorflow/tensorflow
# issue 15897, the comparison of kernels in KernelEvolve (arXiv:2512.23236), and 24 pairs of training steps
# that differ only in the layout (benchmarks/tables/rehearsed_times.toml).

ON_TENSOR_CORES: Final = ("bf16", "fp16", "tf32")
"""Dtypes of operands for which GPUs have tensor cores."""


def conversion(call: Call, dtype: str) -> Work | None:
    """Return the work of the copies around the convolution *call* in *dtype*; None if there are none.

    Depthwise convolutions have their own kernels, which accept both layouts.
    """
    named = call.named
    data, weight = named["input"], named["weight"]
    is_depthwise = int(named.get("groups", 1)) == data.shape[1]
    if dtype not in ON_TENSOR_CORES or is_depthwise:
        return None
    is_last = _asks_for_last(data) or _asks_for_last(weight)  # one operand decides for all
    copied: list[Any] = []
    for operands, result in _products(call):
        copied += [tensor for tensor in operands if not _is_last(tensor)]
        copied += [] if is_last or _is_alike(result) else [result]
    if not copied:
        return None
    moved = 2 * sum(map(tensor_bytes, copied))
    return Work(CONVERSION, "memory", shapes_of(call), dtype, 0, moved, kernels=len(copied))


def _products(call: Call) -> list[tuple[tuple[Any, Any], Any]]:
    """Return operands and result of each product; a gradient has the layout of its tensor."""
    named = call.named
    data, weight, given = named["input"], named["weight"], named.get("grad_output")
    if given is None:
        return [((data, weight), next(iter(tensors_in(call.out))))]
    asked = named["output_mask"]
    both = [((given, weight), data), ((data, given), weight)]
    return [product for product, is_asked in zip(both, asked[:2], strict=True) if is_asked]


def _is_alike(tensor: Any) -> bool:
    """Whether *tensor* is the same in both layouts: it has one channel, or one pixel."""
    return bool(tensor.shape[1] == 1 or prod(tensor.shape[2:]) == 1)


def _is_last(tensor: Any) -> bool:
    """Whether the channels of *tensor* are innermost."""
    return bool(tensor.stride(1) == 1) or _is_alike(tensor)


def _asks_for_last(tensor: Any) -> bool:
    """Whether PyTorch treats *tensor* as having its channels innermost, even if both layouts are the same."""
    return bool(tensor.stride(1) == 1 and tensor.shape[1] > 1 and tensor.stride(-1) >= tensor.shape[1])


class Pricing:
    """Finds the work of calls."""

    def __init__(self, session: State) -> None:
        self._session = session
        self._found_empty = False

    def number(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        """Return the number of the work of a call on the tape."""
        work = self.work(name, func, args, kwargs, out)
        work = rounded(work) if is_asked(name) else work
        if work.kind == "gemm" and not work.flops and not self._found_empty:
            self._found_empty = True
            self._session.warn(
                f"{asker()}: a matrix product with an empty operand ({work.shapes}): check the numbers "
                f"that the script was given, and set those that decide sizes in a stub ({STUB})"
            )
        return self._session.tape.number_of(work)

    def beside(self, name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any] | None:
        """Return what tells on what the work of calls of *name* depends beside what is remembered of them.

        None if that is nothing. A script may change the setting of precision between two calls.
        """
        if name in BY_NUMBERS:
            return lambda args, kwargs: self._ends(name, args, kwargs)
        return (lambda args, kwargs: is_asked(name)) if name in ROLES else None

    def conversion(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> int:
        """Return the number of the work of the copies between layouts around a convolution, -1 for none."""
        call = _call(name, func, args, kwargs, out)
        work = conversion(call, type_of(dtype_of([call.named["input"]]), name))
        return -1 if work is None else self._session.tape.number_of(work)

    def work(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Work:
        """Return the work of a call."""
        call = _call(name, func, args, kwargs, out)._replace(ends=self._ends(name, args, kwargs))
        return as_laid_out(work_of(call), func, call)

    def _ends(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
        """Return where the rows of each expert or sequence end, nothing if it is unknown."""
        if name not in BY_NUMBERS:
            return ()
        given = [one for one in (*args[2:], *kwargs.values()) if _is_list_of_whole(one)]
        wanted = given[:1] if name in GROUPED else given[:2]
        return tuple(number for tensor in wanted for number in self._known(tensor))

    def _known(self, tensor: Any) -> tuple[int, ...]:
        """Return the numbers in *tensor*, nothing if they are unknown."""
        numbers = self._session.stated.numbers
        real = numbers.of(tensor)
        if real is None:
            return ()
        with numbers.really():
            return tuple(real.tolist())


def _call(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Call:
    names = [argument.name for argument in internals.schema_of(func).arguments]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    positional = (*args, *(value for key, value in kwargs.items() if key != "out"))
    return Call(name, positional, named, out)


def _is_list_of_whole(value: Any) -> bool:
    """Whether *value* is a one-dimensional tensor of integers."""
    return hasattr(value, "element_size") and value.dim() == 1 and not value.dtype.is_floating_point
