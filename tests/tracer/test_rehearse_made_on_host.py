"""What is made on the host is its memory, and what goes up and down crosses the link: sums by hand."""

from pathlib import Path
from typing import Any

import pytest
from tests.rehearsals import in_steps
from tests.tracer.host_work import host_bytes

from foretrace.traces.rehearsal import ON_HOST, TO_DEVICE, TO_HOST, RankTables

pytest.importorskip("torch")

SCRIPT, RANKS = Path(__file__).parent / "made_on_host.py", 4
LAYER_BYTES, ROWS_BYTES, TABLE_BYTES, PLACES_BYTES = 64 * 64 * 4, 8 * 64 * 4, 1000 * 64 * 4, 8 * 8
LARGE_BYTES = 512 * 64 * 4
HOST_WAIT = 5


def _events(tables: RankTables) -> list[dict[str, Any]]:
    """Return the events of the step that is kept, without those that prepare the next one."""
    places = tables.places.to_pylist()
    return [event for event in tables.events.to_pylist() if places[event["place"]]["step"] == 1]


def _bytes(tables: RankTables) -> dict[tuple[str, str], int]:
    """Return the bytes of all work of the host in the step, by its kind and operator; copies have none."""
    return host_bytes(tables, _events(tables))


def _waits(tables: RankTables) -> int:
    return sum(event["what"] == HOST_WAIT for event in _events(tables))


