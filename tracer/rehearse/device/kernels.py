"""Operators on the device, where PyTorch's fake tensors have no rule, need a value, or are not active."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.rehearse.device.driver import HOST, PAGED, Driver
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.tape.calls import tensors_in

WHOLE: Final = ("_fused_rms_norm", "mish_backward", "silu_backward")
"""Operators for which a build for CUDA has kernels, and which PyTorch makes of others where there are none:
they are under both ``CUDA`` and ``CompositeImplicitAutograd`` in PyTorch's ``native_functions.yaml``."""


class NoRuleError(RehearsalError):
    """PyTorch does not know the shapes that an operator would return."""


class _AsksGpuError(RuntimeError):
    """PyTorch would run an operator on the GPU, to learn what it returns."""


def make_mode(driver: Driver) -> Any:
    """Return the mode in which all tensors are fake, those of the device with an address.

    PyTorch's constants, values that a fake tensor keeps, are off: they would be computed a second time, where
    a session follows values, and on a GPU that is not there.
    """
    import torch

    fakes = internals.fakes()
    rules, fake, places = _rules(driver), fakes.tensor, driver.place
    meta = torch.device("meta")

    class DeviceMode(fakes.mode):  # type: ignore[misc, name-defined]  # torch is untyped here
        """PyTorch's mode of fake tensors, with an answer where that would ask a GPU."""

        def may_turn_const(self, tensor: Any) -> bool:
            """Return False: PyTorch keeps no elements."""
            return False

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if (rule := rules.get(func)) is not None:
                out = rule(*args, **kwargs)
            elif "device" in kwargs:
                out = self._made(func, types, args, kwargs)
            else:
                out = self._called(func, types, args, kwargs)
            if kwargs.get("pin_memory"):
                places(out.untyped_storage(), HOST)
            for tensor in tensors_in(out):
                if type(tensor) is fake:
                    self.place(tensor)
            return out

        def from_tensor(self, *args: Any, **kwargs: Any) -> Any:
            """Return the fake tensor for a real one."""
            out = super().from_tensor(*args, **kwargs)
            self.place(out)
            return out

        def place(self, tensor: Any) -> None:
            """Give a fake *tensor* an address: libraries tell parameters apart by these."""
            if (device := getattr(tensor, "fake_device", meta)).type != "meta":
                places(tensor.untyped_storage(), device.index if device.type == "cuda" else PAGED)

        def _called(self, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            except _AsksGpuError:
                raise NoRuleError(
                    f"{func}: PyTorch {torch.__version__} has no rule for the shapes of its results; a file "
                    "for --stub can give it one with torch.library.register_fake"
                ) from None

        def _made(self, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            """Call what makes a tensor on a device, or moves it there."""
            device = kwargs["device"]
            if device is not None and device.type == "cpu":  # PyTorch numbers no processors
                kwargs = {**kwargs, "device": torch.device("cpu")}
            if device is not None and device.type == "cuda" and (device.index or 0) >= driver.count:
                if not driver.count:
                    raise RuntimeError("No CUDA GPUs are available")
                raise getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: invalid device ordinal")
            return self._called(func, types, args, kwargs)

    def deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
        """Return a copy of *tensor* in the same mode.

        PyTorch would copy the mode, too, which sometimes crashes the process: ``WeakIdKeyDictionary`` in
        torch/utils/weak.py reads storages that have been freed (valgrind names ``THPStorage_fix_weakref``).
        """
        if (known := memo.get(id(tensor))) is not None:
            return known
        if not tensor.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")
        with torch.no_grad():
            out = tensor.detach().clone()
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        out = torch.nn.Parameter(out) if is_parameter else out
        memo[id(tensor)] = out.requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            out.grad = deepcopy(tensor.grad, memo)
        return out

    fake.__deepcopy__ = deepcopy
    own, swap_any = torch.Tensor.data, torch.utils.swap_tensors

    def take_data(tensor: Any, of: Any) -> None:
        """Let *tensor* have the data of another, with its device: parameters move so."""
        own.__set__(tensor, of)
        # PyTorch takes the data alone; the device of a fake tensor stands beside it.
        if type(of) is fake:
            tensor.fake_device = of.fake_device

    def swap(one: Any, other: Any) -> None:
        """Swap the data of two tensors; PyTorch would refuse where somebody refers to one."""
        if type(one) is not fake or type(other) is not fake:
            swap_any(one, other)
            return
        if "meta" in {
            one.fake_device.type,
            other.fake_device.type,
        }:  # PyTorch puts no data of the one into the other
            one.__dict__, other.__dict__ = other.__dict__, one.__dict__
            internals.swap(one, other)
            return
        kept = one.detach()
        one.data = other
        other.data = kept

    fake.data, torch.utils.swap_tensors = property(own.__get__, take_data), swap
    return DeviceMode(allow_non_fake_inputs=True)


def _rules(driver: Driver) -> Mapping[Any, Callable[..., Any]]:
    """Return what operators do for which PyTorch has a kernel of CUDA, and no rule."""
    import torch

    aten: Any = torch.ops.aten

    def record_stream(tensor: Any, stream: Any) -> None:
        """Do nothing: the allocator is not told when a stream is done with memory."""

    def is_pinned(tensor: Any, device: Any = None) -> bool:
        return bool(tensor.device.type == "cpu" and driver.is_pinned(tensor.untyped_storage()))

    def pin_memory(tensor: Any, device: Any = None) -> Any:
        if tensor.device.type != "cpu":
            raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
        return torch.empty_like(tensor, pin_memory=True).copy_(tensor)

    of_layers = {0: 1, 1: 1, 2: 5, 3: 4}  # by the mode of cuDNN: gates, the cell, a part of one

    def rnn(  # noqa: PLR0917 - as the operator is called
        x: Any, weights: Any, stride: Any, buffer: Any, hx: Any, cx: Any, *others: Any
    ) -> Any:
        # How much cuDNN reserves is not documented: this is the least that a backward needs.
        mode, hidden, projected, layers, batch_first, _, trains, is_two, sizes = others[:9]
        n_directions, n_tokens = 2 if is_two else 1, math.prod(x.shape[:-1])
        # The first step of packed sequences has all of them.
        batch = sizes[0] if sizes else x.shape[0 if batch_first else 1]
        width, n_layers = projected or hidden, layers * n_directions
        n_kept = n_tokens * n_layers * of_layers[mode] * hidden if trains else 0
        return (
            x.new_empty((*x.shape[:-1], width * n_directions)),
            x.new_empty((n_layers, batch, width)),
            x.new_empty(0 if cx is None else (n_layers, batch, hidden)),
            x.new_empty(n_kept * x.element_size(), dtype=torch.uint8),
            buffer,
        )

    def rnn_backward(  # noqa: PLR0917 - as the operator is called
        x: Any, weights: Any, stride: Any, buffer: Any, hx: Any, cx: Any, *others: Any, **named: Any
    ) -> Any:
        wants = named.get("output_mask", others[-1])
        of = [
            torch.empty_like(one) if one is not None and wanted else None
            for one, wanted in zip((x, hx, cx), wants, strict=False)
        ]
        return (*of, [torch.empty_like(weight) for weight in weights] if wants[3] else [])

    def like_second(gradient: Any, x: Any, *others: Any, **named: Any) -> Any:
        return torch.empty_like(x)

    def flatten_weights(weights: Any, *others: Any, **named: Any) -> Any:
        return weights[0].new_empty(0)  # they would share a buffer then, as large as they are

    return {
        aten.record_stream.default: record_stream,
        aten.is_pinned.default: is_pinned,
        getattr(aten, "_pin_memory").default: pin_memory,  # noqa: B009 - a name of an operator, here and below
        getattr(aten, "_cudnn_rnn").default: rnn,  # noqa: B009
        getattr(aten, "_cudnn_rnn_backward").default: rnn_backward,  # noqa: B009
        getattr(aten, "_cudnn_rnn_flatten_weight").default: flatten_weights,  # noqa: B009
        getattr(aten, "_ctc_loss_backward").default: like_second,  # noqa: B009
    }


def register(mode: Any, driver: Driver) -> Any:
    """Register kernels of the device with PyTorch's dispatcher; return what must be kept for them.

    With them tensors of the device are fake where *mode* is not active, too, as in threads.
    """
    import torch

    def making(operator: Any) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            if internals.is_below_fakes():
                raise _AsksGpuError
            with mode:
                return operator(*args, **kwargs)

        return make

    aten, library = torch.ops.aten, torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a build for CUDA has kernels of its own
        library.impl("empty.memory_format", making(aten.empty.memory_format), "CUDA")
        library.impl("empty_strided", making(aten.empty_strided.default), "CUDA")
        for name in WHOLE:
            if (packet := getattr(aten, name, None)) is not None:  # an older PyTorch may lack one
                library.impl(name, making(packet.default), "CUDA")
        library.impl("record_stream", _rules(driver)[aten.record_stream.default], "CUDA")
    library.impl("_cudnn_rnn", _cast_as_autocast, "AutocastCUDA")
    # Of fake tensors PyTorch leaves the lengths on the host; of others it reads them, as here.
    for overload in ("IntList", "Tensor"):
        library.impl(f"ctc_loss.{overload}", _ctc_loss, "AutogradCUDA")
    library.impl("_pad_packed_sequence", _pad, "AutogradCUDA")
    return library


def _cast_as_autocast(*args: Any) -> Any:
    """Call cuDNN's recurrent layers on what autocast makes of their operands (ATen/cudnn/AutocastRNN.cpp)."""
    import torch

    dtype = torch.get_autocast_dtype("cuda")

    def cast(one: Any) -> Any:
        if isinstance(one, list | tuple):
            return [cast(part) for part in one]
        return one.to(dtype) if isinstance(one, torch.Tensor) and one.is_floating_point() else one

    with torch.autocast("cuda", enabled=False):
        return getattr(torch.ops.aten, "_cudnn_rnn")(*map(cast, args))  # noqa: B009 - a name of an operator


def _pad(rows: Any, sizes: Any, batch_first: bool, value: float, total: int) -> Any:  # noqa: FBT001
    """Pad packed sequences by copies: one for all steps that have the same number of sequences."""
    import torch

    at_each = sizes.tolist()
    n_steps = total if total > 0 else len(at_each)
    out, at, step = rows.new_full((n_steps, at_each[0], *rows.shape[1:]), value), 0, 0
    for n, group in itertools.groupby(at_each):
        length = len(list(group))
        part = rows[at : at + n * length].view(length, n, *rows.shape[1:])
        out[step : step + length, :n] = part
        at, step = at + n * length, step + length
    lengths = torch.tensor([sum(n > i for n in at_each) for i in range(at_each[0])])
    return out.transpose(0, 1) if batch_first else out, lengths


def _ctc_loss(  # noqa: PLR0917 - as the operator is called
    scores: Any,
    targets: Any,
    lengths: Any,
    of_targets: Any,
    blank: int = 0,
    reduction: int = 1,
    *zeroed: bool,
) -> Any:
    """Compute a CTC loss by the operators that PyTorch calls without cuDNN."""
    import torch

    # As ATen/native/LossCTC.cpp: 1 is the mean of losses by the lengths of targets, 2 the sum.
    lengths, known = ([int(one) for one in numbers] for numbers in (lengths, of_targets))
    loss = getattr(torch, "_ctc_loss")(scores, targets, lengths, known, blank, *zeroed)[0]  # noqa: B009 - an operator
    if any(zeroed):
        loss = torch.where(loss == float("inf"), loss.new_zeros(()), loss)
    if reduction == 1:
        return (loss / torch.tensor(known).clamp_min(1).to(loss.device, loss.dtype)).mean()
    return loss.sum() if reduction == 2 else loss
