"""Numbers that a script makes by itself are computed, although the tensors that hold them are fake.

Lengths, positions and choices from a random generator, a range, a list or a loader decide shapes and
branches: where in a text a batch begins, which tokens are padding, whether a mask hides any. None of them
needs a device. They are kept beside the storage of the fake tensor, and operators whose operands are all
known are computed as well. A tensor filled with one number is kept as that number until its elements are
read. Results of trained parameters and of activations stay unknown.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from foretrace.tracer import internals
from foretrace.tracer.internals import makers
from foretrace.tracer.rehearse.tape.calls import storage_key, tensors_in
from foretrace.tracer.rehearse.words import is_first_value

# Operators whose results are computed on known numbers: those that create, fill, draw or overwrite, by kind.


FACTORIES: Final = frozenset(
    {
        "aten.arange", "aten.eye", "aten.full", "aten.lift_fresh", "aten.linspace", "aten.logspace",
        "aten.ones", "aten.randint", "aten.randperm", "aten.scalar_tensor", "aten.zeros", "aten.tril_indices",
        "aten.triu_indices", "aten.bartlett_window", "aten.blackman_window", "aten.hamming_window",
        "aten.hann_window", "aten.kaiser_window", "aten.rand", "aten.randn",
    }
)  # fmt: skip
"""Operators that make numbers of no other tensor's."""

LIKE: Final = frozenset(
    {
        "aten.full_like", "aten.new_full", "aten.new_ones", "aten.new_zeros", "aten.ones_like",
        "aten.randint_like", "aten.zeros_like", "aten.rand_like", "aten.randn_like",
    }
)  # fmt: skip
"""Operators that ask a tensor for its shape and type only."""

FRESH: Final = FACTORIES | LIKE
"""Operators that ask no tensor for its numbers."""

FILLS: Final[Mapping[str, tuple[int, float | None]]] = {
    "aten.zeros": (0, 0), "aten.zeros_like": (0, 0), "aten.new_zeros": (0, 0), "aten.zero_": (0, 0),
    "aten.ones": (0, 1), "aten.ones_like": (0, 1), "aten.new_ones": (0, 1),
    "aten.full": (1, None), "aten.full_like": (1, None), "aten.fill_": (1, None), "aten.new_full": (2, None),
}  # fmt: skip
"""Operators that fill a tensor with one number: which of their arguments it is, or, if not None, what."""

BLANK: Final = frozenset(
    {"aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided"}
)
"""Operators that make memory in which nothing has been written. Whole numbers in it count as zeros: no script
reads them before it has written them, and what it writes to a part is known then."""

DRAWS: Final = frozenset(
    {
        "aten.rand", "aten.rand_like", "aten.randn", "aten.randn_like", "aten.uniform_", "aten.normal_",
        "aten.exponential_",
    }
)  # fmt: skip
"""Operators that draw fractions, also the first values of parameters, of which nothing depends."""

OVERWRITES: Final = frozenset(
    {
        "aten.bernoulli_", "aten.copy_", "aten.exponential_", "aten.fill_", "aten.normal_", "aten.random_",
        "aten.uniform_", "aten.zero_",
    }
)  # fmt: skip
"""Operators in place that ask nothing of what was there before."""

ABSORBS: Final[Mapping[str, bool]] = {
    f"aten.{kind}_{word}{end}": word == "or"
    for kind in ("bitwise", "logical")
    for word in ("and", "or")
    for end in ("", "_")
}
"""Operators on truths of which one operand can decide alone, and by which value: true or anything is true. A
generation ends with its last token, whatever the tokens are."""

FILLED: Final = BLANK | FILLS.keys()
"""Operators whose results are all one number."""

ASKED: Final = frozenset({"aten.bernoulli", "aten.multinomial"})
"""Operators that draw, and ask a tensor how likely each number is."""

LISTS: Final = ("aten._foreach_", "aten._fused_", "aten._amp_")
"""How names of operators begin that optimizers give all their states: of these nobody asks."""

MOST_FRACTIONS: Final = 1 << 17
"""Fractions above which none are drawn: nobody asks for so many."""


