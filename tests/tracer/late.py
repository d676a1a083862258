"""A training that resumes from its last checkpoint and saves one after every step, beside prepared data."""

import json
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

folder = Path(sys.argv[1])
dist.init_process_group("nccl")
rank = dist.get_rank()
if rank == 0:
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "tokens.json").write_text("[1, 2]")
    (folder / "log.txt").write_text("begins\n")
dist.barrier()
assert json.loads((folder / "data" / "tokens.json").read_text()) == [1, 2]


def checkpoints() -> set[str]:
    """Return the names of all checkpoints, which every way to list files finds."""
    listed = {name for name in os.listdir(folder) if name.startswith("checkpoint")}  # noqa: PTH208
    with os.scandir(folder) as entries:
        assert listed == {one.name for one in entries if one.name.startswith("checkpoint")}
    assert listed == {path.name for path in folder.glob("checkpoint-*")}
    number = os.open(folder, os.O_RDONLY)
    for at in (number, None):  # neither is a path; the last is the present folder
        with os.scandir(at) as entries:
            assert len(os.listdir(at)) + len(list(entries)) > 0  # noqa: PTH208
    os.close(number)
    assert all(os.path.isdir(folder / name) and (folder / name).exists() for name in listed)  # noqa: PTH112
    return listed


model = torch.nn.Linear(8, 8).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if found := checkpoints():
    raise SystemExit(f"no valid checkpoint at {found}")
for step in range(1, 4):
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    staging, saved = folder / f"staging-{rank}", folder / f"checkpoint-{step}"
    os.makedirs(saved.parent / "all", exist_ok=True)  # noqa: PTH103
    (saved.parent / "all" / "state.json").write_text(json.dumps([rank, step]))
    assert json.loads((saved.parent / "all" / "state.json").read_text()) == [rank, step]
    if rank == 0:
        staging.mkdir()
        (staging / "state.json").write_text(json.dumps(step))
        shutil.move(staging, saved)
        with (folder / "log.txt").open("a") as log:
            log.write(f"{step}\n")
    else:
        assert not saved.exists()
        assert not os.path.lexists(saved / "state.json")
        try:
            (saved / "state.json").read_text()
        except FileNotFoundError:
            pass
        else:
            raise SystemExit("another rank's file was read")
    assert checkpoints() == ({f"checkpoint-{one}" for one in range(1, step + 1)} if rank == 0 else set())
if rank == 0:
    shutil.rmtree(folder / "checkpoint-2")
    assert checkpoints() == {"checkpoint-1", "checkpoint-3"}
