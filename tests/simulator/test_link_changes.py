"""Slow and failing links as part of a run, and the record of how full links were."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers, sampled_from
from tests.simulator.predicted import simulate

from foretrace.simulator.config import job_from, job_settings
from foretrace.simulator.engine.changes import IN, OUT, Way
from foretrace.simulator.errors import EngineError, JobError, ProgramError
from foretrace.simulator.job import Job
from foretrace.simulator.network.uplinks import link_changes
from foretrace.traces.timeline import LINKS


def job(**settings: object) -> Job:
    """Return a small job on two nodes."""
    given: dict[str, object] = {
        "model": "llama2-7b",
        "cluster": "dgx-h100",
        "gpus": 16,
        "tp": 8,
        "global_batch": 4,
        **settings,
    }
    return job_from(given)


@given(
    rank=integers(0, 10**6), tier=sampled_from(["near", "far"]), left=floats(0, 1), at_us=integers(0, 10**6)
)
def test_a_change_says_rank_tier_what_is_left_and_when(rank: int, tier: str, left: float, at_us: int) -> None:
    found = link_changes(f"{rank}:{tier}:{left!r}@{at_us} us, ")
    assert [change.way for change in found] == [Way(rank, tier, IN), Way(rank, tier, OUT)]
    assert {(change.at_ns, change.capacity) for change in found} == {(1000 * at_us, left)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("3", "'3' is not rank:tier:capacity"),
        ("3:far:half", "is not rank:tier:capacity"),
        ("3:far:0.5@2", "is not rank:tier:capacity"),
        ("3:far:0.5@", "is not rank:tier:capacity"),
        ("3:up:0.5", "no tier 'up'; near and far are"),
        ("3:far:1.5", "a capacity between 0 and 1"),
    ],
)
def test_a_change_of_another_form_is_refused(text: str, says: str) -> None:
    with pytest.raises(JobError, match=says):
        link_changes(text)


def test_a_slow_nic_makes_the_step_longer_and_shows_in_the_links(tmp_path: Path) -> None:
    well, slow = (
        simulate(job(**change), engine="contended") for change in ({}, {"link_changes": "3:far:0.1"})
    )
    assert slow.summary["step_time_s"] > 1.02 * well.summary["step_time_s"]
    with pa.memory_map(str(slow.write(tmp_path / "run") / "links.arrow")) as file:
        links = pa.ipc.open_file(file).read_all()
    assert links.schema == LINKS
    assert b'"capacity": 0.1' in links.schema.metadata[b"changes"]  # a report frames when it was slow
    mine = links.filter(pa.compute.equal(links["rank"], 3))
    assert pa.compute.max(mine.filter(pa.compute.equal(mine["tier"], "far"))["used"]).as_py() <= 0.1 + 1e-9


def test_links_that_change_are_shared_without_being_asked() -> None:
    assert simulate(job(link_changes="3:far:0.5")).summary["engine"] == "contended"
    with pytest.raises(EngineError, match="but the engine is event: --engine contended"):
        simulate(job(link_changes="3:far:0.5"), engine="event")


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(JobError, match="link_changes: rank 16 is outside a world of 16"):
        simulate(job(link_changes="16:far:0.5"))


@pytest.mark.parametrize("engine", ["contended", "contended-compiled"])
def test_a_link_that_stays_down_is_named_as_what_stops_the_run(engine: str) -> None:
    with pytest.raises(ProgramError, match=r"rank 1, 9 came by .* link between them is down and does not"):
        simulate(job(link_changes="9:far:0"), engine=engine)


def test_changes_are_among_the_settings_of_a_run() -> None:
    settings = job_settings(job(link_changes="3:far:0.5"))
    assert settings["link_changes"] == "3:far:0.5"
    assert "link_changes" not in job_settings(job())


def test_both_contended_engines_give_one_timeline_when_links_and_gpus_change() -> None:
    given = job(link_changes="3:far:0.1@1ms,3:far:1@2s", stragglers="1:1.5@10ms,1:1@1s")
    found = [simulate(given, engine=name) for name in ("contended", "contended-compiled")]
    assert found[0].spans.equals(found[1].spans)
    links = [simulation.links for simulation in found]
    assert links[0] is not None
    assert links[1] is not None
    assert links[0].drop_columns("used").equals(links[1].drop_columns("used"))
    np.testing.assert_allclose(links[0]["used"], links[1]["used"], rtol=0, atol=1e-8)


def test_large_programs_share_links_on_the_compiled_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("foretrace.simulator.engine.WORTH_LOADING", 1)
    names = {
        change: simulate(job(link_changes=change)).summary["engine"] for change in ("3:far:0.5", "0:leaf:0.5")
    }
    assert names == {"3:far:0.5": "contended-compiled", "0:leaf:0.5": "contended-compiled"}


def test_the_record_of_links_says_what_happened_to_them() -> None:
    found = simulate(job(link_changes="3:far:0.1@2ms, 3:far:1@5ms"), engine="contended").links
    assert found is not None
    said = json.loads(found.schema.metadata[b"changes"])
    assert [(one["at_ns"], one["capacity"]) for one in said] == [(2e6, 0.1)] * 2 + [(5e6, 1.0)] * 2
    assert [(one["rank"], one["tier"], one["direction"]) for one in said] == [
        (3, "far", "in"),
        (3, "far", "out"),
    ] * 2
    assert found.schema.equals(LINKS)
    free = simulate(job(), engine="contended").links
    assert free is not None
    assert free.schema.metadata is None
