"""Custom operators that communicate: the timeline has what their Python function does, not its description.

``torch.library.custom_op`` makes an operator of a function, and ``register_fake`` describes its result. torch
asks for the description alone where tensors are fake, so what the function sends would be missing. That of
an operator that communicates is called instead; of other operators the description is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from tracer.operators import OPERATORS
from tracer.rehearse.code_names import names_of

MOST_DEEP: Final = 3
"""Functions that call each other in which a collective is looked for."""

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


def by_body(mode: Any, func: Any, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Return the handler of the operator *func*: its function if it communicates, else *otherwise*.

    Args:
        mode: sees the operators that the function calls.
        func: an overload of an operator.
        otherwise: its handler if it is none of a Python function, or one that does not communicate.
    """
    body = _function(func)
    if body is None:
        return otherwise
    sends = communicates(body)

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if sends or _names_group((*args, *kwargs.values())):
            with mode:
                return body(*args, **kwargs)
        return otherwise(func, args, kwargs)

    return handler


def _function(func: Any) -> Callable[..., Any] | None:
    """Return the Python function that a GPU would run for *func*, None if there is none."""
    from torch._library import custom_ops

    known: Any = getattr(custom_ops, "OPDEFS", {})
    definition = known.get(func._schema.name)  # noqa: SLF001 - an overload has no other name for it
    if definition is None:
        return None
    kernels: Any = definition._backend_fns  # noqa: SLF001 - what was registered for a device
    return kernels.get("cuda") or kernels.get(None) or kernels.get("cpu")  # type: ignore[no-any-return]


def communicates(function: Any, depth: int = MOST_DEEP) -> bool:
    """Whether *function* names a collective, or calls a function of its own module that does.

    >>> import types
    >>> dist = types.SimpleNamespace(all_reduce=abs)
    >>> communicates(lambda x: dist.all_reduce(x)), communicates(lambda x: abs(x))
    (True, False)
    """
    function = getattr(function, "__wrapped__", function)
    code = getattr(function, "__code__", None)
    if code is None or not depth:
        return False
    names = {*names_of(code)}
    if names & (SENDS - AMBIGUOUS) or (names & AMBIGUOUS and names & MODULES):
        return True
    cells = getattr(function, "__closure__", None) or ()
    near = {name: function.__globals__.get(name) for name in names}
    near |= dict(zip(code.co_freevars, (_content(cell) for cell in cells), strict=False))
    return any(communicates(one, depth - 1) for one in near.values() if hasattr(one, "__code__"))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _names_group(values: Iterable[Any]) -> bool:
    """Whether one of *values* is the name of a process group."""
    import torch.distributed as dist

    said = [value for value in values if isinstance(value, str)]
    if not said or not dist.is_initialized():
        return False
    return not set(said).isdisjoint(dist.distributed_c10d._world.pg_names.values())  # noqa: SLF001
