"""States that a script reads, copies and drops: they are in the memory until then, and not after."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import rehearsal_folder

torch = pytest.importorskip("torch")

WIDTH = 512
BYTES = 4 * WIDTH * WIDTH

SCRIPT = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
model = torch.nn.Linear({width}, {width}, bias=False).cuda()
before = torch.cuda.memory_allocated()
state = torch.load(sys.argv[1], map_location=sys.argv[2])
read = torch.cuda.memory_allocated() - before
model.load_state_dict(state)
del state
print("read", read, "left", torch.cuda.memory_allocated() - before)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(2):
    model(torch.ones(1, {width}, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("where", "read"), [("cuda:0", BYTES), ("cpu", 0)])
def test_what_was_read_and_dropped_takes_no_memory(tmp_path: Path, where: str, read: int) -> None:
    """It is where the script maps it to, and goes with the last reference, on either side."""
    state, script = tmp_path / "state.pt", tmp_path / "train.py"
    torch.save({"weight": torch.zeros(WIDTH, WIDTH)}, state)
    script.write_text(SCRIPT.format(width=WIDTH))
    asked = Asked(command=(str(script), str(state), where), world_size=1)
    found = rehearse(asked, tmp_path / "run")
    log = rehearsal_folder(tmp_path / "run") / "rank-00000" / "output.log"
    assert log.read_text().splitlines()[-1] == f"read {read} left 0"
    assert found.memory["0"].get("host", {}).get("peak_bytes", 0) < BYTES
