"""Scripts that offload by their own hands: hooks, buffers of another type, tables of embeddings."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.rehearsals import rehearse
from tests.tracer.host_work import host_bytes

from foretrace.tracer.rehearse.rehearsing import Asked
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

SCRIPT = Path(__file__).parent / "kept_by_hand.py"
LAYER_BYTES, ROWS_BYTES, TABLE_BYTES, PLACES_BYTES = 64 * 64 * 4, 8 * 64 * 4, 1000 * 64 * 4, 8 * 8


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that rehearses the script, once each way."""

    @cache
    def run(how: str) -> tuple[Rehearsal, RankTables]:
        folder = tmp_path_factory.mktemp("run") / "run"
        found = rehearse(Asked(command=(str(SCRIPT), how), world_size=4, ranks=(0,)), folder)
        return found, read_rank(rehearsal_folder(folder), 0)

    return run


def _bytes(tables: RankTables) -> dict[tuple[str, str], int]:
    """Return the bytes of all work of the host, by its kind and operator; copies have none."""
    return host_bytes(tables, tables.events.to_pylist())


def test_hooks_of_a_class_of_its_own_keep_on_the_host(rehearsed: Any) -> None:
    """Rows before the product and after the nonlinearity, down and up, beside the stream that computes."""
    found, tables = rehearsed("hooks")
    assert _bytes(tables) == {(TO_HOST, ""): 2 * ROWS_BYTES, (TO_DEVICE, ""): 2 * ROWS_BYTES}
    assert found.memory["0"]["host"]["peak_bytes"] == 2 * ROWS_BYTES
    streams = {event["stream"] for event in tables.events.to_pylist() if event["what"] == 0}
    assert len(streams) == 2


def test_a_copy_into_another_type_is_cast_where_torch_casts_it(rehearsed: Any) -> None:
    """One that blocks is cast on the host, another one on the device: ``copy_kernel_cuda``.

    So the link carries 16 bit both ways if the host waits, 32 bit if it does not.
    """
    _, tables = rehearsed("types")
    both = LAYER_BYTES + LAYER_BYTES // 2
    assert _bytes(tables) == {
        (ON_HOST, "_to_copy"): both,
        (ON_HOST, "copy_"): both,
        (TO_DEVICE, ""): both,
        (TO_HOST, ""): both,
    }


def test_gradients_go_back_over_the_link_to_what_is_on_the_host(rehearsed: Any) -> None:
    """Rows of the table go up, theirs come down, and the host does its part of one optimizer's step.

    Places that nobody has put anywhere are made there, too.
    """
    _, tables = rehearsed("table")
    assert _bytes(tables) == {
        (ON_HOST, "zeros"): PLACES_BYTES,
        (ON_HOST, "embedding"): 2 * ROWS_BYTES + PLACES_BYTES,
        (TO_DEVICE, ""): ROWS_BYTES,
        (TO_HOST, ""): ROWS_BYTES,
        (ON_HOST, "embedding_dense_backward"): TABLE_BYTES + 3 * ROWS_BYTES + PLACES_BYTES,
        (ON_HOST, "_foreach_add_"): 3 * TABLE_BYTES,
    }
    lists = [work for work in tables.works.to_pylist() if work["name"] == "aten._foreach_add_"]
    assert sorted(work["bytes_moved"] for work in lists) == [3 * LAYER_BYTES, 3 * TABLE_BYTES]
