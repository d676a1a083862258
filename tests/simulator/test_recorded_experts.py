"""Experts of a recorded model are found in its parameters, however they are kept, on however few ranks."""

from typing import Any

import pytest

from foretrace.simulator.errors import LikeError
from foretrace.simulator.models.model import Model
from foretrace.simulator.recorded.model import recorded_model


def small(**changes: Any) -> Model:
    """Return a small model with experts."""
    settings = {"n_experts": 8, "top_k": 2, "moe_ffn_hidden": 48, "ffn_hidden": 48, **changes}
    return Model(
        name="small", n_layers=3, hidden=64, n_heads=4, n_kv_heads=2, head_dim=16, vocab=256, **settings
    )


def linear(layers: list[int], *shape: int) -> dict[str, Any]:
    """Return the entry of a matrix in *layers*."""
    return {"kind": "Linear", "shapes": {"weight": list(shape)}, "layers": layers}


def described(model: Model, *, n_local: int, kept: str, top_k: str = "top_k") -> dict[str, Any]:
    """Return what a rank that holds *n_local* of the experts notes of *model*."""
    everywhere = list(range(model.n_layers))
    routed, hidden, ffn = everywhere[model.n_dense_layers :], model.hidden, model.moe_ffn_hidden
    heads, kv = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    norm = {"kind": "RMSNorm", "shapes": {"weight": [hidden]}, "layers": everywhere}
    structure: dict[str, Any] = {
        "embed": {"kind": "Embedding", "shapes": {"weight": [model.vocab, hidden]}},
        "layers.*.norm1": norm,
        "layers.*.norm2": norm,
        "layers.*.attn": {"kind": "Attention", "numbers": {"n_heads": model.n_heads}, "layers": everywhere},
        "layers.*.attn.wq": linear(everywhere, heads, hidden),
        "layers.*.attn.wk": linear(everywhere, kv, hidden),
        "layers.*.attn.wv": linear(everywhere, kv, hidden),
        "layers.*.attn.wo": linear(everywhere, hidden, heads),
        "layers.*.moe": {"kind": "MoE", "numbers": {top_k: model.top_k}, "layers": routed},
        "layers.*.moe.router.gate": linear(routed, model.n_experts, hidden),
        "norm": {"kind": "RMSNorm", "shapes": {"weight": [hidden]}},
        "head": {"kind": "Linear", "shapes": {"weight": [model.vocab, hidden]}},
    }
    if model.n_dense_layers:
        dense = everywhere[: model.n_dense_layers]
        for name in ("up", "gate_proj", "down"):
            shape = (hidden, model.ffn_hidden) if name == "down" else (model.ffn_hidden, hidden)
            structure[f"layers.*.mlp.{name}"] = linear(dense, *shape)
    if model.n_shared_experts:
        wide = model.n_shared_experts * ffn
        for name in ("w1", "w2", "w3"):
            shape = (hidden, wide) if name == "w2" else (wide, hidden)
            structure[f"layers.*.moe.shared_experts.{name}"] = linear(routed, *shape)
    if kept == "list":
        for number in range(8 - n_local, 8):
            for name in ("w1", "w2", "w3"):
                shape = (hidden, ffn) if name == "w2" else (ffn, hidden)
                structure[f"layers.*.moe.experts.{number}.{name}"] = linear(routed, *shape)
    else:
        fused = {"gate_up_proj": [n_local, 2 * ffn, hidden], "down_proj": [n_local, hidden, ffn]}
        single = {name: [n_local, ffn, hidden] for name in ("w1", "w3")} | {"w2": [n_local, hidden, ffn]}
        shapes = fused if kept == "fused" else single
        structure["layers.*.moe.experts"] = {"kind": "Experts", "shapes": shapes, "layers": routed}
    held = model.n_params - (8 - n_local) * 3 * hidden * ffn * len(routed)
    return {"name": model.name, "n_params": held, "structure": structure}


@pytest.mark.parametrize("n_local", [8, 4, 1])
@pytest.mark.parametrize("kept", ["list", "grouped", "fused"])
@pytest.mark.parametrize(
    "changes", [{}, {"n_dense_layers": 1, "ffn_hidden": 160}, {"n_shared_experts": 2, "top_k": 6}]
)
def test_experts_are_found_in_the_parameters(n_local: int, kept: str, changes: dict[str, Any]) -> None:
    model = small(**changes)
    found = recorded_model(described(model, n_local=n_local, kept=kept), "run")
    for field in ("n_experts", "top_k", "moe_ffn_hidden", "n_shared_experts", "n_dense_layers", "gated"):
        assert getattr(found, field) == getattr(model, field), field
    assert found.n_params == model.n_params
    assert found.n_active_params == model.n_active_params


def test_what_the_modules_do_not_tell_is_asked_for() -> None:
    silent = described(small(), n_local=8, kept="grouped", top_k="choices")
    with pytest.raises(LikeError, match="how many experts a token visits: give --model"):
        recorded_model(silent, "run")
    lost = described(small(), n_local=8, kept="grouped")
    del lost["structure"]["layers.*.moe.router.gate"]
    with pytest.raises(LikeError, match="no router"):
        recorded_model(lost, "run")
