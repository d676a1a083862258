"""Layers of stages, overlapped messages, freed outputs: each changes time or memory as it should."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulator.predicted import simulate

from foretrace.cli import main
from foretrace.simulator.builder.stage_layers import ENDS, split_layers
from foretrace.simulator.builder.stages import stage_layers
from foretrace.simulator.config import job_from, job_settings, read_config, write_config
from foretrace.simulator.errors import ConfigError, JobError
from foretrace.simulator.job import Job
from foretrace.simulator.memory.activations import layer_input_bytes
from foretrace.simulator.memory.ranks import rank_memories


def make_job(**given: Any) -> Job:
    """Return a job of 32 layers on a pipeline of 4; anything may be given."""
    base = {"model": "llama2-7b", "cluster": "dgx-h100", "pp": 4, "global_batch": 16, "seq_len": 2048}
    return job_from({**base, **given})


def step_s(**given: Any) -> float:
    found: float = simulate(make_job(**given)).summary["step_time_s"]
    return found


@settings(deadline=None)
@given(n_layers=st.integers(1, 200), n_stages=st.integers(1, 64), ends=st.sampled_from(ENDS))
def test_every_layer_is_in_one_stage_and_stages_differ_by_one(
    n_layers: int, n_stages: int, ends: str
) -> None:
    counted = (ends in ("embedding", "both")) + (ends in ("head", "both"))
    if n_stages > n_layers + counted:
        with pytest.raises(JobError, match=f"{n_stages} pipeline stages for {n_layers + counted} layers"):
            split_layers(n_layers, n_stages, ends)
        return
    found = split_layers(n_layers, n_stages, ends)
    assert list(chain.from_iterable(found)) == list(range(n_layers))
    sizes = [len(layers) for layers in found]
    sizes[0] += ends in ("embedding", "both")
    sizes[-1] += ends in ("head", "both")
    assert max(sizes) - min(sizes) <= 1


def test_126_layers_on_8_stages_by_every_way_to_say_it(tmp_path: Path) -> None:
    """Llama 3 405B as published, by default, by a list in a file and by a flag."""
    wanted = [15, 16, 16, 16, 16, 16, 16, 15]
    given = {"model": "llama3-405b", "pp": 8, "tp": 8}
    assert [len(held) for held in stage_layers(make_job(**given), 8)] == wanted
    listed = make_job(**given, layers_per_stage=wanted)
    assert stage_layers(listed, 8) == stage_layers(make_job(**given), 8)
    (tmp_path / "run.toml").write_text(write_config(job_settings(listed)), encoding="utf-8")
    assert "layers_per_stage = [15, 16, 16, 16, 16, 16, 16, 15]" in (tmp_path / "run.toml").read_text()
    assert job_from(read_config(tmp_path / "run.toml")) == listed
    assert job_from({**job_settings(listed), "layers_per_stage": "15,16,16,16,16,16,16,15"}) == listed


def test_simulate_and_memory_agree_on_the_stages_of_a_list(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(write_config(job_settings(make_job())), encoding="utf-8")
    found = []
    for verb in ("simulate", "memory"):
        arguments = [
            verb,
            "--config",
            str(tmp_path / "run.toml"),
            "--layers-per-stage",
            "0,12,12,8",
            "--json",
        ]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.output))
    simulated = found[0]
    assert [stage["layers"] for stage in simulated["stages"]] == [0, 12, 12, 8]
    peaks = [[stage["peak_bytes"] for stage in one["stages"]] for one in found]
    assert peaks[0] == peaks[1]


def test_the_longest_stage_sets_the_pace_and_memory_follows_its_layers() -> None:
    """With many micro-batches, a stage with twice the layers takes nearly twice as long as equal ones."""
    even, uneven = ({"layers_per_stage": sizes, "global_batch": 64} for sizes in ((8,) * 4, (4, 16, 8, 4)))
    assert 1.6 < step_s(**uneven) / step_s(**even) < 2.0
    kept = [memory.kept_bytes[memory.pp] for memory in rank_memories(make_job(**uneven))]
    assert kept[1] == pytest.approx(2 * kept[2], rel=0.01)


def test_stages_that_shares_of_the_cost_leave_empty_are_run_and_spoken_of() -> None:
    """nanotron runs them: 65 published runs have such stages. Whoever shares out evenly has none."""
    found = simulate(
        make_job(layers_per_stage=(), framework="nanotron", schedule="looped-bfs", virtual_stages=16)
    )
    (warning,) = [line for line in found.info.warnings if "no layer" in line]
    assert warning == "stages 32-62 hold no layer: nanotron deals layers out by their cost"
    assert found.summary["step_time_s"] > 0


def test_counting_the_head_as_a_layer_levels_the_stages() -> None:
    """The head of Llama 3 8B costs more than a layer; Megatron-LM's flag is there for this."""
    given = {"model": "llama3-8b", "global_batch": 64, "pp": 4, "layers_per_stage": ()}
    sizes = {ends: [len(s) for s in stage_layers(make_job(**given, counted_ends=ends), 4)] for ends in ENDS}
    assert sizes["none"] == [8, 8, 8, 8]
    assert sizes["head"] == [8, 8, 9, 7]
    assert sizes["both"] == [7, 9, 9, 7]
    assert step_s(**given, counted_ends="head") < step_s(**given)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-h1", "zb-v"])
def test_overlapped_messages_never_make_a_step_longer(schedule: str) -> None:
    """Across nodes, where a message takes long; what a stage computes and keeps stays the same."""
    given = {"schedule": schedule, "tp": 8, "gpus": 32, "seq_len": 4096}
    slow, fast = (simulate(make_job(**given, overlap_p2p=on)).summary for on in (False, True))
    assert fast["step_time_s"] < slow["step_time_s"]
    assert fast["peak_memory_bytes"] == slow["peak_memory_bytes"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zb-v"])
def test_outputs_that_are_kept_cost_their_size_for_every_micro_batch_in_flight(schedule: str) -> None:
    freed, kept = (make_job(schedule=schedule, deallocate_outputs=on) for on in (True, False))
    for before, after in zip(rank_memories(freed), rank_memories(kept), strict=True):
        last = 2 * 4 - 1 if len(before.stages) > 1 else 3
        sends = sum(stage != last for stage in before.stages)
        more = after.peak_bytes - before.peak_bytes
        assert (more > 0) == (sends > 0)
        assert more <= before.in_flight * layer_input_bytes(freed)
        if sends == len(before.stages):
            assert more == before.in_flight * layer_input_bytes(freed)
    assert simulate(freed).summary["step_time_s"] == simulate(kept).summary["step_time_s"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers_per_stage": (8, 8, 8, 7)}, "8, 8, 8, 7 are 31 layers, but llama2-7b has 32: 1 too few"),
        ({"layers_per_stage": (8, 8, 8, 9)}, "1 too many"),
        ({"layers_per_stage": (16, 0, 8, 8)}, "at least 1 each; the first and the last may have 0"),
        ({"layers_per_stage": (16, 16)}, "lists 2 stages, but schedule 1f1b has 4: 1 on each of 4 pipeline"),
        ({"layers_per_stage": (8,) * 4, "schedule": "zb-v"}, "lists 4 stages, but schedule zb-v has 8: 2 on"),
        ({"counted_ends": "tail"}, "counted_ends='tail': one of none, embedding, head, both"),
    ],
)
def test_layers_that_do_not_fit_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        simulate(make_job(**given))


def test_a_list_that_is_not_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="layers_per_stage = '8,x': must be a list of whole numbers"):
        make_job(layers_per_stage="8,x")
