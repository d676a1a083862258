"""What tokens cost: said for machines with a price, and how to give one for others."""

import json

import pytest
from click.testing import CliRunner

from foretrace.cli import main
from foretrace.simulator.price import unknown, usd_per_1b_tokens, usd_per_gpu_hour, whose
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.errors import UnitError

JOB = "simulate --model gpt2 --gpus 8 --global-batch 8 --seq-len 512"


def said(arguments: str, *more: str) -> str:
    """Return what ``foretrace`` prints, in one line."""
    result = CliRunner().invoke(main, [*arguments.split(), *more])
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def test_a_given_price_goes_before_the_listed_one() -> None:
    assert usd_per_gpu_hour(None, 2.0) == 2.0
    assert usd_per_gpu_hour(None, None) is None
    assert usd_per_gpu_hour("3 USD/h", 2.0) == 3.0
    with pytest.raises(UnitError, match="'3' is not a price"):
        usd_per_gpu_hour("3", None)


def test_twice_the_price_or_half_the_speed_costs_twice() -> None:
    assert usd_per_1b_tokens(7.2, 1000) == 2 * usd_per_1b_tokens(3.6, 1000) == usd_per_1b_tokens(3.6, 500)


def test_a_machine_with_a_price_says_whose_and_one_without_how_to_give_it() -> None:
    listed = load_cluster("dgx-h100").price_usd_per_gpu_hour
    assert listed is not None
    assert whose("dgx-h100", listed, given=False) in said(f"{JOB} --cluster dgx-h100")
    assert "at 2.5 USD per GPU-hour" in said(f"{JOB} --cluster dgx-h100", "--price", "2.5 USD/h")
    assert load_cluster("hgx-h20").price_usd_per_gpu_hour is None
    assert unknown("hgx-h20") in said(f"{JOB} --cluster hgx-h20")
    assert "price" not in said(JOB.replace("--gpus 8", "--gpus 2") + " --cluster localhost --precision fp32")


def test_the_json_has_price_and_cost() -> None:
    found = json.loads(said(f"{JOB} --cluster dgx-h100 --json", "--price", "3.6 USD/h"))
    assert found["usd_per_gpu_hour"] == 3.6
    assert found["usd_per_1b_tokens"] == pytest.approx(1e6 / found["tokens_per_s_per_gpu"])
    unpriced = json.loads(said(f"{JOB} --cluster hgx-h20 --json"))
    assert (unpriced["usd_per_gpu_hour"], unpriced["usd_per_1b_tokens"]) == (None, None)


def test_a_search_among_machines_with_and_without_a_price() -> None:
    search = JOB.replace("simulate", "search") + " --tp 1 --pp 1 --top 2"
    text = said(f"{search} --cluster dgx-h100 --cluster hgx-h20")
    assert unknown("hgx-h20") in text
    assert "the price in the file of dgx-h100" in text
