"""Settings about the network reach the simulation, and slow layouts are spoken of."""

import json

import pytest
from click.testing import CliRunner

from foretrace.simulator.cli import simulate
from foretrace.simulator.errors import SimulationError
from foretrace.topologies.errors import CatalogError

JOB = ["--model", "llama2-7b", "--cluster", "dgx-h100", "--gpus", "64", "--global-batch", "64", "--tp", "8"]


def simulated(*flags: str) -> dict[str, object]:
    """Return what ``foretrace simulate --json`` prints."""
    result = CliRunner().invoke(simulate, [*JOB, *flags, "--json"], catch_exceptions=False)
    found: dict[str, object] = json.loads(result.stdout)
    return found


def step_s(found: dict[str, object]) -> float:
    """Return the step time."""
    return float(str(found["step_time_s"]))


def test_ranks_dealt_out_over_nodes_are_slower_and_it_is_said() -> None:
    packed, spread = simulated(), simulated("--placement", "spread")
    assert step_s(spread) > 1.2 * step_s(packed)
    assert not [line for line in list(packed["warnings"]) if "lies across" in line]  # type: ignore[call-overload]
    (warning,) = [line for line in list(spread["warnings"]) if "lies across" in line]  # type: ignore[call-overload]
    assert "tp=8 lies across 8 nodes" in warning
    assert "another placement would keep it inside" in warning


def test_algorithms_and_protocols_are_those_that_are_left() -> None:
    free, forced = simulated(), simulated("--nccl-algo", "ring", "--nccl-proto", "ll")
    assert step_s(forced) > step_s(free)


def test_shared_links_are_an_engine_of_their_own() -> None:
    free, shared = simulated("--engine", "event"), simulated("--engine", "contended")
    assert step_s(shared) >= step_s(free)


def test_mistakes_are_named() -> None:
    with pytest.raises(CatalogError, match="placement 'pakced'"):
        simulated("--placement", "pakced")
    with pytest.raises(SimulationError, match="algorithm 'rnig'"):
        simulated("--nccl-algo", "rnig")
