"""Trainings that do what strangers' scripts were found to, one behind the other: ``strangers.py NAME...``."""

import gc
import sys
from functools import cache
from importlib import import_module

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as exchanges
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

WIDTH, ROWS = 64, 8

dist.init_process_group("nccl")
model = nn.Linear(WIDTH, WIDTH, bias=False, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def say(*words: object) -> None:
    """Write *words* to the output."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")


def batch() -> Tensor:
    """Return rows for the model."""
    return torch.randn(ROWS, WIDTH, device="cuda")


def finite() -> None:
    """Ask in many ways whether numbers are finite, among them those of a tensor too large to be kept."""
    loss = model(batch()).square().mean()
    loss.backward()
    grad, large = model.weight.grad, torch.randn(1024, 1024, device="cuda")
    not_finite = torch.isnan(grad).any() | torch.isinf(grad).any()
    flag = (~torch.isfinite(loss)).float()
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    bad = [
        not torch.isfinite(loss),
        torch.isnan(loss),
        loss != loss,  # noqa: PLR0124 - as one asks for NaN
        not torch.isfinite(large).all(),
        torch.isnan(large).sum().item(),
        torch.isinf(large).any(),
        not_finite,
        flag.item(),
    ]
    say("found", [bool(one) for one in bad])
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def sought() -> None:
    """Look for given numbers among those of a batch, and among others."""
    rows = model(batch())
    is_end = torch.isin(rows.argmax(-1).view(2, 4), torch.tensor([1, 2], device="cuda"))
    own = torch.isin(torch.arange(4), torch.tensor([1, 3]))
    say("sought", [tuple(is_end.shape), own.tolist()])
    rows.square().mean().backward()


def chosen() -> None:
    """Draw from distributions, whose parameters torch looks at."""
    choice = torch.distributions.Categorical(logits=model(batch()))
    spread = torch.distributions.Normal(choice.entropy(), model(batch())[:, 0].exp())
    spread.log_prob(torch.zeros((), device="cuda")).mean().backward()


def gathered() -> None:
    """Gather rows of all ranks with their gradients: over NCCL those are scattered."""
    say("over", dist.get_backend(), dist.is_nccl_available(), batch().is_cuda)
    torch.cat(exchanges.all_gather(model(batch()))).square().mean().backward()


def collected() -> None:
    """Collect the states of an optimizer that is cut over ranks."""
    cut = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    model(batch()).square().mean().backward()
    cut.step()
    cut.consolidate_state_dict(to=0)


def aligned() -> None:
    """A loss over alignments, with targets of several lengths."""
    scores = model(batch()).view(4, 2, WIDTH).log_softmax(-1)
    lengths = torch.tensor([2, 1])
    nn.functional.ctc_loss(
        scores, torch.ones(2, 2, dtype=torch.long), torch.tensor([4, 4]), lengths
    ).backward()


class Parts(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Layers of the same size, and one more that only some do not use."""

    def __init__(self, *, has_rest: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False, device="cuda") for _ in range(4)])
        self.rest = nn.Linear(1, 1, device="cuda") if has_rest else None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


@cache
def parallel(*, as_view: bool = False, has_rest: bool = False) -> DistributedDataParallel:
    """Return layers under DDP, of which the optimizer now trains the parameters."""
    found = DistributedDataParallel(Parts(has_rest=has_rest), gradient_as_bucket_view=as_view)
    optimizer.param_groups[0]["params"] = list(found.parameters())
    return found


def unused() -> None:
    """DDP of which a parameter has no gradient, which it was not told to look for."""
    parallel(has_rest=True)(batch()).square().mean().backward()


def _taken(name: str, *, as_view: bool) -> None:
    """Tell what DDP and its gradients hold; gradients of the step before are there during the forward."""
    before = torch.cuda.memory_allocated()
    ddp = DistributedDataParallel(Parts(has_rest=False), gradient_as_bucket_view=as_view)
    for _ in range(2):
        loss = ddp(batch()).square().mean()
        held = torch.cuda.memory_allocated()
        ddp.zero_grad()
        freed = held - torch.cuda.memory_allocated()
        loss.backward()
    del loss
    say(name, torch.cuda.memory_allocated() - before, freed)


def viewed() -> None:
    """DDP whose gradients lie in its buckets."""
    _taken("viewed", as_view=True)


def copied() -> None:
    """DDP whose gradients lie beside its buckets."""
    _taken("copied", as_view=False)


def joined() -> None:
    """DDP that waits for ranks with more batches."""
    ddp = parallel()
    with ddp.join():
        ddp(batch()).square().mean().backward()


def exported() -> None:
    """Take the graph of a model, and keep it."""
    parts, rows = Parts(has_rest=False), batch()
    gc.collect()  # the graph of the step before, which keeps its own model in a circle
    before = torch.cuda.memory_allocated()
    graph = torch.export.export(parts, (rows,))
    n_nodes = len(graph.graph.nodes)
    say("exported", n_nodes > len(parts.layers), torch.cuda.memory_allocated() - before)


@cache
def in_shards() -> FullyShardedDataParallel:
    """Return the model under the first FSDP."""
    whole = nn.Linear(WIDTH, WIDTH, bias=False, device="cuda")
    found = FullyShardedDataParallel(whole, device_id=torch.cuda.current_device(), use_orig_params=True)
    optimizer.param_groups[0]["params"] = list(found.parameters())
    return found


def saved() -> None:
    """Collect a whole state on the host of the first rank, as one saves with the first FSDP."""
    whole = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    sharded = in_shards()
    sharded(batch()).square().mean().backward()
    with FullyShardedDataParallel.state_dict_type(sharded, StateDictType.FULL_STATE_DICT, whole):
        say("state", [tuple(found.shape) for found in sharded.state_dict().values()])


def wrapped() -> None:
    """Miss a module, and say so in words of one's own as a library does."""
    try:
        import_module("a_module_that_nobody_has")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Could not import module 'Trainer'") from error


def once() -> None:
    """A single step in all, before an evaluation."""
    model(batch()).square().mean().backward()


def main() -> None:
    """Do two steps of each that is asked for."""
    for name in sys.argv[1:]:
        for _ in range(1 if name == "once" else 2):
            optimizer.zero_grad()
            globals()[name]()
            optimizer.step()
    with torch.no_grad():
        model(batch())


main()
