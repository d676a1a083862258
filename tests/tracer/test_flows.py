"""What flows over a group tells its axis where nothing else does: gradients, activations, tokens."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.rehearsals import rehearse, rows_and_tokens

from foretrace.tracer.flows import Flows, are_gradients
from foretrace.tracer.groups import GroupInfo, Groups
from foretrace.tracer.records import Block, Communication
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.layout import AXES, Layout
from foretrace.traces.store import open_run

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
    flows = Flows(groups, lambda: [Counter({(params,): 1})], lambda: passes)
    for step, several in enumerate([*sizes, [0]]):
        for size in several:
            where = (step, -1, -1, -1)
            flows.note(Communication(kind, info, 0, -1, 2 * size, "bf16", Block("x"), where, 0))
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


SHAPES = Counter({(6, 2): 5, (12,): 1, (8, 3): 3})


@pytest.mark.parametrize(
    ("summed", "are"),
    [
        ({48: 2, 24: 3, 12: 1}, True),  # five of a shape in two rounds of four ranks, filled up with zeros
        ({96: 2, 12: 1}, True),  # a stack of all of a shape
        ({12: 6, 24: 3}, True),
        ({144: 1}, True),
        ({48: 1, 24: 3, 12: 1}, False),
        ({48: 3, 24: 3, 12: 1}, False),
        ({192: 1}, False),
        ({}, False),
    ],
)
def test_parameters_filled_up_to_the_ranks_are_gradients_if_all_of_their_shape_are_there(
    summed: dict[int, int], are: bool
) -> None:
    for times in (1, 3):
        scattered = Counter({("reduce_scatter", size): times * n for size, n in summed.items()})
        assert are_gradients(scattered, SHAPES, 4, times) == are


def test_only_reduce_scatters_are_filled_up() -> None:
    """An all-reduce has no shares that must be equal: what is twice as much is something else."""
    padded = {48: 2, 24: 3, 12: 1}
    assert not are_gradients(Counter({("all_reduce", size): n for size, n in padded.items()}), SHAPES, 4)


OWNERS = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
n, rank = dist.get_world_size(), dist.get_rank()
model = nn.Sequential(*(nn.Linear(16, 16, bias=i == 0) for i in range(5))).cuda()
matrices = [one for one in model.parameters() if one.ndim == 2]
bias = model[0].bias
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(4, 16, device="cuda")).sum().backward()
    {others}
    for first in range(0, 5, n):
        some = [one.grad for one in matrices[first : first + n]]
        some += [torch.zeros_like(some[0])] * (n - len(some))
        mean = torch.empty_like(some[0])
        {scatter}
        whole = [torch.empty_like(mean) for _ in range(n)]
        dist.all_gather(whole, mean)
    optimizer.step()
    optimizer.zero_grad()
"""
LIST = "dist.reduce_scatter(mean, some, op=dist.ReduceOp.AVG)"
STACK = "dist.reduce_scatter_tensor(mean, torch.cat(some))"
BIAS = "dist.all_reduce(bias.grad)"


@pytest.mark.parametrize(
    ("scatter", "others", "layout"),
    [(LIST, BIAS, Layout(dp=4)), (STACK, BIAS, Layout(dp=4)), (LIST, "pass", None)],
)
def test_ranks_that_own_parameters_are_data_parallel_in_a_rehearsal(
    scatter: str, others: str, layout: Layout | None, tmp_path: Path
) -> None:
    """Each gets the gradients that it updates by; where some parameter is left out, nothing is claimed."""
    script = tmp_path / "train.py"
    script.write_text(OWNERS.format(scatter=scatter, others=others))
    found = rehearse(Asked(command=(str(script),), world_size=4, ranks=(0,)), tmp_path / "run")
    assert found.layout == layout


def test_all_reduces_by_hand_are_data_parallel_in_a_rehearsal(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        SCRIPT.replace('"gloo"', '"nccl"')
        .replace("16)", "16, device='cuda')")
        .replace("1))", "1)).cuda()")
        .replace("ones(256)", "ones(256, device='cuda')")
    )
    found = rehearse(Asked(command=(str(script),), world_size=4, ranks=(0,)), tmp_path / "run")
    assert {group.ranks for group in found.groups if group.axis == "dp"} >= {(0, 1), (0, 2)}


PLACES, PARAMS = 24, 1000
ACTIVATIONS = [("all_reduce", 48, "forward"), ("all_reduce", 72, "backward")]
TOKENS = [("all_to_all", 48, phase) for phase in ("forward", "backward")]


