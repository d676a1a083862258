"""Autocast of a rehearsal casts as that of CUDA does."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import rehearsal_folder

torch = pytest.importorskip("torch")

SCRIPT = """
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

wide = torch.randn(4, 8, device="cuda")
rows, picture = wide.to(DTYPE), torch.randn(2, 8, 6, 6, device="cuda").to(DTYPE)
volume, sequence = picture[..., None], wide[None]
norm, gru = torch.nn.GroupNorm(2, 8).cuda(), torch.nn.GRU(8, 8).cuda()
model = torch.nn.Linear(8, 8).cuda()
calls = {
    "group_norm": lambda: norm(picture),
    "softmax": lambda: rows.softmax(1),
    "cross_entropy": lambda: F.cross_entropy(rows, torch.zeros(4, dtype=torch.long, device="cuda")),
    "logsumexp": lambda: rows.logsumexp(1),
    "inside gumbel_softmax": lambda: F.gumbel_softmax(rows),
    "inside interpolate": lambda: F.interpolate(picture, scale_factor=2),
    "inside pairwise_distance": lambda: F.pairwise_distance(rows, rows),
    "sum": lambda: rows.sum(),
    "norm": lambda: rows.norm(dim=1),
    "vector_norm": lambda: torch.linalg.vector_norm(rows),
    "pow": lambda: rows**2,
    "area": lambda: F.interpolate(picture, scale_factor=0.5, mode="area"),
    "avg_pool3d": lambda: F.avg_pool3d(volume, (2, 2, 1)),
    "pad": lambda: F.pad(picture, (1, 1, 1, 1), mode="reflect"),
    "gelu": lambda: F.gelu(rows),
    "mean": lambda: rows.mean(),
    "mv": lambda: wide @ wide[0],
    "gru": lambda: gru(sequence)[0],
    "cell": lambda: torch.nn.LSTMCell(8, 8).cuda()(wide)[0],
    "tensordot": lambda: torch.tensordot(wide, wide.t(), 1),
    "scatter_add": lambda: wide.scatter_add(0, torch.zeros(4, 8, dtype=torch.long, device="cuda"), rows),
    "double": lambda: wide.double().logsumexp(1),
}
again = []

def part(x):
    found = F.interpolate(model(x)[None], scale_factor=2)
    again.append((found.dtype, model(x).dtype))
    return found

with torch.autocast("cuda", DTYPE):
    for name, call in calls.items():
        print(name, "=", str(call().dtype)[6:])
    with set_checkpoint_early_stop(False):
        out = checkpoint(part, wide, use_reentrant=False)
out.sum().backward()
print("again =", len(again), len(set(again)))
with torch.autocast("cpu", DTYPE):
    of_host = picture.logsumexp(1), F.avg_pool3d(volume, (2, 2, 1))
    print("of the host =", *(str(one.dtype)[6:] for one in of_host))
torch.optim.SGD(model.parameters(), 0.1).step()
"""
WIDE = (
    *("group_norm", "softmax", "cross_entropy", "logsumexp", "inside gumbel_softmax", "inside interpolate"),
    *("inside pairwise_distance", "sum", "norm", "vector_norm", "pow", "tensordot", "scatter_add"),
)
LOW = ("area", "avg_pool3d", "pad", "gelu", "mean", "mv", "gru", "cell")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_cast_is_what_cuda_casts_wherever_it_is_called(tmp_path: Path, dtype: str) -> None:
    """Also in a recomputation; a region of the processor casts nothing that is on a GPU."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("DTYPE", f"torch.{dtype}"))
    rehearse(Asked(command=(str(script),), world_size=1, warmup=0), tmp_path / "run")
    log = (rehearsal_folder(tmp_path / "run") / "rank-00000" / "output.log").read_text()
    found = dict(line.split(" = ") for line in log.splitlines() if " = " in line)
    assert found.pop("again") == "2 1"
    assert found.pop("of the host") == f"{dtype} {dtype}"
    expected = {**dict.fromkeys(WIDE, "float32"), **dict.fromkeys(LOW, dtype), "double": "float64"}
    if torch.__version__ >= "2.13":
        assert found == expected
