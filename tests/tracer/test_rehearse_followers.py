"""What a script has follow a communication is done whether or not it waits for it, as over NCCL."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import WHAT, RankTables, read_rank, rehearsal_folder

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "followers.py"
HOW = ("works", "futures", "all", "told", "nobody")


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that rehearses the script, once each way."""

    @cache
    def run(how: str) -> RankTables:
        folder = tmp_path_factory.mktemp("run") / "run"
        rehearse(Asked(command=(str(SCRIPT), how), world_size=4, ranks=(0,)), folder)
        return read_rank(rehearsal_folder(folder), 0)

    return run


def _issued(tables: RankTables) -> Counter[tuple[str, str, int]]:
    """Return what is computed and sent, how often, in whatever order."""
    works, messages = tables.works.to_pylist(), tables.messages.to_pylist()
    found: Counter[tuple[str, str, int]] = Counter()
    for event in tables.events.to_pylist():
        if WHAT[event["what"]] == "op":
            found[works[event["item"]]["name"], works[event["item"]]["shapes"], 0] += 1
        elif WHAT[event["what"]] == "communication":
            found[messages[event["item"]]["kind"], "", messages[event["item"]]["size_bytes"]] += 1
    return found


@pytest.mark.parametrize("how", HOW)
def test_it_is_issued_however_the_script_waits(rehearsed: Any, how: str) -> None:
    """As much as where the script waits first and does it itself: kernels, and what is sent to all then."""
    expected = _issued(rehearsed("by_hand"))
    assert _issued(rehearsed(how)) == expected
    assert sum(n for (kind, _, _), n in expected.items() if kind == "broadcast") == 4


def test_it_waits_for_its_communication_on_a_stream_of_its_own(rehearsed: Any) -> None:
    """So the next gradient is cast while the first is reduced; the optimizer waits for who is waited for."""
    for how, n_waits in (("futures", 4), ("nobody", 0)):
        tables = rehearsed(how)
        works, messages = tables.works.to_pylist(), tables.messages.to_pylist()
        events = tables.events.to_pylist()
        reduced = [
            at for at, one in enumerate(events)
            if WHAT[one["what"]] == "communication" and messages[one["item"]]["kind"] == "all_reduce"
        ]  # fmt: skip
        copies = [
            at for at, one in enumerate(events)
            if WHAT[one["what"]] == "op" and works[one["item"]]["name"] == "aten.copy_"
        ]  # fmt: skip
        assert len(reduced) == len(copies) == 4
        for start, copy in zip(reduced, copies, strict=True):
            wait = events[copy - 1]
            assert (WHAT[wait["what"]], wait["number"]) == ("wait", start)
            assert wait["stream"] == events[copy]["stream"] != events[start]["stream"]
        assert len({events[copy]["stream"] for copy in copies}) == 1
        on_main = [one for one in events if WHAT[one["what"]] == "wait_mark" and not one["stream"]]
        assert len(on_main) == n_waits
