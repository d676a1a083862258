"""A recording against what c10d itself holds of its calls: all is confirmed, and what is not is named."""

import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis.strategies import integers, lists, sampled_from, tuples

from foretrace.cli import main
from foretrace.door import shaped
from foretrace.tracer.audit import Auditor, Call, Entry, compare
from foretrace.tracer.groups import GroupInfo, Groups
from foretrace.tracer.records import Block, Communication
from foretrace.traces.info import Audit, Tally, joined_audits
from foretrace.traces.store import open_run

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from foretrace.tracer import collectives

path, way = sys.argv[1:]
dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
one, several = torch.ones(4), [torch.ones(4) for _ in range(n)]

def every_kind():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    model(one).sum().backward()
    dist.all_gather(several, one)
    dist.all_gather_into_tensor(torch.ones(4 * n), one)
    dist.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * n))
    dist.reduce_scatter(torch.ones(4), several)
    dist.gather(one, several if rank == 0 else None, 0)
    dist.scatter(one, several if rank == 0 else None, 0)
    dist.reduce(one, 0)
    dist.all_to_all_single(torch.ones(2 * n), torch.ones(2 * n))
    dist.all_to_all([torch.ones(2) for _ in range(n)], [torch.ones(2) for _ in range(n)])
    dist.barrier()
    dist.broadcast_object_list([rank], 0)
    dist.all_gather_object([None] * n, "x" * 100)
    with dist._coalescing_manager():
        dist.all_reduce(one)
        dist.all_reduce(torch.ones(8))
    again = dist.new_group(list(range(n)), group_desc="tp")
    dist.all_reduce(torch.ones(8, dtype=torch.bfloat16), group=again)
    both = [dist.P2POp(dist.isend, one, 1 - rank), dist.P2POp(dist.irecv, torch.ones(4), 1 - rank)]
    for work in dist.batch_isend_irecv(both):
        work.wait()

if way == "middle":
    every_kind()
if way == "unseen":
    known = collectives.RECORDED
    collectives.RECORDED = {k: v for k, v in known.items() if k not in ("broadcast_", "send")}
if way == "resized":
    wrong = collectives.RECORDED["reduce_"]._replace(size=lambda a, n: 17, whole=-1)
    collectives.RECORDED = {**collectives.RECORDED, "reduce_": wrong}
import foretrace
with foretrace.record(path, steps="1:2" if way == "steps" else ""):
    if way == "steps":
        dist.all_reduce(one)
    foretrace.step()
    if way == "long":
        for i in range(700):
            dist.all_reduce(one)
            dist.all_gather(several, one)
            dist.broadcast(one, 0)
    if way != "long":
        every_kind()
    foretrace.step()
    every_kind() if way == "steps" else None
every_kind()
dist.destroy_process_group()
"""


def recorded(tmp_path: Path, ranks: Any, way: str) -> Audit:
    """Return the audit of the script, trained in *way*."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = ranks.run([sys.executable, "-W", "ignore", str(script), str(tmp_path / "run"), way], ranks.env())
    assert result.status == (0, 0), result.errors
    found = open_run(tmp_path / "run").info.audit
    assert found is not None
    return found


@pytest.mark.parametrize("way", ["all", "middle"])
def test_every_kind_of_call_is_confirmed(way: str, tmp_path: Path, ranks: Any) -> None:
    found = recorded(tmp_path, ranks, way)
    rows = open_run(tmp_path / "run").spans().to_pylist()
    assert found.differences == ()
    assert found.reasons == {}
    n = sum(row["category"] == "collective" for row in rows)
    assert found.collectives == Tally(recorded=n, compared=n)
    assert found.transfers == Tally(recorded=4, counted=4)
    assert len({row["kind"] for row in rows if row["category"] == "collective"}) == 9


def test_a_call_that_was_not_recorded_is_named(tmp_path: Path, ranks: Any) -> None:
    found = recorded(tmp_path, ranks, "unseen")
    n = found.collectives.recorded
    assert found.collectives == Tally(recorded=n, compared=n)
    assert found.transfers == Tally(recorded=2)
    for rank in (0, 1):
        missed = next(text for text in found.differences if "broadcast" in text and f"rank {rank}" in text)
        assert re.fullmatch(
            rf"rank {rank}: c10d counts \d broadcasts of group dp more than recorded, "
            r"first at its sequence \d+",
            missed,
        )
        # Gloo numbers transfers, but names none.
        assert f"rank {rank}: c10d counts 1 call of group dp more than recorded" in found.differences
    said = CliRunner().invoke(main, ["analyze", str(tmp_path / "run")]).output
    assert f"{n:,} of {n:,} collectives confirmed by c10d; 0 of 2 transfers" in said
    assert f"differs from c10d: {found.differences[0]}" in said


