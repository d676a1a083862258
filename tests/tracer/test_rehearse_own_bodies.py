"""What the Python function of a custom operator sends is in a rehearsal, although its result is described."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.wrapped import cutting_sequences
from foretrace.traces.rehearsal import WHAT, read_rank, rehearsal_folder

pytest.importorskip("torch")

SCRIPT = """
import torch, torch.distributed as dist
from torch import Tensor

dist.init_process_group("nccl")
groups = {{}}
sender = {sender}

{made}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.down(exchange(self.up(x), {given}))

model = Model().cuda()
name = dist.group.WORLD.group_name
groups[name] = dist.group.WORLD
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(4, 8).cuda()).sum().backward()
    optimizer.step()
"""
CUSTOM = """
@torch.library.custom_op("stranger::exchange", mutates_args=())
def exchange(x: Tensor, group_name: str) -> Tensor:
{body}
{described}
"""
LIBRARY = """
def function(x, group_name):
{body}
library = torch.library.Library("stranger", "DEF")
library.define("exchange(Tensor x, str group_name) -> Tensor")
library.impl("exchange", function, "{key}")
exchange = torch.ops.stranger.exchange
{described}
"""
FUNCTIONS = """
def function(x, group_name):
{body}
torch.library.define("stranger::exchange", "(Tensor x, str group_name) -> Tensor")
torch.library.impl("stranger::exchange", "{key}", function)
exchange = torch.ops.stranger.exchange
{described}
"""
DESCRIBED = """
torch.library.register_fake("stranger::exchange", lambda x, group_name: torch.empty_like(x))
torch.library.register_autograd(
    "stranger::exchange",
    lambda ctx, grad: (exchange(grad.contiguous(), ctx.group), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "group", inputs[1]),
)
"""
BY_HAND = """
class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group_name):
        ctx.group = group_name
        with torch._C._AutoDispatchBelowAutograd():
            return exchange(x, group_name)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad.contiguous(), ctx.group), None

library.impl("exchange", Exchange.apply, "AutogradCUDA")
"""
BY_CODE = """
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=groups.get(group_name))
    return out
"""
BY_NAME = """
    return sender.method(x, groups[group_name])
"""
METHOD = """type("S", (), {"method": lambda self, x, group: self.later(x, group)})()
def later(self, x, group):
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out
type(sender).later = later
"""
SILENT = """
    return x.mul(2).add_(1).sub(1)
"""


CUSTOM_OP = CUSTOM.replace("{described}", DESCRIBED)


def sent(made: str, given: str, sender: str, folder: Path) -> tuple[int, list[str], list[str]]:
    """Return communications in a step, their kinds, and the names of other work."""
    script = folder / "train.py"
    script.write_text(SCRIPT.format(made=made, given=given, sender=sender))
    rehearse(Asked(command=(str(script),), world_size=4, ranks=(0,)), folder / "run")
    tables = read_rank(rehearsal_folder(folder / "run"), 0)
    kinds = [row["kind"] for row in tables.messages.to_pylist()]
    issued = tables.events["what"].to_pylist().count(WHAT.index("communication"))
    return issued, kinds, [row["name"] for row in tables.works.to_pylist()]


@pytest.mark.parametrize(
    ("body", "given", "sender", "n_sent"),
    [(BY_CODE, "''", "None", 2), (BY_NAME, "name", METHOD, 2), (SILENT, "''", "None", 0)],
)
def test_a_custom_operator_sends_what_its_function_sends(
    body: str, given: str, sender: str, n_sent: int, tmp_path: Path
) -> None:
    """By its code, or as it is told a group by name; one that sends nothing remains one operator."""
    issued, kinds, names = sent(CUSTOM_OP.format(body=body), given, sender, tmp_path)
    assert (issued, kinds) == (n_sent, ["all_to_all"] * bool(n_sent))
    assert any(one.startswith("stranger.") for one in names) == (not n_sent)
    assert "aten.sub" not in names


@pytest.mark.parametrize(
    ("made", "key", "described"),
    [
        (LIBRARY, "CUDA", DESCRIBED),
        (LIBRARY, "CompositeExplicitAutograd", DESCRIBED),
        (LIBRARY, "CUDA", BY_HAND),
        (FUNCTIONS, "cuda", DESCRIBED),
        (FUNCTIONS, "default", DESCRIBED),
    ],
    ids=["of a GPU", "of every device", "gradients by hand", "a function for a GPU", "a function"],
)
def test_an_operator_of_a_library_sends_what_its_function_sends(
    made: str, key: str, described: str, tmp_path: Path
) -> None:
    """However a Python function has become an operator: forward and backward send, as a custom one's do."""
    words = made.format(body=BY_CODE, key=key, described=described)
    issued, kinds, names = sent(words, "''", "None", tmp_path)
    assert (issued, kinds) == (2, ["all_to_all"])
    assert not any(one.startswith("stranger.") for one in names)


def test_an_operator_of_a_library_that_sends_nothing_remains_one(tmp_path: Path) -> None:
    """Its description is enough, as a kernel of a GPU has it."""
    words = LIBRARY.format(body=SILENT, key="CUDA", described=DESCRIBED)
    issued, _, names = sent(words, "''", "None", tmp_path)
    assert (issued, "stranger.exchange" in names, "aten.sub" in names) == (0, True, False)


def test_an_engine_of_deepspeed_tells_over_which_ranks_it_cuts_sequences() -> None:
    """An engine is one that has the setting; a group is one that torch has made."""

    class DeepSpeedEngine(SimpleNamespace):
        pass

    group = SimpleNamespace(group_name="3")
    assert cutting_sequences(
        DeepSpeedEngine(module=1, sequence_parallel_size=4, seq_parallel_group=group)
    ) == [group]
    assert not cutting_sequences(
        DeepSpeedEngine(module=1, sequence_parallel_size=1, seq_parallel_group=group)
    )
    assert not cutting_sequences(DeepSpeedEngine(module=1))
