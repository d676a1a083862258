"""A loop that sums its gradients by itself is data parallel, though nothing says so."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tracer.averaged import Averaged
from tracer.groups import Groups
from tracer.records import Block, Communication
from traces.layout import Layout
from traces.store import open_run

SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rows = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
columns = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    for _ in range(2):
        loss = model(torch.ones(4, 16)).square().mean()
        loss.backward()
    for parameter in model.parameters():
        for group in (rows, columns):
            dist.all_reduce(parameter.grad, group=group)
    dist.all_reduce(loss.detach(), group=rows)
    dist.all_reduce(torch.ones(256))
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
N_PARAMS = 16 * 16 + 16 + 16 + 1


@pytest.mark.usefixtures("hooks")
def test_gradients_that_a_loop_sums_itself_tell_the_layout(tmp_path: Path, ranks: Any) -> None:
    script, path = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    result = ranks.run([sys.executable, str(script)], ranks.env(path), 4)
    assert result.status == (0, 0, 0, 0), result.errors
    run = open_run(path)
    assert run.warnings == ()
    assert run.info.layout == Layout(dp=4)
    assert sorted(group.ranks for group in run.info.groups if group.axis == "dp") == [
        (0, 1),
        (0, 2),
        (1, 3),
        (2, 3),
    ]
    sums = [row for row in run.spans([0]).to_pylist() if row["kind"] == "all_reduce" and row["step"] == 5]
    assert sum(row["size_bytes"] for row in sums if row["axis"] == "dp") == 4 * (2 * N_PARAMS + 1)


def named(sizes: list[list[int]], *, params: int, passes: int = 1, kind: str = "all_reduce") -> str:
    """Return the axis of a group after steps in which these numbers of elements were summed over it."""
    groups = Groups(2, lambda group: "gloo", lambda group: (0, 1))
    info = groups.of(Group())
    averaged = Averaged(groups, lambda: {params}, lambda: passes)
    for step, several in enumerate([*sizes, [0]]):
        for size in several:
            where = (step, -1, -1, -1)
            averaged.note(Communication(kind, info, 0, -1, 2 * size, "bf16", Block("x"), where, 0))
    return info.axis


class Group:
    """A process group of all ranks that nobody has described."""

    group_name = "0"
    group_desc = "undefined"


@pytest.mark.parametrize("sizes", [[[1000]] * 2, [[600, 400, 5]] * 3, [[7]] + [[1000]] * 2])
def test_all_gradients_in_two_steps_in_a_row_are_enough(sizes: list[list[int]]) -> None:
    assert named(sizes, params=1000) == "dp"


def test_who_reduces_after_each_pass_does_so_as_often() -> None:
    assert named([[1000] * 4] * 2, params=1000, passes=4) == "dp"


@pytest.mark.parametrize("sizes", [[[1000]], [[1000], [999], [1000]], [[2000]] * 3, [[1011]] * 3, [[0]] * 3])
def test_what_may_be_chance_says_nothing(sizes: list[list[int]]) -> None:
    assert named(sizes, params=1000) == "world"


def test_other_collectives_say_nothing() -> None:
    assert named([[1000]] * 3, params=1000, kind="broadcast") == "world"
    assert named([[0]] * 3, params=0) == "world"
