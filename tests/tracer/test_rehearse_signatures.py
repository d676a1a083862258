"""What stands for torch's own takes the arguments that torch's takes: libraries read them, and go by them."""

import inspect
import json
from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.fsdp")

NAMES = (
    "torch.utils.data.DataLoader.__init__",
    "torch.nn.parallel.DistributedDataParallel.__init__",
    "torch.distributed.fsdp.FullyShardedDataParallel.__init__",
    "torch.amp.autocast.__init__",
    "torch.distributed.init_process_group",
    "torch.distributed.new_group",
    "torch.load",
    "torch.save",
    "torch.compile",
)

OF_OBJECTS = tuple(
    f"torch.distributed.{name}"
    for name in (
        "all_gather_object",
        "gather_object",
        "scatter_object_list",
        "broadcast_object_list",
        "send_object_list",
        "recv_object_list",
    )
)

SCRIPT = """
import inspect
import json

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn.parallel
from torch.utils.data import DataLoader

dist.init_process_group("nccl")
print(json.dumps([list(inspect.signature(one).parameters) for one in ({names})]))


def anew(loader):
    taken = inspect.signature(type(loader).__init__).parameters
    kept = {{k: v for k, v in vars(loader).items() if k in taken and taken[k].default is not v}}
    return DataLoader(**{{k: v for k, v in kept.items() if k not in ("sampler", "batch_sampler")}})


model = torch.nn.Linear(16, 16).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows in anew(DataLoader(torch.zeros(64, 16), batch_size=8)):
    model(rows.cuda()).sum().backward()
    optimizer.step()
    print(len(rows))
"""


def test_arguments_are_told_as_torch_has_them(tmp_path: Path) -> None:
    """A loader that is made anew from what a first one took, as by Lightning, has batches of as many rows."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(names=", ".join(NAMES)))
    rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,)), tmp_path / "run")
    told, *rows = (tmp_path / "run/rehearsal/rank-00000/output.log").read_text().splitlines()
    ours = [list(inspect.signature(eval(name)).parameters) for name in NAMES]
    assert json.loads(told) == ours
    assert set(rows) == {"8"}


def test_collectives_of_objects_take_all_that_torchs_take(tmp_path: Path) -> None:
    """Also what newer versions have added: copies of torch's pipelines send shapes with ``use_batch``."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(names=", ".join(OF_OBJECTS)))
    rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,)), tmp_path / "run")
    told, *_ = (tmp_path / "run/rehearsal/rank-00000/output.log").read_text().splitlines()
    for name, taken in zip(OF_OBJECTS, json.loads(told), strict=True):
        assert {*inspect.signature(eval(name)).parameters} <= {*taken}, name


SCRIPTED = """
import math

import torch


@torch.jit.script
def angles(places, n: int):
    scale = math.log(10000) / math.floor(n - 1.5) + math.sqrt(n)
    return torch.exp(-torch.arange(n, dtype=torch.float, device=places.device) * scale)


model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(angles(torch.ones(1).cuda(), 4)).sum().backward()
optimizer.step()
"""


def test_what_stands_for_functions_is_compiled_as_they_are(tmp_path: Path) -> None:
    """``torch.jit.script`` knows functions of ``math`` and torch by what they are."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPTED)
    rehearse(Asked(command=(str(script),), world_size=1), tmp_path / "run")