def test_a_call_of_another_size_is_named(tmp_path: Path, ranks: Any) -> None:
    found = recorded(tmp_path, ranks, "resized")
    assert found.collectives.recorded - found.collectives.compared == 2
    words = "1 reduce of group dp of another size than c10d holds, first at sequence"
    assert [text.rpartition(words)[2].partition(": ")[2] for text in found.differences] == [
        "17 bytes recorded, 16 held"
    ] * 2


def test_steps_that_are_left_out_are_no_difference(tmp_path: Path, ranks: Any) -> None:
    found = recorded(tmp_path, ranks, "steps")
    assert (found.differences, found.reasons) == ((), {})
    assert found.collectives.recorded == found.collectives.compared > 0


def test_what_the_ring_does_not_hold_any_more_is_confirmed_by_number_only(tmp_path: Path, ranks: Any) -> None:
    found = recorded(tmp_path, ranks, "long")
    assert found.collectives == Tally(recorded=4200, compared=4000, counted=200)
    assert found.differences == ()
    (line,) = found.lines()
    said = "4,000 of 4,200 collectives confirmed by c10d, 200 more by their number only; "
    assert line == said + "200 collectives older than what c10d's flight recorder holds"


def test_a_recording_that_was_killed_says_nothing(tmp_path: Path, ranks: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\nimport foretrace\ndist.init_process_group('gloo')\n"
        f"with foretrace.record({str(tmp_path / 'run')!r}, flush_s=0.01):\n"
        "    for _ in range(9):\n        dist.all_reduce(torch.ones(4)); foretrace.step()\n"
        "    import time; time.sleep(1)\n    os._exit(3) if dist.get_rank() else None\n"
    )
    ranks.run([sys.executable, str(script)], ranks.env(), fresh=tmp_path / "run")
    found = open_run(tmp_path / "run").info.audit
    assert found is not None
    assert found.collectives == Tally(recorded=9, compared=9)
    assert found.reasons == {"ranks that ended before the comparison": 1}


CALLS = lists(
    tuples(sampled_from(["all_reduce", "all_gather", "reduce_scatter"]), integers(1, 3)), max_size=30
)


def held(calls: list[Call]) -> list[Entry]:
    """Return what gloo holds of *calls*: a reduce-scatter is all-reduces, one per element."""
    entries = []
    for call in calls:
        parts = [1] * call.size_bytes if call.kind == "reduce_scatter" else [call.size_bytes]
        kind = "all_reduce" if call.kind == "reduce_scatter" else call.kind
        entries += [(kind, part) for part in parts]
    return [Entry(number, kind, size) for number, (kind, size) in enumerate(entries, 1)]


def numbered(calls: list[tuple[str, int]]) -> list[Call]:
    """Return *calls* with their numbers."""
    return [Call(number, kind, size) for number, (kind, size) in enumerate(calls)]


@given(CALLS)
def test_whatever_was_called_is_the_same_as_what_is_held(given_calls: list[tuple[str, int]]) -> None:
    calls = numbered(given_calls)
    for is_whole in (True, False):
        found = compare(calls, held(calls), "gloo", is_whole=is_whole)
        assert sorted(found.same) == calls
        assert (found.missed, found.unheld, found.resized) == ([], [], [])
        assert len(found.same) + found.n_beyond == len(held(calls))


@given(CALLS, integers(0, 29))
def test_a_call_is_missed_where_only_it_was_not_recorded(given_calls: list[tuple[str, int]], at: int) -> None:
    calls = numbered([*given_calls[:at], ("broadcast", 7), *given_calls[at:]])
    at = min(at, len(given_calls))
    entries = held(calls)
    for is_whole in (True, False):
        found = compare([*calls[:at], *calls[at + 1 :]], entries, "gloo", is_whole=is_whole)
        assert [entry.kind for entry in found.missed] == ["broadcast"]
        assert (len(found.same), found.unheld, found.resized) == (len(given_calls), [], [])
        found = compare(calls, [one for one in entries if one.kind != "broadcast"], "gloo", is_whole=True)
        assert [call.kind for call in found.unheld] == ["broadcast"]


def test_the_last_entries_of_a_ring_are_compared_with_the_last_calls() -> None:
    calls = numbered([("all_reduce", 1 + n % 7) for n in range(100)])
    found = compare(calls, held(calls)[60:], "gloo", is_whole=False)
    assert sorted(found.same) == calls[60:]
    assert (found.missed, found.unheld, found.resized) == ([], [], [])


class Names(Groups):
    """Groups that no process group of torch stands behind."""

    def __init__(self, *known: GroupInfo) -> None:
        super().__init__(4)
        self.known_names = {group.name: group for group in known}

    def named(self, name: str) -> GroupInfo | None:
        """Return the group of that name."""
        return self.known_names.get(name)


