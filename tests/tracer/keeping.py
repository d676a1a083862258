"""A training that keeps its last checkpoint, its best, a log and a link, in the folder that it is given."""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

folder = Path(sys.argv[1])
model = nn.Linear(8, 8).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    for old in folder.glob("checkpoint-*"):
        shutil.rmtree(old, ignore_errors=True)
    staging = folder / f"staging-{step}"
    staging.mkdir()
    (staging / "state.json").write_text(json.dumps(step))
    staging.rename(folder / f"checkpoint-{step}")
    with (folder / "log.txt").open("a") as log:
        log.write(f"{step}\n")
    (folder / "new.txt").write_text(str(step))
    (folder / "latest").unlink(missing_ok=True)
    (folder / "latest").symlink_to(f"checkpoint-{step}")
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        file.write(str(step))
    Path(file.name).replace(folder / "best.json")
    if json.loads((folder / "best.json").read_text()) != step:
        raise SystemExit("what was written is not what is read")
    if (folder / "changed.bin").exists():
        descriptor = os.open(folder / "changed.bin", os.O_RDWR)
        os.write(descriptor, b"new")
        os.close(descriptor)
if [line for line in (folder / "log.txt").read_text().splitlines() if line.isdigit()] != ["0", "1", "2"]:
    raise SystemExit("what was appended is not what is read")
there = sorted(path.name for path in folder.iterdir())
sys.stdout.write(" ".join([*there, (folder / "new.txt").read_text()]))
