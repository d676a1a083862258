"""``foretrace memory``, what it proposes, and the memory of offloading, HSDP, LoRA and QLoRA."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis.strategies import builds, integers, sampled_from

from foretrace.cli import main
from foretrace.simulator.config import job_from
from foretrace.simulator.errors import JobError
from foretrace.simulator.job import OFFLOADS, RECOMPUTES, Job
from foretrace.simulator.memory.ranks import fits, peak_bytes
from foretrace.simulator.memory.remedies import changes
from foretrace.simulator.memory.stage import StageMemory, stage_memory
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.sharding import SHARDINGS
from foretrace.simulator.workload.lora import NF4_BITS
from foretrace.topologies.catalog import load_cluster
from foretrace.traces.layout import Layout

LLAMA_70B = (
    "memory --model llama3-70b --cluster dgx-h100 --gpus 64 --tp 8 --global-batch 256 --micro-batch 2 "
    "--seq-len 8192"
).split()


def job(layout: Layout | None = None, model: str = "llama2-7b", **settings: object) -> Job:
    layout = layout or Layout()
    return Job(
        model=load_model(model),
        cluster=load_cluster("dgx-a100", layout.world_size),
        layout=layout,
        global_batch=layout.dp * 4,
        **settings,  # type: ignore[arg-type]
    )


def memory_of(some: Job) -> StageMemory:
    return stage_memory(some, range(some.model.n_layers), 0, 1, first=True, last=True)


jobs = builds(
    lambda dp, tp, sharding, recompute, micro_batch: job(
        Layout(dp=dp, tp=tp), sharding=sharding, recompute=recompute, micro_batch=micro_batch
    ),
    sampled_from([1, 2, 8]),
    sampled_from([1, 2]),
    sampled_from(sorted(SHARDINGS)),
    sampled_from(RECOMPUTES),
    sampled_from([1, 2, 4]),
)


@given(some=jobs, offload=sampled_from(OFFLOADS))
def test_what_leaves_the_device_is_on_the_host(some: Job, offload: str) -> None:
    whole, parted = memory_of(some), memory_of(replace(some, offload=offload))
    assert parted.peak_bytes + parted.host_bytes == whole.peak_bytes
    assert parted.host_bytes >= 0
    assert all(parted.items[name] <= size for name, size in whole.items.items())


def test_offloading_all_leaves_what_is_computed_with() -> None:
    memory = memory_of(job(sharding="zero3", offload="all"))
    assert [memory.items[name] for name in ("parameters", "gradients", "optimizer")] == [0, 0, 0]
    assert memory.items["gathered"] > 0
    some = job(sharding="zero3")  # of a layer that is used, and of one on its way
    of_a_layer = memory_of(some).activation_bytes_per_microbatch // some.model.n_layers
    assert memory.items["activations"] == 2 * of_a_layer


def test_parameters_that_are_not_sharded_stay() -> None:
    assert memory_of(job(offload="all")).items["parameters"] == 2 * load_model("llama2-7b").n_params


@pytest.mark.parametrize(("shard_ranks", "ranks"), [(0, 16), (16, 16), (8, 8), (2, 2)])
def test_hybrid_sharding_spreads_one_copy_over_fewer_ranks(shard_ranks: int, ranks: int) -> None:
    some = job(Layout(dp=16), sharding="fsdp", shard_ranks=shard_ranks)
    assert memory_of(some).items["optimizer"] == 8 * -(-load_model("llama2-7b").n_params // ranks)


def test_adapters_alone_have_gradients_and_optimizer_states() -> None:
    """Rank 16 on q k v (fused), o, gate and up (fused), down of 32 layers; the base in 16 bit."""
    model = load_model("llama2-7b")
    adapters = 32 * 16 * ((4096 + 3 * 4096) + 2 * 4096 + (4096 + 2 * 11008) + (11008 + 4096))
    items = memory_of(job(sharding="ddp", lora_rank=16)).items
    assert items["parameters"] == 2 * (model.n_params + adapters)
    assert (items["gradients"], items["optimizer"]) == (4 * adapters, 12 * adapters)


def test_a_quantised_base_takes_little_more_than_four_bits() -> None:
    model = load_model("llama2-7b")
    matrices = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    wanted = 2 * (model.n_params - matrices) + matrices * NF4_BITS / 8
    half = memory_of(job(sharding="ddp", lora_rank=1)).items["parameters"]
    quarter = memory_of(job(sharding="ddp", lora_rank=1, quantized_base=True)).items["parameters"]
    assert half - quarter == pytest.approx(2 * model.n_params - wanted, rel=1e-6)


def test_the_seven_billion_of_qlora_fit_into_eight_gigabytes() -> None:
    """pytorch/torchtune's README measures 7.4 GiB (7.95 GB) for QLoRA of Llama 3.1 8B on one RTX 4090."""
    some = job(lora_rank=8, quantized_base=True, recompute="full", sharding="ddp")
    assert memory_of(some).peak_bytes == pytest.approx(7.95e9, rel=0.15)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"offload": "disk"}, "offload='disk'"),
        ({"framework": "keras"}, "framework='keras'"),
        ({"quantized_base": True}, "lora_rank"),
        ({"lora_rank": -1}, "lora_rank=-1: give a number from 0 on"),
        ({"recompute_every": 0, "recompute": "full"}, "recompute_every=0: give a number from 1 on"),
        ({"checkpoint_every": 1, "checkpoint_bytes_per_s": float("nan")}, "checkpoint_bytes_per_s=nan"),
        ({"layout": Layout(dp=8), "shard_ranks": 3}, "does not divide"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(JobError, match=message):
        job(**settings)  # type: ignore[arg-type]


@given(some=jobs)
def test_every_change_needs_less_and_every_remedy_fits(some: Job) -> None:
    before = peak_bytes(some)
    for change in changes(some):
        assert change.peak_bytes == peak_bytes(change.job) < before
    limit = some.cluster.device.memory_bytes
    assert all(fits(one.job) == (one.peak_bytes <= limit) for one in changes(some))


@pytest.mark.parametrize(("recompute", "sharding"), [*zip(cycle(RECOMPUTES), SHARDINGS, strict=False)])
def test_every_setting_that_keeps_less_is_offered_and_none_that_keeps_more(
    recompute: str, sharding: str
) -> None:
    some = job(Layout(dp=8), recompute=recompute, sharding=sharding)
    found = [change.job for change in changes(some)]
    for own, kinds, offered in (
        (recompute, RECOMPUTES, [one.recompute for one in found]),
        (sharding, tuple(SHARDINGS), [one.sharding for one in found]),
    ):
        assert {*offered} - {own} == {*kinds[kinds.index(own) + 1 :]}


@given(dp=sampled_from([2, 4, 8]), micro_batch=integers(1, 4))
def test_other_layouts_fill_the_same_gpus(dp: int, micro_batch: int) -> None:
    some = job(Layout(dp=dp), micro_batch=1 if micro_batch == 3 else micro_batch)
    assert all(change.job.layout.world_size == dp for change in changes(some))


def test_the_verb_says_what_does_not_fit_and_what_would() -> None:
    run = CliRunner().invoke(main, LLAMA_70B)
    assert run.exit_code == 0
    assert "does not fit" in run.output
    assert "any one of these would fit" in run.output
    assert "--sharding zero3" in run.output
    assert "activations" in run.output


def test_the_verb_prints_one_object() -> None:
    run = CliRunner().invoke(main, [*LLAMA_70B, "--json"])
    document = json.loads(run.output)
    assert not document["fits"]
    assert document["spare_bytes"] == document["memory_limit_bytes"] - document["peak_memory_bytes"] < 0
    assert document["largest"][0]["item"] == "activations"
    assert {one["change"] for one in document["would_fit"]} >= {"recompute=full", "sharding=fsdp"}
    (stage,) = document["stages"]
    assert stage["ranks"] == [0, 63]
    assert sum(stage["bytes"].values()) == document["peak_memory_bytes"]


def test_the_verb_takes_the_files_that_simulate_takes(tmp_path: Path) -> None:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
    }
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    (tmp_path / "run.toml").write_text(
        'model = "llama2-7b"\ncluster = "dgx-a100"\ngpus = 8\nseq_len = 4096\n'
    )
    paths = [str(tmp_path / "run.toml"), "--from", str(tmp_path / "ds.json")]
    shown = json.loads(CliRunner().invoke(main, ["memory", *paths, "--json"]).output)
    assert shown["name"] == "llama2-7b on 8 dgx-a100, dp8"
    (read,) = (one for one in shown["configs"] if one["tool"] == "DeepSpeed")
    assert {"zero3"} < {one["gave"] for one in read["used"]}
    assert "settings used" in CliRunner().invoke(main, ["memory", *paths]).output


