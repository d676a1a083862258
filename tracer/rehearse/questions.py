"""Operators that ask for numbers which nobody has computed: each is answered, or ends the rehearsal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from tracer.rehearse.errors import RehearsalError
from tracer.rehearse.tape import HOST_WAIT

if TYPE_CHECKING:
    from tracer.rehearse.session import RehearsalSession

Kernel = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Handles a call of an operator: takes the operator, its arguments and those by name."""

DATA_DEPENDENT: Final[Mapping[str, str]] = {
    "aten._local_scalar_dense": "local_scalar_dense",
    "aten.item": "local_scalar_dense",
    "aten.nonzero": "nonzero",
    "aten.masked_select": "masked_select",
    "aten.index": "index",
    "aten.repeat_interleave": "repeat_interleave",
    "aten.bincount": "bincount",
    "aten.histc": "histc",
}
"""Operators that need numbers, and the method that handles each."""


class Questions:
    """Handlers of such operators.

    Args:
        session: the rehearsal.
        indexed: handles indexing by numbers, which needs none.
    """

    def __init__(self, session: RehearsalSession, indexed: Kernel) -> None:
        import torch
        from torch._subclasses.fake_tensor import FakeTensor

        self._session, self._torch, self._FakeTensor, self._indexed = session, torch, FakeTensor, indexed

    def local_scalar_dense(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a question for one number."""
        tensor = args[0]
        if self._session.position.step >= 0:
            self._session.tape.note(HOST_WAIT)
        if not isinstance(tensor, self._FakeTensor) or tensor.constant is not None:
            return func(*args, **kwargs)
        return self._session.stated.scalar(tensor)

    def nonzero(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle places that are not zero."""
        mask = args[0]
        if not isinstance(mask, self._FakeTensor):
            return func(*args, **kwargs)
        found = self._session.stated.count_true(mask)
        if found is None:
            raise self._depends(func)
        return mask.new_empty((found, mask.dim()), dtype=self._torch.int64)

    def masked_select(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle elements that a mask selects."""
        data, mask = args[:2]
        if not isinstance(data, self._FakeTensor):
            return func(*args, **kwargs)
        found = self._session.stated.count_true(mask)
        if found is None:
            raise self._depends(func)
        return data.new_empty((found,))

    def index(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle indexing: by a mask, as many rows come out as it is told to have."""
        data, indices = args[:2]
        masks = [i for i in indices if i is not None and str(i.dtype) in {"torch.bool", "torch.uint8"}]
        if masks and isinstance(data, self._FakeTensor):
            if len(indices) > 1 or (found := self._session.stated.count_true(masks[0])) is None:
                raise self._depends(func)
            return data.new_empty((found, *data.shape[masks[0].dim() :]))
        return self._indexed(func, args, kwargs)

    def repeat_interleave(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle rows that are repeated as often as a tensor says."""
        counts = args[0]
        known = kwargs.get("output_size") or self._session.stated.sum_of(counts)
        if not isinstance(counts, self._FakeTensor):
            return func(*args, **kwargs)
        if known is None:
            raise self._depends(func)
        return counts.new_empty((known,), dtype=self._torch.int64)

    def bincount(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle counting: there are as many bins as the script says there are at least."""
        data = args[0]
        least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
        if not isinstance(data, self._FakeTensor):
            return func(*args, **kwargs)
        if not least:
            raise self._depends(func)
        counts = data.new_empty((least,), dtype=self._torch.int64)
        self._session.stated.note("aten.bincount", args, counts)
        return counts

    def histc(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a histogram: of integers, too, as on CUDA."""
        data = args[0]
        if not isinstance(data, self._FakeTensor):
            return func(*args, **kwargs)
        counts = data.new_empty((kwargs.get("bins", args[1] if len(args) > 1 else 100),))
        self._session.stated.note("aten.histc", args, counts)
        return counts

    def _depends(self, func: Any) -> RehearsalError:
        return RehearsalError(
            f"{func} makes a tensor whose size depends on numbers, which a rehearsal does not have; "
            f"give it a size in a stub file (--stub, docs/rehearse.md section 6)"
        )
