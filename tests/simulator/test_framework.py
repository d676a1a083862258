"""Framework conventions: what each of them changes in memory, and that the default changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import booleans, sampled_from

from foretrace.simulator import framework
from foretrace.simulator.builder.stages import stage_layers
from foretrace.simulator.errors import JobError
from foretrace.simulator.framework import (
    OVERRIDABLE,
    Framework,
    framework_names,
    framework_of,
    load_framework,
)
from foretrace.simulator.job import Job
from foretrace.simulator.memory.activations import kept_bytes, logits_bytes
from foretrace.simulator.memory.ranks import rank_memories
from foretrace.simulator.memory.stage import stage_memory
from foretrace.simulator.memory.states import bucket_bytes, sharding_units
from foretrace.simulator.models.sources import load_model
from foretrace.topologies.catalog import load_cluster
from foretrace.traces.layout import Layout


def job(layout: Layout | None = None, **settings: object) -> Job:
    layout = layout or Layout()
    return Job(
        model=load_model("llama3-8b"),
        cluster=load_cluster("dgx-h100", layout.world_size),
        layout=layout,
        global_batch=layout.dp * 8,
        seq_len=4096,
        **settings,  # type: ignore[arg-type]
    )


def kept(name: str, tp: int = 1, **settings: object) -> int:
    return kept_bytes(job(Layout(tp=tp), framework=name, **settings), 0)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("nanotron v0.5", "nanotron"),
        ("Megatron-DeepSpeed", "megatron-deepspeed"),
        ("NeMo/Megatron", "nemo"),
        ("llm-foundry/composer FSDP", "composer"),
        ("torchtitan +compile", "torchtitan"),
        ("TRL, FSDP", "transformers"),
        ("Accelerate + DeepSpeed ZeRO-3", "deepspeed"),
        ("PyTorch FSDP", "torchtitan"),
        ("NeMo AutoModel (PyTorch)", "torchtitan"),
        ("something new", "megatron"),
    ],
)
def test_a_framework_is_recognised_as_people_write_it(text: str, name: str) -> None:
    assert framework_of(text) == name


@pytest.mark.parametrize("name", framework_names())
def test_every_convention_that_is_not_the_default_says_where_it_was_read(name: str) -> None:
    profile, plain = load_framework(name), Framework(name=name, matches=())
    own = {key for key in OVERRIDABLE if getattr(profile, key) != getattr(plain, key)}
    assert own - {"bucket_ranks"} <= set(profile.sources)  # who has buckets stands with what they hold


def test_an_unknown_profile_names_a_near_one() -> None:
    with pytest.raises(JobError, match="did you mean nanotron"):
        load_framework("nanotorn")


@pytest.mark.parametrize(("said", "meant"), [("trl", "transformers"), ("fsdp", "torchtitan"), ("x", "")])
def test_a_library_that_has_no_profile_of_its_name_is_told_which_it_has(said: str, meant: str) -> None:
    with pytest.raises(JobError, match=f"{said} has the profile {meant}$" if meant else "transformers$"):
        job(framework=said)


def test_nanotron_keeps_the_activated_gate_and_if_told_gathered_inputs() -> None:
    """Per token: one more of the 14,336 of a gate; and 7/8 of two hidden states that tp=8 would share out."""
    assert kept("nanotron") - kept("megatron") == 4096 * 2 * 14336
    told = kept("nanotron", 8, conventions=(("keeps_gathered_inputs", True),))
    more = told - kept("megatron", 8)
    assert more == 4096 * 2 * (14336 // 8) + 2 * (4096 * 2 * 4096 * 7 // 8)


def test_autocast_keeps_a_cast_for_every_product_that_reads_a_norm() -> None:
    """Query, key, value, gate and up read casts of their own, 2 bytes each; a layer's input is in fp32."""
    on: dict[str, Any] = {"sharding": "ddp", "fp32_gradients": True}
    off: dict[str, Any] = {**on, "conventions": (("autocast", False),)}
    assert kept("transformers", **on) - kept("transformers", **off) == 4096 * 4096 * 2 * 5
    assert kept("transformers", recompute="full", **on) == 4096 * 4096 * 4


def test_torchtitan_keeps_every_other_product_of_a_selected_layer() -> None:
    """Input, query, value, gate, down and the result of attention with its statistic, of Llama 3 8B."""
    per_token = 2 * (4096 + 4096 + 1024 + 14336 + 4096 + 4096) + 4 * 32
    assert kept("torchtitan", recompute="selective") == 4096 * per_token
    assert kept("torchtitan", recompute="full") == kept("megatron", recompute="full")


def test_nanotron_holds_buckets_only_with_data_parallel_ranks() -> None:
    def gradients_of(dp: int) -> int:
        some = job(Layout(dp=dp), framework="nanotron")
        return bucket_bytes(some, sharding_units(some, range(32), first=True, last=True))

    assert gradients_of(1) == 0
    assert gradients_of(2) == 2 * load_model("llama3-8b").n_params


def test_logits_follow_the_framework() -> None:
    n_logits = 4096 * 128256
    assert logits_bytes(job(framework="nanotron"), 3) == n_logits * (4 * 3 + 8)
    assert logits_bytes(job(framework="megatron"), 3) == n_logits * (4 * 3 + 2)


def test_stages_by_cost_leave_the_head_its_share() -> None:
    """The head of Llama 3 8B costs as much as 2.4 of its layers."""
    sizes = [len(layers) for layers in stage_layers(job(Layout(pp=4), framework="nanotron"), 4)]
    assert sizes == [9, 9, 8, 6]
    assert [len(layers) for layers in stage_layers(job(Layout(pp=4)), 4)] == [8, 8, 8, 8]


@given(
    name=sampled_from(framework_names()),
    pp=sampled_from([1, 2, 4, 8]),
    virtual=sampled_from([1, 2]),
    sp=booleans(),
)
def test_stages_hold_every_layer_once_and_fewer_micro_batches_each(
    name: str, pp: int, virtual: int, *, sp: bool
) -> None:
    virtual = virtual if pp > 1 else 1
    schedule = "interleaved-1f1b" if virtual > 1 else "1f1b"
    stages: Any = {"schedule": schedule, "virtual_stages": virtual}
    some = job(Layout(pp=pp), framework=name, sequence_parallel=sp, **stages)
    layers = stage_layers(some, pp)
    assert [layer for stage in layers for layer in stage] == list(range(32))
    held = [memory.in_flight for memory in rank_memories(some)]
    assert held == sorted(held, reverse=True)
    assert 1 <= held[-1] <= held[0] <= some.n_microbatches * virtual


def test_a_profile_that_is_not_one_is_refused() -> None:
    with pytest.raises(JobError, match="selective"):
        framework.Framework(name="x", matches=(), selective="some")


@given(
    name=sampled_from(framework_names()),
    tp=sampled_from([1, 2]),
    micro_batch=sampled_from([1, 4]),
    in_flight=sampled_from([1, 2, 8]),
)
def test_recomputation_never_raises_the_peak_of_any_framework(
    name: str, tp: int, micro_batch: int, in_flight: int
) -> None:
    some = job(Layout(tp=tp), framework=name, micro_batch=micro_batch)
    peaks = [
        stage_memory(
            replace(some, recompute=recompute), range(32), 0, in_flight, first=True, last=True
        ).peak_bytes
        for recompute in ("none", "selective", "full")
    ]
    assert peaks == sorted(peaks, reverse=True)


def test_the_page_explains_every_convention() -> None:
    page = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
    assert [key for key in OVERRIDABLE if f"`{key}`" not in page] == []
