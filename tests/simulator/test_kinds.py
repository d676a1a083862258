"""Every kind of layer as work on a rank: what it executes, holds and keeps, alone and cut over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from tests.simulator.made_jobs import job, memory_of
from tests.simulator.predicted import simulate

from foretrace.simulator.builder.stages import units_by_stage
from foretrace.simulator.errors import JobError
from foretrace.simulator.memory.activations import kept_bytes
from foretrace.simulator.models.kinds import KINDS
from foretrace.simulator.models.model import Model
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.workload.micro_batch import layer_blocks
from foretrace.simulator.workload.ops import Comm, Op, Phase
from foretrace.traces.layout import Layout

PRESETS = {
    "attention": "qwen3-next-80b-a3b",
    "window": "gemma3-1b",
    "chunk": "llama4-scout",
    "latent": "deepseek-v3",
    "sparse": "deepseek-v3.2",
    "linear": "minimax-text-01",
    "both": "falcon-h1-7b",
    "delta": "qwen3-next-80b-a3b",
    "kimi": "kimi-linear-48b-a3b",
    "mamba": "falcon-mamba-7b",
    "mamba2": "nemotron-h-8b",
    "short": "lfm2-1.2b",
    "mlp": "nemotron-h-8b",
    "moe": "qwen3-next-80b-a3b",
}
MIXERS = sorted(kind for kind in KINDS if not KINDS[kind].is_mlp)
SCANS = [kind for kind in MIXERS if KINDS[kind].scan and not KINDS[kind].attends]
SEQ_LEN = 16384


def of_one_kind(kind: str, n_layers: int = 2) -> Model:
    """A preset that has layers of *kind*, made of those alone."""
    return replace(
        load_model(PRESETS[kind]), n_layers=n_layers, pattern=kind, global_every=0, n_dense_layers=0
    )


def executed(phase: Phase) -> int:
    return sum(item.flops for item in phase if isinstance(item, Op))


def mixed(kind: str, seq_len: int) -> float:
    """Forward FLOPs of a token beside matrices: model FLOPs of two more layers, less those of matrices."""
    few, more = of_one_kind(kind, 2), of_one_kind(kind, 4)
    both = more.flops_per_token(seq_len, causal=True) - few.flops_per_token(seq_len, causal=True)
    return both / 2 / 3 - 2 * few.matmul_params(0)


def test_every_kind_is_looked_at() -> None:
    assert set(PRESETS) == set(KINDS)
    assert all(one.source for one in KINDS.values())


@pytest.mark.parametrize("kind", MIXERS)
def test_forward_executes_the_model_flops_that_a_causal_mask_leaves(kind: str) -> None:
    some = job(of_one_kind(kind), seq_len=SEQ_LEN)
    (block,) = layer_blocks(some, 0)
    wanted = SEQ_LEN * (2 * some.model.matmul_params(0) + mixed(kind, SEQ_LEN))
    assert executed(block.phases["forward"]) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("kind", MIXERS)
def test_kernels_compute_as_many_tiles_more_as_there_are_sequences(kind: str) -> None:
    """The shapes that products are timed by, beside the FLOPs that they count."""
    one, four = (layer_blocks(job(of_one_kind(kind), micro_batch=n), 0)[0].phases for n in (1, 4))
    for phase in ("forward", "backward"):
        tiles = [
            sum(op.m * op.n * op.k * op.batch for op in phases[phase] if isinstance(op, Op))
            for phases in (one, four)
        ]
        assert tiles[1] == 4 * tiles[0]


@pytest.mark.parametrize("kind", SCANS)
def test_the_backward_of_a_scan_executes_twice_its_forward(kind: str) -> None:
    (block,) = layer_blocks(job(of_one_kind(kind)), 0)
    assert executed(block.phases["backward"]) == 2 * executed(block.phases["forward"])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_rank_holds_what_the_model_counts(kind: str) -> None:
    """Block by block, and in memory: a layer more is its parameters more, in 2 + 4 + 12 bytes."""
    model = of_one_kind(kind)
    (block,) = layer_blocks(job(model), 0)
    assert block.params == model.layer_params(0)
    few, more = (memory_of(job(of_one_kind(kind, n), sharding="ddp")).items for n in (2, 3))
    assert more["parameters"] - few["parameters"] == 2 * model.layer_params(0)


@pytest.mark.parametrize("kind", [kind for kind in SCANS if KINDS[kind].is_cut])
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(cp=2), Layout(tp=2, cp=2)])
def test_heads_of_a_scan_are_dealt_out(kind: str, layout: Layout) -> None:
    """Each of n ranks executes an n-th of what one would; context-parallel ones exchange heads both ways."""
    whole, part = (layer_blocks(job(of_one_kind(kind), one), 0)[0] for one in (Layout(), layout))
    n = layout.tp * layout.cp
    assert executed(part.phases["forward"]) == pytest.approx(executed(whole.phases["forward"]) / n, rel=1e-6)
    exchanges = [item for item in part.phases["forward"] if isinstance(item, Comm) and item.axis == "cp"]
    assert [item.kind for item in exchanges] == ["all_to_all"] * (2 if layout.cp > 1 else 0)


def test_two_mixers_side_by_side_are_those_two() -> None:
    """In FLOPs and parameters, and in what they keep, but for the one input and norm that they share."""
    model = of_one_kind("both")
    one, other = (replace(model, pattern=kind) for kind in ("attention", "mamba2"))
    norms = model.hidden + model.scan_heads * model.scan_value_dim  # theirs has none over its result
    assert model.layer_params(0) == one.layer_params(0) + other.layer_params(0) - norms
    blocks = [layer_blocks(job(each), 0)[0] for each in (model, one, other)]
    for phase in ("forward", "backward"):
        both, *apart = (executed(block.phases[phase]) for block in blocks)
        assert both == sum(apart)
    kept = [kept_bytes(job(each), 0) for each in (model, one, other)]
    assert max(kept[1:]) < kept[0] < sum(kept[1:])


@pytest.mark.parametrize("kind", SCANS)
def test_a_scan_keeps_as_much_of_each_token_however_long_the_sequence(kind: str) -> None:
    short, long = (kept_bytes(job(of_one_kind(kind), seq_len=n), 0) for n in (4096, 16384))
    assert long == 4 * short


@pytest.mark.parametrize(
    ("kind", "layout", "words"),
    [
        ("sparse", Layout(tp=2), "how ranks would share sparse layers of deepseek-v3.2 is not known; tp=1"),
        ("sparse", Layout(cp=2), "tp=1 with cp=1 would work"),
        ("mamba2", Layout(tp=4, cp=4), "does not divide the 8 heads of keys that mamba2 layers"),
        ("delta", Layout(tp=4, cp=8), "16 would work"),
    ],
)
def test_what_ranks_cannot_share_is_refused_with_a_way_out(kind: str, layout: Layout, words: str) -> None:
    with pytest.raises(JobError, match=words):
        job(of_one_kind(kind), layout)


def test_chunks_end_where_documents_do() -> None:
    """Packed documents shorter than a chunk are what is attended to, as in chunks of their length."""
    model = of_one_kind("chunk")
    packed, chunks = (
        layer_blocks(some, 0)[0].phases["forward"]
        for some in (
            job(model, seq_len=SEQ_LEN, document_len=1024),
            job(replace(model, window=1024), seq_len=SEQ_LEN),
        )
    )
    assert packed == chunks


def notes_of(model: str, **settings: object) -> Iterable[str]:
    cut = replace(load_model(model), n_layers=4)
    return simulate(job(cut, **settings)).summary["rests_on"]  # type: ignore[arg-type,no-any-return]


def test_a_prediction_says_what_is_left_out_and_what_its_layers_rest_on() -> None:
    said = " | ".join(notes_of("qwen3-next-80b-a3b", seq_len=512))
    assert "qwen3-next-80b-a3b without its multi-token prediction" in said
    assert "delta layers: its scan is priced as batched products over chunks" in said
    assert "layers:" not in " | ".join(notes_of("llama3-8b", seq_len=512))


@pytest.mark.parametrize("name", ["llama4-maverick", "nemotron-h-8b", "minimax-text-01"])
def test_stages_of_a_hybrid_hold_its_layers_once(name: str) -> None:
    """Whatever kinds they are of: parameters of all stages are those of the model."""
    model = replace(load_model(name), n_layers=8)
    stages = units_by_stage(job(model, Layout(pp=4)), 4)
    assert sum(unit.params_in_all for units in stages for unit in units) == model.n_params
