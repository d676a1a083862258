"""Small rules of what is on the host: which operands stay there, and for which copies the host waits."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.device.host import STAGED_BYTES
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import HOST_WAIT, read_rank, rehearsal_folder

pytest.importorskip("torch")

SCRIPT = """
import torch

model = torch.nn.Linear(4, 4, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
table = torch.zeros(8, 4, device="cuda")
number, places, mask = torch.tensor(2.0), torch.tensor([0, 3]), torch.zeros(8, 4)
for step in range(2):
    out = model(torch.ones(2, 4, device="cuda")) * number
    out = out + table[places]
    table.index_put_((places,), out.detach())
    if step:
{copies}
    out.sum().backward()
    optimizer.step()
print(number.device, places.device, mask.device, (mask + number).device, (table * number).device)
"""


def _rehearsed(folder: Path, copies: str = "pass") -> tuple[str, int]:
    """Return what was printed, and how often the host waited in the second step."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT.format(copies="\n".join(f"        {line}" for line in copies.splitlines())))
    rehearse(Asked(command=(str(script),), world_size=1, steps=9), folder / "run")
    tables = read_rank(rehearsal_folder(folder / "run"), 0)
    log = (rehearsal_folder(folder / "run") / "rank-00000" / "output.log").read_text()
    return log.strip(), tables.events["what"].to_pylist().count(HOST_WAIT)


def test_single_numbers_and_places_stay_on_the_host(tmp_path: Path) -> None:
    """CUDA takes a number of the host beside a tensor of its own, and places of the host to look it up by."""
    assert _rehearsed(tmp_path / "in")[0] == "cpu cpu cpu cpu cuda:0"


@pytest.mark.parametrize(
    ("copies", "waits"),
    [
        ("torch.zeros({size} // 4).cuda(non_blocking=True)", 0),
        ("torch.zeros({size} // 4 + 1).cuda(non_blocking=True)", 1),
        ("torch.zeros({size} // 4 + 1).pin_memory().cuda(non_blocking=True)", 0),
        ("torch.zeros({size} // 4).cuda()", 1),
        ("torch.zeros({size}, device='cuda').to('cpu', non_blocking=True).cuda(non_blocking=True)", 0),
        ("torch.zeros({size}, device='cuda').cpu().cuda(non_blocking=True)", 2),
    ],
)
def test_the_host_waits_for_copies_of_memory_that_is_not_pinned(
    copies: str, waits: int, tmp_path: Path
) -> None:
    """But not for those of 64 KiB or less to the device. A copy that does not block goes to pinned memory."""
    _, before = _rehearsed(tmp_path / "without")
    _, found = _rehearsed(tmp_path / "with", copies.format(size=STAGED_BYTES))
    assert found - before == waits
