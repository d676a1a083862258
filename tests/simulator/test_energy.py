"""Power and energy: laws of what is drawn, what the verbs say of it, and what was measured of trainings."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import energy as table
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis.strategies import floats, integers, tuples
from tests.simulator.predicted import simulate

from foretrace.cli import main
from foretrace.simulator.config import job_from
from foretrace.simulator.energy import (
    DRAWS,
    HOST,
    HOST_OVER_LIMIT,
    IDLE,
    MEMORY_BOUND,
    MOST_PUE,
    Range,
    Supply,
    doing,
    energy_kwh,
    nodes_of,
    power,
    unknown,
)
from foretrace.simulator.goodput.failures import DAY_S
from foretrace.topologies.catalog import device_names, load_cluster, load_device, names

MACHINE = {"name": "some", "power_limit_w_per_gpu": 500.0, "host_power_w_per_gpu": 100.0}
JOB = "--model gpt2 --cluster dgx-h100 --gpus 8 --global-batch 8 --seq-len 512"

parts = tuples(floats(0, 1), floats(0, 1), floats(0, 1)).map(
    lambda found: (min(found[:2]), max(found[:2]) - min(found[:2]), found[2])
)
"""Shares of a step that computes and that only communicates, and of the computing that memory decides."""


def said(arguments: str, *more: str, status: int = 0) -> str:
    result = CliRunner().invoke(main, [*arguments.split(), *more])
    assert result.exit_code == status, result.output
    return " ".join((result.output if status else result.stdout).split())


def drawn(compute: float, transfers: float, bound: float | None) -> Range:
    found = power(MACHINE, {"compute": compute, "exposed:dp": transfers}, bound)
    assert found is not None
    return found.gpu


@given(parts)
def test_a_board_draws_no_less_than_idle_and_no_more_than_its_limit(
    share: tuple[float, float, float],
) -> None:
    assert sum(doing({"compute": share[0], "exposed:tp": share[1]}, share[2]).values()) == pytest.approx(1)
    low, likely, high = drawn(*share)
    assert DRAWS["waits"].low * 500 - 1e-9 <= low <= likely + 1e-9
    assert likely <= high + 1e-9 <= 500 + 2e-9
    assert DRAWS["waits"].likely * 500 - 1e-9 <= likely


@given(parts, floats(0.01, 0.99))
def test_a_step_that_waits_more_draws_less(share: tuple[float, float, float], slower: float) -> None:
    compute, transfers, bound = share
    waiting = drawn(compute * slower, transfers * slower, bound)
    assert waiting.likely <= drawn(*share).likely + 1e-9
    assert waiting.likely >= drawn(0, 0, bound).likely - 1e-9


def test_what_nobody_knows_widens_the_range() -> None:
    known, unknown_bound = drawn(1, 0, MEMORY_BOUND.likely), drawn(1, 0, None)
    assert unknown_bound.likely == pytest.approx(known.likely)
    assert unknown_bound.low < known.low
    assert unknown_bound.high > known.high
    assumed = power({**MACHINE, "host_power_w_per_gpu": None}, {})
    told = power(MACHINE, {})
    assert assumed is not None
    assert told is not None
    assert (
        assumed.host.high / assumed.host.low > told.host.high / told.host.low == pytest.approx(1 / HOST.low)
    )


@given(parts, integers(1, 40), integers(1, 8))
def test_nodes_draw_what_their_gpus_and_hosts_do_wherever_ranks_are(
    share: tuple[float, float, float], n_gpus: int, per_node: int
) -> None:
    """Over the job: a board for each rank, an idle one for every other GPU, and the host of every node."""
    nodes = nodes_of({"gpus_per_node": 8}, n_gpus, per_node)
    shares = {"compute": share[0], "exposed:dp": share[1]}
    machine = {**MACHINE, "gpus_per_node": 8}
    full, whole = power(machine, shares, share[2]), power(machine, shares, share[2], nodes)
    assert full is not None
    assert whole is not None
    assert nodes.n_nodes == -(-n_gpus // per_node)
    assert nodes.n_gpus + nodes.n_idle == 8 * nodes.n_nodes
    hosts = HOST.times(8 * nodes.n_nodes * 100.0).plus(IDLE.times(500.0 * nodes.n_idle))
    assert whole.total.times(n_gpus) == pytest.approx(full.gpu.times(n_gpus).plus(hosts))
    assert any("whole nodes" in note for note in whole.rests_on) == bool(nodes.n_idle)
    assert all(
        IDLE[end] <= DRAWS["waits"][end] for end in range(3)
    )  # no more without a process than with one that waits


@given(integers(1, 300), integers(1, 72))
def test_of_a_rack_the_trays_of_a_job_are_powered(n_gpus: int, per_node: int) -> None:
    """No tray without a rank, and of each rack as few trays as hold its ranks."""
    rack = {"gpus_per_node": 72, "gpus_per_tray": 4}
    assert nodes_of(rack, n_gpus) == nodes_of({"gpus_per_node": 4}, n_gpus)
    found = nodes_of(rack, n_gpus, per_node)
    on_each = [min(per_node, n_gpus - first) for first in range(0, n_gpus, per_node)]
    assert found.n_idle == sum(-ranks % 4 for ranks in on_each)
    assert found.n_gpus + found.n_idle == 4 * found.n_nodes


def test_a_job_of_a_part_of_a_rack_powers_no_more_than_its_trays(tmp_path: Path) -> None:
    job = "--model gpt2 --cluster gb200-nvl72 --gpus 8 --global-batch 64 --seq-len 1024 --json"
    assert json.loads(said(f"simulate {job}"))["energy"]["gpus_without_rank"] == 0
    mine = tmp_path / "mine.toml"
    mine.write_text('base = "gb200-nvl72"\ngpus_per_tray = 5\n')
    assert "gpus_per_tray = 5 does not divide gpus_per_node = 72" in said(f"topology show {mine}", status=2)
    mine.write_text('base = "gb200-nvl72"\ngpus_per_node = 2\nnics_per_node = 2\nnode_power = "4 kW"\n')
    assert load_cluster(mine).gpus_per_tray == 0


def test_fewer_ranks_on_a_node_cost_energy_not_money(tmp_path: Path) -> None:
    settings = JOB.replace("gpt2", "llama3.2-1b")
    half = json.loads(said(f"simulate {settings} --ranks-per-node 4 -o {tmp_path / 'half'} --json"))
    full = json.loads(said(f"simulate {settings} -o {tmp_path / 'full'} --json"))
    assert half["energy"]["gpus_without_rank"] == 8
    assert full["energy"]["gpus_without_rank"] == 0
    more_w = half["energy"]["w_per_gpu"] - full["energy"]["w_per_gpu"]
    host_w = load_cluster("dgx-h100").powers()["host_power_w_per_gpu"]
    boards = half["energy"]["board_w"] - full["energy"]["board_w"]
    assert more_w == pytest.approx(boards + HOST.likely * (host_w or 0) + IDLE.likely * 700)
    assert half["usd_per_1b_tokens"] * half["tokens_per_s"] == pytest.approx(
        full["usd_per_1b_tokens"] * full["tokens_per_s"]
    )
    plans = {name: said(f"goodput {tmp_path / name} --tokens 1B") for name in ("half", "full")}
    told = "8 GPUs of its nodes have no rank and are not counted"
    assert told in plans["half"]
    assert told in said(f"simulate {settings} --ranks-per-node 4")
    assert "have no rank" not in plans["full"]
    plan = json.loads(said(f"goodput {tmp_path / 'half'} --tokens 1B --json"))
    assert (plan["n_nodes"], plan["gpus_without_rank"]) == (2, 8)
    assert plan["energy"]["w_per_gpu"] == pytest.approx(half["energy"]["w_per_gpu"])


def test_a_run_from_before_power_limits_says_so_and_names_its_machine(tmp_path: Path) -> None:
    run = tmp_path / "run"
    said(f"simulate {JOB} -o {run}")
    file = run / "run.json"
    info = json.loads(file.read_text())
    del info["cluster"]["power_limit_w_per_gpu"]
    file.write_text(json.dumps(info))
    plan = said(f"goodput {run} --tokens 1B", "--price", "3 USD/h")
    assert unknown("dgx-h100", is_old=True) in plan
    assert unknown("dgx-h100") not in plan


@given(floats(1, 1e6), floats(1, 1e6), floats(1, 2))
def test_energy_adds_up_over_time_and_a_building_multiplies_it(a: float, b: float, pue: float) -> None:
    watts, given_ = Range(200, 400, 700), Supply(pue=pue)
    together = energy_kwh(watts, a + b, given_)
    apart = energy_kwh(watts, a, given_).plus(energy_kwh(watts, b, given_))
    assert together == pytest.approx(apart)
    assert together == pytest.approx(energy_kwh(watts, a + b, Supply()).times(pue))


def test_a_wider_step_time_never_narrows_a_range() -> None:
    watts = Range(200, 400, 700)
    assert watts.widened(1, 1) == pytest.approx(watts)
    wider = watts.widened(0.8, 1.1)
    assert wider.low < 200
    assert wider.high > 700
    assert Range(400, 400, 400).widened(0.8, 1.1) == pytest.approx((320, 400, 440))


def test_every_limit_of_the_catalogue_has_its_own_source_and_no_device_that_of_its_base(
    tmp_path: Path,
) -> None:
    for name in device_names():
        device = load_device(name)
        assert device.sources["power_limit"].startswith("not given") == (device.power_limit_w == 0)
    (tmp_path / "mine.toml").write_text('base = "h100-sxm"\nname = "mine"\n')
    assert load_device(str(tmp_path / "mine.toml")).power_limit_w == 0
    other = tmp_path / "other.toml"
    other.write_text('base = "dgx-h100"\ndevice = "a100-80gb"\n')
    assert load_cluster(other).powers() == {"power_limit_w_per_gpu": 400.0, "host_power_w_per_gpu": None}
    other.write_text('base = "dgx-h100"\nnode_power = "5 kW"\n')
    assert "its GPUs draw 5600 W alone" in said(f"topology show {other}", status=2)


def test_the_rest_of_a_node_is_assumed_as_the_catalogue_has_it() -> None:
    powers = [load_cluster(name).powers() for name in names()]
    over = {
        round(host / limit, 2)
        for limit, host in (one.values() for one in powers)
        if host is not None and limit is not None
    }
    assert (min(over), median(over), max(over)) == HOST_OVER_LIMIT


def test_a_mixed_machine_draws_the_mean_of_its_nodes(tmp_path: Path) -> None:
    mixed = tmp_path / "mixed.toml"
    mixed.write_text('base = "dgx-h100"\nn_gpus = 32\nothers = [{ machine = "dgx-a100", nodes = 1 }]\n')
    a, b = load_cluster("dgx-h100").powers(), load_cluster("dgx-a100").powers()
    expected = {name: (3 * (a[name] or 0) + (b[name] or 0)) / 4 for name in a}
    assert load_cluster(mixed).powers() == pytest.approx(expected)


def test_a_machine_without_a_limit_says_so(tmp_path: Path) -> None:
    board, mine = tmp_path / "board.toml", tmp_path / "grace.toml"
    board.write_text('base = "h100-sxm"\nname = "board"\n')
    mine.write_text(f'base = "dgx-h100"\ndevice = "{board}"\n')
    job = JOB.replace("dgx-h100", str(mine))
    assert unknown("grace") in said(f"simulate {job}")
    assert json.loads(said(f"simulate {job} --json"))["energy"] is None
    assert unknown("grace") in said(f"search {job} --tp 1 --pp 1 --top 1")
    processes = JOB.replace("dgx-h100 --gpus 8", "localhost --gpus 2 --precision fp32")
    assert "energy" not in said(f"simulate {processes}")


def test_the_json_of_every_verb_tells_the_same_energy(tmp_path: Path) -> None:
    flags = ["--pue", "1.5", "--grid", "0.1 kgCO2/kWh"]
    plain = json.loads(said(f"simulate {JOB} --json"))["energy"]
    found = json.loads(said(f"simulate {JOB} --json -o {tmp_path / 'run'}", *flags))["energy"]
    assert found["kwh_per_1b_tokens"] == pytest.approx(1.5 * plain["kwh_per_1b_tokens"])
    assert found["kg_co2e_per_1b_tokens"] == pytest.approx(0.1 * found["kwh_per_1b_tokens"])
    assert len(found["rests_on"]) == len(plain["rests_on"]) - 2
    low, high = found["kwh_per_1b_tokens_interval"]
    assert low < found["kwh_per_1b_tokens"] < high
    best = json.loads(
        said(f"search {JOB} --tp 1 --pp 1 --micro-batch 1 --sharding zero1 --top 1 --json", *flags)
    )
    assert best["layouts"][0]["energy"]["kwh_per_1b_tokens"] == pytest.approx(found["kwh_per_1b_tokens"])
    plan = json.loads(said(f"goodput {tmp_path / 'run'} --tokens 1T --json", *flags))
    whole = plan["energy"]
    hours = plan["expected_days"] * DAY_S / 3600 * 8
    waits = plan["shares"]["checkpoints"] + plan["shares"]["restarts"]
    mean_w = (1 - waits) * whole["w_per_gpu"] + waits * whole["w_per_waiting_gpu"]
    assert whole["kwh"] == pytest.approx(1.5 * mean_w * hours / 1000)
    assert whole["kwh"] >= found["kwh_per_1b_tokens"] * 1000
    assert "of CO2" in said(f"goodput {tmp_path / 'run'} --tokens 1T")
    sure, unsure = (
        json.loads(said(f"goodput {tmp_path / 'run'} --tokens 1T --json --step-error {error}"))["energy"]
        for error in (0, 0.3)
    )
    assert unsure["kwh_interval"][0] < sure["kwh_interval"][0] < sure["kwh"] == unsure["kwh"]
    assert unsure["kwh_interval"][1] > sure["kwh_interval"][1] > sure["kwh"]
    assert "steps of 68 % to 147 %" in unsure["rests_on"][-1]  # 0.3 times 1.28 to both sides
    assert "steps" not in sure["rests_on"][-1]


@pytest.mark.parametrize("verb", ["simulate", "search"])
def test_what_is_no_building_and_no_grid_is_refused(verb: str) -> None:
    for pue in ("0.9", "3.1", "1e300"):
        assert f"pue = {float(pue):g}: from 1" in said(f"{verb} {JOB} --pue {pue}", status=2)
    assert Supply(pue=MOST_PUE).pue == MOST_PUE
    assert "'400' is not a grid's factor" in said(f"{verb} {JOB} --grid 400", status=2)


def test_memory_decides_all_of_an_optimizer_and_none_of_a_product() -> None:
    few = job_from({"model": "gpt2", "cluster": "dgx-h100", "gpus": 1, "global_batch": 1, "seq_len": 128})
    many = job_from({"model": "gpt2", "cluster": "dgx-h100", "gpus": 1, "global_batch": 64, "seq_len": 1024})
    shares = [simulate(job, only_figures=True).summary["memory_bound_share"] for job in (few, many)]
    assert 0 < shares[1] < shares[0] < 1


def test_measured_power_and_energy_of_trainings_lie_within_the_ranges() -> None:
    found = list(table.rows())
    assert all(row.is_within for row in found)
    rows = [row for row in found if row.what.startswith(table.POWER)]
    assert len(rows) >= 6
    assert 0.9 <= median(row.ratio for row in rows) <= 1.15
    nodes = [row.predicted for row in rows if row.run.startswith("Llama 2 70B")]
    assert nodes == sorted(
        nodes, reverse=True
    )  # as measured: the more nodes share the work, the more it waits
