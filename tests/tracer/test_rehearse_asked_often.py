"""Scripts that ask for very many numbers, as lists of large tensors."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.data.unknown import ONE_BY_ONE
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import Rehearsal, rehearsal_folder

pytest.importorskip("torch")

HEAD = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def step():
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


"""
TAIL = "\nfor _ in range(3):\n    step()\n"


def _rehearsed(folder: Path, body: str, warmup: int = 1) -> tuple[Rehearsal, str]:
    script = folder / "asking.py"
    script.write_text(HEAD + body)
    asked = Asked(command=(str(script),), world_size=2, ranks=(0,), samples=0, warmup=warmup)
    found = rehearse(asked, folder / "run")
    return found, (rehearsal_folder(folder / "run") / "rank-00000" / "output.log").read_text()


@pytest.mark.parametrize("n_rows", [ONE_BY_ONE // 4, ONE_BY_ONE])
def test_the_list_of_a_large_tensor_is_as_long_as_the_tensor(tmp_path: Path, n_rows: int) -> None:
    """Known numbers are those of the tensor, and all others can be printed."""
    body = f"""
found = model(torch.randn({2 * n_rows}, 8, device="cuda")).view({n_rows}, 16)[:, :4].tolist()
whole = torch.arange({4 * n_rows}, device="cuda").view({n_rows}, 4).tolist()
print(len(found), {{len(row) for row in found}}, {{str(one) for row in found for one in row}}, whole[-1][-1])
"""
    _, said = _rehearsed(tmp_path, body + TAIL)
    assert said.strip() == f"{n_rows} {{4}} {{'nan'}} {4 * n_rows - 1}"


def test_first_values_of_parameters_are_not_worth_a_line(tmp_path: Path) -> None:
    """``trunc_normal_`` draws again what lies outside of its bounds, and asks whether anything does."""
    body = """
weight = torch.nn.Parameter(torch.empty(8, 8, device="cuda"))
torch.nn.init.trunc_normal_(weight, std=0.02)
"""
    found, _ = _rehearsed(tmp_path, body + TAIL)
    assert not found.stated
    with pytest.raises(RehearsalError, match=r"asking\.py:19 needs a number, which a rehearsal"):
        _rehearsed(tmp_path, body + "print(int((weight > 1).any()))\n" + TAIL)
