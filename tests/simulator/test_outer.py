"""Sites that train apart: laws of what meeting takes, of bytes and memory, and what is published of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import outer_steps as table
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis.strategies import builds, floats, integers
from tests.simulator.predicted import simulate

from foretrace.cli import main
from foretrace.simulator.config import job_from, job_settings
from foretrace.simulator.errors import JobError
from foretrace.simulator.goodput.training import training_of
from foretrace.simulator.job import Job
from foretrace.simulator.memory.ranks import rank_memories
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.outer import Meeting, meeting, ring_bytes
from foretrace.simulator.search.best import fastest
from foretrace.simulator.search.cli import search
from foretrace.simulator.search.found import order_of
from foretrace.simulator.search.space import Space
from foretrace.simulator.settings import OUTER
from foretrace.topologies.catalog import load_cluster

SITES = """
base = "dgx-h100"
name = "sites"
n_gpus = 32
[fabric]
kind = "two-site"
group_nodes = {nodes}
group_bandwidth = "{bandwidth}"
group_latency = "{latency}"
"""

seconds = floats(0.01, 100)
meetings = builds(
    Meeting,
    every=integers(10, 200),
    step_s=seconds,
    wire_s=seconds,
    fragments=integers(1, 8),
    overlap=floats(0, 5),
)


def machine(tmp_path: Path, nodes: int = 2, bandwidth: str = "10 Gb/s", latency: str = "20 ms") -> str:
    path = tmp_path / "sites.toml"
    path.write_text(SITES.format(nodes=nodes, bandwidth=bandwidth, latency=latency))
    return str(path)


def job(cluster: str, **others: Any) -> Job:
    settings = {"model": "llama3.2-1b", "gpus": 32, "global_batch": 64, "seq_len": 2048, "sharding": "fsdp"}
    return job_from({**settings, "cluster": cluster, "outer_every": 50, **others})


def said(command: str, status: int = 0) -> str:
    found = CliRunner().invoke(main, command.split())
    assert found.exit_code == status, found.output
    return found.stdout if status == 0 else found.output


@given(meetings, floats(0.05, 0.99))
def test_the_slowest_link_for_a_utilisation_gives_just_that(met: Meeting, utilisation: float) -> None:
    slower = met.slower(utilisation)
    assert slower is not None
    assert replace(met, wire_s=met.wire_s * slower).utilisation == pytest.approx(utilisation)


@given(meetings, floats(1, 10))
def test_waiting_never_shrinks_with_a_slower_link_nor_grows_with_overlap(met: Meeting, slower: float) -> None:
    assert replace(met, wire_s=slower * met.wire_s).exposed_s >= met.exposed_s
    assert replace(met, overlap=met.overlap + 1).exposed_s <= met.exposed_s
    blocking = replace(met, overlap=0.0)
    assert blocking.exposed_s == pytest.approx(met.fragments * met.wire_s)
    assert met.exposed_s <= blocking.exposed_s + 1e-9


def test_latency_alone_can_forbid_a_utilisation() -> None:
    met = Meeting(every=1, step_s=1.0, wire_s=0.1, latency_s=0.5)
    assert met.slower(0.9) is None
    assert replace(met, every=100).slower(0.9) is not None


@pytest.mark.parametrize("nodes", [2, 1])
@pytest.mark.parametrize("degrees", [{}, {"tp": 2, "pp": 2, "sharding": "zero1", "model": "llama3-8b"}])
def test_sites_send_one_copy_of_what_they_train_and_the_link_takes_as_long(
    tmp_path: Path, nodes: int, degrees: dict[str, Any]
) -> None:
    apart = job(machine(tmp_path, nodes), **degrees)
    found = simulate(apart, only_figures=True).summary["outer"]
    n_sites = 4 // nodes
    assert found["sites"] == apart.n_sites == n_sites
    expected = ring_bytes(4 * apart.model.n_params, n_sites)
    assert found["bytes_per_site"] == pytest.approx(expected, rel=0.02)
    least_s = expected / found["link_bytes_per_s"]
    assert least_s * 0.95 <= found["exchange_s"] <= 1.5 * least_s
    few = simulate(replace(apart, outer_bits=4), only_figures=True).summary["outer"]
    assert found["bytes_per_site"] == pytest.approx(8 * few["bytes_per_site"])
    cut = simulate(replace(apart, outer_fragments=4), only_figures=True).summary["outer"]
    assert cut["bytes_per_site"] == found["bytes_per_site"]


def test_all_sites_do_what_one_does_times_their_number_and_what_the_link_leaves(tmp_path: Path) -> None:
    apart = job(machine(tmp_path))
    alone = replace(apart.of_one_site, outer_every=0)
    all_of_them, one = (simulate(some, only_figures=True).summary for some in (apart, alone))
    assert all_of_them["step_time_s"] == one["step_time_s"]
    left = all_of_them["outer"]["utilisation"]
    assert 0 < left < 1
    assert all_of_them["tokens_per_s"] == pytest.approx(2 * left * one["tokens_per_s"])
    assert all_of_them["mfu"] == pytest.approx(left * one["mfu"])
    low, high = all_of_them["intervals"]["mfu"]
    assert low < all_of_them["mfu"] < high
    wide = job(machine(tmp_path, bandwidth="10 Tb/s", latency="0 s"))
    rate = simulate(wide, only_figures=True).summary["tokens_per_s"]
    assert rate == pytest.approx(2 * one["tokens_per_s"], rel=0.01)


def test_the_link_that_pays_is_the_one_at_which_sites_are_as_fast_as_one(tmp_path: Path) -> None:
    pays = simulate(job(machine(tmp_path)), only_figures=True).summary["outer"]["pays_from_bytes_per_s"]
    at_it = job(machine(tmp_path, bandwidth=f"{pays / 1e6} MB/s"))
    found = simulate(at_it, only_figures=True).summary
    alone = simulate(replace(at_it.of_one_site, outer_every=0), only_figures=True).summary
    assert found["tokens_per_s"] == pytest.approx(alone["tokens_per_s"], rel=0.02)


def test_what_a_link_has_to_be_does_not_depend_on_the_link_there_is(tmp_path: Path) -> None:
    found = [
        simulate(job(machine(tmp_path, bandwidth=width)), only_figures=True).summary["outer"]
        for width in ("1 Gb/s", "100 Gb/s", "1 Pb/s")
    ]
    assert found[0]["exposed_s"] > 50 * found[1]["exposed_s"] > 50 * found[2]["exposed_s"]
    for name in ("pays_from_bytes_per_s", "full_from_bytes_per_s"):
        assert [one[name] for one in found] == pytest.approx([found[0][name]] * 3, rel=0.15)


def test_sites_keep_what_they_last_agreed_on_and_its_momentum(tmp_path: Path) -> None:
    apart = job(machine(tmp_path))
    alone = replace(apart.of_one_site, outer_every=0)
    whole, without = rank_memories(apart)[0], rank_memories(alone)[0]
    assert whole.items["outer"] == pytest.approx(8 * apart.model.n_params / 16, rel=1e-3)
    assert whole.peak_bytes - whole.items["outer"] == without.peak_bytes
    cut = rank_memories(replace(apart, outer_fragments=8))[0]
    assert cut.items["outer"] == pytest.approx(whole.items["outer"] / 8, rel=1e-3)
    over_time = simulate(apart).memory.to_pylist()
    assert {row["bytes"] for row in over_time if row["category"] == "outer"} == {whole.items["outer"]}


def test_published_bytes_are_fewer_by_as_much(tmp_path: Path) -> None:
    streaming = job(machine(tmp_path), outer_every=100, outer_bits=4, fp32_gradients=False)
    assert simulate(streaming, only_figures=True).summary["outer"]["bytes_fewer"] == 400  # arXiv:2501.18512
    first = job(machine(tmp_path), outer_every=500)
    assert simulate(first, only_figures=True).summary["outer"]["bytes_fewer"] == 500  # arXiv:2311.08105
    prime = job(machine(tmp_path), outer_every=100, outer_bits=8)
    assert simulate(prime, only_figures=True).summary["outer"]["bytes_fewer"] == 400  # arXiv:2412.01152


def test_published_links_and_utilisations_are_met() -> None:
    found = list(table.rows())
    assert len(found) == 164
    assert 0.9 <= median(row.ratio for row in found) <= 1.2  # links are 1.2 times apart there
    assert sum(1 / 1.5 <= row.ratio <= 1.5 for row in found) >= 0.9 * len(found)
    assert all(abs(published - predicted) < 0.2 for published, predicted in table.measured())


def test_every_verb_counts_all_sites(tmp_path: Path) -> None:
    cluster = machine(tmp_path)
    words = f"simulate --model llama3.2-1b --cluster {cluster} --gpus 32 --global-batch 64 --sharding fsdp"
    result = CliRunner().invoke(main, [*words.split(), "--outer-every", "50", "-o", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "2, which meet every 50 steps" in text
    assert "all sites beat one from" in text
    again = [*words.split(), "--outer-every", "50", "--json"]
    said = json.loads(CliRunner().invoke(main, again).stdout)
    assert said["energy"]["kwh_per_step"] == pytest.approx(
        said["energy"]["w_per_gpu"] * 32 * said["average_step_time_s"] / 3.6e6
    )
    asked_again = ["simulate", "--like", str(tmp_path / "run"), "--cluster", cluster, "--json"]
    repeated = json.loads(CliRunner().invoke(main, asked_again).stdout)
    for name in ("job", "outer", "step_time_s", "tokens_per_s"):
        assert repeated[name] == said[name], name
    larger = json.loads(CliRunner().invoke(main, [*asked_again, "--gpus", "64"]).stdout)
    assert (larger["outer"]["sites"], larger["job"]["global_batch"]) == (4, 128)
    training = training_of(simulate(job(cluster, seq_len=2048)).run)
    assert (training.n_gpus, training.n_nodes, training.tokens_per_step) == (32, 4, 64 * 2048)


def test_what_sites_cannot_do_is_refused(tmp_path: Path) -> None:
    cluster = machine(tmp_path)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"gpus": 16}, "needs GPUs on several sites: 16 are on one"),
        ({"gpus": 24}, "24 GPUs are no multiple of 16; 32 would work"),
        ({"gpus": 40, "global_batch": 80}, "40 GPUs are no multiple of 16; 32 or 48 would work"),
        ({"tp": 8, "pp": 4}, "dp=1 replicas do not divide over 2 sites"),
        ({"outer_fragments": 17}, "outer_fragments=17: at most 16"),
        ({"outer_overlap": 51}, "at most outer_every = 50 steps"),
        ({"ranks_per_node": 4}, "with a rank on each GPU of their nodes"),
        ({"outer_bits": 5}, "outer_bits=5: one of 4, 8, 16, 32"),
        ({"cluster": "dgx-h100"}, "needs a machine of sites"),
    ]
    for others, message in cases:
        with pytest.raises(JobError, match=message):
            job(others.pop("cluster", cluster), **{"global_batch": 96, **others})
    apart = job(cluster, outer_fragments=2)
    assert job_from({**job_settings(apart), "cluster": cluster}) == apart


def test_copies_of_shards_are_summed_once_per_step_if_asked(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"outer_every": 0, "shard_ranks": 16, "framework": "torchtitan"}
    each = job(machine(tmp_path), **settings)
    once = job(machine(tmp_path), **settings, conventions={"copies_once": True})
    assert each.n_microbatches == 2
    sums = []
    for one in (each, once):
        kinds = simulate(one, only_figures=True).run.spans([0]).select(["kind", "name", "size_bytes"])
        rows = [
            row for row in kinds.to_pylist() if row["kind"] == "all_reduce" and row["name"] == "gradients"
        ]
        sums.append(sum(row["size_bytes"] for row in rows))
    assert sums[0] == 2 * sums[1] > 0
    times = [simulate(one, only_figures=True).summary["step_time_s"] for one in (each, once)]
    assert times[1] < times[0]


def test_meeting_asks_the_network_of_the_whole_machine(tmp_path: Path) -> None:
    apart = job(machine(tmp_path, latency="1 s"))
    assert meeting(apart, 1.0).latency_s > 1.0
    assert load_cluster(machine(tmp_path)).fabric_spec.kind == "two-site"


def test_a_search_over_sites_finds_what_simulating_each_layout_finds(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    path = machine(tmp_path)
    settings = {"outer_every": 50, "outer_fragments": 2, "outer_bits": 4}
    space = Space(
        model=load_model("llama3.2-1b"),
        cluster=load_cluster(path, 32),
        global_batch=64,
        seq_len=2048,
        tp=(1, 2),
        pp=(1, 2),
        schedule=("1f1b",),
        recompute=("none",),
        micro_batch=(1, 2),
        others=settings,
    )
    jobs = list(space.jobs())
    assert {job.n_sites for job in jobs} == {2}
    times = {
        order_of(job): simulate(job, engine="compiled", only_figures=True).summary["average_step_time_s"]
        for job in jobs
        if max(rank.peak_bytes for rank in rank_memories(job)) <= job.cluster.device.memory_bytes
    }
    found, _ = fastest(space.families(), len(jobs))
    assert {order_of(one.job): one.cost / 1e9 for one in found} == pytest.approx(times, rel=1e-6)
    assert [one.cost for one in found] == sorted(one.cost for one in found)


def test_search_has_the_flags_of_sites_that_simulate_has(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    path = machine(tmp_path)
    layout = "--tp 1 --pp 1 --micro-batch 1 --sharding fsdp --recompute none"
    of_job = f"--model llama3.2-1b --cluster {path} --global-batch 64 --seq-len 2048 --outer-every 50"
    found = json.loads(said(f"search {of_job} --gpus 32 {layout} --top 1 --json"))["layouts"][0]
    layout = "--sharding fsdp --recompute none"
    alone = json.loads(said(f"simulate {of_job} --gpus 32 {layout} --json"))
    assert found["step_time_s"] == pytest.approx(alone["average_step_time_s"])
    for name in ("tokens_per_s_per_gpu", "usd_per_1b_tokens"):
        assert found[name] == pytest.approx(alone[name])
    assert found["energy"]["kwh_per_1b_tokens"] == pytest.approx(alone["energy"]["kwh_per_1b_tokens"])
    low, high = found["step_time_interval_s"]
    assert low < found["step_time_s"] < high
    one_site = f"search {of_job} --gpus 16 --tp 1 --pp 1 --micro-batch 1"
    assert "needs GPUs on several sites" in said(one_site, status=2)
    flags = {option.name for option in search.params}
    assert {*OUTER, "images", "image_tokens", "shard_ranks"} <= flags


def hybrid(tmp_path: Path, bandwidth: str, **others: Any) -> Mapping[str, Any]:
    cluster = machine(tmp_path, bandwidth=bandwidth, latency="2 ms")
    is_once = others.pop("is_once", True)
    given = {"outer_every": 0, "shard_ranks": 16, "global_batch": 256, **others}
    given["conventions"] = {"copies_once": is_once}
    return simulate(job(cluster, **given), covers_unsaid=False).summary


def test_copies_of_shards_pay_from_the_link_that_is_said(tmp_path: Path) -> None:
    """HSDP: over it, two sites take twice as long as one, which has half of the batch."""
    found = hybrid(tmp_path, "100 Gb/s")["across_sites"]
    trained = load_model("llama3.2-1b").n_params
    assert found["bytes_per_site"] == pytest.approx(4 * trained, rel=1e-3)
    assert found["sites"] == 2
    pays = hybrid(tmp_path, f"{8 * found['pays_from_bytes_per_s'] / 1e9} Gb/s")
    one = {"model": "llama3.2-1b", "cluster": "dgx-h100", "gpus": 16, "seq_len": 2048, "sharding": "fsdp"}
    alone = simulate(job_from({**one, "global_batch": 128}), covers_unsaid=False).summary
    assert pays["step_time_s"] == pytest.approx(2 * alone["step_time_s"], rel=0.1)


def test_copies_are_summed_in_every_microbatch_unless_once(tmp_path: Path) -> None:
    once, each = (hybrid(tmp_path, "100 Gb/s", is_once=is_once) for is_once in (True, False))
    assert once["across_sites"]["sums_per_step"] == 1
    assert each["across_sites"]["sums_per_step"] == 8
    assert each["across_sites"]["bytes_per_site"] == 8 * once["across_sites"]["bytes_per_site"]
    assert "copies of shards on 2 sites are summed once a step" in once["rests_on"][0]
    assert "--set copies_once=true" in each["rests_on"][0]


@pytest.mark.parametrize("others", [{"shard_ranks": 0}, {"gpus": 16, "shard_ranks": 8}])
def test_nothing_is_said_where_copies_stay_on_a_site(tmp_path: Path, others: dict[str, Any]) -> None:
    assert "across_sites" not in hybrid(tmp_path, "100 Gb/s", **others)
