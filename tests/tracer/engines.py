"""What engines of large trainings do that plain loops do not: ``engines.py FOLDER``."""

import importlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 16

AGREEING = """
import torch
import torch.distributed as dist


def assert_lst_len_same_as_other_ranks(lst):
    length = torch.tensor(len(lst) if dist.get_rank() == 0 else -1, device="cuda")
    dist.broadcast(length, src=0)
    if length.cpu().item() != len(lst):
        raise RuntimeError("ranks disagree")


def get_lst_from_rank0(lst):
    first = torch.tensor(lst if dist.get_rank() == 0 else [-1] * len(lst), device="cuda")
    dist.broadcast(first, src=0)
    return [one.item() for one in first.cpu()]
"""
"""A library whose ranks hold what they have against what the first of them has."""

VALID = """
import torch


def is_invalid_grad_norm(norm):
    if torch.is_tensor(norm):
        return bool((~torch.isfinite(norm) | (norm < 0)).any())
    return not torch.isfinite(torch.tensor(norm)) or norm < 0
"""
"""What it asks of the norms by which it clips gradients."""


class Wrapper(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Has a list where a module has a method, as that of Megatron-core."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.buffers = module, [object()]

    def forward(self, x: Tensor) -> Tensor:
        """Return what the module makes of *x*."""
        return self.module(x)


DistributedDataParallel = type("DistributedDataParallel", (Wrapper,), {})


def agree(folder: Path) -> None:
    """Let ranks agree about a list, as the third stage of ZeRO does about its parameters."""
    path = folder / "deepspeed" / "runtime" / "zero" / "utils.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    for package in path.relative_to(folder).parents[:-1]:  # regular ones go before what is installed
        (folder / package / "__init__.py").touch()
    path.write_text(AGREEING)
    (path.parents[1] / "utils.py").write_text(VALID)
    sys.path.insert(0, str(folder))
    found = importlib.import_module("deepspeed.runtime.zero.utils")
    found.assert_lst_len_same_as_other_ranks([3, 4])
    if found.get_lst_from_rank0([3, 4]) != [3, 4]:
        raise ValueError("told otherwise")


def overflows(model: nn.Module) -> bool:
    """Return whether a gradient is not finite, counted as DeepSpeed does: a step would be left out."""
    count = torch.zeros([1], device="cuda")
    for parameter in model.parameters():
        gradient = parameter.grad
        count += gradient.amax().isfinite().logical_and(gradient.amin().isfinite()).logical_not()
    found = count.bool().byte()
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    is_invalid = importlib.import_module("deepspeed.runtime.utils").is_invalid_grad_norm
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    return bool(found[0].item()) or is_invalid(norm) or is_invalid(norm.item())


def main() -> None:
    """Train three steps."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = torch.cuda.random.get_rng_state("cuda")
    torch.cuda.default_generators[torch.cuda.current_device()].set_state(state)
    told = nn.parallel.DistributedDataParallel(nn.Linear(1, 1, device="cuda"))._get_ddp_logging_data()
    if told.get("can_set_static_graph"):
        raise ValueError("nothing is known of the graph yet")
    for _ in range(3):
        model(torch.ones(2, WIDTH, device="cuda")).sum().backward()
        agree(Path(sys.argv[1]))
        norms = [[parameter.grad.norm() for parameter in model.parameters()]]
        whole = torch.norm(torch.tensor(norms))
        mixed = torch.tensor([torch.tensor(3), 4]).tolist()
        said = (whole.device, tuple(torch.tensor(norms).shape), mixed, overflows(model))
        sys.stdout.write(" ".join(map(str, said)) + "\n")
        optimizer.step()
        optimizer.zero_grad()


main()
