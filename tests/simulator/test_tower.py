"""Models that see: a tower is a stack of layers beside the text's, and works on images alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import integers, sampled_from
from tests.simulator.predicted import simulate

from foretrace.simulator.config import job_from, job_settings, read_config, write_config
from foretrace.simulator.errors import JobError, ModelError
from foretrace.simulator.job import Job
from foretrace.simulator.memory.ranks import rank_memories
from foretrace.simulator.models.hf import model_from_config
from foretrace.simulator.models.hf_vision import TOWERS, tower_of
from foretrace.simulator.models.model import Model, Tower
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.workload.micro_batch import embedding_blocks
from foretrace.simulator.workload.ops import Op
from foretrace.topologies.catalog import load_cluster
from foretrace.traces.layout import Layout

QWEN = load_model("qwen2.5-vl-7b")
TEXT = replace(QWEN, tower=None)
PUBLISHED: dict[
    str, tuple[int, int, dict[str, Any]]
] = {  # parameters of the checkpoint less those of its text
    "gemma3": (
        4_300_079_472 - load_model("gemma3-4b").n_params,
        2560,
        {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
        | {"image_size": 896, "patch_size": 14, "vision_use_head": False},
    ),
    "llama4": (
        108_641_793_536 - load_model("llama4-scout").n_params,
        5120,
        {"hidden_size": 1408, "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16}
        | {"image_size": 336, "patch_size": 14, "pixel_shuffle_ratio": 0.5, "projector_input_dim": 4096}
        | {"projector_output_dim": 4096, "vision_output_dim": 4096},
    ),
    "mistral3": (
        24_011_361_280 - load_model("mistral-small-24b").n_params,
        5120,
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
        | {"head_dim": 64, "image_size": 1540, "patch_size": 14},
    ),
    "qwen2_5_vl": (
        8_292_166_656 - load_model("qwen2.5-7b").n_params,
        3584,
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3}
        | {"out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "window_size": 112}
        | {"fullatt_block_indexes": [7, 15, 23, 31]},
    ),
    "qwen2_vl": (
        8_291_375_616 - load_model("qwen2.5-7b").n_params,
        3584,
        {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "num_heads": 16}
        | {"in_chans": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    ),
    "qwen3_vl": (
        8_767_123_696 - load_model("qwen3-8b").n_params,
        4096,
        {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16}
        | {"out_hidden_size": 4096, "spatial_merge_size": 2, "num_position_embeddings": 2304}
        | {"deepstack_visual_indexes": [8, 16, 24]},
    ),
}


def seen(kind: str) -> Tower:
    _, hidden, vision = PUBLISHED[kind]
    found = tower_of(kind, {"model_type": kind, "vision_config": vision}, hidden, "config.json")
    assert found is not None
    return found


def job(model: Model = QWEN, layout: Layout | None = None, **settings: Any) -> Job:
    layout = layout or Layout(dp=2)
    given_ = {"global_batch": 4 * layout.dp, "seq_len": 4096, **settings}
    return Job(model=model, cluster=load_cluster("dgx-h100", layout.world_size), layout=layout, **given_)


def work(some: Job, phase: str) -> int:
    """FLOPs of products and attention before the layers."""
    ops = (op for block in embedding_blocks(some) for op in block.phases[phase] if isinstance(op, Op))
    return sum(op.flops for op in ops)


@pytest.mark.parametrize("kind", sorted(PUBLISHED))
def test_a_tower_has_the_parameters_that_its_checkpoint_has_beside_the_text(kind: str) -> None:
    assert seen(kind).n_params == PUBLISHED[kind][0]


def test_the_preset_that_sees_is_the_config_that_does() -> None:
    tower = seen("qwen2_5_vl")
    preset = QWEN.tower
    assert preset is not None
    assert replace(tower, name=preset.name, source=preset.source, pattern=preset.pattern) == preset
    assert [tower.kinds(layer) for layer in range(32)] == [preset.kinds(layer) for layer in range(32)]
    assert replace(load_model("qwen2.5-7b"), name=TEXT.name, source=TEXT.source) == TEXT


def test_towers_of_unknown_kinds_are_left_out_and_that_is_said() -> None:
    text = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    text |= {"intermediate_size": 128, "vocab_size": 100}
    found = model_from_config({"model_type": "new", "text_config": text, "vision_config": {"depth": 1}})
    assert found.tower is None
    assert found.left_out == "vision tower of new"
    parts = {
        "qformer_config": {"model_type": "q"},
        "audio_config": {"depth": 1},
        "quantization_config": {"a": 1},
    }
    found = model_from_config({"model_type": "new", "text_config": text, **parts})
    assert found.left_out == "qformer and audio tower of new"
    found = model_from_config({"model_type": "new", "text_config": text})
    assert found.left_out == "what is beside the language model of new"
    with pytest.raises(ModelError, match=r"vision_config: hidden_size"):
        model_from_config(
            {"model_type": "mistral3", "text_config": text, "vision_config": {"hidden_size": "wide"}}
        )
    assert "new" not in TOWERS


@given(kind=sampled_from(sorted(PUBLISHED)), images=integers(1, 3), micro_batch=sampled_from((1, 2)))
def test_the_tower_does_its_flops_forward_and_twice_that_backward(
    kind: str, images: int, micro_batch: int
) -> None:
    """But for features of patches, which have no gradients."""
    tower = seen(kind)
    some = job(replace(TEXT, tower=tower), images=images, image_tokens=256, micro_batch=micro_batch)
    forward = images * micro_batch * tower.flops(256)
    assert work(some, "forward") == pytest.approx(forward, rel=1e-9)
    embedded = 2 * images * micro_batch * 256 * tower.patches_per_token * tower.vocab * tower.hidden
    scores = work(some, "backward") - 2 * forward + embedded  # a fused kernel computes them again
    assert 0 <= scores <= 0.25 * forward
    assert some.flops_per_token - job(TEXT).flops_per_token == pytest.approx(
        3 * images * tower.flops(256) / some.seq_len, rel=1e-6
    )


@given(images=integers(1, 4), tp=sampled_from((1, 2, 4)), pp=sampled_from((1, 2)))
def test_blocks_hold_the_parameters_and_tp_cuts_the_layers(images: int, tp: int, pp: int) -> None:
    tower = QWEN.tower
    assert tower is not None
    some = job(layout=Layout(tp=tp, pp=pp), images=images, image_tokens=64)
    held = sum(block.params for block in embedding_blocks(some))
    assert held == QWEN.embedding_params(tp) + tower.params(tp)
    assert held == sum(block.params for block in embedding_blocks(replace(some, images=0)))
    assert tower.params(tp) - tower.ends_params == pytest.approx(
        (tower.n_params - tower.ends_params) / tp, rel=2e-3
    )


def test_without_images_a_tower_is_parameters_alone() -> None:
    plain, seeing = (simulate(job(model, sharding="fsdp", recompute="full")) for model in (TEXT, QWEN))
    kept = [run.summary["stages"][0]["bytes"]["activations"] for run in (plain, seeing)]
    assert kept[0] == kept[1]
    states = [run.summary["stages"][0]["bytes"]["optimizer"] for run in (plain, seeing)]
    assert states[1] - states[0] == pytest.approx(8 * (QWEN.n_params - TEXT.n_params) / 2, rel=1e-6)
    compute = [run.summary["shares"]["compute"] * run.summary["step_time_s"] for run in (plain, seeing)]
    assert compute[1] == pytest.approx(compute[0], rel=0.02)  # their update


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_more_images_take_longer_and_keep_more(recompute: str) -> None:
    runs = [
        simulate(job(images=n, image_tokens=512, recompute=recompute, sharding="fsdp")) for n in (1, 2, 4)
    ]
    times = [run.summary["step_time_s"] for run in runs]
    assert times == sorted(set(times))
    kept = [run.summary["stages"][0]["bytes"]["activations"] for run in runs]
    assert kept == sorted(set(kept))
    assert any("tower" in note for note in runs[0].summary["rests_on"])


def test_frozen_weights_run_the_tower_forward_alone() -> None:
    some = job(images=2, image_tokens=256, lora_rank=16, sharding="fsdp")
    assert work(some, "backward") == work(some, "recompute") == 0
    (memory,), (text,) = rank_memories(some), rank_memories(job(TEXT, lora_rank=16, sharding="fsdp"))
    assert memory.items["activations"] == text.items["activations"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": TEXT, "images": 1}, "has no tower"),
        ({"images": 1}, "image_tokens says of which"),
        ({"images": 3, "image_tokens": 2048}, r"3 of 2048 tokens do not fit into seq_len=4096; 6144 would"),
        ({"images": 1, "image_tokens": 64, "layout": Layout(cp=2)}, "cp=1 would work"),
        ({"images": -1}, "give a number from 0 on"),
    ],
)
def test_images_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=said):
        job(**settings)


def test_a_tower_goes_through_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "qwen2_5_vl",
                "hidden_size": 3584,
                "intermediate_size": 18944,
                "vocab_size": 152064,
            }
            | {"num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4}
            | {"vision_config": PUBLISHED["qwen2_5_vl"][2]}
        )
    )
    settings = {"model": str(tmp_path), "cluster": "dgx-h100", "gpus": 2, "seq_len": 2048, "global_batch": 8}
    some = job_from({**settings, "images": 1, "image_tokens": 256})
    assert some.model.n_params == QWEN.n_params
    path = tmp_path / "run.toml"
    path.write_text(write_config(job_settings(some)))
    assert job_from(read_config(path)).model == some.model
    (tmp_path / "mine.toml").write_text('base = "qwen2.5-vl-7b"\n')
    assert load_model(tmp_path / "mine.toml").tower == QWEN.tower
    (tmp_path / "mine.toml").write_text('base = "qwen2.5-7b"\n[tower]\nhiden = 1\n')
    with pytest.raises(ModelError, match=r"tower: unknown key 'hiden'; .*hidden"):
        load_model(tmp_path / "mine.toml")
