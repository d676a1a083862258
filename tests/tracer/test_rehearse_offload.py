"""What is kept on the host: memory of the device without it, copies both ways, an optimizer there."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from foretrace.tracer.rehearse.rehearsing import Asked, rehearse
from foretrace.tracer.rehearse.world.acting import Loaded
from foretrace.traces.rehearsal import (
    ON_HOST,
    TO_DEVICE,
    TO_HOST,
    RankTables,
    Rehearsal,
    read_rank,
    rehearsal_folder,
)

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "kept_on_host.py"
LAYERS, LAYER_BYTES, ROW_BYTES, RANKS = 3, 64 * 64 * 4, 8 * 64 * 4, 4
SHARDS_BYTES = LAYERS * LAYER_BYTES // RANKS
ADAM_BYTES = 7 * SHARDS_BYTES  # parameter, gradient and moments are read, all but the gradient written


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory, loaded: Loaded) -> Any:
    """Return a function that rehearses the script with arguments, once each."""

    @cache
    def run(*how: str) -> tuple[Rehearsal, RankTables]:
        folder = tmp_path_factory.mktemp("run") / "run"
        asked = Asked(command=(str(SCRIPT), *how), world_size=RANKS, ranks=(0,))
        found = rehearse(asked, folder, on=loaded)
        return found, read_rank(rehearsal_folder(folder), 0)

    return run


def _bytes(tables: RankTables) -> dict[tuple[str, str], int]:
    """Return the bytes of all work of the host, by its kind and that of its place."""
    works, places = tables.works.to_pylist(), tables.places.to_pylist()
    found: Counter[tuple[str, str]] = Counter()
    for event in tables.events.to_pylist():
        work = works[event["item"]] if event["what"] == 0 else None
        if work and work["kind"] in {ON_HOST, TO_DEVICE, TO_HOST}:
            found[work["kind"], places[event["place"]]["kind"]] += work["bytes_moved"]
    return dict(found)


def _held(tables: RankTables) -> int:
    """Return what the device holds when the optimizer has been asked to run."""
    places = tables.places.to_pylist()
    events = tables.events.to_pylist()
    return int([e["allocated_bytes"] for e in events if places[e["place"]]["kind"] == "optimizer"][-1])


def test_states_of_fsdp2_are_on_the_host(rehearsed: Any) -> None:
    """Parameters come up for each of both gathers, gradients go down once, the optimizer runs there.

    A fused one has its counters of steps where the parameters are.
    """
    (_, plain), (found, tables) = rehearsed("fsdp2"), rehearsed("fsdp2", "offload")
    assert _bytes(tables) == {
        (TO_DEVICE, "forward"): SHARDS_BYTES,
        (TO_DEVICE, "backward"): SHARDS_BYTES,
        (TO_HOST, "backward"): SHARDS_BYTES,
        (ON_HOST, "optimizer"): ADAM_BYTES,
    }
    assert _held(plain) - _held(tables) == 4 * SHARDS_BYTES + LAYERS * 512
    assert found.memory["0"]["host"]["peak_bytes"] == 4 * SHARDS_BYTES + LAYERS * 4
    assert found.memory["0"]["bytes"]["parameters"] == 0


def test_what_is_not_asked_for_is_not_there(rehearsed: Any) -> None:
    """Without offloading there is no host: neither work nor memory."""
    for way in ("fsdp2", "fsdp1"):
        found, tables = rehearsed(way)
        assert not _bytes(tables)
        assert "host" not in found.memory["0"]
        assert {work["kind"] for work in tables.works.to_pylist()} <= {"gemm", "memory"}


@pytest.mark.parametrize("way", ["fsdp2", "fsdp1"])
def test_what_is_gathered_is_told_apart(rehearsed: Any, way: str) -> None:
    """Memory is fullest backward, where the layer before is gathered already: two of them are whole."""
    held = rehearsed(way)[0].memory["0"]["bytes"]
    assert (held["gathered"], held["parameters"]) == (2 * LAYER_BYTES, SHARDS_BYTES)


def test_states_of_fsdp1_are_on_the_host(rehearsed: Any) -> None:
    """Its shards come up before each gather, and gradients go down into a copy that is there already."""
    found, tables = rehearsed("fsdp1", "offload")
    moved = _bytes(tables)
    assert moved[TO_DEVICE, "forward"] == moved[TO_DEVICE, "backward"] == SHARDS_BYTES
    assert moved[TO_HOST, "backward"] == SHARDS_BYTES
    assert moved[ON_HOST, "optimizer"] == ADAM_BYTES
    assert found.memory["0"]["bytes"]["parameters"] == 0


def test_shards_of_fsdp1_are_cast_on_the_device(rehearsed: Any) -> None:
    """They come up as they are kept; what is cast of them is made where it is gathered, and never kept."""
    (plain, plain_tables), (found, tables) = (
        rehearsed("fsdp1", "offload"),
        rehearsed("fsdp1", "offload", "mixed"),
    )
    assert _bytes(tables) == _bytes(plain_tables)
    assert found.memory["0"]["host"] == plain.memory["0"]["host"]
    assert found.memory["0"]["bytes"]["parameters"] == 0


def test_saved_tensors_go_down_and_up_once(rehearsed: Any) -> None:
    """Weights but for the first, inputs of products, results of nonlinearities, the last one twice."""
    found, tables = rehearsed("save_on_cpu")
    saved = (LAYERS - 1) * LAYER_BYTES + (2 * LAYERS + 1) * ROW_BYTES
    moved = _bytes(tables)
    assert moved == {(TO_HOST, "forward"): saved, (TO_DEVICE, "backward"): saved}
    assert found.memory["0"]["host"]["peak_bytes"] == saved


def test_a_script_that_moves_a_tensor_itself(rehearsed: Any) -> None:
    """It waits for what it fetches, computes there, and sends it back in fp32: the device casts it."""
    _, tables = rehearsed("by_hand")
    assert _bytes(tables) == {
        (TO_HOST, "optimizer"): LAYER_BYTES,
        (ON_HOST, "optimizer"): 2 * LAYER_BYTES,
        (TO_DEVICE, "optimizer"): LAYER_BYTES,
    }
    assert (tables.events["what"].to_numpy() == 5).sum() == 1
