"""Meshes whose dimensions are told a backend or options of NCCL are those that are told none."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import RankTables, read_rank, read_rehearsal, rehearsal_folder

SCRIPT = """
import datetime, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def options():
    made = dist.ProcessGroupNCCL.Options()
    made._timeout = datetime.timedelta(minutes=1)
    return made

OVERRIDE = {{
    "none": None,
    "nccl": {{"replicate": "nccl", "shard": "nccl"}},
    "options": {{name: ("nccl", options()) for name in ("replicate", "shard")}},
    "gloo": {{"replicate": "gloo"}},
}}
dist.init_process_group("nccl")
mesh = init_device_mesh(
    "cuda", (2, 4), mesh_dim_names=("replicate", "shard"), backend_override=OVERRIDE[{kind!r}]
)
model = fully_shard(torch.nn.Linear(8, 8, device="cuda"), mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    dist.all_reduce(torch.ones(4, device={device!r}), group=mesh["replicate"].get_group())
    optimizer.step()
"""


def _rehearsed(folder: Path, kind: str, device: str = "cuda") -> tuple[RankTables, tuple[str, ...]]:
    """Return what rank 0 of 8 does, and the notes."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT.format(kind=kind, device=device))
    asked = Asked(command=(str(folder / "train.py"),), world_size=8, ranks=(0,), warmup=0, steps=3)
    rehearse(asked, folder / "run")
    tables = rehearsal_folder(folder / "run")
    return read_rank(tables, 0), read_rehearsal(tables).notes


@pytest.mark.parametrize("kind", ["nccl", "options"])
def test_a_mesh_that_is_told_what_it_would_take_is_the_same(kind: str, tmp_path: Path) -> None:
    plain, none = _rehearsed(tmp_path / "none", "none")
    told, notes = _rehearsed(tmp_path / kind, kind)
    assert told.events.equals(plain.events)
    assert told.messages.equals(plain.messages)
    assert notes == none


def test_a_dimension_over_gloo_is_known_as_one(tmp_path: Path) -> None:
    """It carries what is on the host, which one over NCCL refuses, and what is on the device by the host."""
    _, notes = _rehearsed(tmp_path / "device", "gloo")
    assert any("are sent over gloo" in note for note in notes)
    assert not any("are sent over gloo" in note for note in _rehearsed(tmp_path / "nccl", "nccl")[1])
    _rehearsed(tmp_path / "host", "gloo", device="cpu")
    with pytest.raises(RehearsalError, match=r"of a tensor on the host, in the group .* whose backend nccl"):
        _rehearsed(tmp_path / "refused", "nccl", device="cpu")
