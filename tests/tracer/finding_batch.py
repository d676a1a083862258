"""Looks for the largest batch that fits, as many scripts do, and says in JSON what it saw."""

import json
import sys

import torch
from torch import nn

GIB = 2**30
model = nn.Linear(8, 1024, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def fits(rows: int) -> bool:
    """Whether *rows* rows of 4 KiB fit three times over."""
    try:
        first = torch.empty(rows, 1024, device="cuda")
        return bool((first + first + first).shape)
    except torch.OutOfMemoryError:
        return False


rows = 2**18
while fits(2 * rows):
    rows *= 2
found: dict[str, float] = {"rows": rows}
torch.cuda.empty_cache()
free, total = torch.cuda.mem_get_info()
found["total"], before = total / GIB, torch.cuda.memory_allocated()
found["is within"] = torch.cuda.max_memory_allocated() <= total
for n in (4, 2):
    torch.cuda.reset_peak_memory_stats()
    torch.empty(n * GIB, dtype=torch.uint8, device="cuda")
    found[f"peak of {n}"] = (torch.cuda.max_memory_allocated() - before) / GIB
    found[f"reserved after {n}"] = (torch.cuda.memory_reserved() - before) / GIB
found["free"] = (free - torch.cuda.mem_get_info()[0]) / GIB
model(torch.ones(4, 8, device="cuda")).sum().backward()
optimizer.step()
optimizer.step()
sys.stdout.write(json.dumps(found) + "\n")
