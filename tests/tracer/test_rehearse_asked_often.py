"""Scripts that ask for very many numbers, as lists of large tensors; tensors made sparse."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.gpu.listed import ONE_BY_ONE
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.script.sparse import WHOLE
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


@pytest.mark.parametrize(("n_rows", "times"), [(ONE_BY_ONE // 4, ONE_BY_ONE), (ONE_BY_ONE, 1)])
def test_the_list_of_a_large_tensor_is_asked_for_once(tmp_path: Path, n_rows: int, times: int) -> None:
    """It is as long as the tensor, and known numbers are those of the tensor."""
    body = f"""
found = torch.randn({n_rows}, 4, device="cuda").tolist()
whole = torch.arange({4 * n_rows}, device="cuda").view({n_rows}, 4).tolist()
print(len(found), {{len(row) for row in found}}, {{one for row in found for one in row}}, whole[-1][-1])
"""
    found, said = _rehearsed(tmp_path, body + TAIL)
    assert said.strip() == f"{n_rows} {{4}} {{1.0}} {4 * n_rows - 1}"
    counts = {1: ""}.get(times, f" ({times} times)")
    assert any(line.endswith(f"told 1.0 (nothing is known of it){counts}") for line in found.stated)


def test_first_values_of_parameters_are_not_worth_a_line(tmp_path: Path) -> None:
    """``trunc_normal_`` draws again what lies outside of its bounds, and asks whether anything does."""
    body = """
weight = torch.nn.Parameter(torch.empty(8, 8, device="cuda"))
torch.nn.init.trunc_normal_(weight, std=0.02)
"""
    found, _ = _rehearsed(tmp_path, body + TAIL)
    assert not found.stated
    found, _ = _rehearsed(tmp_path, body + "print((weight > 1).any().item())\n" + TAIL)
    assert found.stated == ("asking.py:19 reads a number: told False (nothing is known of it)",)


@pytest.mark.parametrize(("warmup", "is_said"), [(1, True), (2, False)])
def test_what_is_made_sparse_is_kept_whole(tmp_path: Path, warmup: int, is_said: bool) -> None:
    """As by an evaluation of sparse embeddings. It is said where it is in the answer: of the second step."""
    body = "step()\nx = torch.ones(4, 8, device='cuda').to_sparse()\nprint(tuple(x.shape), x.is_sparse)\n"
    found, said = _rehearsed(tmp_path, body + TAIL, warmup)
    assert said.strip() == "(4, 8) False"
    note = WHOLE.format(where=f"asking.py:{HEAD.count(chr(10)) + 2}")
    assert (note in found.notes) == is_said
