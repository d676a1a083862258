"""One job has one answer: what each verb says of it is what every other verb says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from one_answer import QUESTIONS, differ, flags, of_the_best, of_the_layout, said, whole

from foretrace.simulator.config import job_from

pytest.importorskip("numba")


@pytest.mark.parametrize("asked", QUESTIONS[:6], ids=lambda job: f"{job['model']}-{job['gpus']}")
def test_every_verb_says_the_same_of_one_job(asked: dict[str, Any]) -> None:
    for figure, values in of_the_layout(asked).items():
        assert not differ(values), (figure, values)


@pytest.mark.parametrize("more", [{}, {"framework": "nemo"}], ids=["open", "nemo"])
def test_a_file_of_a_search_is_the_job_that_it_found(more: dict[str, str], tmp_path: Path) -> None:
    """What a framework decides is decided, and what nobody said is as open as it was."""
    file = str(tmp_path / "run.toml")
    asked = {**whole(QUESTIONS[1]), **more}
    (found,) = said("search", *flags(asked), "--top", "1", "--output", file)["layouts"]
    for told in (said("simulate", file), said("simulate", *flags(asked))):
        assert found["step_time_s"] == pytest.approx(told["step_time_s"])
        assert found["step_time_interval_s"] == pytest.approx(told["intervals"]["step_time_s"])


def test_the_best_layout_is_one_whoever_looks_for_it() -> None:
    assert not differ(of_the_best(QUESTIONS[0]))


def test_advice_is_what_a_search_finds() -> None:
    """The layout that advice calls the fastest is the first that a search lists, in every figure."""
    job = {"model": "mixtral-8x7b", "cluster": "dgx-h100", "gpus": 16, "seq_len": 4096, "global_batch": 32}
    question = flags({**job, "micro_batch": 1, "tokens": "1T"})
    listed = said("search", *question)
    advised = said("advise", *question)
    last = next(rung for rung in advised["ladder"] if rung["way"] == "search")
    alone = {"tied", "name"}
    assert {key: value for key, value in last["figures"].items() if key not in alone} == {
        key: value for key, value in listed["layouts"][0].items() if key not in alone
    }
    assert advised["conventions"]["framework"] == listed["conventions"]["framework"]
    fastest = min(
        rung["figures"]["step_time_s"] for rung in advised["ladder"] if rung["trains_all"] and rung["fits"]
    )
    assert fastest == pytest.approx(listed["layouts"][0]["step_time_s"])
    for rung in advised["ladder"]:
        if rung["fits"]:
            assert rung["figures"]["step_time_s"] == pytest.approx(rung["numbers"]["step_time_s"])
            assert job_from(rung["job"]).layout.world_size == 16
