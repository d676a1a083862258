"""What one rank tells others is what they hear, though ranks are rehearsed one by one."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.world.letters import ALL, Address, Letters
from foretrace.traces.rehearsal import Rehearsal, read_rank, rehearsal_folder
from foretrace.traces.store import open_run

pytest.importorskip("torch")

SCRIPT, RANKS = Path(__file__).parent / "told_by_others.py", 3
STEP = 1
"""The step that is held against a real one."""

WAYS = ("around", "to_all", "by_objects", "by_store")
"""Beside the chain."""

OBJECTS = {(kind, dtype) for kind in ("broadcast", "scatter", "send", "recv") for dtype in ("int64", "uint8")}
"""What collectives of objects are made of."""

Row = tuple[Any, ...]


def _row(row: dict[str, Any], members: dict[int, tuple[int, ...]]) -> Row:
    return row["kind"], members[row["group"]], row["peer"], row["size_bytes"], row["dtype"]


def _rehearsed(folder: Path, ranks: tuple[int, ...], *ways: str) -> tuple[Rehearsal, dict[int, list[Row]]]:
    asked = Asked(command=(str(SCRIPT), *ways), world_size=RANKS, ranks=ranks, warmup=STEP, samples=0)
    found = rehearse(asked, folder)
    members = {group.id: group.ranks for group in found.groups}
    rows = {}
    for rank in found.ranks:
        tables = read_rank(rehearsal_folder(folder), rank)
        messages, places = tables.messages.to_pylist(), tables.places.to_pylist()
        events = [event for event in tables.events.to_pylist() if event["what"] == 1]
        kept = [event for event in events if places[event["place"]]["step"] == STEP]
        rows[rank] = [_row(messages[event["item"]], members) for event in kept]
    return found, rows


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rehearsal, dict[int, list[Row]]]:
    """All ranks, rehearsed."""
    return _rehearsed(tmp_path_factory.mktemp("told") / "run", tuple(range(RANKS)), *WAYS)


@pytest.mark.slow
def test_every_rank_sends_and_gets_what_a_real_one_does(
    found: tuple[Rehearsal, dict[int, list[Row]]], tmp_path: Path, ranks: Any
) -> None:
    """Sizes change with the step, and are told in tensors, objects and a store; in a chain, around a ring."""
    result = ranks.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), *WAYS], ranks.env(tmp_path), RANKS, fresh=tmp_path
    )
    assert result.status == (0,) * RANKS, result.errors
    run = open_run(tmp_path)
    members = {group.id: group.ranks for group in run.info.groups}
    for rank in range(RANKS):
        spans = [row for row in run.spans([rank]).to_pylist() if row["category"] in {"collective", "p2p"}]
        real = Counter(_row(row, members) for row in spans if row["step"] == STEP)
        told = Counter(found[1][rank])
        of_objects = real - told  # a rehearsal has them not in its timeline: a size and the bytes of each
        assert not told - real
        assert {(row[0], row[4]) for row in of_objects} <= OBJECTS


@pytest.mark.slow
def test_sizes_are_those_of_the_step(found: tuple[Rehearsal, dict[int, list[Row]]]) -> None:
    """Rows of the chain, what one rank has told all, and what each hears around the ring."""
    for rank, rows in found[1].items():
        sizes = {size for _, _, _, size, _ in rows}
        assert (STEP + 2) * 8 * 4 in sizes
        assert {4 * (told + STEP) for told in (100, 200, 300, 500)} <= sizes
        got = next(
            size
            for kind, _, peer, size, dtype in rows
            if kind == "recv" and peer == (rank - 1) % RANKS and dtype == "fp32" and size != (STEP + 2) * 32
        )
        assert got == 4 * (STEP + 10 * ((rank - 1) % RANKS) + 1)


def test_the_last_rank_alone_hears_what_one_before_it_would_say(tmp_path: Path) -> None:
    """Its neighbour is not rehearsed: rank 0, which is as far from rank 1, says as much."""
    _, rows = _rehearsed(tmp_path / "run", (0, RANKS - 1))
    assert (STEP + 2) * 8 * 4 in {size for kind, _, peer, size, _ in rows[RANKS - 1] if kind == "recv"}


SENDER = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(2):
    rows = torch.tensor([9 + step], device="cuda")
    if rank == 3:
        dist.send(rows, 0)
    elif rank == 0:
        rows = torch.zeros(1, dtype=torch.int64, device="cuda")
        dist.recv(rows, 3)
    model(torch.randn(int(rows), 8, device="cuda")).sum().backward()
    optimizer.step()
    print(int(rows))
"""


