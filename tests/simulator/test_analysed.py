"""Analysis of a simulated run returns what the simulator put in."""

from dataclasses import replace

import numpy as np
import pyarrow.compute as pc
import pytest
from tests.simulator.predicted import simulate

from foretrace.simulator.config import job_from
from foretrace.simulator.job import Job
from foretrace.simulator.network.cost import Network
from foretrace.simulator.variation import Variation
from foretrace.traces.analysis.collectives import bandwidths, bus_factor, collectives, stragglers
from foretrace.traces.analysis.critical_path import critical_path
from foretrace.traces.analysis.everything import analysis
from foretrace.traces.analysis.metrics import summarize
from foretrace.traces.analysis.roots import held_up, roots
from foretrace.traces.columns import BoolArray
from foretrace.traces.compare import compare
from foretrace.traces.replay.waves import Graph
from foretrace.traces.replay.whatif import scaled, what_if
from foretrace.traces.replay.work import Parts, replay
from foretrace.traces.run import Part, Run

LARGE = {"model": "llama3-8b", "cluster": "dgx-h100", "seq_len": 8192, "micro_batch": 1}


def job_of(**changes: object) -> Job:
    """Return a job in which devices, not hosts, set the pace, with some settings changed."""
    return job_from({**LARGE, "global_batch": 8, **changes})


@pytest.mark.parametrize("rank", [0, 5])
def test_the_straggler_that_was_put_in_is_the_one_that_is_found(rank: int) -> None:
    """Whoever it is, it is named first; others wait for it at least as long, some of it while computing."""
    even = job_of(dp=8, sharding="ddp")
    uneven = replace(even, variation=Variation(stragglers=f"{rank}:1.5"))
    runs = [simulate(job, folded=False) for job in (even, uneven)]
    first = stragglers(runs[1].run)[0]
    assert first.rank == rank
    slower_s = runs[1].summary["step_time_s"] - runs[0].summary["step_time_s"]
    assert first.caused_ns / 1e9 / 7 > 0.95 * slower_s > 0


def test_bandwidths_are_those_of_the_network() -> None:
    """Transfer time and bus bandwidth of every size, to the nanosecond that times are rounded to."""
    job = job_of(dp=8, sharding="ddp")
    run = simulate(job, folded=False).run
    network = Network(job.cluster)
    rows = collectives(run).to_pylist()
    assert rows
    for row in rows:
        if row["kind"] in {"send", "recv"}:
            continue
        cost = network.collective(row["kind"], row["size_bytes"], range(8))
        taken_ns = cost.latency_ns + cost.wire_ns
        assert row["transfer_ns"] == pytest.approx(taken_ns, abs=2)
        if row["size_bytes"] > 1 << 20:
            expected = row["size_bytes"] * bus_factor(row["kind"], 8) / (taken_ns / 1e9)
            assert row["busbw_bytes_per_s"] == pytest.approx(expected, rel=1e-3)
    for row in bandwidths(run):
        if row["share_of_limit"] is not None and row["size_bytes"] > 1 << 20:
            assert 0 < row["share_of_limit"] < 1.2  # switches that reduce carry a little more than a ring


@pytest.mark.parametrize("changes", [{"pp": 2, "dp": 2}, {"tp": 4}, {"dp": 4, "sharding": "fsdp"}])
def test_the_critical_path_is_the_makespan(changes: dict[str, object]) -> None:
    """And what is never waited for is not on it."""
    run = simulate(job_of(**changes)).run
    spans = run.spans()
    start = spans["start_ns"].to_numpy()
    assert critical_path(run, 0).length_ns == int(
        np.max(start + spans["duration_ns"].to_numpy()) - start.min()
    )


