"""After a death: who failed first, after which call, and where the others waited."""

import json
import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.processes import Runner

from foretrace.cli import main
from foretrace.tracer.completion import Completions
from foretrace.traces.analysis.diagnosis import Diagnosis, diagnose
from foretrace.traces.errors import RunError
from foretrace.traces.store import open_run

N_KILLS = int(os.environ.get("FORETRACE_KILLS", "1"))
"""Kills at random moments of each of two jobs."""

SCRIPT = """
import datetime, os, random, signal, socket, sys, time
import torch, torch.distributed as dist
import foretrace
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard  # imported once, before the forks
from foretrace.tracer import session
from foretrace.tracer.ended import watch

def steps(rank, noted, ends):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(10**6):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        note(noted, number)

def reduces(rank, noted, ends):
    for number in range(10**6):
        if number == 20:
            ends(rank)
        time.sleep(random.uniform(0, 0.002))
        note(noted, number)
        dist.all_reduce(torch.ones(4))

def stages(rank, noted, ends):
    for number in range(10**6):
        if number == 20:
            ends(rank)
        if rank:
            note(noted, number)
            dist.recv(torch.ones(4), rank - 1)
        if rank < dist.get_world_size() - 1:
            dist.send(torch.ones(4), rank + 1)

def note(noted, number):
    os.write(noted, b"%d\\n" % number)

def others_come():  # to the call that this rank does not come to: they are ended as soon as it is gone
    time.sleep(0.5)

def exits(rank):
    if rank == 2:
        others_come()
        os._exit(7)

def raises(rank):
    if rank == 1:
        others_come()
        raise ValueError("no such file")

def all_raise(rank):
    raise ValueError("no such file")

def crashes(rank):
    if rank == 2:
        others_come()
        os.kill(os.getpid(), signal.SIGSEGV)

def is_killed(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

def stands_still(rank):
    if rank == 3:
        time.sleep(1000)

def leaves(rank):
    if rank == 0:
        others_come()
        raise SystemExit  # the loader of one rank has run out

def comes_late(rank):
    if rank == 1:
        time.sleep(4)

def cuts(rank):  # the links of one rank break
    for number in os.listdir("/proc/self/fd") if rank == 1 else ():
        try:
            with socket.socket(fileno=os.dup(int(number))) as link:
                link.getpeername()
                link.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

def catches(rank):  # that the others do not come to a call, and goes on
    side = dist.new_group(timeout=datetime.timedelta(seconds=1.2))
    if rank == 0:
        try:
            dist.all_reduce(torch.ones(4), group=side)
        except RuntimeError:
            pass
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    if rank == 0:
        raise ValueError("no such file")

def nothing(rank):
    pass

def child(path, rank, n, loop, ends, limit_s):
    random.seed(rank)
    noted = os.open(f"{path}.{rank}.noted", os.O_WRONLY | os.O_CREAT)
    limit = datetime.timedelta(seconds=limit_s)
    store = dist.FileStore(f"{path}.store", n)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=limit)
    with foretrace.record(path, flush_s=0.2):
        loop(rank, noted, ends)

def lasts(path, n):
    files = [f"{path}.{rank}.noted" for rank in range(n)]
    return [open(file).read().splitlines() if os.path.exists(file) else [] for file in files]

def job(path, *asked, **more):
    if not os.fork():  # a launcher of its own
        watch(path)
        launches(path, *asked, **more)
        os._exit(0)
    os.wait()

def launches(path, n, loop, ends, victims=(), waits_s=0.0, after=30, ends_others=True, limit_s=300):
    children = {}
    for rank in range(n):
        if not (number := os.fork()):
            try:
                child(path, rank, n, loop, ends, limit_s)
            except SystemExit:
                os._exit(0)
            except BaseException as error:
                os._exit(1)
            os._exit(0)
        children[number] = rank
    if victims:
        while min(map(len, lasts(path, n))) < after:
            time.sleep(0.01)
        time.sleep(waits_s or random.uniform(0, 0.5))
        for number, rank in children.items():
            if rank in victims:
                kill(number, signal.SIGKILL)
    while children:  # as torchrun: the first that fails ends all others
        for number in list(children):
            found, status = os.waitpid(number, os.WNOHANG)
            if found:
                del children[number]
                if status and ends_others:
                    for other in children:
                        os.kill(other, signal.SIGTERM)
        time.sleep(0.02)

base, kill = sys.argv[1], os.kill  # by which somebody else kills, unseen by the launcher
torch.set_num_threads(1)
random.seed(1)
everybody = (0, 1, 2, 3)
for number in range(int(sys.argv[2])):
    job(f"{base}/run-killed{number}", 4, reduces, nothing, (2,))
    job(f"{base}/run-ddp{number}", 4, steps, nothing, (2,))
job(f"{base}/run-whole", 4, steps, nothing, everybody)
job(f"{base}/run-exits", 4, reduces, exits)
job(f"{base}/run-raises", 4, reduces, raises)
job(f"{base}/run-all", 4, reduces, all_raise, ends_others=False)
job(f"{base}/run-crashes", 4, reduces, crashes)
job(f"{base}/run-leaves", 4, reduces, leaves)
job(f"{base}/run-stage", 3, stages, is_killed)
job(f"{base}/run-late", 3, reduces, comes_late, ends_others=False, limit_s=1.5)
job(f"{base}/run-away", 4, reduces, stands_still, limit_s=1.5)
job(f"{base}/run-cut", 3, reduces, cuts, ends_others=False, limit_s=5)
job(f"{base}/run-catches", 3, reduces, catches, ends_others=False)
job(f"{base}/run-hangs", 4, reduces, stands_still, everybody, 2.5, after=20)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, ranks: Any) -> Path:
    """The folder of all jobs that have died."""
    folder = tmp_path_factory.mktemp("died")
    script = tmp_path_factory.mktemp("script") / "die.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", str(script), str(folder), str(N_KILLS)]
    (result,) = ranks.launch(command, fresh=folder, timeout_s=300)
    assert result.returncode == 0, result.stderr
    return folder


def told(base: Path, name: str) -> Diagnosis:
    """Return what is said of a job, with spans or without."""
    path = base / f"run-{name}"
    try:
        return diagnose(path, open_run(path))
    except RunError:
        return diagnose(path, None)


def noted(base: Path, name: str, rank: int) -> int:
    """Return the last number that a rank has noted, before the call of that number."""
    return int((base / f"run-{name}.{rank}.noted").read_text().splitlines()[-1])


@pytest.mark.parametrize("number", range(N_KILLS))
def test_whenever_a_rank_is_killed_it_is_named_with_its_last_call(base: Path, number: int) -> None:
    name = f"killed{number}"
    found, last = told(base, name), noted(base, name, 2)
    assert found.failed == (2,), found
    said = re.match(r"rank 2 was killed \(signal 9\) after all_reduce (\d+) of world(.*)", found.text)
    assert said is not None, found.text
    assert int(said[1]) in {last, last - 1}  # it noted the number, and may not have come to the call
    for rank in (0, 1, 3):
        evidence = next(one for one in found.ranks if one.rank == rank)
        (count,) = evidence.counts.values()
        assert count - 1 in {noted(base, name, rank), noted(base, name, rank) - 1}
    if said[2]:
        assert said[2].endswith(f" waited in all_reduce {int(said[1]) + 1}")  # those that had come to it


@pytest.mark.parametrize("number", range(N_KILLS))
def test_a_rank_that_is_killed_within_a_step_is_named(base: Path, number: int) -> None:
    name = f"ddp{number}"
    found = told(base, name)
    assert found.failed == (2,), found
    said = re.match(r"rank 2 was killed \(signal 9\) after \w+ \d+ of \w+, step (\d+)", found.text)
    assert said is not None, found.text
    assert noted(base, name, 2) <= int(said[1]) <= noted(base, name, 2) + 1  # noted when it was over


def test_of_a_job_that_is_killed_as_a_whole_no_rank_is_named(base: Path) -> None:
    found = told(base, "whole")
    assert found.failed == ()
    assert found.text == "ranks 0-3 were killed (signal 9) together: no rank is known to have gone first"


@pytest.mark.parametrize(
    ("name", "rank", "end"),
    [
        ("exits", 2, "exited (status 7)"),
        ("raises", 1, "ended with ValueError: no such file"),
        ("crashes", 2, "crashed (signal 11, SIGSEGV)"),
        ("leaves", 0, "exited (status 0)"),
    ],
)
def test_how_the_first_has_ended_is_said(base: Path, name: str, rank: int, end: str) -> None:
    found = told(base, name)
    others = {0: "1-3", 1: "0, 2-3", 2: "0-1, 3"}[rank]
    assert (
        found.text
        == f"rank {rank} {end} after all_reduce 19 of world; ranks {others} waited in all_reduce 20"
    )
    assert found.failed == (rank,)


def test_what_all_have_raised_is_said_of_all(base: Path) -> None:
    found = told(base, "all")
    assert found.text.startswith("ranks 0-3 ended with ValueError: no such file")
    assert found.failed == ()


def test_who_comes_once_others_have_timed_out_is_named(base: Path) -> None:
    """It raises, too, as its peers are gone; others raised long before it came."""
    found = told(base, "late")
    assert found.failed == (1,)
    said = (
        r"rank 1 came to all_reduce 20 of world (.*) s after others had given up; ranks 0, 2 waited in .* 20"
    )
    late = re.fullmatch(said, found.text)
    assert late is not None, found.text
    assert 1 < float(late[1]) < 4


def test_who_stood_still_until_its_launcher_ended_it_is_named(base: Path) -> None:
    """The others have raised, and the launcher sends away whom they had waited for."""
    found = told(base, "away")
    assert found.failed == (3,)
    said = (
        r"rank 3 stood still after all_reduce 19 of world \(.*die.py:\d+ stands_still\), until ended by the "
        r"launcher \(signal 15\); ranks 0-2 waited in all_reduce 20"
    )
    assert re.fullmatch(said, found.text), found.text


def test_of_links_that_break_no_rank_is_the_cause_whatever_each_has_raised(base: Path) -> None:
    found = told(base, "cut")
    assert found.failed == ()
    assert found.text.endswith(": no rank is known to have gone first")
    assert {one.process.call_failed for one in found.ranks} == {True}


def test_a_failure_that_the_training_caught_ends_it_no_more(base: Path) -> None:
    """Its peers raise once it is gone, and wait for it in the call behind the last that it made."""
    found = told(base, "catches")
    assert found.text == (
        "rank 0 ended with ValueError: no such file after all_reduce 22 of world; "
        "ranks 1-2 waited in all_reduce 23"
    )
    assert [one.process.call_failed for one in found.ranks] == [False, True, True]


def test_who_goes_on_to_another_step_has_got_over_what_failed() -> None:
    calls = Completions(lambda *_: True, 0)
    calls.raised()
    assert calls.failure_seen()
    calls.step_ended()
    assert not calls.failure_seen()


def test_a_stage_that_dies_holds_up_both_sides_of_the_pipeline(base: Path) -> None:
    found = told(base, "stage")
    assert found.failed == (1,)
    assert found.text.startswith("rank 1 was killed (signal 9) after send 19 of world")
    assert "rank 2 waited in recv 20" in found.text


def test_who_stood_still_before_all_were_killed_is_named_as_standing(base: Path) -> None:
    found = told(base, "hangs")
    assert found.failed == ()
    (wait,) = found.waits
    assert (wait.kind, wait.sequence, wait.waiting, wait.missing) == ("all_reduce", 20, (0, 1, 2), (3,))
    assert "stands_still" in wait.places[3]
    assert wait.age_s >= 1
    assert found.lines == [("hang", wait.text)]


DUMPS = """
import os, sys, time
import torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d