@pytest.mark.parametrize("way", ["table", "bare_table"])
def test_a_table_is_on_the_host_beside_shards_on_the_device(rehearsed: Any, way: str) -> None:
    """Rows go up, their gradients down; one optimizer works at both, in each place for itself.

    The table may be named to be there, or never be moved from where it was made.
    """
    found, tables = rehearsed(way)
    assert _bytes(tables) == {
        (ON_HOST, "embedding"): 2 * ROWS_BYTES + PLACES_BYTES,
        (TO_DEVICE, ""): ROWS_BYTES,
        (TO_HOST, ""): ROWS_BYTES,
        (ON_HOST, "embedding_dense_backward"): TABLE_BYTES + 3 * ROWS_BYTES + PLACES_BYTES,
        (ON_HOST, "_foreach_add_"): 3 * TABLE_BYTES,
    }
    lists = [work for work in tables.works.to_pylist() if work["name"] == "aten._foreach_add_"]
    assert sorted(work["bytes_moved"] for work in lists) == [3 * LAYER_BYTES // RANKS, 3 * TABLE_BYTES]
    memory = found.memory["0"]
    assert memory["bytes"]["parameters"] == LAYER_BYTES // RANKS
    assert memory["host"]["bytes"]["parameters"] == TABLE_BYTES + PLACES_BYTES


def test_pinned_memory_is_never_on_the_device(rehearsed: Any) -> None:
    """Not for the moment in which it is made either."""
    (plain, _), (found, tables) = rehearsed("plain"), rehearsed("pinned")
    assert found.memory["0"]["host"]["peak_bytes"] == 4 * 2**20
    assert found.memory["0"]["peak_bytes"] - plain.memory["0"]["peak_bytes"] in {0, ROWS_BYTES}
    assert not _bytes(tables)


def test_states_on_the_host_are_worked_on_there(rehearsed: Any) -> None:
    """A copy down that blocks, a sum of two operands into one of them, a copy up that does not."""
    found, tables = rehearsed("states")
    assert _bytes(tables) == {
        (TO_HOST, ""): ROWS_BYTES,
        (ON_HOST, "add_"): 3 * ROWS_BYTES,
        (TO_DEVICE, ""): ROWS_BYTES,
    }
    assert _waits(tables) == 1
    assert found.memory["0"]["host"]["peak_bytes"] == 2 * ROWS_BYTES
    assert found.memory["0"]["peak_bytes"] == rehearsed("plain")[0].memory["0"]["peak_bytes"]


@pytest.mark.parametrize(
    ("way", "waits"),
    [
        ("bare_batch", 1),
        ("batch", 1),
        ("free_batch", 0),
        ("ddp_batch", 1),
        ("fsdp2_batch", 1),
        ("fsdp1_batch", 1),
    ],
)
def test_a_batch_that_is_made_on_the_host_goes_up_once(rehearsed: Any, way: str, waits: int) -> None:
    """Whether or not it is named to be there, by the script's hand, or by that of what wraps the model.

    What is computed of it is the device's.
    """
    found, tables = rehearsed(way)
    assert _bytes(tables) == {(ON_HOST, "ones"): ROWS_BYTES, (TO_DEVICE, ""): ROWS_BYTES}
    assert _waits(tables) == waits
    assert found.memory["0"]["host"]["peak_bytes"] == ROWS_BYTES


@pytest.mark.parametrize(
    ("way", "waits"), [("loader", 0), ("pinned_batch", 0), ("pageable", 1), ("array", 1)]
)
def test_what_others_make_on_the_host_goes_up_as_it_is_there(rehearsed: Any, way: str, waits: int) -> None:
    """A loader's batch and an array take no work; the driver has to take over what is not pinned."""
    _, tables = rehearsed(way)
    size = ROWS_BYTES if way == "array" else LARGE_BYTES
    made = {} if way in {"loader", "array"} else {(ON_HOST, "ones"): size}
    assert _bytes(tables) == made | {(TO_DEVICE, ""): size}
    assert _waits(tables) == waits
    assert {work["name"] for work in tables.works.to_pylist() if work["kind"] == TO_DEVICE} == {
        "input.to_device"
    }


def test_masks_that_are_made_in_layers_go_up_in_each(rehearsed: Any) -> None:
    """Of ones, which are written, and a triangle of them, which is read and written."""
    _, tables = rehearsed("masks")
    assert _bytes(tables) == {
        (ON_HOST, "ones"): 2 * LAYER_BYTES,
        (ON_HOST, "tril"): 2 * 2 * LAYER_BYTES,
        (TO_DEVICE, ""): 2 * LAYER_BYTES,
    }
    assert _waits(tables) == 2


@pytest.mark.parametrize("way", ["fetched", "fetched_fp64"])
def test_a_parameter_that_is_fetched_in_a_step_is_one_on_the_device_too(rehearsed: Any, way: str) -> None:
    """It is there while the step needs it, and its gradient goes down; another type is cast on the host."""
    found, tables = rehearsed(way)
    size = LAYER_BYTES * (2 if way == "fetched_fp64" else 1)
    memory = found.memory["0"]
    assert memory["bytes"]["parameters"] == LAYER_BYTES + size
    assert memory["host"]["bytes"]["parameters"] == LAYER_BYTES
    copies = {key: n for key, n in _bytes(tables).items() if key[0] != ON_HOST}
    assert copies == {(TO_DEVICE, ""): size, (TO_HOST, ""): size}


def test_numbers_of_what_is_on_the_host_are_there(rehearsed: Any) -> None:
    """One copy down is waited for: neither an array of it nor a number of it is waited for again."""
    _, tables = rehearsed("measured")
    assert _bytes(tables) == {(TO_HOST, ""): ROWS_BYTES, (ON_HOST, "mean"): ROWS_BYTES + 4}
    assert _waits(tables) == 1


def test_counters_of_an_optimizer_are_on_the_host(rehearsed: Any) -> None:
    """They are no memory of the device, no work of either, and the host reads them without waiting.

    There is one, and the number that is added to it.
    """
    found, tables = rehearsed("counters")
    assert found.memory["0"]["host"]["peak_bytes"] == 2 * 4
    assert found.memory["0"]["bytes"]["optimizer"] % LAYER_BYTES == 0
    assert not _bytes(tables)
    assert not _waits(tables)


@pytest.mark.parametrize(
    ("way", "like"),
    [
        *[("moved", "plain"), ("moved_ddp", "ddp"), ("moved_fsdp2", "fsdp2")],
        *[("left", "plain"), ("left_ddp", "ddp"), ("left_fsdp2", "fsdp2")],
        *[("left_fsdp1", "fsdp1"), ("left_meta", "plain"), ("generator", "plain")],
    ],
)
def test_a_model_that_is_built_on_the_host_is_on_the_device_once(rehearsed: Any, way: str, like: str) -> None:
    """When it is trained, all is as had it been built there, named to be on the host before or not."""
    (found, tables), (expected, expected_tables) = rehearsed(way), rehearsed(like)
    assert found.memory["0"] == expected.memory["0"]
    assert tables.works.equals(expected_tables.works)
    assert tables.events.equals(expected_tables.events)


def test_what_is_made_before_a_gpu_is_spoken_of_is_on_the_host(rehearsed: Any) -> None:
    """As soon as there is a device beside it."""
    (found, _), (plain, _) = rehearsed("early"), rehearsed("plain")
    own, host = in_steps(found.memory)["0"], found.memory["0"]["host"]
    assert own == in_steps(plain.memory)["0"] | {"host": host}
    assert found.memory["0"]["host"]["peak_bytes"] == LAYER_BYTES


def test_a_processor_alone_has_no_host(rehearsed: Any) -> None:
    """A script that never speaks of a GPU copies nothing, wherever it says ``cpu``."""
    found, tables = rehearsed("alone")
    assert not _bytes(tables)
    assert "host" not in found.memory["0"]
