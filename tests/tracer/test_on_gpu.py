"""On a GPU: times come from events on the device, and nothing waits for them.

``pytest -m gpu tests/tracer`` runs them: the first on one GPU, those with processes on two or more.
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import foretrace
from foretrace.tracer.ingest.ingest import ingest
from foretrace.traces.run import Run
from foretrace.traces.store import open_run

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one process per GPU: needs two GPUs")

WIDTH = 4096


@pytest.fixture
def alone() -> Any:
    """A world of one rank on NCCL, which does its work on one GPU, too."""
    device = torch.device("cuda:0")
    distributed.init_process_group(
        "nccl", store=distributed.HashStore(), rank=0, world_size=1, device_id=device
    )
    yield device
    distributed.destroy_process_group()


def training(device: Any) -> Callable[[], Any]:
    """Return a step of DDP over three products of 137 GFLOP each."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, WIDTH**2, device=device).reshape(WIDTH, WIDTH)

    def step() -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def product() -> tuple[Any, Any, Any]:
    """Return one layer of 137 GFLOP, what it is multiplied by, and its optimizer, once they are there."""
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False).cuda()
    x = torch.ones(WIDTH, WIDTH, device="cuda")
    torch.cuda.synchronize()
    return model, x, torch.optim.SGD(model.parameters(), lr=0.1)


def within_steps(run: Run) -> None:
    """Check that every span of a step lies in its window, give or take what an anchor is off."""
    rows = run.spans().to_pylist()
    windows = {(row["rank"], row["step"]): row for row in rows if row["category"] == "step"}
    for row in rows:
        if (window := windows.get((row["rank"], row["step"]))) is not None:
            ended_ns = window["start_ns"] + window["duration_ns"]
            assert window["start_ns"] - 1_000_000 <= row["start_ns"]
            assert row["start_ns"] + row["duration_ns"] <= ended_ns + 1_000_000


def test_nccl_and_kernels_are_timed_on_the_device(tmp_path: Path, alone: Any) -> None:
    step = training(alone)
    with foretrace.record(tmp_path / "run"):
        for _ in range(4):
            step()
    run = open_run(tmp_path / "run")
    assert run.warnings == ()
    assert run.info.dropped == {}
    spans = [row for row in run.spans().to_pylist() if row["step"] == 2]
    products = [row for row in spans if row["name"] in {"0", "1", "2"} and row["kind"] == "forward"]
    assert len(products) == 3
    # 137 GFLOP each: no GPU does that in 50 us, and no host needs 50 ms to launch it.
    assert all(50_000 < row["duration_ns"] < 50_000_000 for row in products)
    reduced = [row for row in spans if row["kind"] == "all_reduce"]
    assert sum(row["size_bytes"] for row in reduced) == 3 * 4 * WIDTH**2
    within_steps(run)
    assert {row["category"] for row in run.memory().to_pylist()} == {"total", "reserved"}
    held = [row["bytes"] for row in run.memory().to_pylist() if row["category"] == "total"]
    assert min(held) > 3 * 4 * WIDTH**2  # the parameters at least
    assert '"kind": "gpu"' in run.info.to_json()


def test_losses_are_the_same_to_the_last_bit(tmp_path: Path, alone: Any) -> None:
    plain = [step().item() for step in [training(alone)] for _ in range(5)]
    with foretrace.record(tmp_path / "run"):
        recorded = [step().item() for step in [training(alone)] for _ in range(5)]
    assert plain == recorded