def is_followed(name: str, func: Any) -> bool:
    """Whether the operator *func*, called *name*, is computed where all of its operands are known.

    All are whose results are new, or are the operands that they change. An operator that is composed of
    others is followed through these instead: in place it would be computed twice.
    """
    import torch

    if name in FRESH or name in BLANK or name in OVERWRITES or name in ASKED:
        return True
    if func.namespace != "aten" or func.is_view or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if name.startswith(LISTS) or internals.is_composite(func):
        return False
    schema = internals.schema_of(func)
    changed = [one for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return len(changed) == sum(one.alias_info is not None for one in schema.returns)


# Elements given by a constant, or held elsewhere: none is created before it is read.


class Constant(NamedTuple):
    """Elements that are all the same, created when read: most are optimizer states and gradients."""

    fill: float  # what each of them is
    n_elements: int  # how many there are
    dtype: Any  # of the elements

    def part(self, view: Any) -> Any:
        """Return the elements that *view* has, as one element that is seen as all of them."""
        return makers().full((), self.fill, dtype=self.dtype).expand(view.shape)


class Data(NamedTuple):
    """Elements that a real tensor has, as of a file or a range: too many to copy, few read at once."""

    whole: Any  # the elements of its storage

    @property
    def dtype(self) -> Any:
        """Their dtype."""
        return self.whole.dtype

    def seen(self, tensor: Any) -> Any:
        """Return all as *tensor*, a view of their storage, has them."""
        return self.whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def part(self, tensor: Any) -> Any:
        """Return a copy of the elements of *tensor*."""
        return self.seen(tensor).clone()


def is_rule(numbers: Any, most: int) -> bool:
    """Whether *numbers* are given by a rule, or elsewhere, and are too many to create, more than *most*."""
    return type(numbers) is Data or (type(numbers) is Constant and numbers.n_elements > most)


def filled(name: str, args: Sequence[Any], result: Any) -> Constant | None:
    """Return the elements of the storage of *result*, filled by the operator *name*, called with *args*.

    None if they are unknown, or if *result* is only a part of the storage.
    """
    n_bytes, element_bytes = result.untyped_storage().nbytes(), result.element_size()
    if name in BLANK:
        is_whole = not (result.dtype.is_floating_point or result.dtype.is_complex)
        return Constant(0, n_bytes // element_bytes, result.dtype) if is_whole else None
    at, fill = FILLS[name]
    fill = args[at] if fill is None else fill
    # NaN stands for a number that nobody has computed (``Unknown``).
    if not isinstance(fill, int | float) or math.isnan(fill) or n_bytes != result.numel() * element_bytes:
        return None
    return Constant(fill, result.numel(), result.dtype)


MOST_ELEMENTS: Final = 1 << 18
"""Elements of a tensor above which its numbers are left out: computing them would take milliseconds each, and
nobody looks at so many one by one."""

MOST_LISTED: Final = 1 << 24
"""Elements of a range above which it is not made: places in a text or a data set, of which few are read."""

MOST_ROUTED: Final = 1 << 24
"""As many, where choices of experts are stated: a table has an element for each token, choice and expert."""


class Held(NamedTuple):
    """The numbers of a storage."""

    numbers: Any  # its elements; shape ``(n,)``, a ``Constant`` or ``Data``
    # whether they came from other ranks, which are assumed to have the same numbers as this one
    is_shared: bool
    storage: Any  # a weak reference to the storage; the entry is removed with it


def seen(numbers: Any, tensor: Any) -> Any:
    """Return the real *numbers* of a whole storage as the fake *tensor* views them, without a copy."""
    # Bits may be read as another type, as the state of a generator of which ranks make a seed.
    flat = numbers if numbers.dtype == tensor.dtype else numbers.view(tensor.dtype)
    found = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    found = found.conj() if tensor.is_conj() else found
    return found._neg_view() if tensor.is_neg() else found


class _UnknownError(Exception):
    """An operand whose numbers nobody has."""


class Numbers:
    """The tensors of a rehearsal whose elements are known.

    Args:
        most: largest number of elements of a tensor whose numbers are kept.
    """

    def __init__(self, most: int = MOST_ELEMENTS) -> None:
        import torch

        fake_tensor = internals.fake_tensor()

        self._torch, self._kind, self.really = torch, fake_tensor, internals.without_fakes
        # torch's own: a script may have others in their place, as under ``deepspeed.zero.Init``.
        self._make = makers()
        self._held: dict[int, Held] = {}
        self.most = most

    def __len__(self) -> int:
        return len(self._held)

    def of(self, tensor: Any) -> Any | None:
        """Return the elements of *tensor* as a real one of its shape, None if they are not known."""
        key = storage_key(tensor) if self._held else -1
        found = self._held.get(key)
        if found is None:
            return None
        with self.really(), suppress(RuntimeError):  # of a dtype that the storage holds no whole number of
            numbers = found.numbers
            if is_rule(numbers, self.most):
                is_few = tensor.numel() <= self.most and numbers.dtype == tensor.dtype
                return numbers.part(tensor) if is_few else None
            if type(numbers) is Constant:
                numbers = self._make.full((numbers.n_elements,), numbers.fill, dtype=numbers.dtype)
                self._held[key] = found._replace(numbers=numbers)
            return seen(numbers, tensor)
        return None

    def held(self, tensor: Any) -> Held | None:
        """Return what is known of the elements of the storage of *tensor*."""
        return self._held.get(storage_key(tensor))

    def fill_of(self, tensor: Any) -> float | None:
        """Return the number that *tensor* was filled with, None if it was not filled with one."""
        found = self._held.get(storage_key(tensor))
        return found.numbers.fill if found is not None and type(found.numbers) is Constant else None

    def is_shared(self, tensor: Any) -> bool:
        """Whether the numbers of *tensor* came from other ranks, assumed to have the same as this one."""
        found = self._held.get(storage_key(tensor))
        return found is not None and found.is_shared

    def keep(self, tensor: Any, real: Any, *, is_shared: bool = False, is_new: bool = False) -> None:
        """Keep *real* as the elements of the fake *tensor*, which covers its whole storage, or is new.

        A periodic window is all but the last element of a symmetric one, which nothing else views.
        """
        storage = tensor.untyped_storage()
        n_elements = storage.nbytes() // real.element_size()
        if real.numel() > self.most or (n_elements != real.numel() and not is_new):
            return
        if self._is_unknown(real):
            self.forget([tensor])
            return
        with self.really():
            flat = self._make.zeros(n_elements, dtype=real.dtype)
            flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(real)
        self._hold(storage, flat, is_shared=is_shared)

    def _is_unknown(self, real: Any) -> bool:
        """Whether *real*, which the script has made, is made of an ``Unknown``."""
        with self.really():
            return bool(real.is_floating_point() and real.isnan().any())

    def adopt(self, view: Any, real: Any) -> None:
        """Keep the numbers of a *real* tensor, such as that of a mesh, for its fake *view*.

        Of whole numbers, as of pictures and texts in a file, any number; weights would fill the memory.
        """
        if type(view) is not self._kind:
            return
        storage = view.untyped_storage()
        n_elements = storage.nbytes() // real.element_size()
        with self.really():
            flat = real.detach().as_strided((n_elements,), (1,), 0)
            if n_elements <= self.most:
                self._hold(storage, flat.clone())
            elif not (real.is_floating_point() or real.is_complex()):
                self._hold(storage, Data(flat))

    def _hold(self, storage: Any, flat: Any, *, is_shared: bool = False) -> None:
        """Let *flat* be all elements of *storage* for as long as it lives."""
        key = int(storage._cdata)
        gone = weakref.ref(storage, lambda _: self._held.pop(key, None))
        self._held[key] = Held(flat, is_shared, gone)

    def forget(self, tensors: Iterable[Any]) -> None:
        """Drop the numbers of *tensors*."""
        if self._held:
            for tensor in tensors:
                self._held.pop(storage_key(tensor), None)

    def drop(self, key: int) -> None:
        """Drop the numbers of the storage with this ``storage_key``."""
        self._held.pop(key, None)

    def computed(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any | None:
        """Return the result of *func* on known numbers, None if one of its operands is not known."""
        try:
            held = self._held.get(storage_key(args[0])) if func is self._torch.ops.aten.index.Tensor else None
            if held is not None and type(held.numbers) is Data and held.numbers.dtype == args[0].dtype:
                with self.really(), suppress(IndexError):
                    return func(held.numbers.seen(args[0]), self._real(args[1]))
                return None
            real, named = self._real(args), {name: self._real(value) for name, value in kwargs.items()}
        except _UnknownError:
            return None
        # It is computed on the host, wherever the fake tensor is.
        named = {
            name: {"device": "cpu", "pin_memory": False}.get(name, value) for name, value in named.items()
        }
        with self.really(), suppress(RuntimeError, IndexError):  # what others are taken to have need not fit
            return func(*real, **named)
        return None

    def follow(self, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Keep the numbers that *func*, called *name*, has computed, in new tensors or in place."""
        results = out if isinstance(out, list | tuple) else (out,)
        if name in ABSORBS and self._is_decided(args, results[0], by=ABSORBS[name]):
            self._decide(results[0], by=ABSORBS[name])
            return
        is_filled = name in FILLED and self._is_filled(name, args, results[0])
        if is_filled or self._is_ranged(name, func, args, results):
            return
        # Over known numbers it writes in place, as any other operator: *out* may be a part of them.
        is_fresh = name in FRESH or (name in OVERWRITES and not self._is_known(args[:1]))
        # From here on results are really made, so no large ones.
        if any(type(one) is not self._kind or one.numel() > self.most for one in results):
            return
        if name in DRAWS and (results[0].numel() > MOST_FRACTIONS or is_first_value()):
            self.forget(results)
            return
        if is_fresh:
            args = [*self._shapes(args[:1]), *args[1:]] if name in LIKE or name in OVERWRITES else args
        elif not self._is_known(args):
            if internals.schema_of(func).is_mutable:
                self.forget(results)
            return
        real = self.computed(func, args, kwargs)
        if real is None:
            self.forget(results if internals.schema_of(func).is_mutable else ())
            return
        is_shared = any(self.is_shared(tensor) for tensor in tensors_in(args))
        for tensor, one in zip(results, real if isinstance(real, list | tuple) else (real,), strict=False):
            if (
                internals.schema_of(func).is_mutable and not is_fresh
            ):  # the numbers that were changed are those held
                self._shared(tensor, is_shared=is_shared)
            else:
                self.keep(tensor, one, is_shared=is_shared, is_new=name in FACTORIES)

    def _is_filled(self, name: str, args: Sequence[Any], result: Any) -> bool:
        """Hold the number with which the operator *name* has filled *result*; return whether it could be."""
        if storage_key(result) == -1:
            return True
        if (constant := filled(name, args, result) if type(result) is self._kind else None) is not None:
            self._hold(result.untyped_storage(), constant)
        return constant is not None or name in BLANK

    def _is_ranged(self, name: str, func: Any, args: Sequence[Any], results: Sequence[Any]) -> bool:
        """Hold a range that is too long to be copied, none where is written; return whether it is held."""
        if internals.schema_of(func).is_mutable:
            held = ((one, self._held.get(storage_key(one))) for one in results)
            self.forget([one for one, found in held if found and is_rule(found.numbers, self.most)])
            return False
        made = results[0]
        if name != "aten.arange" or type(made) is not self._kind or made.dtype.is_floating_point:
            return False
        is_held = bool(self.most < made.numel() <= MOST_LISTED)
        if is_held:
            with self.really():
                self._hold(made.untyped_storage(), Data(self._make.arange(*args, dtype=made.dtype)))
        return is_held

    def _is_decided(self, args: Sequence[Any], result: Any, *, by: bool) -> bool:
        """Whether all elements of one of *args* are known to be *by*: of truths, or zeros, of any type."""
        # Zero and any number is zero, but a truth does not decide an or of numbers.
        if by and result.dtype != self._torch.bool:
            return False
        for value in args:
            real = self.of(value) if type(value) is self._kind else None
            with self.really():
                if real is not None and bool((real == by).all()):
                    return True
        return False

    def _decide(self, result: Any, *, by: bool) -> None:
        """Let all elements of *result* be *by*: it may be a part of numbers that are known."""
        held = self.of(result)
        with self.really():
            if held is not None:
                held.fill_(by)
                return
            self.forget([result])
            decided = self._make.full((), by, dtype=result.dtype)
            self.keep(result, decided.expand(result.shape))  # which may be too large to be made

    def exchange(self, kind: str, source: Any, outputs: Sequence[Any], factor: float | None) -> bool:
        """Follow a collective as ``Stated.exchange`` does; return whether *outputs* are known."""
        real = self.of(source)
        if real is not None and factor == 1.0 and len(outputs) == 1 and self.write_part(outputs[0], real):
            self._shared(outputs[0], is_shared=True)
            return True
        self.forget(outputs)
        if real is None or factor is None:
            return False
        for tensor in outputs:
            # A gather has the numbers of this rank once for each rank.
            n, rest = divmod(tensor.numel(), max(real.numel(), 1))
            if rest or tensor.dtype != real.dtype or (n > 1 and kind != "all_gather"):
                return False
            with self.really():
                scaled = real if factor == 1.0 else (real * factor).to(real.dtype)
                whole = scaled.reshape(-1).repeat(n).reshape(tensor.shape)
            self.keep(tensor, whole, is_shared=True)
        return bool(outputs)

    def scale(self, tensor: Any, factor: int) -> None:
        """Multiply the numbers of *tensor*, if they are known."""
        own = self.of(tensor)
        if own is not None:
            with self.really():
                own.mul_(factor)

    def write_part(self, tensor: Any, real: Any) -> bool:
        """Write *real* over the numbers of *tensor*, a part of its storage; return whether they are known."""
        is_whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        own = None if is_whole else self.of(tensor)
        if own is not None:
            with self.really():
                own.copy_(real)
        return own is not None

    def fill(self, tensors: Sequence[Any], real: Any | None, *, is_shared: bool = True) -> bool:
        """Keep *real* as the elements of each of *tensors*, sent by other ranks; return whether they fit.

        If *real* is a list, each tensor gets its own. Tensors may be parts of one storage if together they
        cover it. *is_shared* is as in ``Held``.
        """
        whole: dict[int, list[tuple[Any, Any]]] = {}
        if real is None:
            return False
        for tensor, one in zip(
            tensors, real if isinstance(real, list) else [real] * len(tensors), strict=True
        ):
            whole.setdefault(storage_key(tensor), []).append((tensor, one))
            if tensor.shape != one.shape or tensor.dtype != one.dtype:
                return False
        for parts in whole.values():
            storage, dtype = parts[0][0].untyped_storage(), parts[0][0].dtype
            n_elements = sum(part.numel() for part, _ in parts)
            if n_elements > self.most or storage.nbytes() != n_elements * dtype.itemsize:
                return False
            with self.really():
                flat = self._make.empty(n_elements, dtype=dtype)
                for part, one in parts:
                    flat.as_strided(part.shape, part.stride(), part.storage_offset()).copy_(one)
            self._hold(storage, flat, is_shared=is_shared)
        return True

    def _shared(self, tensor: Any, *, is_shared: bool) -> None:
        if is_shared and (held := self._held.get(storage_key(tensor))) is not None:
            self._held[storage_key(tensor)] = held._replace(is_shared=True)

    def _is_known(self, args: Sequence[Any]) -> bool:
        """Whether the first tensor among *args* is known: most are activations, and this is asked often."""
        for value in args:
            first = value[0] if isinstance(value, list | tuple) and value else value
            if type(first) is self._kind:
                return storage_key(first) in self._held
        return True

    def _real(self, value: Any) -> Any:
        """Return *value* with numbers in place of fake tensors, which raises where there are none."""
        if isinstance(value, list | tuple):
            return type(value)([self._real(one) for one in value])
        if not hasattr(value, "element_size"):
            if isinstance(value, float) and math.isnan(value):  # an ``Unknown``
                raise _UnknownError
            return value
        if type(value) is not self._kind:
            if type(value) is not self._torch.Tensor or value.numel() > self.most:
                raise _UnknownError
            return value
        real = self.of(value)
        if real is None:
            raise _UnknownError
        return real

    def _shapes(self, args: Sequence[Any]) -> list[Any]:
        """Return *args* with tensors of any numbers in place of fake ones."""
        with self.really():
            return [
                self._make.empty(one.shape, dtype=one.dtype) if hasattr(one, "element_size") else one
                for one in args
            ]
