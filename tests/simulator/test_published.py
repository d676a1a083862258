"""Presets that carry the recipe of their published run, and the settings that these runs need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.simulator.predicted import simulate

from foretrace.simulator.config import job_from, job_settings
from foretrace.simulator.job import Job
from foretrace.simulator.memory.activations import kept_bytes
from foretrace.simulator.workload.micro_batch import layer_blocks
from foretrace.simulator.workload.ops import Comm

SAID: Mapping[str, Any] = {"model": "deepseek-v3", "cluster": "hgx-h800", "gpus": 2048}


def _with(job: Job, **conventions: object) -> Job:
    return replace(job, conventions=tuple({**dict(job.conventions), **conventions}.items()))


def _step_s(job: Job) -> float:
    return float(simulate(job, only_figures=True).summary["step_time_s"])


def _exchanges(job: Job, phase: str) -> list[int]:
    _, moe = layer_blocks(job, job.model.n_layers - 1)
    return [op.size_bytes for op in moe.phases[phase] if isinstance(op, Comm) and op.axis == "ep"]


def test_deepseek_v3_as_published_fits_and_takes_its_time() -> None:
    """14.8 T tokens in 2.664 M hours of H800, steps of 15,360 x 4,096 tokens: 19.9 s (arXiv:2412.19437)."""
    job = job_from(SAID)
    summary = simulate(job, only_figures=True).summary
    assert summary["fits"]
    assert summary["step_time_s"] == pytest.approx(19.9, rel=0.05)
    assert any("as published" in line for line in summary["rests_on"])
    again = job_from(job_settings(job))
    assert again == job


def test_a_run_that_says_more_or_has_other_gpus_is_not_the_published_one() -> None:
    assert not job_from({**SAID, "gpus": 1024, "global_batch": 1024}).published
    own = job_from({**SAID, "pp": 8, "ep": 64, "global_batch": 4096})
    assert (own.published, own.schedule, own.optimizer) == ("", "1f1b", "adamw")


def test_tokens_go_to_experts_in_8_bits_and_come_back_in_16() -> None:
    """A byte and an fp32 scale for 128: 33/64 of 16 bits; gradients of results go to experts too."""
    narrow = job_from(SAID)
    wide = _with(narrow, dispatch_fp8=False)
    for phase, at in (("forward", 0), ("backward", 0)):
        less, more = _exchanges(narrow, phase), _exchanges(wide, phase)
        assert less[at] / more[at] == pytest.approx(33 / 64)
        assert less[1 - at] == more[1 - at]


def test_each_setting_of_dispatch_acts_in_its_direction() -> None:
    job = job_from({**SAID, "gpus": 256, "pp": 4, "ep": 64, "global_batch": 512, "schedule": "dualpipe"})
    job = _with(replace(job, fp8=True, recipe="blockwise"), expert_dispatch="once")
    base = _step_s(job)
    assert _step_s(_with(job, dispatch_fp8=True)) < base
    assert _step_s(replace(job, model=replace(job.model, route_nodes=2))) < base
    assert _step_s(_with(job, dispatch_processors=20)) > base


def test_inputs_of_activations_in_8_bits_are_half_as_large() -> None:
    job = job_from(SAID)
    layer = job.model.n_layers - 1
    saved = kept_bytes(_with(job, fp8_activation_inputs=False), layer) - kept_bytes(job, layer)
    tokens = job.seq_len
    assert saved == 2 * tokens * (8 * 2048 + 2048)