def gathered(steps: int, rows: int = 1 << 24) -> int:
    """Gather into new tensors, dropped at once, beside the computing stream; return the peak of memory."""
    x = torch.ones(rows, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        y = torch.empty(rows * distributed.get_world_size(), device="cuda")
        work = distributed.all_gather_into_tensor(y, x, async_op=True)
        work.wait()
        x.add_(y[:rows], alpha=0.0)
    torch.cuda.synchronize()
    peak: int = torch.cuda.memory_stats()["reserved_bytes.all.peak"]
    return peak


def test_memory_is_free_as_soon_as_without_recording(tmp_path: Path, alone: Any) -> None:
    """The future of a work would keep each result until a stream of torch's pool has seen its end."""
    plain = gathered(50)
    with foretrace.record(tmp_path / "run"):
        recorded = gathered(50)
    assert recorded == plain
    rows = [row for row in open_run(tmp_path / "run").spans().to_pylist() if row["kind"] == "all_gather"]
    assert len(rows) == 50
    assert open_run(tmp_path / "run").info.dropped == {}


def test_a_collective_beside_the_computation_ends_when_the_device_says(tmp_path: Path, alone: Any) -> None:
    """It is waited for long after its end: its own work tells how long it took."""
    model, small = torch.nn.Linear(8, 8).cuda(), torch.ones(4, 8, device="cuda")
    x = torch.ones(1 << 20, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with foretrace.record(tmp_path / "run"):
        for _ in range(3):
            work = distributed.all_reduce(x, async_op=True)
            torch.cuda._sleep(200_000_000)
            model(small).sum().backward()
            torch.cuda.synchronize()
            work.wait()
            optimizer.step()
    found = [row for row in open_run(tmp_path / "run").spans().to_pylist() if row["kind"] == "all_reduce"]
    assert len(found) == 3
    assert all(row["duration_ns"] < 20_000_000 for row in found[1:])  # 4 MiB; the sleep takes some 0.1 s


def test_a_model_that_is_warmed_up_on_another_stream_is_followed(tmp_path: Path) -> None:
    side, (model, x, optimizer) = torch.cuda.Stream(), product()
    with foretrace.record(tmp_path / "run"):
        with torch.cuda.stream(side):
            model(x).sum().backward()
        torch.cuda.current_stream().wait_stream(side)
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
    rows = [row for row in open_run(tmp_path / "run").spans().to_pylist() if row["step"] == 2]
    forward_ns = sum(row["duration_ns"] for row in rows if row["kind"] == "forward")
    assert forward_ns > 500_000  # 137 GFLOP: no host launches that slowly, no GPU does it faster


def test_kernels_of_chosen_steps_are_in_a_trace(tmp_path: Path, alone: Any) -> None:
    step = training(alone)
    with foretrace.record(tmp_path / "run", steps="1:3", depth="kernels"):
        for _ in range(4):
            step()
    ingest([tmp_path / "run" / "kineto"], tmp_path / "kernels")
    rows = open_run(tmp_path / "kernels").spans().to_pylist()
    products = [row for row in rows if "gemm" in row["name"].lower() and row["duration_ns"] > 50_000]
    assert len(products) >= 2 * 3 * 2  # two steps, three layers, forward and backward at least


def test_a_graph_is_captured_while_the_recording_writes(tmp_path: Path) -> None:
    """A query of an event on any thread would end the capture."""
    x = torch.ones(256, 256, device="cuda")
    model = torch.nn.Linear(256, 256, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with foretrace.record(tmp_path / "run", flush_s=0.001):
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
        with torch.no_grad():
            expected = model(x).clone()
            for _ in range(50):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    y = model(x)
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(y, expected)
    assert open_run(tmp_path / "run").warnings == ()


def test_a_side_stream_does_not_compute_for_the_model(tmp_path: Path) -> None:
    """Work on another stream, and the time in which the compute stream waits for it, belong to no block."""
    side, (model, x, optimizer) = torch.cuda.Stream(), product()
    with foretrace.record(tmp_path / "run"):
        for _ in range(3):
            with torch.cuda.stream(side):
                torch.cuda._sleep(200_000_000)  # some 0.1 s of clock ticks
            torch.cuda.current_stream().wait_stream(side)
            model(x).sum().backward()
            optimizer.step()
    rows = [row for row in open_run(tmp_path / "run").spans().to_pylist() if row["step"] == 1]
    computed_ns = sum(row["duration_ns"] for row in rows if row["category"] == "compute")
    window_ns = next(row["duration_ns"] for row in rows if row["category"] == "step")
    assert computed_ns < 0.5 * window_ns


BATCH = """
import sys
import torch, torch.distributed as dist

rank = int(__import__("os").environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
n = dist.get_world_size()
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.ones(1 << 20, device="cuda"), torch.ones(1 << 20, device="cuda")
for _ in range(4):
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    batch = [dist.P2POp(dist.isend, x, (rank + 1) % n), dist.P2POp(dist.irecv, y, (rank - 1) % n)]
    works = dist.batch_isend_irecv(batch)
    dist.all_reduce(torch.ones(4, device="cuda"))  # waited for before the batch is
    for work in works:
        work.wait()
    optimizer.step()
torch.cuda.synchronize()
dist.destroy_process_group()
"""


@needs_two
def test_a_batch_of_transfers_ends_with_its_own_work(tmp_path: Path, ranks: Any) -> None:
    script, path = tmp_path / "train.py", tmp_path / "run"
    script.write_text(BATCH)
    result = ranks.run([sys.executable, str(script)], ranks.env(path))
    assert result.status == (0, 0), result.errors
    run = open_run(path)
    assert run.warnings == ()
    for rank in (0, 1):
        kinds = Counter(row["kind"] for row in run.spans([rank]).to_pylist() if row["category"] == "p2p")
        assert kinds == {"send": 4, "recv": 4}
    within_steps(run)


@needs_two
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tp", "pp"])
def test_examples_on_two_gpus_say_what_they_say_on_processors(
    tmp_path: Path, ranks: Any, config: Path, name: str
) -> None:
    """The same collectives on both ranks, over NCCL, and the same losses as without recording."""
    script = str(ranks.root / "examples" / f"train_{name}.py")
    command = [sys.executable, script, "--config", str(config), "--steps", "4", "--seq-len", "16"]
    plain, recorded = ranks.run(command, ranks.env()), ranks.run(command, ranks.env(tmp_path / "run"))
    assert plain.status == recorded.status == (0, 0), recorded.errors
    assert plain.losses == recorded.losses
    run = open_run(tmp_path / "run")
    assert run.warnings == ()
    assert run.info.dropped == {}
    within_steps(run)
    numbers = [
        {
            (row["group"], row["sequence"], row["kind"], row["size_bytes"])
            for row in run.spans([rank]).to_pylist()
            if row["category"] == "collective" and len(members(run, row["group"])) == 2
        }
        for rank in (0, 1)
    ]
    assert numbers[0] == numbers[1]


def members(run: Run, group: int) -> tuple[int, ...]:
    """Return the ranks of a group."""
    return next(one.ranks for one in run.info.groups if one.id == group)
