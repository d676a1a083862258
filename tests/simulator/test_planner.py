"""The what-if page says what the command says, and every mistake in one line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretrace.simulator.config import job_from
from foretrace.simulator.simulate import simulate
from foretrace.simulator.what_if.fitting import ways_to_fit
from foretrace.simulator.what_if.planner import DEFAULTS, Planned, Planner, choices, words_of
from foretrace.topologies.catalog import load_cluster
from foretrace.traces.report.format import format_si
from foretrace.traces.serving.server import Query

SMALL = {"model": "llama3-8b", "gpus": "8", "tp": "2", "pp": "2", "global_batch": "8", "seq_len": "2048"}


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner()


def figures(planner: Planner, **settings: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(planner.routes()["/plan/figures"](Query({**SMALL, **settings})).body)
    return found


def picture(planner: Planner, **settings: str) -> dict[str, Any]:
    body = planner.routes()["/plan/picture"](Query({**SMALL, **settings})).body
    found: dict[str, Any] = json.loads(body[4 : 4 + int.from_bytes(body[:4], "little")])
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_figures_are_those_of_simulate(planner: Planner, schedule: str, recompute: str) -> None:
    found = figures(planner, schedule=schedule, recompute=recompute)
    settings: dict[str, Any] = {
        "model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "tp": 2, "pp": 2, "global_batch": 8,
        "seq_len": 2048, "schedule": schedule, "recompute": recompute,
    }  # fmt: skip
    known = simulate(job_from(settings)).summary
    assert found["summary"] == {key: known[key] for key in found["summary"]}
    assert found["dp"] == 2
    (step,) = picture(planner, schedule=schedule, recompute=recompute)["runs"][0]["steps"]
    assert max(row["window_ns"] for row in step["rows"]) == pytest.approx(known["step_time_s"] * 1e9)


def test_the_price_of_a_token_is_that_of_the_gpus(planner: Planner) -> None:
    found = figures(planner, price="2.5")
    (cost,) = (one for one in found["headline"] if one["name"] == "Cost")
    per_billion = 8 * 2.5 / 3600 / found["summary"]["tokens_per_s"] * 1e9
    assert cost["value"] == f"${per_billion:,.0f}"


def test_a_plan_is_held_against_the_pinned_one(planner: Planner) -> None:
    pinned = "&".join(f"{name}={value}" for name, value in SMALL.items())
    found = figures(planner, a=pinned, recompute="full")
    step = found["headline"][0]
    alone, before = figures(planner, recompute="full"), figures(planner)
    change = alone["summary"]["step_time_s"] / before["summary"]["step_time_s"] - 1
    assert change > 0
    assert step["was"] == f"A {before['headline'][0]['value']}, {change:+.1%}".replace("%", " %")
    assert step["tone"] == "bad"
    assert [run["label"] for run in picture(planner, a=pinned, recompute="full")["runs"]] == ["A", "B"]
    assert "was" not in alone["headline"][0]


TOO_LARGE: tuple[dict[str, str], ...] = (
    {"model": "llama3-8b", "gpus": "8", "tp": "1", "pp": "1", "seq_len": "8192"},
    {"model": "llama3-70b", "gpus": "16", "tp": "4", "pp": "2", "sharding": "ddp"},  # changes together
    {"model": "llama3-70b", "gpus": "8", "tp": "8", "pp": "1"},  # more GPUs
    {"model": "llama3-70b", "gpus": "8", "tp": "1", "pp": "1", "global_batch": "64"},  # both
    {"model": "mixtral-8x7b", "gpus": "16", "tp": "2", "pp": "1"},
)


def test_what_a_node_does_not_hold_is_said() -> None:
    cluster = replace(load_cluster("dgx-h100", 8), node_memory_bytes=1)
    asked = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "sharding": "fsdp", "global_batch": 8}
    job = replace(job_from({**asked, "offload": "optimizer"}), cluster=cluster)
    made = simulate(job)
    misfit = words_of(Planned(job=job, simulation=made, run=made.run, price=None), None)["misfit"]
    assert misfit is not None
    assert "in the memory of a node, of 1 B" in misfit["text"]


@pytest.mark.parametrize("large", TOO_LARGE)
def test_what_does_not_fit_says_what_would_and_that_is_true(planner: Planner, large: dict[str, str]) -> None:
    found = figures(planner, **large)
    assert not found["summary"]["fits"]
    assert found["misfit"]["text"].startswith("does not fit: ")
    assert found["misfit"]["remedies"]
    for remedy in found["misfit"]["remedies"]:
        settled = figures(planner, **{**large, **remedy["settings"]})
        assert settled["summary"]["fits"], remedy
        assert remedy["peak"] == format_si(settled["summary"]["peak_memory_bytes"], "B"), remedy
    assert figures(planner)["misfit"] is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tp": "3"}, "2 or 4 would work"),
        ({"pp": "3"}, "GPUs cannot be filled"),
        ({"global_batch": "7"}, "not a multiple"),
        ({"model": "../model.json"}, "one of"),
        ({"cluster": "../x.toml"}, "one of"),
        ({"schedule": "../plan.csv"}, "one of"),
        ({"gpus": "-8"}, "whole number"),
        ({"gpus": "1e3"}, "whole number"),
        ({"gpus": "32768"}, "up to 16384"),
        ({"price": "free"}, "USD per GPU-hour"),
        ({"price": "nan"}, "USD per GPU-hour"),
        ({"global_batch": "100000"}, "larger micro_batch"),
        ({"a": "tp=3"}, "2 or 4 would work"),
        ({"tp": "²"}, "whole number"),
    ],
)
def test_a_mistake_is_one_line_on_both_pages(planner: Planner, settings: dict[str, str], said: str) -> None:
    for answer in (figures(planner, **settings), picture(planner, **settings)):
        assert set(answer) <= {"error", "ways"}
        assert said in answer["error"]
        assert "\n" not in answer["error"]
    ways = figures(planner, **settings)["ways"]
    far = {"gpus": "32768"}, {"global_batch": "100000"}  # no single change near them is possible
    assert bool(ways) == ("a" not in settings and settings not in far)
    for way in ways[:2]:
        assert "error" not in figures(planner, **{**settings, **way}), way


def test_what_was_worked_out_is_kept_and_forgotten_in_time(planner: Planner) -> None:
    first = planner.plan(SMALL)
    assert planner.plan({**SMALL, "unknown": "x"}) is first
    for seq_len in range(1024, 1024 + 16 * 64, 64):
        planner.plan({**SMALL, "model": "bert-large", "tp": "1", "pp": "1", "seq_len": str(seq_len)})
    assert planner.plan(SMALL) is not first


def test_the_choices_hold_the_defaults() -> None:
    offered = choices()
    for name, known in offered["names"].items():
        assert DEFAULTS[name] in known
    assert set(offered["prices"]) <= set(offered["names"]["cluster"])


def test_more_gpus_are_of_the_machine_itself(tmp_path: Path) -> None:
    """A file that says what one of the catalogue does is offered the same, whatever it is called."""
    file = tmp_path / "mine.toml"
    file.write_text('base = "dgx-h100"')
    settings = {"model": "llama3-70b", "gpus": 8, "tp": 8, "global_batch": 32, "seq_len": 8192}
    known, own = (ways_to_fit(job_from({**settings, "cluster": name})) for name in ("dgx-h100", str(file)))
    assert own == known
    assert any("gpus" in way.settings for way in known)