def test_a_faster_link_is_the_cause_that_compare_finds() -> None:
    """Two simulations that differ in one thing differ in one cause."""
    slow, fast = job_of(tp=4), job_of(tp=4)
    fast = replace(
        fast,
        cluster=replace(fast.cluster, transfer_factors={"near.others.wire": 0.5, "near.others.latency": 0.5}),
    )
    found = compare(simulate(slow).run, simulate(fast).run)
    moved = {cause.name: cause.difference_ns for cause in found.details if cause.difference_ns}
    by_tp = sum(ns for name, ns in moved.items() if name.startswith("exposed:tp"))
    assert by_tp < 0
    assert abs(by_tp) > 0.8 * sum(map(abs, moved.values()))


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        ({"dp": 8, "sharding": "ddp"}, 5),
        ({"dp": 8, "sharding": "fsdp"}, 2),
        ({"tp": 4, "dp": 2}, 6),
        ({"pp": 4, "global_batch": 16}, 1),
        ({"pp": 2, "tp": 2, "dp": 2}, 3),
        ({"pp": 4, "dp": 2, "schedule": "interleaved-1f1b", "virtual_stages": 2, "model": "llama2-7b"}, 2),
    ],
    ids=lambda value: "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else None,
)
def test_the_straggler_is_the_root_of_the_waiting(layout: dict[str, object], rank: int) -> None:
    """Whatever waits for whom along whichever axes: the first to be named is slow, and by how much."""
    job = replace(job_of(**layout), variation=Variation(stragglers=f"{rank}:1.4"))
    run = simulate(job, folded=False).run
    found = roots(run)
    assert found[0].rank == rank
    assert found[0].by_cause["compute"] > 0.9 * found[0].caused_ns
    assert held_up(run)[0].text.startswith(f"rank {rank} computes 1.")


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 4, "global_batch": 16},
        {"pp": 2, "tp": 2, "dp": 2},
        {"pp": 4, "schedule": "interleaved-1f1b", "virtual_stages": 2},
        {"pp": 4, "schedule": "zb-h1"},
    ],
    ids=lambda layout: str(layout.get("schedule", len(layout))),
)
def test_a_pipeline_played_again_follows_the_rules_that_made_it(layout: dict[str, object]) -> None:
    """Without the recorded delays only dependencies are left: those of the simulator, to 1 %."""
    job = job_of(**layout)
    found = what_if(simulate(job, folded=False).run)
    assert found.delay_slowdown == pytest.approx(1.0, abs=0.01)
    slow = replace(job, variation=Variation(stragglers="1:1.4"))
    run = simulate(slow, folded=False).run
    uneven = what_if(run)
    assert uneven.delay_slowdown == pytest.approx(1.0, abs=0.01)
    assert next(iter(uneven.by_worker)) == 1
    assert scaled(run, {"forward": 1.0})[0] == pytest.approx(uneven.step_time_s, rel=1e-9)


def test_a_replay_with_faster_forward_passes_is_what_the_simulator_says() -> None:
    """Stragglers of factor 0.5 everywhere: all compute in half the time, played again or simulated."""
    job = job_of(pp=4, global_batch=16)
    run = simulate(job, folded=False).run
    half = replace(job, variation=Variation(stragglers=",".join(f"{rank}:0.5" for rank in range(4))))
    factors = dict.fromkeys(("forward", "backward", "optimizer"), 0.5)
    expected = simulate(half, folded=False).summary["step_time_s"]
    assert scaled(run, factors)[0] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("stragglers", ["", "3:1.25,6:1.5"])
@pytest.mark.parametrize("layout", [{"pp": 2, "tp": 2, "dp": 4}, {"pp": 4, "dp": 2, "tp": 2}])
def test_ranks_that_are_told_to_be_alike_change_no_figure(
    layout: dict[str, int], stragglers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every figure is the same, to the last digit, if each rank is read, joined and played by itself."""
    job = job_of(**{**LARGE, "model": "gpt2", "seq_len": 1024, "global_batch": 16}, **layout)
    job = replace(job, variation=Variation(stragglers=stragglers))
    run = simulate(job, folded=False).run
    spans = run.spans()
    parts = {rank: spans.filter(pc.equal(spans["rank"], rank)).combine_chunks() for rank in run.stored_ranks}

    def part(rank: int) -> Part:
        return Part(rank, lambda: parts[rank])

    def opened() -> Run:
        return Run("made", run.info, [part(rank) for rank in parts], run.memory(), ())

    alike = opened()
    together = {**summarize(alike), **analysis(alike)}
    n_played = len(set(replay(alike).work.rank.tolist()))
    monkeypatch.setattr(Run, "_shared", lambda _self, _rank, table: table)
    apart = opened()
    assert {**summarize(apart), **analysis(apart)} == together
    assert len(set(replay(apart).work.rank.tolist())) == len(parts)
    assert (n_played == layout["pp"]) is not bool(stragglers)


@pytest.mark.parametrize("layout", [{"pp": 2, "tp": 2, "dp": 2}, {"pp": 4, "tp": 2, "schedule": "zb-h1"}])
def test_ranks_beside_each_other_play_as_they_do_in_one_graph(layout: dict[str, object]) -> None:
    """Every rank is as slow as no other: each is played by itself, or as a column of its form."""
    slow = Variation(stragglers=",".join(f"{rank}:{1 + rank / 50}" for rank in range(8)))
    run = simulate(replace(job_of(**layout), variation=slow), folded=False).run
    played = replay(run)
    rank, actual = played.work.rank, np.maximum(played.work.work_ns, 0).astype(np.float64)
    assert len(set(rank.tolist())) == 8
    ideal = actual * 0.75
    graph = Graph(len(rank), played.free, played.work.instance)

    def alone_s(mask: BoolArray) -> float:
        chain_ns = graph.summed(np.where(mask, actual, ideal)[:, None])
        return float(graph.played(chain_ns, played.first_ns, played.step).mean()) / 1e9

    parts, ranks = Parts(played, actual, ideal), [*range(8), 3]
    of_ranks = parts.means_s([np.arange(8) <= last for last in ranks])
    assert of_ranks.tolist() == pytest.approx([alone_s(rank <= last) for last in ranks], rel=1e-12)
    masks = [played.work.stage == 0, played.work.is_communication, rank == 5]
    assert parts.means_of_spans_s(masks).tolist() == pytest.approx(list(map(alone_s, masks)), rel=1e-12)