@pytest.mark.parametrize(("seq_len", "is_tight"), [(4096, False), (9216, True), (10240, False)])
def test_a_job_that_leaves_no_room_for_the_allocator_is_called_tight(*, seq_len: int, is_tight: bool) -> None:
    """It fits with room to spare, it just fits, and it does not."""
    flags = ["memory", "--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "8", "--global-batch", "8"]
    flags += ["--seq-len", str(seq_len), "--sharding", "fsdp", "--framework", "torchtitan"]
    document = json.loads(CliRunner().invoke(main, [*flags, "--json"]).output)
    assert (0 <= document["spare_bytes"] < document["slack_bytes"]) == is_tight
    assert ("tight:" in CliRunner().invoke(main, flags).output) == is_tight


def test_the_verb_takes_what_only_memory_knows() -> None:
    flags = ["--lora-rank", "8", "--quantized-base", "--offload", "optimizer", "--framework", "torchtitan"]
    run = CliRunner().invoke(main, [*LLAMA_70B, "--micro-batch", "1", *flags, "--json"])
    assert json.loads(run.output)["fits"]
    wrong = CliRunner().invoke(main, [*LLAMA_70B, "--quantized-base"])
    assert wrong.exit_code == 2
    assert "lora_rank" in wrong.output


def test_experts_over_more_ranks_and_half_of_the_layers_again_are_tried() -> None:
    some = job_from({"model": "mixtral-8x7b", "cluster": "dgx-h100", "gpus": 8, "tp": 2, "global_batch": 16})
    found = {one.change: one for one in changes(some)}
    assert found["ep=2"].job.layout.ep == 2
    half, full = found["recompute=full, recompute_every=2"], found["recompute=full"]
    assert full.peak_bytes < half.peak_bytes
    again = {one.change for one in changes(half.job)}
    assert "recompute=full" in again