@pytest.mark.parametrize("chosen", [(), (0, 7)])
def test_a_sender_that_is_needed_is_rehearsed_or_named(tmp_path: Path, chosen: tuple[int, ...]) -> None:
    """Where ranks are given nobody is added to them, and no number is made up in place of what is sent."""
    script, folder = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SENDER)
    asked = Asked(command=(str(script),), world_size=8, ranks=chosen)
    if chosen:
        with pytest.raises(
            RehearsalError, match=r"script\.py:16 reads a number .* rehearse also 3 \(--ranks\)"
        ):
            rehearse(asked, folder)
        return
    found = rehearse(asked, folder)
    assert (rehearsal_folder(folder) / "rank-00000" / "output.log").read_text() == "9\n10\n"
    assert 3 in found.ranks


def test_messages_that_are_alike_go_as_far() -> None:
    """And are as many into their kind; what all are told is like nothing."""
    told = Letters(0, {}, ())
    sent = [told.next("transfer", 7, 0, 1) for _ in range(2)]
    assert [address.sequence for address in sent] == [0, 1]
    heard = Letters(3, {sent[1]: b""}, ())
    assert Address("transfer", 7, 2, 3, 1).resembles(sent[1])
    assert not Address("transfer", 7, 2, 3, 0).resembles(sent[1])
    assert not Address("transfer", 7, 1, 3, 1).resembles(sent[1])
    assert not Address("broadcast", 7, 2, ALL, 1).resembles(Address("broadcast", 7, 0, ALL, 1))
    assert heard.read(Address("transfer", 7, 2, 3, 1)) is None


TENSORS = """
import sys

import torch
import torch.distributed as dist

has_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if has_gpu else "gloo")
rank, device = dist.get_rank(), "cuda" if has_gpu else "cpu"
model = torch.nn.Linear(8, 8).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(2):
    batch = None
    if rank == 1:
        rows = torch.randn(7 + step, 8, device=device, requires_grad=True)
        batch = {"ids": torch.arange(5 + step), "rows": rows}
    heard = [batch]
    dist.broadcast_object_list(heard, 1)
    ids, rows = heard[0]["ids"], heard[0]["rows"]
    model(rows).sum().backward()
    optimizer.step()
    print(ids.tolist(), ids.device.type, tuple(rows.shape), rows.dtype, rows.device.type, rows.grad is None)
"""


@pytest.mark.parametrize("has_gpu", [True, False])
def test_tensors_in_objects_have_the_shape_place_and_numbers_that_were_sent(
    tmp_path: Path, *, has_gpu: bool
) -> None:
    """And the sender's device; numbers where the sender knows them."""
    script, folder = tmp_path / "script.py", tmp_path / "run"
    script.write_text(TENSORS)
    asked = Asked(command=(str(script),), world_size=2, ranks=(0, 1), has_gpu=has_gpu)
    rehearse(asked, folder)
    device = "cuda" if has_gpu else "cpu"
    said = [f"{list(range(n))} cpu ({n + 2}, 8) torch.float32 {device} False" for n in (5, 6)]
    for rank in range(2):
        output = rehearsal_folder(folder) / f"rank-{rank:05}" / "output.log"
        assert output.read_text().splitlines() == said


FAILS = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
pairs = [dist.new_group([at, at + 1]) for at in range(0, dist.get_world_size(), 2)]
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(2):
    heard = [(4 + step, model.weight)] if rank % 2 == 0 else [None]
    dist.broadcast_object_list(heard, rank // 2 * 2, group=pairs[rank // 2])
    assert heard[0] is not None, "nothing heard"
    model(torch.randn(heard[0][0], 8, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_a_rank_that_fails_for_want_of_a_sender_is_rehearsed_with_it(tmp_path: Path) -> None:
    """The last rank, in no group of the first, hears what rank 6 sends; where ranks are given it fails."""
    script = tmp_path / "script.py"
    script.write_text(FAILS)
    found = rehearse(Asked(command=(str(script),), world_size=8), tmp_path / "run")
    assert 6 in found.ranks
    assert found.checked == tuple(f"rank {n} does the same as rank 0, which represents it" for n in (1, 7))
    with pytest.raises(RehearsalError, match=r"rank 7: .*nothing heard.*hears objects"):
        rehearse(Asked(command=(str(script),), world_size=8, ranks=(0, 7)), tmp_path / "other")


def test_what_holds_tensors_that_nobody_describes_is_not_left() -> None:
    """Most tensors of a rehearsal have no numbers."""
    torch = pytest.importorskip("torch")
    letters = Letters(0, {}, ())
    letters.leave("plain", {"lengths": [1, 2]})
    letters.leave("tensors", {"weights": torch.ones(2)})
    assert list(letters.left) == ["plain"]