def dumped(path, way):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(torch.ones(6), group=pair)
    works = []
    if way == "behind" and rank != 2:
        works.append(dist.all_reduce(torch.ones(5), async_op=True))
    if way == "differs":
        works.append(dist.all_reduce(torch.ones(7 if rank == 3 else 5), async_op=True))
    time.sleep(0.5)
    said = c10d._dump_fr_trace_json() if rank == 1 else c10d._dump_fr_trace()
    with open(f"{path}/trace_rank_{rank}", "wb") as file:
        file.write(said)
    time.sleep(1)  # no peer goes before all have dumped
    os._exit(0)

dumped(*sys.argv[1:])
"""


def dumps(tmp_path: Path, ranks: Any, way: str) -> Path:
    """Return the folder of what the flight recorders of four gloo ranks hold."""
    if ranks.torch() < (2, 13):
        pytest.skip("the flight recorder of an older torch does not see gloo")
    script, path = tmp_path / "train.py", tmp_path / "dumps"
    script.write_text(DUMPS)
    path.mkdir()
    env = ranks.env() | {"TORCH_FR_BUFFER_SIZE": "100"}
    command = [sys.executable, "-W", "ignore", str(script), str(path), way]
    result = ranks.run(command, env, 4, fresh=path)
    assert result.status == (0, 0, 0, 0), result.errors
    return path


def analyzed(*paths: Path) -> str:
    """Return what ``analyze`` says of dumps."""
    result = CliRunner().invoke(main, ["analyze", *map(str, paths)])
    assert result.exit_code == 0, result.output
    return result.output


def test_dumps_tell_who_is_behind_as_torch_says_it(tmp_path: Path, ranks: Any) -> None:
    path = dumps(tmp_path, ranks, "behind")
    said = analyzed(path)
    assert said.startswith(
        "hang rank 0-1, 3 wait in all_reduce 4 of world, 20 B (scheduled); "
        "rank 2 has not come: its last call is all_reduce 3 of world, completed at "
    )
    assert "train.py:" in said
    (missing,) = by_torch(path, tmp_path / "pickled")
    assert missing == (4, {2})
    some = [path / f"trace_rank_{rank}" for rank in (0, 1, 3)]
    assert "nothing is known of rank 2 and any others: the members are not listed" in analyzed(*some)
    assert analyzed(*some[:2]) == (  # gloo lists no members: more ranks may not have come
        "hang rank 0-1 wait in all_reduce 4 of world, 20 B (scheduled); "
        "nothing is known of any ranks but these: the members are not listed\n"
    )


def by_torch(path: Path, copy: Path) -> list[tuple[int, set[int]]]:
    """Return which ranks torch's own analysis misses in which collective.

    It reads pickles, and needs members, which the recorder of gloo does not list.
    """
    copy.mkdir()
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    config["1"] = {"name": "1", "desc": "undefined", "ranks": "[0, 1]"}
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        document = json.loads(data) if data.startswith(b"{") else pickle.loads(data)
        document["pg_config"] = config
        for entry in document["entries"]:
            entry["process_group"] = tuple(entry["process_group"])
        (copy / file.name).write_bytes(pickle.dumps(document))
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(copy)]
    (done,) = Runner.launch(command)
    said = done.stdout + done.stderr
    found = re.findall(r"sequence number: (\d+)(?:.*\n){1,4}?.*missing ranks: \{([\d, ]+)\}", said)
    assert found, said
    assert analyzed(copy).startswith("hang rank 0-1, 3 wait in all_reduce 4 of world")
    return [(int(number), {int(rank) for rank in ranks.split(",")}) for number, ranks in found]


def test_dumps_tell_in_what_ranks_do_not_agree(tmp_path: Path, ranks: Any) -> None:
    said = analyzed(dumps(tmp_path, ranks, "differs"))
    assert said.startswith(
        "mismatch collective 4 of world: all_reduce of 20 B fp32 on rank 0-2, "
        "all_reduce of 28 B fp32 on rank 3"
    )


def entry(name: str, number: int, state: str = "completed", group: str = "0", **more: Any) -> dict[str, Any]:
    """Return an entry as NCCL's recorder writes it."""
    told = {"profiling_name": f"nccl:{name}", "collective_seq_id": number, "p2p_seq_id": 0, "state": state}
    told |= {"process_group": [group, "default_pg" if group == "0" else "mesh_pp"], "record_id": number}
    return told | {"time_created_ns": number, "input_sizes": [[8]], "input_dtypes": ["Float"]} | more


