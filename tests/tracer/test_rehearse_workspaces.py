"""Workspaces of cuBLAS in the memory that a rehearsal reserves."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.device.host import SETTING, workspace_bytes
from foretrace.tracer.rehearse.rehearsing import Asked

PRODUCTS = """
import torch

side = torch.cuda.Stream()
weight = torch.nn.Parameter(torch.randn(64, 64, device="cuda"))
def told(what):
    print(what, torch.cuda.memory_reserved() >> 20)
told("before")
x = weight @ weight
told("forward")
(x @ weight).sum().backward()
told("backward")
with torch.cuda.stream(side):
    weight.detach() @ weight.detach()
told("stream")
torch.ones(64, 64) @ torch.ones(64, 64)
told("host")
for _ in range(2):
    with torch.no_grad():
        torch.mm(weight, weight)
told("again")
torch.cuda.empty_cache()
told("emptied")
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(2):
    (weight @ weight).sum().backward()
    optimizer.step()
"""


def test_each_thread_and_stream_that_multiplies_has_a_workspace(tmp_path: Path) -> None:
    """Of 32 MiB on Hopper: of the forward, of autograd's thread, and of another stream; none of the host.

    It comes in a segment of its own, beside the 2 MiB of each stream that has small blocks.
    """
    script = tmp_path / "products.py"
    script.write_text(PRODUCTS)
    rehearse(Asked(command=(str(script),), world_size=1, ranks=(0,)), tmp_path / "run")
    output = (tmp_path / "run" / "rehearsal" / "rank-00000" / "output.log").read_text().split()
    told = dict(zip(output[::2], map(int, output[1::2]), strict=True))
    assert told["before"] == 2
    assert told["forward"] == 2 + 32
    assert told["backward"] == 2 + 2 * 32
    assert told["stream"] == 2 * 2 + 3 * 32
    assert told["host"] == told["again"] == told["stream"]
    assert told["emptied"] == told["stream"] - 2  # nothing is left in the small blocks of the other stream


@given(kib=st.integers(0, 2**20), count=st.integers(0, 16))
def test_a_workspace_is_as_large_as_the_variable_says(kib: int, count: int) -> None:
    said = workspace_bytes({SETTING: f":{kib}:{count}:16:8"})
    assert said == kib * 2**10 * count + 16 * 2**10 * 8
    assert workspace_bytes({}) == workspace_bytes({SETTING: "nonsense"})
