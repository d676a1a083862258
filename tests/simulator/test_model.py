"""Parameter counts against published ones, FLOPs against published formulas."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis.strategies import booleans, integers, sampled_from

from foretrace.simulator.errors import ModelError
from foretrace.simulator.models.kinds import KINDS
from foretrace.simulator.models.model import Model
from foretrace.simulator.models.sources import EXACT, _read, load_model, names, published_params


@pytest.mark.parametrize("name", names())
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    """But for a bias per expert that balances load: checkpoints have it, no gradient trains it."""
    model, count = load_model(name), published_params(name)
    assert count is not None
    biases = model.n_experts * (sum(map(model.is_moe, range(model.n_layers))) + (1 if count.beside else 0))
    if count.decimals < EXACT:
        assert count.agrees(model.n_params)
    else:
        assert count.params - count.beside - model.n_params in (0, biases)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x7b", 12.88),
        ("deepseek-v3", 37.55),
        ("qwen3-30b-a3b", 3.35),
        ("qwen3-235b-a22b", 22.19),
        ("dbrx", 36.47),
        ("gpt-oss-120b", 5.71),
    ],
)
def test_active_parameters(name: str, billions: float) -> None:
    assert load_model(name).n_active_params / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize("vocab", [50257, 51200])
def test_gpt3_has_174_6_billion_parameters(vocab: int) -> None:
    """Table 1 of arXiv:2104.04473 gives 174.6 billion; the padding of the vocabulary does not show."""
    gpt3 = replace(load_model("gpt3-175b"), vocab=vocab)
    assert round(gpt3.n_params / 1e9, 1) == 174.6


def gpt(n_layers: int, hidden: int, vocab: int, max_positions: int) -> Model:
    return replace(
        load_model("gpt3-175b"),
        n_layers=n_layers,
        hidden=hidden,
        n_heads=8,
        n_kv_heads=8,
        head_dim=hidden // 8,
        ffn_hidden=4 * hidden,
        vocab=vocab,
        max_positions=max_positions,
    )


@given(layers=integers(1, 100), width=integers(1, 500), vocab=integers(1, 99_999), seq_len=integers(1, 4096))
def test_gpt_parameters_are_megatrons_equation_2(layers: int, width: int, vocab: int, seq_len: int) -> None:
    """P = 12 l h^2 (1 + 13/12h + (V + s)/12lh), arXiv:2104.04473 eq. 2, which leaves out the final norm."""
    h = 8 * width
    model = gpt(layers, h, vocab, seq_len)
    assert model.n_params == 12 * layers * h**2 + 13 * layers * h + (vocab + seq_len) * h + 2 * h


@given(layers=integers(1, 100), width=integers(1, 500), vocab=integers(1, 99_999), seq_len=integers(1, 9999))
def test_gpt_flops_are_megatrons_equation_3(layers: int, width: int, vocab: int, seq_len: int) -> None:
    """96 B s L h^2 (1 + s/6h + V/16Lh) with every layer's forward done twice, arXiv:2104.04473 eq. 3.

    Without recomputation the layers cost three quarters of that and the output matrix the same.
    """
    h = 8 * width
    output = 6 * vocab * h
    layer_flops = gpt(layers, h, vocab, 0).flops_per_token(seq_len) - output
    assert 4 * layer_flops == 3 * (96 * layers * h**2 + 16 * layers * h * seq_len)
    assert layer_flops * 4 // 3 + output == 96 * layers * h**2 + 16 * layers * h * seq_len + 6 * vocab * h


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b", "gpt3-175b"])
def test_flops_are_palms_appendix_b(name: str) -> None:
    """6 N + 12 L H Q T, where N leaves out what is looked up or only scaled; 0.1 % of norms and biases."""
    model = load_model(name)
    looked_up = model.max_positions * model.hidden + (0 if model.tied_embeddings else model.head_params())
    attention = 12 * model.n_layers * model.n_heads * model.head_dim * 4096
    assert model.flops_per_token(4096) == pytest.approx(
        6 * (model.n_params - looked_up) + attention, rel=1e-3
    )


PLAIN = [name for name in names() if {load_model(name).mixer(0)} <= {"attention", "window", "latent"}]
"""Presets whose layers are all alike but for a window."""


@given(name=sampled_from(PLAIN), seq_len=integers(1, 65536))
def test_a_causal_mask_halves_attention_and_nothing_else(name: str, seq_len: int) -> None:
    model = replace(load_model(name), window=0)
    weights = model.flops_per_token(0)
    full = model.flops_per_token(seq_len) - weights
    assert model.flops_per_token(seq_len, causal=True) - weights == full // 2


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_tensor_parallel_shards_hold_the_layer_once(name: str, tp: int) -> None:
    """Column and row shards of all ranks add up to the matrices; only norms and the like are copied."""
    model = load_model(name)
    for layer in (0, model.n_layers - 1):
        whole = model.layer_params(layer)
        together = tp * model.layer_params(layer, tp)
        copied = 2 * (tp * model.kv_heads_per_rank(tp) - model.n_kv_heads) * model.head_dim * model.hidden
        copied += 0 if KINDS[model.mixer(layer) or "mlp"].is_cut else tp * model.block_params("sparse")
        assert whole <= together <= whole * 1.1 + max(copied, 0)


@given(seq_len=integers(1, 65536), chunk=integers(1, 65536), causal=booleans())
def test_chunks_see_as_much_as_so_many_sequences_of_their_length(
    seq_len: int, chunk: int, *, causal: bool
) -> None:
    """Of a sequence that is whole chunks, and of one that is shorter than a chunk."""
    plain = load_model("llama3-8b")
    model = replace(plain, pattern="chunk+mlp", window=chunk)
    length = min(chunk, seq_len)
    assert model.flops_per_token(seq_len, causal=causal) == plain.flops_per_token(length, causal=causal)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].scan and not KINDS[kind].attends])
def test_a_recurrence_costs_a_token_the_same_however_long_the_sequence(kind: str) -> None:
    """And less where the sequence is shorter than a chunk, if products are as long as that is."""
    name = {
        "delta": "qwen3-next-80b-a3b",
        "kimi": "kimi-linear-48b-a3b",
        "linear": "minimax-text-01",
        "mamba": "falcon-mamba-7b",
        "mamba2": "nemotron-h-8b",
        "short": "lfm2-1.2b",
    }[kind]
    model = replace(load_model(name), pattern=kind)
    chunk = model.scan_chunk or 64
    assert model.flops_per_token(chunk) == model.flops_per_token(100 * chunk)
    is_less = model.flops_per_token(chunk // 2) < model.flops_per_token(chunk)
    assert is_less == (kind not in {"mamba", "short"})


def test_an_indexer_adds_scores_of_all_keys_and_takes_those_that_it_leaves_out() -> None:
    """Of so many keys that all are chosen, the indexer alone is added: (64 x 129 + 7168 x 192 + ...) each."""
    sparse, dense = load_model("deepseek-v3.2"), load_model("deepseek-v3")
    index = 1536 * 64 * 128 + 7168 * 128 + 7168 * 64
    for seq_len, seen in ((2048, 2048), (65536, 2048)):
        scores = 2 * 64 * 129 * seq_len
        lost = 2 * 128 * (192 + 128) * (seq_len - seen)
        more = 61 * (6 * index + 3 * (scores - lost))
        assert sparse.flops_per_token(seq_len) == dense.flops_per_token(seq_len) + more


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pattern": "mamba3"}, "pattern has 'mamba3'; one of attention, window, chunk"),
        ({"pattern": "mlp+attention"}, "pattern has mlp+attention: a mixer, an MLP, or mixer+MLP"),
        ({"pattern": "delta+mlp"}, "delta layers need scan_heads, scan_key_heads"),
        ({"pattern": "attention+mlp", "global_every": 2}, "pattern and global_every both say"),
        ({"pattern": "attention mlp", "n_mtp": 1}, "n_mtp=1: a module is like the last layer, mlp alone"),
    ],
)
def test_a_pattern_that_cannot_be_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=re.escape(words)):
        replace(load_model("llama3-8b"), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("LLAMA3-8b", "llama3-8b"),
        ("Llama-3.1-8B-Instruct", "llama3-8b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("meta-llama/llama-3.1-70b", "llama3-70b"),
        ("deepseek-r1", "deepseek-v3"),
    ],
)
def test_ids_of_the_hub_and_models_of_the_same_shape_are_names(name: str, preset: str) -> None:
    assert load_model(name) == load_model(preset)


def test_no_two_presets_have_the_same_other_name() -> None:
    every = [other.lower() for name in names() for other in _read(name).get("names", ())]
    assert len(set(every)) == len(every)
    assert not set(every) & set(names())


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3"])
def test_expert_shards_hold_the_experts_once(name: str) -> None:
    model = load_model(name)
    layer = model.n_layers - 1
    assert 8 * model.expert_params(layer, ep=8) == model.expert_params(layer)
    assert model.expert_params(0) == (0 if model.n_dense_layers else model.expert_params(layer))


def test_deepseek_has_three_dense_layers() -> None:
    model = load_model("deepseek-v3")
    assert [layer for layer in range(model.n_layers) if not model.is_moe(layer)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_layers": 0}, "n_layers=0"),
        ({"hidden": -1}, "hidden=-1"),
        ({"n_kv_heads": 3}, "n_kv_heads=3 does not divide n_heads=64"),
        ({"ffn_hidden": 0}, "ffn_hidden=0"),
        ({"norm": "batch"}, "rmsnorm, layernorm"),
        ({"n_experts": 8}, "moe_ffn_hidden"),
        ({"n_experts": 8, "moe_ffn_hidden": 64, "top_k": 9}, "top_k (is 9)"),
        ({"kv_lora_rank": 512}, "v_head_dim"),
        ({"vocab": True}, "vocab=True"),
    ],
)
def test_a_model_that_cannot_be_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        replace(load_model("llama3-70b"), **change)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_describe_is_plain() -> None:
    described = load_model("llama3-8b").describe()
    assert described["n_params"] == 8_030_261_248
    assert all(isinstance(value, int | str | bool) for value in described.values())


@pytest.mark.parametrize(("name", "billions"), [("nemotron4-15b", 15.6), ("nemotron4-340b", 341.0)])
def test_nemotron_has_as_many_as_its_reports_say(name: str, billions: float) -> None:
    """12.5 + 3.1 billion (arXiv:2402.16819); 331.6 + 9.4 billion (arXiv:2406.11704)."""
    assert round(load_model(name).n_params / 1e9, 1) == billions


def test_windows_alternate_as_the_model_says() -> None:
    gemma2, mistral = load_model("gemma2-9b"), replace(load_model("mistral-7b"), window=4096)
    assert [gemma2.window_of(layer) for layer in range(4)] == [4096, 0, 4096, 0]
    assert {mistral.window_of(layer) for layer in range(32)} == {4096}


@given(window=integers(1, 8192), seq_len=integers(1, 16384))
def test_a_window_never_sees_more_than_all(window: int, seq_len: int) -> None:
    """And as much, where the sequence is not longer than the window."""
    whole, part = (replace(load_model("mistral-7b"), window=size) for size in (0, window))
    for causal in (False, True):
        seen, most = (model.flops_per_token(seq_len, causal=causal) for model in (part, whole))
        assert seen <= most + 1
        if window >= seq_len:
            assert seen == pytest.approx(most, abs=1)


def test_parallel_blocks_with_one_norm_have_one_norm() -> None:
    falcon = load_model("falcon-7b")
    assert falcon.layer_params(0) - replace(falcon, norms_per_layer=2).layer_params(0) == -falcon.norm_params
    with pytest.raises(ModelError, match="norms_per_layer"):
        replace(falcon, norms_per_layer=3)


def test_a_module_for_multi_token_prediction_counts_apart() -> None:
    model = replace(load_model("deepseek-v3"), n_mtp=1)
    without = replace(model, n_mtp=0)
    assert without.n_params == model.n_params
    more = model.flops_per_token(4096) - without.flops_per_token(4096)
    join_and_head = 6 * (2 * 7168 * 7168 + 7168 * 129280)
    one_layer = 6 * model.matmul_params(60) + 12 * 128 * (192 + 128) // 2 * 4096
    assert more == join_and_head + one_layer


@pytest.mark.parametrize("name", ["llama3-8b", "gemma3-1b", "deepseek-v3"])
@given(seq_len=integers(0, 8192), frozen=sampled_from([False, True]))
def test_model_flops_are_six_per_weight_or_four_and_attention_over_what_a_token_sees(
    name: str, seq_len: int, frozen: bool
) -> None:
    """PaLM, arXiv:2204.02311, appendix B, with windows where layers have one; adapters leave out weights."""
    model = replace(load_model(name), n_mtp=0)
    weights = sum(map(model.matmul_params, range(model.n_layers))) + model.head_params()
    seen = sum(min(model.window_of(layer) or seq_len, seq_len) for layer in range(model.n_layers))
    scores = 6 * model.n_heads * (model.head_dim + model.value_head_dim) * seen
    assert model.flops_per_token(seq_len, frozen=frozen) == (4 if frozen else 6) * weights + scores