def nccl(number: int, name: str, sizes: list[list[int]], **others: Any) -> dict[str, Any]:
    """Return what the flight recorder of NCCL holds of one call, of which *others* says what is uncommon."""
    types = ["Float"] * len(sizes)
    known = {
        "record_id": number,
        "op_id": number,
        "process_group": ("7", "tp"),
        "profiling_name": f"nccl:{name}",
    }
    known |= {"collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": " " in name}
    known |= {"input_sizes": sizes, "input_dtypes": types, "output_sizes": sizes, "output_dtypes": types}
    return {**known, **others}


def test_calls_on_nccl_are_confirmed_as_its_flight_recorder_holds_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = nccl(1, "all_reduce", [[5]])  # of the time before the recording
    monkeypatch.setattr("foretrace.tracer.internals.call_numbers", dict)
    monkeypatch.setattr("foretrace.tracer.internals.flight_recorders", lambda: [[], [before]])
    group = GroupInfo(id=1, axis="tp", ranks=(4, 5), name="7")
    auditor = Auditor(Names(group))
    calls: list[tuple[Any, ...]] = [
        ("all_reduce", 12, -1, nccl(2, "all_reduce", [[3]])),
        ("all_reduce", 20, -1, nccl(3, "allreduce_coalesced", [[3], [2]])),
        ("all_gather", 24, -1, nccl(4, "_all_gather_base", [[3]])),
        ("barrier", 0, -1, nccl(5, "all_reduce_barrier", [[1]])),
        ("scatter", 16, -1, nccl(6, "scatter", [[2]], output_sizes=[[2], [2]], output_dtypes=["Float"] * 2)),
        ("send", 12, 5, nccl(7, "send 0->1", [[3]])),
        ("recv", 8, 5, nccl(8, "recv 0<-1", [[2]])),
        # Parts of unequal sizes are gathered by broadcasts.
        ("all_gather", 28, -1, nccl(9, "_broadcast_oop", [[3]]), nccl(10, "_broadcast_oop", [[4]])),
    ]
    batch = nccl(11, "coalesced", [])  # as which the calls of a batch run
    entries = [before, *(entry for _, _, _, *several in calls for entry in several), batch]
    monkeypatch.setattr("foretrace.tracer.internals.flight_recorders", lambda: [[], entries])
    for number, (kind, size, peer, *_) in enumerate(calls):
        place = (0, -1, -1, -1)
        auditor.add(Communication(kind, group, number, peer, size, "fp32", Block(""), place, 0, device=0))
    found = auditor.audit(4)
    assert found is not None
    assert (found.differences, found.reasons) == ((), {})
    assert found.collectives == Tally(recorded=6, compared=6)
    assert found.transfers == Tally(recorded=2, compared=2)

    del entries[-2]  # and nothing of what is missing is confirmed
    found = auditor.audit(4)
    assert found is not None
    assert found.collectives.compared == 5
    assert found.differences == (
        "rank 4: c10d counts 1 broadcast of group tp more than recorded, first at its sequence 9",
        "rank 4: 1 all_gather of group tp recorded that c10d does not hold, first at sequence 7",
    )


@pytest.mark.parametrize(
    ("backend", "device"), [("gloo", -1), ("gloo", 0), ("cpu:gloo", -1), ("cuda:gloo", 0)]
)
def test_calls_on_gloo_are_confirmed_on_a_gpu_as_on_the_processor(
    backend: str, device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what torch says of the group."""
    distributed = pytest.importorskip("torch.distributed")
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    try:
        groups = Groups(1)
        group = groups.of(distributed.group.WORLD)
    finally:
        distributed.destroy_process_group()
    entries: list[dict[str, Any]] = []
    monkeypatch.setattr("foretrace.tracer.internals.call_numbers", dict)
    monkeypatch.setattr("foretrace.tracer.internals.flight_recorders", lambda: [entries])
    auditor = Auditor(groups)
    place = (0, -1, -1, -1)
    call = Communication("all_reduce", group, 0, -1, 12, "fp32", Block(""), place, 0, device=device)
    auditor.add(call)
    said = {"profiling_name": "gloo:all_reduce", "process_group": (group.name, "")}
    entries.append(nccl(1, "all_reduce", [[3]], **said))
    found = auditor.audit(0)
    assert found is not None
    assert (found.collectives, found.differences) == (Tally(recorded=1, compared=1), ())


def test_audits_of_ranks_are_one() -> None:
    one = Audit(collectives=Tally(recorded=3, compared=2, counted=1), reasons={"old": 1}, differences=("a",))
    both = joined_audits([one, None, one], 3)
    assert both is not None
    assert both.collectives == Tally(recorded=6, compared=4, counted=2)
    assert both.differences == ("a", "a")
    assert both.reasons == {"old": 2, "ranks that ended before the comparison": 1}
    assert shaped(Audit, asdict(both)) == both
    assert joined_audits([None], 1) is None
