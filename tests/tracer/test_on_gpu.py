"""On a GPU: times come from events on the device, and nothing waits for them."""

from pathlib import Path

import pytest

import foretrace
from traces.store import open_run

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_nccl_and_kernels_are_timed_on_the_device(tmp_path: Path) -> None:
    """One rank: NCCL does its work on one GPU, too."""
    store = distributed.HashStore()
    distributed.init_process_group(
        "nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda:0")
    )
    try:
        layers = [torch.nn.Linear(4096, 4096, bias=False) for _ in range(3)]
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).cuda())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(4096, 4096, device="cuda")
        with foretrace.record(tmp_path / "run"):
            for _ in range(4):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        distributed.destroy_process_group()
    run = open_run(tmp_path / "run")
    assert run.warnings == ()
    spans = [row for row in run.spans().to_pylist() if row["step"] == 2]
    products = [row for row in spans if row["name"] in {"0", "1", "2"} and row["kind"] == "forward"]
    assert len(products) == 3
    # 137 GFLOP each: no GPU does that in 50 us, and no host needs 50 ms to launch it.
    assert all(50_000 < row["duration_ns"] < 50_000_000 for row in products)
    reduced = [row for row in spans if row["kind"] == "all_reduce"]
    assert sum(row["size_bytes"] for row in reduced) == 3 * 4 * 4096**2
    window = next(row for row in spans if row["category"] == "step")
    for row in spans:
        assert window["start_ns"] - 1_000_000 <= row["start_ns"]
        assert row["start_ns"] + row["duration_ns"] <= window["start_ns"] + window["duration_ns"] + 1_000_000
    assert {row["category"] for row in run.memory().to_pylist()} <= {"total", "reserved"}
