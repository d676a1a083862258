"""Custom operators that communicate: the timeline has what their Python function does, not its description.

``torch.library.custom_op`` and ``Library.impl`` make an operator of a function, and ``register_fake`` tells
what it returns. torch asks for that where tensors are fake, so what the function sends would be missing.
The function of an operator that communicates is called instead; of others the description is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.operators import OPERATORS
from foretrace.tracer.rehearse.replacing import replaces
from foretrace.tracer.rehearse.words import led_to

MOST_DEEP: Final = 2
"""Longest chain of functions that is followed to find a collective."""

SENDS: Final = frozenset(
    {"all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all", "broadcast"}
    | {"all_to_all_single", "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"}
    | {"reduce_scatter_single", "isend", "irecv", "batch_isend_irecv"}
)
"""Names of what communicates in torch.distributed, and in what libraries put around it."""

AMBIGUOUS: Final = frozenset({"gather", "reduce", "scatter", "broadcast"})
"""Those of them that tensors and other modules have, too: they count beside a module for communication."""

MODULES: Final = frozenset({"dist", "distributed", "comm", "c10d", "funcol", *OPERATORS})
"""Names of such modules."""


ON_GPU: Final = ("CUDA", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CPU")
"""Keys of torch's dispatcher under which a function may be that of an operator on a GPU, the first that has
one counts; that of a processor stands for one in another language."""


class OwnBodies:
    """Python functions of operators, as they are registered.

    Attributes:
        of: by name of the operator with its overload, and by key of the dispatcher.
    """

    def __init__(self) -> None:
        self.of: dict[str, dict[str, Callable[..., Any]]] = {}

    def install(self) -> None:
        """Note what ``torch.library.Library.impl`` registers; ``torch.library.impl`` calls it, too."""
        import torch

        @replaces(torch.library.Library)
        def impl(
            original: Any, own: Any, op_name: Any, fn: Any, dispatch_key: str = "", **kwargs: Any
        ) -> Any:
            out = original(own, op_name, fn, dispatch_key, **kwargs)
            name = op_name if isinstance(op_name, str) else op_name.name()
            name = name if "::" in name else f"{own.ns}::{name}"
            if not kwargs.get("with_keyset"):  # such a function calls the operator again
                self.of.setdefault(name, {})[dispatch_key or own.dispatch_key] = fn
            return out

    def handler(self, mode: Any, func: Any, otherwise: Callable[..., Any]) -> Callable[..., Any]:
        """Return the handler of the operator *func*: its function if it communicates, else *otherwise*.

        Args:
            mode: sees the operators that the function calls.
            func: an overload of an operator.
            otherwise: its handler if it is none of a Python function, or one that does not communicate.
        """
        body = self._function(func)
        if body is None:
            return otherwise
        sends = communicates(body)

        def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if sends or _names_group((*args, *kwargs.values())):
                with mode:
                    return body(*args, **kwargs)
            return otherwise(func, args, kwargs)

        return handler

    def _function(self, func: Any) -> Callable[..., Any] | None:
        """Return the Python function that a GPU would run for *func*, None if there is none."""
        custom_ops = internals.custom_operators()

        known: Any = getattr(custom_ops, "OPDEFS", {})
        definition = known.get(internals.schema_of(func).name)
        if definition is None:
            registered = self.of.get(func.name(), {})
            return next((registered[key] for key in ON_GPU if key in registered), None)
        kernels: Any = definition._backend_fns  # noqa: SLF001 - what was registered for a device
        # Under None is the function that was registered for all devices.
        return kernels.get("cuda") or kernels.get(None) or kernels.get("cpu")  # type: ignore[no-any-return]


def communicates(function: Any) -> bool:
    """Whether *function* names a collective, or calls a function of its own module that does.

    >>> import types
    >>> dist = types.SimpleNamespace(all_reduce=abs)
    >>> communicates(lambda x: dist.all_reduce(x)), communicates(lambda x: abs(x))
    (True, False)
    """
    return any(
        names & (SENDS - AMBIGUOUS) or (names & AMBIGUOUS and names & MODULES)
        for _, names in led_to(function, MOST_DEEP)
    )


def _names_group(values: Iterable[Any]) -> bool:
    """Whether one of *values* is the name of a process group."""
    import torch.distributed as dist

    said = [value for value in values if isinstance(value, str)]
    if not said or not dist.is_initialized():
        return False
    return not set(said).isdisjoint(internals.group_names())
