"""Which machine runs a rehearsed script best."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from tests.simulator.rehearsal_tables import batch

from foretrace import cli
from foretrace.simulator.errors import ConfigError, JobError
from foretrace.simulator.rehearsed.cli import time_and_show, timed
from foretrace.simulator.rehearsed.machines import LINKS, compared_machines
from foretrace.simulator.rehearsed.notes import ON_CPU
from foretrace.simulator.simulate import Simulation
from foretrace.traces.batch import Batch
from foretrace.traces.layout import Group, Layout
from foretrace.traces.rehearsal import (
    EVENTS,
    MESSAGES,
    PLACES,
    WORKS,
    RankTables,
    Rehearsal,
    read_rehearsal,
    write_rank,
    write_rehearsal,
)

SIDE = 8192


@pytest.fixture
def rehearsed(tmp_path: Path) -> Path:
    """A product and the all-reduce of its result over 16 ranks, which memory for 8 GB has to be there for."""
    sizes = {"flops": 2 * SIDE**3, "bytes_moved": 6 * SIDE**2, "m": SIDE, "n": SIDE, "k": SIDE, "batch": 1}
    work = {"name": "aten.mm", "kind": "gemm", "shapes": "", "dtype": "bf16", "v_dim": 0, "causal": False}
    message = {"kind": "all_reduce", "group": 7, "size_bytes": 2 * SIDE**2, "dtype": "bf16", "peer": -1}
    even = {"rows": (), "along": "", "aligned": True}
    message |= {"sent_bytes": (), "received_bytes": ()}
    numbers = {"layer": 0, "step": 0, "microbatch": 0, "stage": 0, "virtual_stage": 0, "trains": True}
    event = {"item": 0, "place": 0, "stream": 0, "allocated_bytes": 8 * 10**9}
    events = [{**event, "what": 0, "number": -1}, {**event, "what": 1, "number": 0}]
    tables = RankTables(
        pa.Table.from_pylist(events, EVENTS),
        pa.Table.from_pylist([{**work, **sizes, **even, "kernels": 1, "is_known": True}], WORKS),
        pa.Table.from_pylist([{**message, "is_async": False, "name": "gradients"}], MESSAGES),
        pa.Table.from_pylist([{**numbers, "kind": "forward", "name": "layer"}], PLACES),
    )
    folder = tmp_path / "rehearsal"
    write_rank(folder, 0, tables)
    found = Rehearsal(
        world_size=16,
        ranks=(0,),
        representatives=(0,) * 16,
        name="script",
        layout=Layout(dp=16),
        groups=(Group(id=7, axis="dp", ranks=tuple(range(16))),),
        job={"first_step": 0, "steps": 1, **batch(16, 4096)},
        memory={"0": {"peak_bytes": 8 * 10**9, "bytes": {"activations": 8 * 10**9}}},
    )
    write_rehearsal(folder, found)
    return tmp_path


def test_the_fastest_machine_comes_first(rehearsed: Path) -> None:
    """A faster GPU on faster links wins by time; by cost, what a token costs decides."""
    names = ("dgx-a100", "dgx-b200", "dgx-h100")
    found = compared_machines(rehearsed, names, price="2 USD/h")["machines"]
    assert [row["cluster"] for row in found] == ["dgx-b200", "dgx-h100", "dgx-a100"]
    times = [row["step_time_s"] for row in found]
    assert times == sorted(times)
    for row in found:
        tokens_per_s = 16 * 4096 / row["step_time_s"]
        assert row["usd_per_1b_tokens"] == pytest.approx(2 * 16 / 3600 / tokens_per_s * 1e9)
    by_cost = compared_machines(rehearsed, names, price="2 USD/h", by="cost")["machines"]
    assert [row["cluster"] for row in by_cost] == [row["cluster"] for row in found]  # one price for all


def test_slower_links_never_help(rehearsed: Path) -> None:
    """Twice the time on the wire is between once and twice the step."""
    rows = compared_machines(rehearsed, ["dgx-h100"], links=tuple(LINKS))["machines"]
    times = {row["links"]: row["step_time_s"] for row in rows}
    assert times["as they are"] < times["half as fast"] < 2 * times["as they are"]


def test_a_budget_has_days_and_dollars(rehearsed: Path) -> None:
    """Tokens over speed, and over the price of a token."""
    row = compared_machines(rehearsed, ["dgx-h100"], price="3 USD/h", tokens="1T")["machines"][0]
    assert row["days"] == pytest.approx(1e12 / row["tokens_per_s"] / 86_400)
    assert row["usd"] == pytest.approx(row["days"] * 24 * 3 * 16)
    own = compared_machines(rehearsed, ["dgx-h100"], price="0 USD/h", tokens="1T", by="cost")["machines"][0]
    assert own["usd"] == own["usd_per_1b_tokens"] == 0  # of one's own machines, which is a price


def test_what_cannot_be_ranked_is_said(rehearsed: Path) -> None:
    """No machine of the name, one without a peak in the type of the script, no price where dollars decide."""
    found = compared_machines(rehearsed, ["dgx-h100", "abacus", "localhost", "dgx-h100"])
    assert [row["cluster"] for row in found["machines"]] == ["dgx-h100"]
    assert [line.partition(":")[0] for line in found["left_out"]] == ["abacus", "localhost"]
    with pytest.raises(JobError, match="runs on none"):
        compared_machines(rehearsed, ["abacus"])
    with pytest.raises(ConfigError, match="dollars need a price: hgx-h20 has none"):
        compared_machines(rehearsed, ["dgx-h100", "hgx-h20"], by="cost")


def test_what_fits_comes_first_and_then_what_is_asked_for(rehearsed: Path) -> None:
    """90 GB are too many for an H100, not for an H20, which is slower; a B300 is faster, not cheaper."""
    by_cost = compared_machines(rehearsed, ["aws-p6-b300", "dgx-h100"], by="cost")["machines"]
    assert [row["cluster"] for row in by_cost] == ["dgx-h100", "aws-p6-b300"]
    costs, times = ([row[key] for row in by_cost] for key in ("usd_per_1b_tokens", "step_time_s"))
    assert costs == sorted(costs)
    assert times == sorted(times, reverse=True)
    large = {"0": {"peak_bytes": 90 * 10**9, "bytes": {"activations": 90 * 10**9}}}
    folder = rehearsed / "rehearsal"
    write_rehearsal(folder, replace(read_rehearsal(rehearsed), memory=large))
    found = compared_machines(rehearsed, ["dgx-h100", "dgx-a100", "hgx-h20"])["machines"]
    assert [(row["cluster"], row["fits"]) for row in found] == [
        ("hgx-h20", True),
        ("dgx-h100", False),
        ("dgx-a100", False),
    ]


def test_a_script_without_tokens_has_no_price_of_them(rehearsed: Path) -> None:
    """Pictures have none, and a budget of tokens no days; so it is too where the batch is unknown."""
    found = read_rehearsal(rehearsed)
    for job in (Batch(rows=2, tokens=0, equation="2 rows").job, Batch(unknown="nobody tells").job):
        write_rehearsal(rehearsed / "rehearsal", replace(found, job={**found.job, **job}))
        said = compared_machines(rehearsed, ["dgx-h100"], tokens="1T")
        (row,) = said["machines"]
        assert (row["usd_per_1b_tokens"], row["days"], row["usd"]) == (None, None, None)
        with pytest.raises(ConfigError, match="rehearse with --tokens-per-step"):
            compared_machines(rehearsed, ["dgx-h100"], by="cost")
    assert said["warnings"] == ["tokens/step unknown: nobody tells"]
    assert row["mfu"] is None


def test_a_calibration_of_the_machine_holds_for_scripts(rehearsed: Path, tmp_path: Path) -> None:
    """The script only multiplies: twice as slow a product takes twice as long, here as there."""
    file = tmp_path / "slow.toml"
    file.write_text(
        'run = "r"\ncluster = "dgx-h100"\ndevice = "h100-sxm"\nprecision = "bf16"\n'
        "[compute]\nproducts = { value = 2.0, error = 0.1 }\n"
    )
    where = {"cluster": "dgx-h100"}
    wanted: dict[str, Any] = {"output": None, "report": None, "as_json": True}
    plain, slow = (
        time_and_show(str(rehearsed), where, **wanted, calibration=one) for one in (None, str(file))
    )
    alone = timed(str(rehearsed), where, calibration=str(file))
    assert slow["step_time_s"] == alone.summary["step_time_s"]
    products = [length(timed(str(rehearsed), where, calibration=one)) for one in (None, str(file))]
    assert products[1] == pytest.approx(2 * products[0], rel=0.02)
    assert plain["step_time_s"] < slow["step_time_s"]


def length(simulation: Simulation) -> int:
    """Return how many nanoseconds of the run are computing."""
    spans = simulation.spans.to_pylist()
    return sum(one["duration_ns"] for one in spans if one["category"] == "compute")


def _asked(*words: str) -> Any:
    return CliRunner().invoke(cli.main, ["search", *words])


def test_the_verb_prints_a_table_or_one_object(rehearsed: Path) -> None:
    """``search --rehearsal``; flags that choose among layouts are refused, and missing ones named."""
    flags = ("--rehearsal", str(rehearsed), "--cluster", "dgx-h100", "--cluster", "dgx-a100")
    shown = _asked(*flags)
    assert shown.exit_code == 0, shown.output
    assert "16 dgx-h100" in shown.output
    bill = _asked(*flags, "--tokens", "15T", "--price", "50 USD/h").output
    assert " M" in bill
    assert "e+" not in bill
    said = json.loads(_asked(*flags, "--what-if", "--json").output)
    assert len(said["machines"]) == 4
    refused = _asked(*flags, "--tp", "4")
    assert refused.exit_code == 2
    assert "layout, model and batch of its script" in refused.output
    missing = _asked("--cluster", "dgx-h100")
    assert missing.exit_code == 2
    assert "--model" in missing.output


@pytest.mark.parametrize("device", ["cpu", ""])
def test_a_script_for_cpus_is_ranked_with_a_warning(rehearsed: Path, device: str) -> None:
    """One sentence for all machines, which names their GPUs; none about a script for GPUs."""
    found = read_rehearsal(rehearsed)
    job = {**found.job, "device": device} if device else found.job
    write_rehearsal(rehearsed / "rehearsal", replace(found, job=job))
    said = compared_machines(rehearsed, ["dgx-h100", "dgx-a100"], links=tuple(LINKS))["warnings"]
    assert said == ([ON_CPU.format(device="h100-sxm, a100-80gb")] if device else [])
