"""The shape of a recorded model: read from its configuration, or worked out from its parameters.

Embedding and head say the width and the vocabulary; inside of a layer, matrices are told apart by where they
stand (attention or MLP) and by their sides. How wide a head is no parameter tells: modules keep it as a
number. What comes out is held against the number of parameters that the recorder counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, Final

from foretrace.simulator.errors import LikeError, ModelError
from foretrace.simulator.models.hf import model_from_config
from foretrace.simulator.models.model import Model
from foretrace.simulator.models.sources import model_from_fields

# The experts of a recorded model: how many there are, how wide, and how many of them a token visits.
#
# A rank of expert parallelism holds some of them only. The router has a row for each, so that it tells how
# many there are; how many a token visits is a number that modules keep.

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

    *settings*: those of ``Model`` that it decides. *absent_params*: parameters of experts that other ranks
    hold.
    """

    settings: Mapping[str, Any]
    absent_params: int


def is_of_experts(path: str) -> bool:
    """Return whether the module at *path* in a layer is an expert, shared or not, or a router."""
    return any(words.search(path) for words in (_EXPERTS, _SHARED, _ROUTER))


def experts_of(layered: Mapping[str, Any], hidden: int, where: str) -> Experts | None:
    """Return the experts of a model, None if it has none.

    *layered*: entries of the structure of a model by their path inside of a layer. Raises LikeError if their
    number, their shapes or how many a token visits is not told.
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
    # Dense layers are first ones, or none: a model has no field for any other order.
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
            # Shared experts run as one MLP, as wide as all of them; at least one, however the widths divide.
            "n_shared_experts": max(round(min(shared) / ffn), 1) if shared else 0,
            "n_dense_layers": len(dense),
        },
        # Experts of other ranks are not in the count that this rank made.
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
        # A row for each expert: a gate of a shared expert has one row, and is no router.
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
    # In one tensor for all experts: its first side is their number.
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
    # Either way round: a linear layer has its inputs second, the Conv1D of GPT-2 first.
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


HEAD_WIDTHS: Final = ("head_dim", "head_size", "attention_head_size", "d_head", "d_k", "dim_head")
HEAD_COUNTS: Final = (
    "num_heads",
    "n_heads",
    "n_head",
    "num_attention_heads",
    "nhead",
    "heads",
    "n_local_heads",
)
"""What modules call the width and the number of their attention heads."""

_ATTENTION: Final = re.compile(r"att|(^|\.)(wq|wk|wv|wo|qkv)\b")
_QUERY: Final = re.compile(r"(^|\.)(wq|q|q_proj|query|to_q|q_lin)$")
_KEY: Final = re.compile(r"(^|\.)(wk|k|k_proj|key|to_k|k_lin)$")
_FUSED: Final = re.compile(r"(^|\.)(qkv|qkv_proj|c_attn|in_proj|wqkv|query_key_value|to_qkv|attn)$")
_TOLERANCE: Final = 0.02
"""Share of the parameters that a shape may miss: rotary tables, adapters, buffers kept as parameters."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of one layer: where it stands, its sides, whether it has a bias."""

    path: str
    sides: tuple[int, int]
    bias: bool

    def other_side(self, hidden: int) -> int:
        """Return the side that is not *hidden*, which is *hidden* if both are; 0 if neither is."""
        one, other = self.sides
        return other if one == hidden else one if other == hidden else 0


