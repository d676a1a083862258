"""A rehearsed rank against the same rank of a real world over gloo: same communication, same FLOPs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import RankTables, Rehearsal, read_rank, rehearsal_folder
from foretrace.traces.store import open_run

pytestmark = pytest.mark.slow

STEPS, COMPARED = 4, 2
"""Steps of every strategy in ``every_strategy.py``, and the one that is compared."""

SCHEDULES = ("gpipe", "1f1b", "looped-bfs", "interleaved-1f1b", "interleaved-zb", "zb-v", "dualpipe-v")
ON_TWO = (
    *(
        "ddp_buckets",
        "ddp_no_sync",
        "ddp_unused",
        "ddp_static",
        "ddp_reentrant",
        "taught",
        "zero",
        "pictures",
        "recompute",
        "fsdp1",
        "fsdp2",
        "tp",
        "ep",
        "cp",
        "lists",
        "ring",
    ),
    "classic",
    *SCHEDULES,
)
ON_FOUR = ("hsdp1", "hsdp2", "fsdp2_pairs", "fsdp_tp", "pp_fsdp", "ring", "pretraining_pp1")
ALONE = ("pretraining_pp2",)
"""Stages of two pipelines in one script have the same numbers: this one has a world of its own."""

WORLDS = ((2, ON_TWO), (4, ON_FOUR), (4, ALONE))

UNCOUNTED = ("attention", "attention_backward")
"""Kinds of work for which torch has no formula: it counts none of the fused attention of the processor."""

SCRIPT = Path(__file__).parent / "every_strategy.py"

Row = tuple[Any, ...]


class Both:
    """The last rank of a world, real and rehearsed.

    Args:
        folder: where to.
        ranks: runs real processes.
        names: strategies.
        n: ranks of the world.
    """

    def __init__(self, folder: Path, ranks: Any, names: tuple[str, ...], n: int) -> None:
        real = folder / "real"
        real.mkdir()
        command = [sys.executable, "-W", "ignore", str(SCRIPT), str(real), *names]
        result = ranks.run(command, ranks.env(), n, fresh=real)
        assert result.status == (0,) * n, result.errors
        self.names, self.rank, self._real = names, n - 1, real
        chosen = (0, n - 1)  # the first one tells the last one the shapes that stages send
        asked = Asked(
            command=(str(SCRIPT), str(real), *names),
            world_size=n,
            ranks=chosen,
            warmup=0,
            steps=STEPS * len(names),
            has_gpu=False,
        )
        self.rehearsal: Rehearsal = rehearse(asked, folder / "rehearsed")
        self.tables: RankTables = read_rank(rehearsal_folder(folder / "rehearsed"), self.rank)
        self._places = self.tables.places.to_pylist()

    def events(self, name: str, what: int, step: int = COMPARED) -> list[dict[str, Any]]:
        """Return the events of a kind in a step of a strategy, with their rows."""
        step += STEPS * self.names.index(name)
        items = (self.tables.works if what == 0 else self.tables.messages).to_pylist()
        return [
            {**self._places[event["place"]], **event, **items[event["item"]], "phase": event["place"]}
            for event in self.tables.events.to_pylist()
            if event["what"] == what and self._places[event["place"]]["step"] == step
        ]

    def rehearsed(self, name: str, step: int = COMPARED) -> list[Row]:
        """Return the communications of the rehearsed rank in order."""
        members = {group.id: group.ranks for group in self.rehearsal.groups}
        return [_row(event, members) for event in self.events(name, 1, step)]

    def recorded(self, name: str, step: int = COMPARED) -> list[Row]:
        """Return those of the real one, in the order of their start."""
        run = open_run(self._real / name)
        members = {group.id: group.ranks for group in run.info.groups}
        rows = sorted(run.spans([self.rank]).to_pylist(), key=lambda row: row["start_ns"])
        found = [row for row in rows if row["category"] in {"collective", "p2p"} and row["step"] == step]
        return [_row(row, members) for row in found]

    def counted_flops(self, name: str) -> int:
        """Return the FLOPs that torch has counted in the real one."""
        found: int = json.loads((self._real / f"flops-{self.rank}.json").read_text())[name]
        return found


def _row(event: dict[str, Any], members: dict[int, tuple[int, ...]]) -> Row:
    """Return what both sides know of a communication: a transfer with its place in the pipeline."""
    row = (event["kind"], members[event["group"]], event["size_bytes"], event["dtype"])
    is_p2p = event["peer"] >= 0
    return (*row, event["peer"], event["stage"], event["microbatch"]) if is_p2p else row


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory, ranks: Any) -> dict[tuple[str, int], Both]:
    """Two and four processes, by strategy."""
    if ranks.torch() < (2, 13):
        pytest.skip("this torch cannot run all of them on gloo")
    found: dict[tuple[str, int], Both] = {}
    for n, names in WORLDS:
        found |= dict.fromkeys(
            ((name, n) for name in names), Both(tmp_path_factory.mktemp("world"), ranks, names, n)
        )
    return found


@pytest.mark.parametrize(("name", "n"), [(name, n) for n, names in WORLDS for name in names])
def test_a_rehearsed_rank_communicates_and_computes_as_a_real_one(
    name: str, n: int, worlds: dict[tuple[str, int], Both]
) -> None:
    """Kind, group, size, dtype and order of collectives; of transfers the order is that of their threads."""
    both = worlds[name, n]
    rehearsed, recorded = both.rehearsed(name), both.recorded(name)
    assert rehearsed, "nothing was rehearsed"
    assert sorted(map(str, rehearsed)) == sorted(map(str, recorded))
    collectives = [[row for row in rows if len(row) == 4] for rows in (rehearsed, recorded)]
    assert collectives[0] == collectives[1]
    counted = [work for work in both.events(name, 0) if work["kind"] not in UNCOUNTED]
    assert sum(work["flops"] for work in counted) == both.counted_flops(name)


def test_buckets_made_anew_are_told_as_in_a_real_world(worlds: dict[tuple[str, int], Both]) -> None:
    """In the second step, once: so many numbers of parameters and one more, and one for each bucket."""
    both = worlds["ddp_buckets", 2]
    rehearsed = both.rehearsed("ddp_buckets", 1)
    assert rehearsed == both.recorded("ddp_buckets", 1)
    assert [row[0] for row in rehearsed].count("broadcast") == 2
    assert not [row for row in both.rehearsed("ddp_buckets") if row[0] == "broadcast"]


def test_losses_are_never_made_up_silently(worlds: dict[tuple[str, int], Both]) -> None:
    """No number was asked for in these trainings, so none was told."""
    assert worlds["tp", 2].rehearsal.stated == ()