def served(*flow: tuple[str, int, str], dtype: str = "bf16", copies: tuple[int, ...] = ()) -> str:
    """Return the axis of a group of two ranks over which numbers flow so in each of three steps."""
    groups = Groups(4, lambda group: "gloo", lambda group: (0, 1))
    info = groups.of(Group())
    if copies:
        groups.by_object[1] = groups._by_name["copies"] = GroupInfo(9, "dp", copies)
    flows = Flows(groups, lambda: [Counter({(PARAMS,): 1, (144,): 1})], lambda: 1, lambda: PLACES)
    for step in range(4):
        for kind, n, phase in flow:
            width = 8 if kind == "counts" else 2
            known = ("all_to_all", "int64") if kind == "counts" else (kind, dtype)
            flows.count(known[0], info, n * width, known[1], step, phase=phase)
    return info.axis


def test_activations_forward_and_backward_are_of_tensor_parallelism() -> None:
    """Nothing else of size may flow there: not out of the passes, nor of the size of parameters or a norm."""
    loss = ("all_reduce", 1, "")
    assert served(*ACTIVATIONS) == served(*ACTIVATIONS, loss) == "tp"
    gathered = [("all_gather", 96, "forward"), ("reduce_scatter", 96, "backward")]
    assert served(*gathered) == "tp"
    for other in (("all_reduce", 48, ""), ("all_gather", 144, "forward"), ("all_gather", 65, "forward")):
        assert served(*ACTIVATIONS, other) == "group 0"
    assert served(ACTIVATIONS[0]) == served(ACTIVATIONS[1]) == "group 0"
    assert served(*ACTIVATIONS, copies=(0, 1, 2, 3)) == "group 0"
    assert served(*ACTIVATIONS, copies=(0, 2)) == "tp"


def test_exchanges_of_counted_tokens_are_among_experts() -> None:
    assert served(*TOKENS, ("counts", 2, "forward")) == "ep"
    assert served(*TOKENS) == served(TOKENS[0], ("counts", 2, "forward")) == "group 0"


BY_HAND = """
import sys
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank, world, averages = dist.get_rank(), dist.get_world_size(), sys.argv[1] == "averages"
across = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
copies = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]

class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient := gradient.clone(), group=across)
        return gradient

class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone(), group=across)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(24, 48, bias=False), nn.Linear(48, 24, bias=False)

    def forward(self, x):
        return x + Summed.apply(self.down(self.up(Copied.apply(x))))

torch.cuda.set_device(rank)
torch.manual_seed(rank // 2)
model = nn.Sequential(nn.Embedding(100, 24), Layer(), Layer()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    loss = model(torch.randint(0, 100, (4, 16), device="cuda")).square().mean()
    loss.backward()
    for parameter in model.parameters() if averages else ():
        dist.all_reduce(parameter.grad, group=copies)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("averages", [True, False])
def test_tensor_parallelism_by_hand_multiplies_no_rows_and_hides_the_size_of_the_model(
    averages: bool, tmp_path: Path
) -> None:
    """Where copies of the model send each other nothing, nobody knows whether they share rows."""
    script = tmp_path / "train.py"
    script.write_text(BY_HAND)
    asked = Asked(command=(str(script), "averages" if averages else "alone"), world_size=4)
    found = rehearse(asked, tmp_path / "run")
    assert ("tp", (0, 1)) in {(group.axis, group.ranks) for group in found.groups}
    assert (found.model or {"n_params": 0})["n_params"] is None
    assert found.layout == (Layout(dp=2, tp=2) if averages else None)
    assert rows_and_tokens(found) == ((2 * 4, 2 * 4 * 16) if averages else (None, None))
    assert [line.split()[1] for line in found.checked] == ["1", "3"]


def test_a_group_of_which_nothing_tells_the_axis_hides_the_size_of_the_model_too(tmp_path: Path) -> None:
    """Its ranks may hold parts of the matrices, as those of tensor parallelism do."""
    script = tmp_path / "train.py"
    script.write_text(BY_HAND.replace("Copied.apply(x)", "x"))
    found = rehearse(Asked(command=(str(script), "averages"), world_size=4), tmp_path / "run")
    (group,) = (group for group in found.groups if group.ranks == (0, 1))
    assert group.axis not in AXES
    assert (found.model or {"n_params": 0})["n_params"] is None