def recorded_model(description: Mapping[str, Any] | None, where: str) -> Model:
    """Return the model that the ``model`` of a run describes.

    *description*: as ``run.json`` holds it. Raises LikeError if it does not say enough, or what it says does
    not make up its parameters.
    """
    untold = f"{where} does not say what model was trained: give --model"
    if not description:
        raise LikeError(untold)
    if "n_layers" in description and "hidden" in description:  # a simulated run
        known = {field.name for field in fields(Model)}
        fields_ = {key: value for key, value in description.items() if key in known and value is not None}
        return model_from_fields({"name": "model", **fields_}, where=where)
    config = description.get("config")
    if isinstance(config, Mapping) and "model_type" in config:
        try:
            return replace(model_from_config(config, where=where), name=_name(description))
        except ModelError:
            pass  # an architecture that is not known by name may be known by its parameters
    structure = description.get("structure")
    if not isinstance(structure, Mapping) or not structure:
        named = f"{where} names its model, {description.get('name')}, but not its shape: give --model"
        raise LikeError(named if "name" in description else untold)
    return _from_structure(description, structure, where)


def _from_structure(description: Mapping[str, Any], structure: Mapping[str, Any], where: str) -> Model:
    # The largest first: the vocabulary; then positions and the like.
    embeddings = sorted(_embeddings(structure), reverse=True)
    if not embeddings:
        raise LikeError(
            f"the model of {where}, {_name(description)}, has no embedding of tokens, so it is none of "
            "those that are simulated: give --model, the transformer that it stands for"
        )
    vocab, hidden = embeddings[0]
    layered = _one_layer(structure, where)
    numbers = sorted({layer for entry in layered.values() for layer in entry["layers"]})
    matrices = list(_matrices(layered))
    attention = [matrix for matrix in matrices if _ATTENTION.search(matrix.path)]
    experts = experts_of(layered, hidden, where)
    others = [matrix for matrix in matrices if matrix not in attention and hidden in matrix.sides]
    mlp = [matrix for matrix in others if experts is None or not is_of_experts(matrix.path)]
    known = int(description.get("head_dim") or 0)
    heads = _heads(layered, attention, hidden, where, known)
    wide = [matrix.other_side(hidden) for matrix in mlp]
    if not wide and experts is None:
        raise LikeError(f"the layers of {where} have no MLP of width {hidden}: give --model")
    routed: dict[str, Any] = {"gated": len(wide) >= 3} if experts is None else dict(experts.settings)
    model = Model(
        name=_name(description),
        n_layers=len(numbers),
        hidden=hidden,
        **heads,
        ffn_hidden=max(wide, default=routed.get("moe_ffn_hidden", 0)),
        vocab=vocab,
        **_norms(structure, layered),
        qkv_bias=any(matrix.bias for matrix in attention),
        # What reads has no part in it: the other matrices put the heads together again.
        proj_bias=any(matrix.bias for matrix in attention if not _reads(matrix)),
        mlp_bias=any(matrix.bias for matrix in mlp),
        max_positions=sum(rows for rows, width in embeddings[1:] if width == hidden),
        source=f"parameters of {where}",
        **routed,  # gated: there are gate, up and down
    )
    return _checked(model, description, where, 0 if experts is None else experts.absent_params)


