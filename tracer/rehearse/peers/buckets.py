"""What DDP's reducer hands to communication hooks, and how it finds parameters that were not used."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final

UNFINISHED: Final = (
    "Expected to have finished reduction in the prior iteration: DDP has {n:,} parameters that were not used "
    "in producing the loss; "
)
"""What torch's reducer says of parameters without a gradient, in short."""

FIND: Final = "pass find_unused_parameters=True to DistributedDataParallel"

LEFT_OUT: Final = (
    "outputs of the model depend on them, but the loss does not depend on those: let it, or do not return "
    f"them, or {FIND}"
)
"""What to do where an output depends on them."""

UNUSED: Final = f"no output of the model depends on them: let them take no gradient, or {FIND}"
"""What to do where no output depends on them."""


def unfinished(n: int, n_in_outputs: int) -> str:
    """Return what to say of *n* parameters without a gradient, on *n_in_outputs* of which outputs depend."""
    ways = [*((UNUSED,) if n_in_outputs < n else ()), *((LEFT_OUT,) if n_in_outputs else ())]
    if len(ways) > 1:
        ways = [f"of {n - n_in_outputs:,}, {UNUSED}", f"of {n_in_outputs:,}, {LEFT_OUT}"]
    return UNFINISHED.format(n=n) + "; ".join(ways)


STATIC_UNDER_NO_SYNC: Final = (
    "DDP with static_graph=True reduces in its first backward, which is under no_sync (accumulation) here: "
    "torch fails (expect_autograd_hooks_ INTERNAL ASSERT); leave either out"
)
"""What torch's reducer means by a failed assertion of its own."""


class Bucket:
    """What a communication hook is handed, as ``torch.distributed.GradBucket``.

    Args:
        index: which bucket.
        data: gradients of all its parameters, one behind the other.
        parameters: those that are in it.
        is_last: whether no other follows.
    """

    def __init__(self, index: int, data: Any, parameters: Sequence[Any], *, is_last: bool) -> None:
        self._index, self._data, self._parameters, self._is_last = index, data, list(parameters), is_last

    def index(self) -> int:
        """Return which bucket it is."""
        return self._index

    def buffer(self) -> Any:
        """Return all gradients as one tensor."""
        return self._data

    def set_buffer(self, data: Any) -> None:
        """Let *data* be the gradients."""
        self._data = data

    def parameters(self) -> list[Any]:
        """Return the parameters."""
        return self._parameters

    def gradients(self) -> list[Any]:
        """Return the gradient of each parameter."""
        sizes = [parameter.numel() for parameter in self._parameters]
        parts = self._data.split(sizes)
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]

    def is_last(self) -> bool:
        """Whether no other bucket follows."""
        return self._is_last


def reached(outputs: Sequence[Any]) -> set[int]:
    """Return the ids of the parameters on which *outputs* depend."""
    left = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, found = set(left), {id(output) for output in outputs}
    while left:
        node = left.pop()
        found.add(id(getattr(node, "variable", None)))
        after = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= after
        left.extend(after)
    return found


class Logger:
    """What ``DistributedDataParallel`` tells of itself goes nowhere, and who asks for it gets nothing."""

    def __init__(self, reducer: Any) -> None:
        del reducer

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        return SimpleNamespace(strs_map={}, ints_map={})

    def __getattr__(self, name: str) -> Any:
        """Take whatever is told."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None