def written(path: Path, entries: dict[int, list[dict[str, Any]]]) -> Path:
    """Write a dump of each rank of a job with a pipeline of three stages."""
    members = {"0": ("default_pg", [0, 1, 2]), "1": ("mesh_pp", [0, 1, 2])}
    config = {n: {"name": n, "desc": desc, "ranks": str(ranks)} for n, (desc, ranks) in members.items()}
    path.mkdir()
    for rank, found in entries.items():
        document = {"version": "2.9", "pg_config": config, "entries": found}
        (path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(document))
    return path


def test_transfers_of_dumps_tell_which_stage_is_behind(tmp_path: Path) -> None:
    path = written(
        tmp_path / "dumps",
        {
            0: [entry("send 0->1", 0, "completed", "1"), entry("recv 0<-1", 0, "started", "1")],
            1: [entry("recv 1<-0", 0, "completed", "1")],
            2: [entry("recv 2<-1", 0, "started", "1")],
        },
    )
    lines = analyzed(path).splitlines()
    assert len(lines) == 2
    assert all("rank 1 has not come" in line and "(started)" in line for line in lines)


def test_a_group_whose_entries_a_full_recorder_has_lost_is_not_judged(tmp_path: Path) -> None:
    late = [entry("all_reduce", 7, record_id=2000), entry("all_reduce", 8, "started")]
    path = written(tmp_path / "dumps", {0: late, 1: late, 2: [entry("send 2->1", 0, group="1", record_id=9)]})
    said = analyzed(path)
    assert "rank 0-1 wait in all_reduce 8 of world" in said
    assert "has not come" not in said
    assert "nothing is known of rank 2" in said


def test_dumps_of_a_job_that_goes_well_name_nobody(tmp_path: Path) -> None:
    path = written(tmp_path / "dumps", {rank: [entry("all_reduce", 1)] for rank in range(3)})
    assert analyzed(path) == "rank 0-2: no rank is known to be behind\n"
