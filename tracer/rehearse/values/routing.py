"""Makes up the choices of routers, so that each expert gets the stated load."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import Any

from foretrace.tracer.internals import makers
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.values.loads import Loads
from foretrace.tracer.rehearse.values.numbers import Numbers


class Routing:
    """Choices of experts.

    Args:
        loads: load of each expert.
        numbers: keeps the choices, and everything that is computed from them.
        tell: called with a sentence for each answer that the script got.
        told: where these sentences are kept, and removed again.

    Attributes:
        is_even: whether all experts have the same load.
        n_choices: number of operator calls for which experts were chosen.
        groups: members of groups that exchanged counts of choices; each member holds experts of its own.
    """

    def __init__(
        self,
        loads: Loads,
        numbers: Numbers,
        tell: Callable[[str], None],
        told: dict[str, int],
    ) -> None:
        self._loads, self._numbers, self._tell, self._told = loads, numbers, tell, told
        self._widest: weakref.WeakKeyDictionary[Any, tuple[int, list[str]]] = weakref.WeakKeyDictionary()
        self.is_even = not loads.shares and not loads.exponent
        self.n_choices = 0
        self.groups: list[tuple[int, ...]] = []

    def choose(self, scores: Any, places: Any, top_k: int, asker: str, module: Any = None) -> bool:
        """Make up *places*, the indices of the *top_k* largest *scores* along the last dimension.

        Returns:
            Whether it is a choice of experts.
        """
        n_experts, n_tokens = scores.shape[-1], places.numel() // max(top_k, 1)
        name = "" if module is None else type(module).__name__
        if n_experts < 2 or not n_tokens or not self._loads.is_of(n_experts, n_tokens, name):
            return False
        before, told = self._widest.get(module, (0, [])) if module is not None else (0, [])
        if n_experts < before:
            return False
        if places.numel() * n_experts > self._numbers.most:
            raise RehearsalError(
                f"{asker} chooses {top_k} of {n_experts} experts for {n_tokens:,} tokens, too many to count "
                f"one by one (tokens x choices x experts up to {self._numbers.most:,}): rehearse a smaller "
                "micro-batch, or give --expert-load one number"
            )
        counts = self._loads.counts(n_tokens, top_k, n_experts)
        self._numbers.keep(places, self._made(counts, n_tokens, top_k, tuple(places.shape)))
        if n_experts > before:  # those were of groups of experts, among whose members is chosen now
            for sentence in told:
                self._told.pop(sentence, None)
            told = []
        told.append(f"{asker} chooses {top_k} of {n_experts} experts: told {self._loads.said(counts)}")
        self._tell(told[-1])
        if module is not None:
            self._widest[module] = n_experts, list(dict.fromkeys(told))
        self.n_choices += 1
        return True

    def exchange(
        self, source: Any, outputs: Sequence[Any], rank: int, ranks: Sequence[int], sizes: Any
    ) -> bool:
        """Follow an all-to-all among *ranks*; return whether *outputs*, what this *rank* gets, are known."""
        group = tuple(ranks)
        known = self._numbers.fill(outputs, heard(self._numbers, source, rank, group, sizes))
        if known and group not in self.groups and len(group) > 1:
            self.groups.append(group)
        return known

    @staticmethod
    def _made(counts: Sequence[int], n_tokens: int, top_k: int, shape: tuple[int, ...]) -> Any:
        """Return choices in which each expert has its *counts*.

        The tokens of one expert follow each other, and begin again with the first token after the last, at
        its next choice: none has an expert twice (R. McNaughton, Scheduling with Deadlines and Loss
        Functions, Management Science 6(1), 1959). Which of its experts comes first changes from token to
        token, so that first choices are spread as all are.
        """
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        listed = list(chain.from_iterable(repeat(expert, n) for expert, n in enumerate(counts)))
        with unset_fake_temporarily():
            tokens = makers().arange(n_tokens)[:, None]
            turned = (tokens + makers().arange(top_k)) % top_k
            return makers().tensor(listed)[turned * n_tokens + tokens].reshape(shape)


def heard(numbers: Numbers, source: Any, rank: int, ranks: Sequence[int], sizes: Any) -> Any | None:
    """Return what *rank* receives from an all-to-all in which each of *ranks* sends the same *source*.

    Args:
        numbers: that are known.
        source: what each rank sends, in one tensor, or one for each rank.
        rank: that gets it.
        ranks: of the group.
        sizes: rows to each rank; empty or None: even.

    Returns:
        What it receives from all ranks, or from one of them if there is a tensor for each; None if unknown.
    """
    place, n_ranks = ranks.index(rank), len(ranks)
    if isinstance(source, list | tuple):
        return numbers.of(source[place])
    real = numbers.of(source)
    if real is None or not real.dim() or (not sizes and len(real) % n_ranks):
        return None
    rows = list(sizes or ()) or [len(real) // n_ranks] * n_ranks
    with numbers.really():
        ours = real[sum(rows[:place]) : sum(rows[: place + 1])]
        return ours.repeat(n_ranks, *[1] * (ours.dim() - 1))
