"""What the Python function of a custom operator sends is in a rehearsal, although its result is described."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.rehearsals import rehearse
from tracer.rehearse.rehearsing import Asked
from tracer.wrapped import cutting_sequences
from traces.rehearsal import WHAT, read_rank, rehearsal_folder

pytest.importorskip("torch")

SCRIPT = """
import torch, torch.distributed as dist
from torch import Tensor

dist.init_process_group("nccl")
groups = {{}}
sender = {sender}

@torch.library.custom_op("stranger::exchange", mutates_args=())
def exchange(x: Tensor, group_name: str) -> Tensor:
{body}

@exchange.register_fake
def _(x, group_name):
    return torch.empty_like(x)

exchange.register_autograd(
    lambda ctx, grad: (exchange(grad.contiguous(), ctx.group), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "group", inputs[1]),
)

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


@pytest.mark.parametrize(
    ("body", "given", "sender", "sent"),
    [(BY_CODE, "''", "None", 2), (BY_NAME, "name", METHOD, 2), (SILENT, "''", "None", 0)],
)
def test_a_custom_operator_sends_what_its_function_sends(
    body: str, given: str, sender: str, sent: int, tmp_path: Path
) -> None:
    """By its code, or as it is told a group by name; one that sends nothing remains one operator."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(body=body, given=given, sender=sender))
    rehearse(Asked(command=(str(script),), world_size=4, ranks=(0,)), tmp_path / "run")
    tables = read_rank(rehearsal_folder(tmp_path / "run"), 0)
    kinds = [row["kind"] for row in tables.messages.to_pylist()]
    issued = tables.events["what"].to_pylist().count(WHAT.index("communication"))
    assert (issued, kinds) == (sent, ["all_to_all"] * bool(sent))
    names = [row["name"] for row in tables.works.to_pylist()]
    assert any(one.startswith("stranger.") for one in names) == (not sent)
    assert "aten.sub" not in names


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
