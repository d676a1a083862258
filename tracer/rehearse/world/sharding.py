"""Lets DTensor find out how operators are cut without being seen, and without looking twice at the same.

To learn the shape of a result DTensor runs each new operator on the whole shapes, which no device does.
An optimizer hands all parameters of a model to one operator. What an element of such a list becomes depends
on the elements at the same place of the other lists alone, so that equal layers have equal answers.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.rehearse.replacing import replaces
from foretrace.tracer.rehearse.state import State

# Notices an input of a model that is one rank's part of the rows, although ranks are of tensor parallelism.
# Sequence parallelism may begin with the first module: its style takes the plain tensor that a rank gives
# it for a part along the first dimension (``ColwiseParallel(input_layouts=Shard(0))``).


def watch_inputs(session: State) -> None:
    """Note ``input_shards``, over how many ranks of tensor parallelism the rows of the input are cut."""
    from torch.distributed.tensor import DTensor

    original = DTensor.from_local

    @functools.wraps(original)
    def from_local(local_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(local_tensor, *args, **kwargs)
        if list(local_tensor.shape) == session.job.get("input_shape") and not local_tensor.requires_grad:
            n_ranks = _ranks_with_rows(session, made)
            if n_ranks > 1:
                session.note_job(input_shards=n_ranks)
        return made

    DTensor.from_local = staticmethod(from_local)


def _ranks_with_rows(session: State, made: Any) -> int:
    """Return over how many ranks along ``tp`` the rows of *made*, a DTensor, are cut."""
    mesh = made.device_mesh
    cut = [i for i, placement in enumerate(made.placements) if placement.is_shard(dim=0)]
    return prod(mesh.size(i) for i in cut if session.groups.of(mesh.get_group(i)).axis == "tp")


LISTED: Final = ("aten::_foreach_", "aten::_amp_foreach_", "aten::_fused_")
"""Beginnings of the names of operators that treat the elements of their lists one by one."""


def install(session: State) -> None:
    """Put the short way in place; what does not fit it goes the long way."""
    kind = internals.sharding_propagator()

    @replaces(kind, name="_propagate_tensor_meta_non_cached")
    def unseen(original: Any, self: Any, op_schema: Any) -> Any:
        with session.aside():
            return original(self, op_schema)

    @replaces(kind, name="propagate_op_sharding_non_cached")
    def propagate(original: Any, self: Any, op_schema: Any) -> Any:
        places = _places(op_schema)
        if places is None:
            return original(self, op_schema)
        # Reversed: of equal elements the first one is asked about.
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

    # Where in a generator's numbers a shard begins is left out: no number of a GPU is drawn here, and finding
    # it takes longer than all else that is done for the first values of a shard.
    draws = internals.places_of_random_numbers()
    draws._compute_rng_offsets = lambda self, spec: (0, 0)
    draws._set_pre_op_offset = draws._set_post_op_offset = lambda self, *where: None


def _places(op_schema: Any) -> list[int] | None:
    """Return for every place of the lists the number of its kind; None if there is nothing to gain.

    Kinds are numbered in the order of their first place.
    """
    if not op_schema.op.name().startswith(LISTED):
        return None
    values = (*op_schema.args_schema, *op_schema.kwargs_schema.values())
    lists = [value for value in values if isinstance(value, list | tuple) and value]
    if not lists or len({len(value) for value in lists}) > 1:
        return None
    if not all(isinstance(element, internals.dtensor_spec()) for value in lists for element in value):
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
