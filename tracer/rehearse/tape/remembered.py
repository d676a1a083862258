"""A cache of operator results: a call with the same shapes as before is answered from it.

Most of the time of a rehearsal goes into finding the outputs of operators. They depend only on shapes,
strides, dtypes and plain numbers. So the second of eighty equal layers gets its results from those of the
first: each is the tensor that was written to, a view of an operand, or new memory. Anything else is not
cached.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from foretrace.tracer import internals

Arguments = tuple[Any, ...]

NAMESPACES: Final = frozenset({"aten", "prims", "fsdp", "_c10d_functional"})
"""Operators of which it is known that nothing but shapes decides what they make."""

_SLICE: Final = (None, 0, None, None, 1)
"""What ``aten.slice`` takes for arguments that are not given: dimension, start, end, step."""


class Made(NamedTuple):
    """A result that can be created again."""

    source: int  # number of the operand that it is, or whose memory it shares; -1: new memory
    is_same: bool  # whether it is that operand itself
    # of a view or of new memory
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: Any = None  # of its elements
    state: dict[str, Any] | None = None  # attributes of the fake tensor
    bits: tuple[bool, bool] = (False, False)  # complex conjugation and sign, where they are put off
    device: Any = None  # that it says it is on


class Remembered:
    """A call that can be answered from the cache.

    Attributes:
        results: what it makes: tensors, None, or numbers, which are the same again.
        container: ``tuple`` or ``list`` if it makes several, else None.
        works: numbers of its work on the tape, by what that depends on beside the call.
    """

    __slots__ = ("container", "results", "works")

    def __init__(self, results: tuple[Made | float | None, ...], container: type | None) -> None:
        self.results, self.container, self.works = results, container, dict[Any, int]()


UNSEEN: Final = object()
"""In place of what is known of a call that was not made before."""


class _UnknownError(Exception):
    """A call that depends on more than its key, or cannot be answered."""


class Memo:
    """Answers calls of operators on fake tensors of one mode."""

    def __init__(self) -> None:
        import torch

        fake_tensor = internals.fake_tensor()

        self._torch, self._kind = torch, fake_tensor
        # Calls are asked about once per shape: a 70B model takes 11 s of a processor, and took 26.
        self._calls: dict[Arguments, Remembered | None] = {}
        self._plain = {
            *(int, float, bool, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format),
            torch.device,
        }
        self._generator = torch.Generator
        self._leaf = internals.make_subclass()
        self._unseen = internals.without_functions()  # by modes that replace functions, as in a backward
        self._slicing, self._lifting = torch.ops.aten.slice.Tensor, torch.ops.aten.lift_fresh.default
        self._keys_of = internals.keys_of()
        self._pinning = internals.pinning()
        self._mode_of, self._fake_key = internals.mode_of_fakes()
        self._mode_of_torch = internals.fakes().mode
        self.n_answered = 0  # calls that were answered without a look

    def call(self, func: Any, args: Arguments, kwargs: dict[str, Any]) -> tuple[Any, Remembered | None]:
        """Return what *func* makes, and what is remembered of it, None if nothing is."""
        if type(self._mode_of(self._fake_key)) is self._mode_of_torch:
            return func(*args, **kwargs), None  # tensors of an export, which are not those of the device
        if func is self._pinning or kwargs.get("pin_memory"):  # what is pinned has an address of its own
            return func(*args, **kwargs), None
        if func is self._slicing and not kwargs and type(args[0]) is self._kind:
            return self._slice(func, args)
        if func is self._lifting and type(args[0]) is self._torch.Tensor:
            return self._lift(func, args)
        return self._call(func, args, kwargs)

    def _slice(self, func: Any, args: Arguments) -> tuple[Any, Remembered | None]:
        """Return a slice as ``call`` does: as the one of its length that begins where its operand does.

        Libraries cut a buffer into a part per rank, in a loop: every part has another beginning, and no more.
        """
        whole: Arguments = (*args, *_SLICE[len(args) :])
        tensor, dim, start, end, step = whole
        is_plain = {type(value) for value in (dim, start, end, step)} <= {int, type(None)}
        if not is_plain or not -tensor.dim() <= dim < tensor.dim() or step < 1:
            return self._call(func, args, {})
        first, last, _ = slice(start, end, step).indices(tensor.shape[dim])
        out, known = self._call(func, (tensor, dim, 0, max(last - first, 0), step), {})
        if not first:
            return out, known
        made = known.results[0] if known is not None else None
        if not isinstance(made, Made) or self._torch.is_inference_mode_enabled():
            return func(*args), None
        return self._again(made._replace(offset=made.offset + first * tensor.stride(dim)), (tensor,)), known

    def _lift(self, func: Any, args: Arguments) -> tuple[Any, Remembered | None]:
        """Return as ``call`` the fake tensor for a real one that was made of numbers, as of a list."""
        real = args[0]
        if self._torch.is_inference_mode_enabled() or not _holds_itself(real) or not self._is_fake():
            return func(*args), None
        key = (func, tuple(real.shape), real.stride(), real.dtype, real.device, real.requires_grad)
        if (known := self._calls.get(key)) is not None:
            return self._again(known.results[0], ()), known
        out = func(*args)
        with suppress(_UnknownError):
            self._calls[key] = self._learned((), out)
        return out, None

    def _call(self, func: Any, args: Arguments, kwargs: dict[str, Any]) -> tuple[Any, Remembered | None]:
        """Return as ``call`` what *func* makes of exactly these arguments."""
        operands: list[Any] = []
        with self._unseen():
            try:
                # The default dtype is that of a quotient of whole numbers, for example.
                key = (func, self._torch.get_default_dtype(), self._whole(args, kwargs, operands))
                known = self._calls.get(key, UNSEEN) if operands or self._is_fake() else None
            except _UnknownError:
                known = None
            if isinstance(known, Remembered) and not self._torch.is_inference_mode_enabled():
                self.n_answered += 1
                found = [self._again(made, operands) for made in known.results]
                return (found[0] if known.container is None else known.container(found)), known
        if known is UNSEEN:
            return self._look(key, operands, func, args, kwargs)
        return func(*args, **kwargs), None

    def _is_fake(self) -> bool:
        """Whether a tensor made of no others is fake: one whose numbers are wanted is really made."""
        return self._mode_of(self._fake_key) is not None

    def _look(
        self, key: Arguments, operands: Sequence[Any], func: Any, args: Arguments, kwargs: dict[str, Any]
    ) -> tuple[Any, Remembered | None]:
        with internals.without_cache():  # to look there, and to keep it, takes as long as the call
            out = func(*args, **kwargs)
        known = None
        if func.namespace in NAMESPACES and self._torch.Tag.inplace_view not in func.tags:
            with suppress(_UnknownError):
                # An operator that has changed the form of an operand cannot be answered by results.
                if self._whole(args, kwargs, []) == key[2]:
                    known = self._learned(operands, out)
        # None as well: the call is not looked at again.
        self._calls[key] = known
        return out, known

    def _whole(self, args: Arguments, kwargs: dict[str, Any], operands: list[Any]) -> Arguments:
        """Return what the result of a call depends on; its tensors go to *operands*."""
        found = self._key(args, operands)
        return (*found, *kwargs, *self._key(tuple(kwargs.values()), operands)) if kwargs else found

    def _key(self, values: Sequence[Any], operands: list[Any]) -> Arguments:
        """Return what the result of a call with *values* depends on; tensors go to *operands*."""
        found: list[Any] = []
        kind_of_tensor, plain = self._kind, self._plain
        for value in values:
            kind = type(value)
            if kind is kind_of_tensor:
                operands.append(value)
                found.append(self._signature(value))
            elif kind is list or kind is tuple or kind is self._torch.Size:
                found.extend((list, len(value), *self._key(value, operands)))
            elif kind in plain:
                found.extend((kind, value))
            elif kind is self._generator:  # which numbers it draws decides no shape
                found.append(kind)
            else:
                raise _UnknownError
        return tuple(found)

    def _signature(self, tensor: Any) -> Arguments:
        return (
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
            self._keys_of(tensor).raw_repr(),
            tensor.fake_device,
        )

    def _learned(self, operands: Sequence[Any], out: Any) -> Remembered:
        """Return what to remember of a call with *operands* that has made *out*.

        Raises:
            _UnknownError: it cannot be made again.
        """
        if self._torch.is_inference_mode_enabled():
            raise _UnknownError
        container = type(out) if isinstance(out, list | tuple) else None
        results = out if container is not None else (out,)
        # Reversed: of operands that share memory, the first one counts.
        places = {_memory(operand): at for at, operand in reversed(list(enumerate(operands)))}
        uses = Counter(_memory(one) for one in results if isinstance(one, self._kind))
        described = tuple(self._describe(one, operands, places, uses) for one in results)
        return Remembered(described, container)

    def _describe(
        self, out: Any, operands: Sequence[Any], places: Mapping[int, int], uses: Mapping[int, int]
    ) -> Made | float | None:
        """Return how to make *out*, a result of a call with *operands*."""
        if out is None or type(out) in {int, float, bool}:
            return out  # type: ignore[no-any-return]
        if type(out) is not self._kind or out.requires_grad:
            raise _UnknownError
        memory = _memory(out)
        # By memory first: of long lists each result would be compared with every operand.
        source = places.get(memory, -1)
        if source >= 0:
            same = next((at for at, operand in enumerate(operands) if operand is out), -1)
            if same >= 0:
                return Made(same, is_same=True)
        if out.layout is not self._torch.strided or out.fake_device.type not in {"cpu", "meta", "cuda"}:
            raise _UnknownError
        # A result that shares new memory, or is a part of it, would be made with memory of its own.
        if source < 0 and (not _holds_itself(out) or uses[memory] > 1):
            raise _UnknownError
        return Made(
            source,
            is_same=False,
            shape=tuple(out.shape),
            stride=out.stride(),
            offset=out.storage_offset(),
            dtype=out.dtype,
            state=dict(vars(out)),
            bits=(out.is_conj(), out.is_neg()),
            device=out.fake_device,
        )

    def _again(self, made: Made | float | None, operands: Sequence[Any]) -> Any:
        """Return a tensor as *made* says, or the number that it is."""
        if not isinstance(made, Made):
            return made
        if made.is_same:
            return operands[made.source]
        torch = self._torch
        with internals.without_dispatch():
            # A fake tensor wraps one of the meta device.
            found = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
            if made.source >= 0:
                found.set_(operands[made.source].untyped_storage(), made.offset, made.shape, made.stride)
        if any(made.bits):
            internals.put_off(found, *made.bits)
        state = made.state or {}
        tensor = self._leaf(
            self._kind, found, require_grad=False, dispatch_device=True, device_for_backend_keys=made.device
        )
        internals.guard_address(tensor, state["fake_mode"])
        vars(tensor).update(state)
        if made.source < 0:
            state["fake_mode"].place(tensor)
        return tensor


def _memory(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _holds_itself(tensor: Any) -> bool:
    """Whether the memory of *tensor* is as large as it needs, and begins where it does."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    n_elements = last + 1 if tensor.numel() else 0
    n_bytes = tensor.untyped_storage().nbytes()
    return not tensor.storage_offset() and n_bytes == n_elements * tensor.element_size()