def _norms(structure: Mapping[str, Any], layered: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the norms of a model are, and how many of them one of its layers has."""
    norms = [entry for path, entry in structure.items() if _is_norm(path, entry)]
    per_layer = sum(1 for path, entry in layered.items() if _is_norm(path, entry))
    return {
        "norm": "rmsnorm" if any("rms" in entry["kind"].lower() for entry in norms) else "layernorm",
        "norm_bias": any("bias" in entry.get("shapes", {}) for entry in norms),
        "norms_per_layer": per_layer if per_layer in (1, 2, 4) else 2,
    }


def _checked(model: Model, description: Mapping[str, Any], where: str, absent: int) -> Model:
    """Return *model*, its head tied if only that makes up what was counted, and the *absent* experts."""
    counted = int(description.get("n_params") or 0)
    counted += absent if counted else 0
    tied = replace(model, tied_embeddings=True)
    best = min((model, tied), key=lambda one: abs(one.n_params - counted))
    if counted and abs(best.n_params - counted) > _TOLERANCE * counted:
        raise LikeError(
            f"the model of {where} has {counted:,} parameters, but a transformer of its shape has "
            f"{best.n_params:,}: it is something else; give --model"
        )
    # Without a count nothing can be held against the shape.
    return best if counted else model


def _embeddings(structure: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield rows and width of every table outside of the layers that is looked up."""
    for entry in structure.values():
        shape = entry.get("shapes", {}).get("weight", ())
        if "embedding" in str(entry.get("kind", "")).lower() and len(shape) == 2 and not entry.get("layers"):
            yield int(shape[0]), int(shape[1])


def _one_layer(structure: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the entries of the layers by their path inside of a layer, of the list that has most."""
    lists: dict[str, dict[str, Any]] = {}
    for path, entry in structure.items():
        before, star, within = path.partition("*")
        if star and entry.get("layers"):
            lists.setdefault(before, {})[within.strip(".")] = entry
    if not lists:
        raise LikeError(f"the model of {where} has no numbered layers: give --model")
    return max(lists.values(), key=len)


def _matrices(layered: Mapping[str, Any]) -> Iterator[Matrix]:
    for path, entry in layered.items():
        shapes = entry.get("shapes", {})
        for name, shape in shapes.items():
            if len(shape) == 2 and name.endswith("weight"):
                own = f"{path}.{name.removesuffix('weight').rstrip('_.')}".strip(".")
                biased = any(other.endswith("bias") for other in shapes)
                yield Matrix(own, (int(shape[0]), int(shape[1])), biased)


def _heads(
    layered: Mapping[str, Any], attention: Sequence[Matrix], hidden: int, where: str, head_dim: int = 0
) -> dict[str, Any]:
    """Return query heads, key-value heads and the width of a head, which is *head_dim* if that is known."""
    query = next((m.other_side(hidden) for m in attention if _QUERY.search(m.path)), 0)
    key = next((m.other_side(hidden) for m in attention if _KEY.search(m.path)), 0)
    fused = next((m.other_side(hidden) for m in attention if _FUSED.search(m.path)), 0)
    out = next((m.other_side(hidden) for m in attention if not _reads(m)), hidden)
    width_of_all = query or out
    numbers = {
        name: value
        for path, entry in layered.items()
        if _ATTENTION.search(path)
        for name, value in entry.get("numbers", {}).items()
    }
    head_dim = head_dim or next((numbers[name] for name in HEAD_WIDTHS if numbers.get(name)), 0)
    if not head_dim and (count := next((numbers[name] for name in HEAD_COUNTS if numbers.get(name)), 0)):
        head_dim = width_of_all // count
    if not head_dim or width_of_all % head_dim:
        raise LikeError(
            f"the recording of {where} does not tell how many attention heads there are: give --model, or "
            "record again with the number in the module of attention under a usual name "
            f"({', '.join(HEAD_COUNTS[:3])}, {HEAD_WIDTHS[0]})"
        )
    n_heads = width_of_all // head_dim
    # A fused matrix is as wide as queries, keys and values together.
    n_kv_heads = key // head_dim if key else (fused // head_dim - n_heads) // 2 if fused else n_heads
    return {"n_heads": n_heads, "n_kv_heads": max(n_kv_heads, 1), "head_dim": head_dim}


def _reads(matrix: Matrix) -> bool:
    """Whether a matrix of attention makes queries, keys or values; the others put heads together again."""
    return bool(re.search(r"(^|\.)(w?[qkv]|w?qkv|in)(_|$)|query|key|value|to_[qkv]|c_attn", matrix.path))


def _is_norm(path: str, entry: Mapping[str, Any]) -> bool:
    shapes = entry.get("shapes", {})
    return (
        bool(shapes)
        and all(len(shape) == 1 for shape in shapes.values())
        and ("norm" in str(entry.get("kind", "")).lower() or bool(re.search(r"norm|ln", path)))
    )


def _name(description: Mapping[str, Any]) -> str:
    return str(description.get("name") or "model")
