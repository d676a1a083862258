"""Lets DTensor find out how operators are cut without being seen, and without looking twice at the same.

To learn the shape of a result DTensor runs each new operator on the whole shapes, which no device does.
An optimizer hands all parameters of a model to one operator. What an element of such a list becomes depends
on the elements at the same place of the other lists alone, so that equal layers have equal answers.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

LISTED: Final = ("aten::_foreach_", "aten::_amp_foreach_", "aten::_fused_")
"""Beginnings of the names of operators that treat the elements of their lists one by one."""


def install(session: RehearsalSession) -> None:
    """Put the short way in place; what does not fit it goes the long way."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    kind: Any = ShardingPropagator
    original, metas = kind.propagate_op_sharding_non_cached, kind._propagate_tensor_meta_non_cached

    def unseen(self: Any, op_schema: Any) -> Any:
        with session.aside():
            return metas(self, op_schema)

    def propagate(self: Any, op_schema: Any) -> Any:
        places = _places(op_schema)
        if places is None:
            return original(self, op_schema)
        firsts = {place: at for at, place in reversed(list(enumerate(places)))}
        found = original(self, _with_lists(op_schema, sorted(firsts.values())))
        specs = found.output_spec
        if specs is not None:
            if not isinstance(specs, list | tuple) or len(specs) != len(firsts):
                return original(self, op_schema)
            found.output_spec = type(specs)([specs[place] for place in places])
        if found.redistribute_schema is not None:
            found.redistribute_schema = _with_lists(found.redistribute_schema, places)
        return found

    kind.propagate_op_sharding_non_cached, kind._propagate_tensor_meta_non_cached = propagate, unseen
    _offsets()


def _offsets() -> None:
    """Compute the places of a shard that is cut twice as torch does: on the host, on lists of whole numbers.

    Random numbers of a GPU ask for them. Nobody needs to follow the operators, of which there are many.
    """
    from torch.distributed.tensor import placement_types
    from torch.utils._python_dispatch import _disable_current_modes

    kind: Any = placement_types._StridedShard
    name = "local_shard_size_and_offset"
    original = getattr(kind, name, None)
    if original is None:  # of an older torch
        return

    @functools.wraps(original)
    def computed(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(*args, **kwargs)

    is_static = isinstance(inspect.getattr_static(kind, name), staticmethod)
    setattr(kind, name, staticmethod(computed) if is_static else computed)


def _places(op_schema: Any) -> list[int] | None:
    """Return for every place of the lists the number of its kind; None if there is nothing to gain.

    Kinds are numbered in the order of their first place.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    if not op_schema.op.name().startswith(LISTED):
        return None
    values = (*op_schema.args_schema, *op_schema.kwargs_schema.values())
    lists = [value for value in values if isinstance(value, list | tuple) and value]
    if not lists or len({len(value) for value in lists}) > 1:
        return None
    if not all(isinstance(element, DTensorSpec) for value in lists for element in value):
        return None
    kinds: dict[Any, int] = {}
    places = [kinds.setdefault(elements, len(kinds)) for elements in zip(*lists, strict=True)]
    return places if len(kinds) < len(places) else None


def _with_lists(op_schema: Any, places: Sequence[int]) -> Any:
    """Return *op_schema* with the elements at *places* of each of its lists."""

    def chosen(value: Any) -> Any:
        if isinstance(value, list | tuple) and value:
            return type(value)([value[place] for place in places])
        return value

    return type(op_schema)(
        op_schema.op,
        tuple(map(chosen, op_schema.args_schema)),
        {name: chosen(value) for name, value in op_schema.kwargs_schema.items()},
        schema_info=op_schema.schema_info,
    )
