"""Where a script ends a graph within what ``torch.compile`` compiles, the parts are graphs of their own."""

from collections.abc import Callable
from functools import cache

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import read_rank, rehearsal_folder

pytest.importorskip("torch")

SCRIPT = """
import torch
from torch import nn

class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(256, 256)
    def forward(self, x):
        return self.linear(x).mul(2).sin().mul(3)

def between(x):
    return x.add(1).cos().exp()

class Last(nn.Module):
    def forward(self, x):
        return x.mul(3).tanh().mul(2).cos()

class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = First(), Last()
    def forward(self, x):
        return self.last(between(self.first(x)))

{between}
model = Whole().cuda()
{compiled}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(1024, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PARTS = "model.first, model.last = torch.compile(model.first), torch.compile(model.last)"
WHOLE = "model = torch.compile(model)"
BREAK = "between = lambda x: (torch._dynamo.graph_break(), x)[1]"
AFTER = "import torch._dynamo\n"


Work = list[tuple[str, int, int]]
Counted = Callable[[str, str], tuple[Work, int]]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    """Return what rehearses the script once with what is *between* and what is *compiled*.

    It tells name, bytes and launches of what a step does, and the largest memory.
    """

    @cache
    def told(between: str, compiled: str) -> tuple[Work, int]:
        folder = tmp_path_factory.mktemp("graphs")
        script = folder / "train.py"
        script.write_text(SCRIPT.format(between=between, compiled=compiled))
        found = rehearse(Asked(command=(str(script),), world_size=1, ranks=(0,)), folder / "run")
        tables = read_rank(rehearsal_folder(folder / "run"), 0)
        works = tables.works.to_pylist()
        done = [works[event["item"]] for event in tables.events.to_pylist() if event["what"] == 0]
        work = [(one["name"], one["bytes_moved"], one["kernels"]) for one in done]
        return work, found.memory["0"]["peak_bytes"]

    return told


@pytest.mark.parametrize(
    "between",
    ["between = torch.compiler.disable(between)", "between = torch.compiler.disable(reason='own')(between)"],
)
def test_a_function_that_is_not_compiled_ends_a_graph(between: str, counted: Counted) -> None:
    """As if what comes before and after it were compiled each by itself, and it were not."""
    cut = counted(between, WHOLE)
    assert cut == counted("", PARTS)
    assert cut != counted("", WHOLE)


@pytest.mark.parametrize("loaded", ["", AFTER])
def test_a_graph_that_is_broken_by_hand_is_two(loaded: str, counted: Counted) -> None:
    """Whether torch's compiler is loaded already or only by the call."""
    cut = counted(loaded + BREAK, WHOLE)
    assert cut == counted("between = lambda x: x", PARTS)
    assert cut != counted("between = lambda x: x", WHOLE)


def test_what_is_not_compiled_anyway_breaks_nothing(counted: Counted) -> None:
    """In eager mode both do what they would without them."""
    plain = counted("", "")
    assert counted("between = torch.compiler.disable(between)", "") == plain
