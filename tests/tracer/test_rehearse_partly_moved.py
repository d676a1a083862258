"""Models of which a part is on the host, and what torch brings there of them: sums by hand."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.tracer.host_work import host_bytes

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.traces.rehearsal import ON_HOST, TO_DEVICE, TO_HOST, RankTables

pytest.importorskip("torch")

SCRIPT, RANKS = Path(__file__).parent / "partly_moved.py", 4
LAYER_BYTES, ROWS_BYTES, TABLE_BYTES = 64 * 64 * 4, 8 * 64 * 4, 1000 * 64 * 4
HERE, THERE = (64 * 64 + 32 * 16) * 4, 64 * 32 * 4


def _bytes(tables: RankTables, step: int = 1) -> dict[tuple[str, str], int]:
    """Return the bytes of all work of the host in a *step*, by its kind and operator; copies have none."""
    return host_bytes(tables, _events(tables, step))


def _lists(tables: RankTables, step: int = 1) -> Counter[tuple[str, str]]:
    """Return the bytes of all work on lists in a *step*, by its kind and operator."""
    works, found = tables.works.to_pylist(), Counter[tuple[str, str]]()
    for event in _events(tables, step):
        work = works[event["item"]] if event["what"] == 0 else None
        if work and "aten._foreach_" in work["name"]:
            found[work["kind"], work["name"].removeprefix("aten._foreach_")] += work["bytes_moved"]
    return found


def _events(tables: RankTables, step: int) -> list[dict[str, Any]]:
    """Return what happens in a *step*."""
    places = tables.places.to_pylist()
    return [event for event in tables.events.to_pylist() if places[event["place"]]["step"] == step]


def test_a_table_that_nobody_moves_stays_on_the_host_in_a_model_that_is_on_the_device(rehearsed: Any) -> None:
    """The model is called with what is on the host; its tower was moved, its table was not."""
    found, tables = rehearsed("both")
    memory, work = found.memory["0"], _bytes(tables)
    assert memory["bytes"]["parameters"] == LAYER_BYTES
    assert memory["host"]["bytes"]["parameters"] == TABLE_BYTES
    assert (work[TO_DEVICE, ""], work[TO_HOST, ""]) == (ROWS_BYTES, ROWS_BYTES)
    assert work[ON_HOST, "add_"] == 3 * TABLE_BYTES


def test_what_nobody_moves_meets_the_rest_in_an_error_as_in_a_real_run(rehearsed: Any) -> None:
    with pytest.raises(RehearsalError, match="Expected all tensors to be on the same device"):
        rehearsed("met")


@pytest.mark.parametrize("way", ["adam", "adam_both"])
def test_an_optimizer_takes_one_by_one_where_one_is_on_the_host(rehearsed: Any, way: str) -> None:
    """``_default_to_fused_or_foreach``: lists are chosen where all parameters are on a GPU alone.

    Beside weight, gradient and two states the host holds a root and a quotient for a moment.
    """
    found, tables = rehearsed(way)
    names = {work["name"] for work in tables.works.to_pylist() if "aten.addcdiv_" in work["name"]}
    lists = {work["name"] for work in tables.works.to_pylist() if "_foreach_" in work["name"]}
    assert names == {"aten.addcdiv_"}
    assert not lists
    counters = 4 * (1 + (way == "adam_both"))
    assert found.memory["0"]["host"]["peak_bytes"] - counters == 6 * LAYER_BYTES


def test_an_average_that_is_kept_on_the_host_is_there(rehearsed: Any) -> None:
    """``AveragedModel(model, device="cpu")`` takes the model down in each step, and counts there."""
    (plain, _), (found, tables) = rehearsed("plain"), rehearsed("averaged")
    assert found.memory["0"]["bytes"] == plain.memory["0"]["bytes"]
    assert found.memory["0"]["host"]["bytes"]["parameters"] == LAYER_BYTES
    assert _bytes(tables)[TO_HOST, ""] == LAYER_BYTES
    assert (TO_DEVICE, "") not in _bytes(tables)


@pytest.mark.parametrize(("way", "up"), [("fsdp2", 0), ("fsdp1", LAYER_BYTES)])
def test_a_whole_state_on_the_host_is_no_memory_of_the_device(rehearsed: Any, way: str, up: int) -> None:
    """It goes down once. FSDP1 takes its flat parameter up again (``FlatParamHandle.to_cpu``)."""
    (plain, _), (found, tables) = rehearsed(way), rehearsed(f"{way}_saved")
    work = _bytes(tables)
    assert (work[TO_HOST, ""], work.get((TO_DEVICE, ""), 0)) == (LAYER_BYTES, up)
    assert found.memory["0"]["host"]["peak_bytes"] >= LAYER_BYTES
    assert found.memory["0"]["bytes"] == plain.memory["0"]["bytes"]


def test_lists_of_both_places_are_worked_on_in_each(rehearsed: Any) -> None:
    """A matrix on the device stands between two on the host; each has its momentum, once.

    Momentum is read and written, and twice two lists are added into one.
    """
    found, tables = rehearsed("listed")
    memory, work = found.memory["0"], _lists(tables)
    for kind, size, held in (("memory", THERE, memory), (ON_HOST, HERE, memory["host"])):
        assert held["bytes"]["parameters"] == held["bytes"]["optimizer"] == size
        assert work[kind, "mul_"] == 2 * size
        assert work[kind, "add_"] == 2 * 3 * size


def test_gradients_of_both_places_are_clipped_in_each(rehearsed: Any) -> None:
    """A norm of each is taken where it is; the one norm goes down, the factor goes up."""
    (_, plain), (_, tables) = rehearsed("listed"), rehearsed("clipped")
    for kind, size, n_norms in (("memory", THERE, 1), (ON_HOST, HERE, 2)):
        assert _lists(tables)[kind, "norm"] == size + 4 * n_norms
        assert _lists(tables)[kind, "mul_"] - _lists(plain)[kind, "mul_"] == 2 * size + 4
    for kind in (TO_HOST, TO_DEVICE):
        assert _bytes(tables)[kind, ""] - _bytes(plain)[kind, ""] == 4


def test_an_average_on_the_device_takes_its_count_from_the_host(rehearsed: Any) -> None:
    """Nobody moves the count of ``AveragedModel``; it goes to where lists of the averages are."""
    _, tables = rehearsed("averaged_there")
    assert _bytes(tables, step=2) == {(TO_DEVICE, ""): 8}
    assert _lists(tables, step=2)["memory", "lerp_"] == 3 * LAYER_BYTES


def test_a_module_that_is_given_its_memory_on_the_host_is_there_as_a_whole(rehearsed: Any) -> None:
    """A weight and a bias, two running sums, and a count of calls."""
    held = rehearsed("emptied")[0].memory["0"]["host"]["bytes"]
    assert held["parameters"] + held["buffers"] == 4 * 64 * 4 + 8


def test_torch_moves_no_module_to_the_host_by_itself(rehearsed: Any) -> None:
    """All tensors are a processor's to its code: a module that it moves to where it is stays there."""
    (plain, plain_tables), (found, tables) = rehearsed("plain"), rehearsed("moved_by_torch")
    assert found.memory == plain.memory
    assert tables.works.equals(plain_tables.works)
