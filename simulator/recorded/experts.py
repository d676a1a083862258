"""The experts of a recorded model: how many there are, how wide, and how many of them a token visits.

A rank of expert parallelism holds some of them only. The router has a row for each, so that it tells how many
there are; how many a token visits is a number that modules keep.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from foretrace.simulator.errors import LikeError

TOP_K: Final = (
    "top_k",
    "topk",
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "n_activated_experts",
    "moe_top_k",
    "router_topk",
)
"""What modules call the number of experts that a token visits."""

_EXPERTS: Final = re.compile(r"(^|\.)experts?(\.|$)")
_ONE: Final = re.compile(r"(?:^|\.)experts\.(\d+)(?:\.|$)")
_SHARED: Final = re.compile(r"(^|\.)shared_experts?(\.|$)")
_ROUTER: Final = re.compile(r"(^|\.)(router|gate|wg)(\.|$)")


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts of a model.

    Attributes:
        settings: those of ``Model`` that it decides.
        absent_params: parameters of experts that other ranks hold.
    """

    settings: Mapping[str, Any]
    absent_params: int


def is_of_experts(path: str) -> bool:
    """Return whether the module at *path* in a layer is an expert, shared or not, or a router."""
    return any(words.search(path) for words in (_EXPERTS, _SHARED, _ROUTER))


def experts_of(layered: Mapping[str, Any], hidden: int, where: str) -> Experts | None:
    """Return the experts of a model, None if it has none.

    Args:
        layered: entries of the structure of a model by their path inside of a layer.
        hidden: width of the model.
        where: what to call the run in messages.

    Raises:
        LikeError: their number, their shapes or how many a token visits is not told.
    """
    if not any(_EXPERTS.search(path) for path in layered):
        return None
    n_experts, layers = _routed(layered, hidden, where)
    shapes, n_local = _shapes(layered)
    widths = [width for shape in shapes if (width := _width(shape, hidden))]
    if not widths:
        raise LikeError(f"the experts of {where} have no matrices of width {hidden}: give --model")
    ffn = min(widths)  # gate and up may be one matrix
    everywhere = sorted({layer for entry in layered.values() for layer in entry.get("layers", ())})
    dense = [layer for layer in everywhere if layer not in layers]
    if dense != everywhere[: len(dense)]:
        raise LikeError(f"layers of {where} with and without experts take turns: give --model")
    shared = [
        width
        for path, entry in layered.items()
        if _SHARED.search(path)
        for shape in entry.get("shapes", {}).values()
        if (width := _width(shape, hidden)) > 1  # 1: the gate of a shared expert
    ]
    return Experts(
        {
            "n_experts": n_experts,
            "top_k": _top_k(layered, where),
            "moe_ffn_hidden": ffn,
            "gated": len(widths) >= 3 or max(widths) == 2 * ffn,
            "n_shared_experts": max(round(min(shared) / ffn), 1) if shared else 0,
            "n_dense_layers": len(dense),
        },
        (n_experts - n_local) * sum(prod(shape) for shape in shapes) * len(layers),
    )


def _routed(layered: Mapping[str, Any], hidden: int, where: str) -> tuple[int, set[int]]:
    """Return the rows of the router, and the layers that have one."""
    with_experts = {
        layer for path, entry in layered.items() if _EXPERTS.search(path) for layer in entry.get("layers", ())
    }
    for path, entry in layered.items():
        shape, layers = entry.get("shapes", {}).get("weight", ()), set(entry.get("layers", ()))
        is_router = _ROUTER.search(path) and not _EXPERTS.search(path) and not _SHARED.search(path)
        if is_router and layers <= with_experts and len(shape) == 2 and shape[1] == hidden and shape[0] > 1:
            return int(shape[0]), layers
    raise LikeError(f"the model of {where} has experts, but no router that tells how many: give --model")


def _shapes(layered: Mapping[str, Any]) -> tuple[list[Sequence[int]], int]:
    """Return the shapes of the parameters of one expert, and how many experts this rank holds."""
    several = [
        shape
        for path, entry in layered.items()
        if _EXPERTS.search(path)
        for shape in entry.get("shapes", {}).values()
        if len(shape) == 3
    ]
    if several:
        return [shape[1:] for shape in several], int(several[0][0])
    numbered = {match[1]: path for path in layered if (match := _ONE.search(path))}
    first = next(iter(numbered), "")
    return list(_own(layered, first)), len(numbered)


def _own(layered: Mapping[str, Any], number: str) -> Iterator[Sequence[int]]:
    for path, entry in layered.items():
        if (match := _ONE.search(path)) and match[1] == number:
            yield from entry.get("shapes", {}).values()


def _width(shape: Sequence[int], hidden: int) -> int:
    """Return the side of a matrix that is not *hidden*, 0 if it is no matrix of that width."""
    if len(shape) != 2 or hidden not in shape:
        return 0
    return int(shape[1] if shape[0] == hidden else shape[0])


def _top_k(layered: Mapping[str, Any], where: str) -> int:
    numbers: dict[str, int] = {}
    for entry in layered.values():
        numbers.update(entry.get("numbers", {}))
    for name in TOP_K:
        if numbers.get(name, 0) > 0:
            return int(numbers[name])
    raise LikeError(
        f"the model of {where} does not tell how many experts a token visits: give --model, or record "
        f"again with the number in their module under a usual name ({', '.join(TOP_K[:3])})"
    )
