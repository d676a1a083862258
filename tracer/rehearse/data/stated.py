"""Answers to a script that reads numbers of tensors.

A number is answered if it is known: the script has made it by itself (``numbers``), it counts choices of
routers, whose shares are stated (``experts``), it says whether numbers are finite, or it is a check that
would end the script (``truths``). Any other number is an ``Unknown``, which the script may print, and which
ends the rehearsal where it is needed. Answers that a real run may not give are kept, with the line of the
script that asked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import local
from types import SimpleNamespace
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.internals import makers
from foretrace.tracer.rehearse.data.experts import (
    CHOOSES,
    COPIED,
    COPIES,
    EXCHANGE,
    KEEPS,
    OF_MEANS,
    PUTS_TOGETHER,
    ROUTERS,
    Choices,
    Known,
    Loads,
    Routing,
    heard,
    made,
    parsed,
    put_together,
    share,
)
from foretrace.tracer.rehearse.data.numbers import MOST_ELEMENTS, MOST_ROUTED, Numbers
from foretrace.tracer.rehearse.data.truths import CHECKS, HOLDS, JOINS, joined, passing, truth_of
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.tape.calls import is_in_part, storage_key, tensors_in
from foretrace.tracer.rehearse.words import STUB, amount, asked_at, asker, is_first_value, number
from foretrace.tracer.rehearse.world.letters import Letters

SHARED: Final = "as if other ranks had what this one has"
"""Why a script is told a number that ranks have exchanged."""

UNHEARD: Final = "that a rank has sent which is not rehearsed"
"""What is said of such numbers, for whoever rehearses ranks again when it is."""

FOLLOWED: Final = KEEPS | CHOOSES | CHECKS | JOINS | OF_MEANS
"""Operators of whose results something may be known."""


class Stated:
    """What is known of the tensors of a rehearsal, and the answers that the script got.

    Args:
        expert_load: tokens sent to the experts of this rank, as a multiple of an even share; or the shape of
            the loads of all experts, as ``experts.parsed`` takes it.
        letters: what other ranks have sent to this one.

    Attributes:
        numbers: tensors whose elements are known.
        routing: makes up choices of experts; None if the expert load is one number.
        finish: ends the step that is over, and the rehearsal if that was the last one to keep.
    """

    def __init__(self, expert_load: float | str = 1.0, letters: Letters | None = None) -> None:
        load = parsed(expert_load)
        shape = load if isinstance(load, Loads) else None
        self.letters = Letters(0, {}, ()) if letters is None else letters
        self._expert_load = 1.0 if isinstance(load, Loads) else load
        self._real = internals.without_fakes
        self.numbers = Numbers(MOST_ELEMENTS if shape is None else MOST_ROUTED)
        self.told: dict[str, int] = {}  # each answer that the script got, as a sentence, and how often
        self._asking = local()
        self.finish: Callable[[], None] = lambda: None
        self.routing = None if shape is None else Routing(shape, self.numbers, self.tell, self.told)
        self.choices = Choices(self.routing)  # choices of experts and others
        self._known: dict[int, tuple[Known, Any]] = {}

    def of(self, tensor: Any) -> Known:
        """Return what is known of the elements of *tensor*."""
        if (found := self._known.get(storage_key(tensor))) is not None:
            return found[0]
        numbers = self.numbers.of(tensor)
        if numbers is None and (fill := self.numbers.fill_of(tensor)) is not None:
            return Known(mean=float(fill), is_own=True)
        if numbers is None or not numbers.numel() or numbers.is_complex():
            return Known()
        with self._real():
            first = numbers.flatten()[0]
            return Known(mean=float(first), is_own=True) if bool((numbers == first).all()) else Known()

    def exchange(self, kind: str, source: Any, outputs: Sequence[Any], factor: float | None) -> None:
        """Follow a collective: other ranks are assumed to send what *source* holds on this one.

        *factor*: the result of a reduction as a multiple of its operand, None if unknown.
        """
        # Before outputs are forgotten: a collective in place has its source among them.
        known = self.of(source)
        self._drop(map(storage_key, outputs))
        factor = 1.0 if kind in COPIES else factor
        if self.numbers.exchange(kind, source, outputs, factor) or factor is None or known.mean is None:
            return
        for tensor in outputs:
            self._set(tensor, replace(known, mean=known.mean * factor))

    def is_from(self, sender: int, tensor: Any) -> None:
        """Note that *tensor* was sent by the rank *sender*, and that nothing else is known of it."""
        self.forget([tensor])
        self._set(tensor, Known(sender=sender))

    def deal(self, source: Any, outputs: Sequence[Any], rank: int, ranks: Sequence[int], sizes: Any) -> bool:
        """Follow an all-to-all in which all ranks send the same; return whether *outputs* are known."""
        if self.routing is not None:
            return self.routing.exchange(source, outputs, rank, ranks, sizes)
        return self.numbers.fill(outputs, heard(self.numbers, source, rank, ranks, sizes))

    def forget(self, tensors: Iterable[Any]) -> None:
        """Drop what is known of *tensors*: something unknown was written to them."""
        for key in map(storage_key, tensors):
            self._drop((key,))
            self.numbers.drop(key)

    def taint(self, args: Sequence[Any], out: Any) -> None:
        """Mark the results of an operator as depending on choices of routers if one of its *args* does."""
        made_of = out if isinstance(out, list | tuple) else (out,)
        results = [one for one in made_of if hasattr(one, "dtype") and not one.dtype.is_floating_point]
        if results and any(self._is_routed(one) for one in tensors_in(args[:3])):
            for one in results:
                known = self._known.get(storage_key(one))
                if known is not None or self.numbers.of(one) is None:
                    self._set(one, replace(Known() if known is None else known[0], is_routed=True))

    def _is_routed(self, tensor: Any) -> bool:
        found = self._known.get(storage_key(tensor))
        return found is not None and found[0].is_routed

    def forget_mean(self, tensors: Iterable[Any]) -> None:
        """Drop the means of *tensors*, not their numbers: an operator writes to them in place."""
        self._drop(map(storage_key, tensors))

    def _drop(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._known.pop(key, None)

    def note(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        """Follow an operator, named without its overload, whose results may be known."""
        results = [out] if not isinstance(out, list | tuple) else list(out)
        # What is written to a part says nothing of the rest.
        if not results or not hasattr(results[0], "numel") or not args or is_in_part(name, results[0]):
            return
        first = args[0][0] if isinstance(args[0], list | tuple) and args[0] else args[0]
        if (name in CHECKS or name in JOINS) and self._is_truth(name, args, results[0]):
            return
        if name in CHOOSES:
            found = self.choices.choose(name, args, results, asker())
            if found is not None and found.n_values:
                self._set(results[-1], found)
        if name in OF_MEANS and (found := made(name, args, first, results[0], self.of)) is not None:
            self._set(results[0], found)
        elif name in KEEPS and hasattr(first, "numel"):
            self._keep(name, args, first, results[0])

    def _keep(self, name: str, args: tuple[Any, ...], first: Any, result: Any) -> None:
        """Follow an operator that keeps means: *result* has that of the *first* operand."""
        if name in PUTS_TOGETHER and result.numel() <= MOST_ELEMENTS:
            with self._real():
                joint = put_together(name, args, [self.of(one) for one in args[0]])
            if joint is not None:
                self._set(result, joint)
                return
        known = self.of(args[1] if name == "aten.copy_" else first)
        # Once: what is exchanged again, as on the way back, has that load already.
        if name == EXCHANGE and known.mean is not None and known.load == 1.0:
            known = Known(mean=known.mean * self._expert_load, load=self._expert_load)
        if known.each is not None and (name not in COPIED or known.each.numel() != result.numel()):
            return
        if known.mean is not None or known.n_values:
            self._set(result, known)

    def _is_truth(self, name: str, args: tuple[Any, ...], result: Any) -> bool:
        """Follow a check of finite numbers, and what is made of its truths; return whether it is one."""
        tensors = [one for one in args[:2] if hasattr(one, "untyped_storage")]
        known = [self.of(one).mean if hasattr(one, "untyped_storage") else one for one in args[:2]]
        truth = truth_of(name, args, known)
        if truth is not None and all(self.numbers.of(one) is not None for one in tensors):
            return True  # they are computed
        if truth is not None:
            self.tell(f"{asker()} asks whether numbers are finite: told that they are")
        elif name in JOINS and str(result.dtype) == "torch.bool":
            truth = joined(name, [self.of(one).mean for one in args if hasattr(one, "untyped_storage")])
        if truth is None:
            return False
        self._truths(result, truth)
        return True

    def _truths(self, result: Any, truth: float) -> None:
        """Let all elements of *result* be one *truth*, 1 or 0."""
        if result.numel() > MOST_ELEMENTS:
            self._set(result, Known(mean=truth))
            return

        with self._real():
            self.numbers.keep(result, makers().full(tuple(result.shape), bool(truth)))

    def scalar(self, tensor: Any) -> Any:
        """Return the answer to a script that reads the only element of *tensor*, or any of several.

        Raises:
            RehearsalError: it is unknown, and the script needs it.
        """
        kind = _kind(tensor)
        if tensor.numel() == 1 and (own := self.numbers.of(tensor)) is not None:
            return self._own(tensor, own, kind)
        if is_first_value():
            return kind()
        known = self.of(tensor)
        value, why = self._follows(tensor, known, kind)
        if value is None:
            return self._unknown(tensor, known, kind)
        if why == "an even share":
            shares = "even shares" if known.load == 1.0 else f"{known.load:g} times even shares"
            self.tell(f"{asker()} reads counts: told {shares}, {known.mean:g} on average")
        elif why:
            self.tell(f"{asker()} reads {amount(tensor)}: told {number(value)} ({why})")
        return value

    def _follows(self, tensor: Any, known: Known, kind: type) -> tuple[Any, str]:
        """Return the element of *tensor* that follows of what is *known*, and why; None if none does."""
        # No mean says what a single truth is that depends on choices of routers.
        mean, is_vague = known.mean, known.is_routed and kind is bool
        if mean is not None and not is_vague and (kind is not bool or mean in {0.0, 1.0}):
            if known.is_own or kind is bool:
                return kind(mean), SHARED if known.is_own else "a share"
            if kind is not int:
                return kind(mean), "a mean"
            # An element that is read alone is a view of all: its offset is its place among them.
            at = int(tensor.storage_offset())
            with self._real():
                value = share(mean, at) if known.each is None else int(known.each.view(-1)[at])
            return value, "an even share"
        holds = passing(*asked_at()) if kind is bool else None
        if holds is not None:
            return holds, HOLDS
        if known.is_routed and kind is not float:
            self.choices.need(asker())
        return (0, "") if known.n_values == 1 else (None, "")

    def _unknown(self, tensor: Any, known: Known, kind: type) -> Any:
        """Let the script have an ``Unknown`` for *tensor* if it can, and return what stands for it.

        What a rank has sent that is rehearsed later is 1 until then: in a ring, one rank has to begin.

        Raises:
            RehearsalError: the script needs it at once.
        """
        if known.sender >= 0:
            self.finish()
            self.letters.await_(known.sender)
            self.tell(f"{asker()} reads {amount(tensor)} {UNHEARD}")
            return kind(1)
        said = amount(tensor)
        if known.n_values:
            said += f", a choice among {known.n_values} (of experts? --expert-load says the share of each)"
        reads: list[SimpleNamespace] = getattr(self._asking, "reads", [])
        if not reads:
            raise self.needed(said)
        reads[-1].said = f"{said} that {asker()} reads"
        return kind()

    @contextmanager
    def reading(self) -> Iterator[SimpleNamespace]:
        """Inside this context, who reads a number can take an ``Unknown``; ``said`` says what it is."""
        reads = self._asking.__dict__.setdefault("reads", [])
        reads.append(SimpleNamespace(said=""))
        try:
            yield reads[-1]
        finally:
            reads.pop()

    def needed(self, said: str) -> RehearsalError:
        """Return the error of a script that needs to know a number, of which is *said* what it is.

        Raises:
            UnroutedError: experts are about to run, so that it may come of choices, which are made up then.
        """
        # Behind the last step that is kept this ends the rehearsal well: nothing is needed any more.
        self.finish()
        if ROUTERS.search(type(self.choices.inside()).__name__):
            self.choices.need(asker())
        said = said.removesuffix(f" that {asker()} reads")
        return RehearsalError(
            f"{asker()} needs {said}, which a rehearsal does not compute: say in a stub file what it is, or "
            f"leave out what depends on it ({STUB})"
        )

    def count_true(self, mask: Any) -> int | None:
        """Return how many elements of *mask* are not zero, None if unknown."""
        if (own := self.numbers.of(mask)) is not None:
            return int(self._own(mask, own, lambda real: int(real.count_nonzero())))
        if (mean := self.of(mask).mean) is None:
            return None
        n = round(min(mean, 1.0) * int(mask.numel()))
        self.tell(f"{asker()} selects by a mask: told {n} of {mask.numel()} elements, an even share")
        return n

    def sum_of(self, counts: Any) -> int | None:
        """Return the sum of *counts*, None if unknown."""
        if (own := self.numbers.of(counts)) is not None:
            return int(self._own(counts, own, lambda real: int(real.sum())))
        mean = self.of(counts).mean
        return None if mean is None else round(mean * int(counts.numel()))

    def largest_of(self, counts: Any) -> int | None:
        """Return the largest of *counts*, a tensor or a list, None if unknown."""
        if isinstance(counts, list | tuple):
            return int(max(counts))
        own = self.numbers.of(counts)
        return None if own is None else int(self._own(counts, own, lambda real: int(real.max())))

    def _own(self, tensor: Any, real: Any, asked: Callable[[Any], complex]) -> Any:
        """Return what is *asked* of the numbers of *tensor*; say so if others are taken to have them, too."""
        with self._real():
            value = asked(real)
        if self.numbers.is_shared(tensor):
            self.tell(f"{asker()} reads {amount(tensor)}: told {number(value)} ({SHARED})")
        return value

    def _set(self, tensor: Any, known: Known) -> None:
        """Let *known* be what is known of *tensor* for as long as its storage lives."""
        key, storage = storage_key(tensor), tensor.untyped_storage()
        self._known[key] = (known, weakref.ref(storage, lambda _: self._known.pop(key, None)))

    def tell(self, sentence: str) -> None:
        """Keep a *sentence* about an answer that the script got."""
        self.told[sentence] = self.told.get(sentence, 0) + 1


def _kind(tensor: Any) -> type:
    if tensor.dtype.is_complex:
        return complex
    return float if tensor.dtype.is_floating_point else bool if str(tensor.dtype) == "torch.bool" else int
