"""Operators that need numbers which are not known: each gets an answer, or ends the rehearsal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.internals import makers
from foretrace.tracer.rehearse.data.experts import ROUTERS
from foretrace.tracer.rehearse.data.truths import HOLDS, are_same, passing
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.session import RehearsalSession
from foretrace.tracer.rehearse.tape.calls import Kernel, tensors_in
from foretrace.tracer.rehearse.words import asked_at, asker
from foretrace.traces.rehearsal import HOST_WAIT

DATA_DEPENDENT: Final[Mapping[str, str]] = {
    "aten._local_scalar_dense": "local_scalar_dense",
    "aten.item": "local_scalar_dense",
    "aten.nonzero": "nonzero",
    "aten.masked_select": "masked_select",
    "aten.index": "index",
    "aten.repeat_interleave": "repeat_interleave",
    "aten.bincount": "bincount",
    "aten.histc": "histc",
    "aten.isin": "isin",
    "aten.equal": "equal",
    "aten._ctc_loss": "ctc_loss",
    "aten._pack_padded_sequence": "packed",
}
"""Operators that need numbers, and the method that handles each."""


class Questions:
    """Handlers of such operators.

    Args:
        indexed: handles indexing by integers, for which no numbers are needed.
        write: records a kernel: takes the operator, its positional and keyword arguments, and its result.
    """

    def __init__(self, session: RehearsalSession, indexed: Kernel, write: Callable[..., None]) -> None:
        import torch

        fake_tensor = internals.fake_tensor()

        self._session, self._torch, self._FakeTensor = session, torch, fake_tensor
        self._indexed, self._write = indexed, write

    def local_scalar_dense(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a question for one number."""
        tensor = args[0]
        self._wait(tensor)
        if not isinstance(tensor, self._FakeTensor):
            return func(*args, **kwargs)
        return self._session.stated.scalar(tensor)

    def nonzero(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle ``nonzero``."""
        count = self._session.stated.count_true
        return self._sized(func, args, kwargs, lambda mask: _shape(count(mask), mask.dim()))

    def masked_select(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle ``masked_select``."""
        count = self._session.stated.count_true
        return self._sized(func, args, kwargs, lambda _: _shape(count(args[1])), dtype=args[0].dtype)

    def index(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle indexing. By a mask, the result has as many rows as the mask is said to select."""
        indices = args[1]
        # Bytes are a mask for torch, too.
        masks = [i for i in indices if i is not None and str(i.dtype) in {"torch.bool", "torch.uint8"}]
        if not masks or not isinstance(args[0], self._FakeTensor):
            return self._indexed(func, args, kwargs)

        def shape(data: Any) -> tuple[int, ...] | None:
            found = self._session.stated.count_true(masks[0]) if len(indices) == 1 else None
            return _shape(found, *data.shape[masks[0].dim() :])

        return self._sized(func, args, kwargs, shape, dtype=args[0].dtype)

    def repeat_interleave(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle ``repeat_interleave``, whose counts are in a tensor."""
        # If the size is given, the host need not wait for the device to tell it.
        size, sum_of = kwargs.get("output_size"), self._session.stated.sum_of
        return self._sized(func, args, kwargs, lambda one: _shape(size or sum_of(one)), waits=not size)

    def bincount(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle ``bincount``: the result has as many bins as the script asks for at least."""
        least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
        return self._sized(func, args, kwargs, lambda data: (least,) if least else None)

    def histc(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a histogram, also of integers, as on CUDA."""
        n_bins = kwargs.get("bins", args[1] if len(args) > 1 else 100)
        own = self._session.stated.numbers.of(args[0]) if isinstance(args[0], self._FakeTensor) else None
        if own is not None and not own.is_floating_point():
            # CPUs have no histogram of whole numbers.
            with self._session.stated.numbers.really():
                real = func(own.double(), *args[1:], **kwargs).to(own.dtype)
            out = self._fakes(real, [args[0]])
            self._write(func, args, kwargs, out)
            return out
        return self._sized(func, args, kwargs, lambda data: (n_bins,), dtype=args[0].dtype, waits=False)

    def isin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a search for given numbers, such as the end token of a generation."""
        if not any(isinstance(tensor, self._FakeTensor) for tensor in tensors_in(args)):
            return func(*args, **kwargs)
        real = self._session.stated.numbers.computed(func, args, kwargs)
        if real is not None:
            out = self._fakes(real, tensors_in(args))
        else:
            shape = getattr(args[0], "shape", ())
            out = tensors_in(args)[0].new_empty(shape, dtype=self._torch.bool)
        self._write(func, args, kwargs, out)
        return out

    def equal(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle ``equal``: false for different shapes, true for the same elements of one storage.

        FSDP1 asks this about the states that ranks send each other, assumed to be those of this rank.
        """
        one, other = args[:2]
        if one.shape != other.shape or are_same(one, other):
            self._wait(one)
            return bool(one.shape == other.shape)
        return self.other(func, args, kwargs)

    def ctc_loss(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle the CTC loss: its table has ``2 n + 1`` places for the longest target of *n* labels.

        CUDA's kernel needs lengths on the host.
        """
        if not isinstance(args[0], self._FakeTensor):
            return func(*args, **kwargs)
        self._wait()
        scores, lengths = args[0], args[3]
        n_steps, batch, _ = scores.shape
        longest = self._session.stated.largest_of(lengths)
        if longest is None:
            raise self._depends(func)
        out = (scores.new_empty(batch), scores.new_empty((batch, n_steps, 2 * longest + 1)))
        self._write(func, args, kwargs, out)
        return out

    def packed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle packing sequences without their padding: the rows of all steps, and how many each step has.

        These counts stay real tensors: recurrent layers read them where no question could be answered.
        """
        data, lengths = args[:2]
        numbers = self._session.stated.numbers
        known = numbers.of(lengths) if isinstance(lengths, self._FakeTensor) else lengths
        if known is None or not isinstance(data, self._FakeTensor):
            return func(*args, **kwargs)
        with numbers.really():
            steps = makers().arange(int(known.max()))
            # Sequences that are longer than each step.
            sizes = (known[None] > steps[:, None]).sum(dim=1)
            total = int(sizes.sum())
        out = data.new_empty((total, *data.shape[2:]))
        self._write(func, args, kwargs, out)
        return out, sizes

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle any other operator that needs numbers: it is computed if they are known, else it fails."""
        if not any(isinstance(tensor, self._FakeTensor) for tensor in tensors_in(args)):
            return func(*args, **kwargs)
        self._wait(tensors_in(args)[0])
        numbers = self._session.stated.numbers
        real = numbers.computed(func, args, kwargs)
        if real is None:
            self._asks_routers()
            is_truth = [str(one.type) for one in internals.schema_of(func).returns] == ["bool"]
            if is_truth and (holds := passing(*asked_at())) is not None:
                self._session.stated.tell(f"{asker()} asks {func}: told {holds} ({HOLDS})")
                return holds
            return func(*args, **kwargs)
        out = self._fakes(real, tensors_in(args))
        if tensors_in(out):
            self._write(func, args, kwargs, out)
        return out

    def _sized(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shape: Callable[[Any], tuple[int, ...] | None],
        *,
        dtype: Any = None,
        waits: bool = True,
    ) -> Any:
        """Return what *func* makes, computed if its operands are known, else as large as it is told to be.

        Raises:
            RehearsalError: nobody knows the shape.
        """
        data = args[0]
        if not isinstance(data, self._FakeTensor):
            return func(*args, **kwargs)
        if waits:
            self._wait(data)
        real = self._session.stated.numbers.computed(func, args, kwargs)
        if real is not None:
            out = self._fakes(real, tensors_in(args))
        elif (found := shape(data)) is None:
            raise self._depends(func)
        else:
            out = data.new_empty(found, dtype=dtype or self._torch.int64)
            self._session.stated.note(".".join(internals.schema_of(func).name.split("::")), args, out)
        self._write(func, args, kwargs, out)
        return out

    def _fakes(self, real: Any, operands: list[Any]) -> Any:
        """Return *real* results, made of *operands*, as fake tensors whose numbers are known."""
        if isinstance(real, list | tuple):
            return type(real)([self._fakes(one, operands) for one in real])
        if not hasattr(real, "element_size"):
            return real
        numbers = self._session.stated.numbers
        anchor = next(tensor for tensor in operands if isinstance(tensor, self._FakeTensor))
        found = anchor.new_empty(tuple(real.shape), dtype=real.dtype)
        numbers.keep(found, real, is_shared=any(map(numbers.is_shared, operands)))
        return found

    def _wait(self, tensor: Any = None) -> None:
        """Write down that the host waits for the device, unless *tensor* is on the host."""
        is_there = tensor is not None and self._session.host.holds(tensor)
        if self._session.position.step >= 0 and not is_there:
            self._session.tape.note(HOST_WAIT)

    def _asks_routers(self) -> None:
        """Begin anew with choices that are made up if numbers may come of what routers choose."""
        if any(map(ROUTERS.search, self._session.classes())):
            self._session.stated.choices.need(asker())

    def _depends(self, func: Any) -> RehearsalError:
        self._asks_routers()
        return RehearsalError(
            f"{func} makes a tensor whose size depends on numbers, which a rehearsal does not have; "
            "give it a size in a stub file (--stub, docs/rehearse.md section 6)"
        )


def _shape(n: int | None, *others: int) -> tuple[int, ...] | None:
    """Return a shape of which the first side is *n*, None if nobody knows that."""
    return None if n is None else (n, *others)
