"""Trainings that go on behind an error, so as to survive a bad batch: ``catching.py KIND``."""

import logging
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, ROWS, MICROBATCHES = 16, 4, 6


@torch.library.custom_op("catching::kernel", mutates_args=())  # type: ignore[untyped-decorator]
def kernel(x: Tensor) -> Tensor:
    """Doubles its operand, without saying what it makes."""
    return x * 2


def pick(x: Tensor) -> Tensor:
    """Take as many rows as the numbers say."""
    return x[torch.unique(x.long()[:, 0])]


def graph(x: Tensor) -> Tensor:
    """Capture, which cannot be rehearsed."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        return x + 1


def unlike(x: Tensor) -> Tensor:
    """Multiply operands of unlike types, as no GPU does."""
    return x @ x.T.double()


class Counting(nn.Module):  # type: ignore[misc]
    """Does more with its fourth micro-batch than with those before."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.n_calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        x = self.part(x)
        return self.part(x) if self.n_calls % MICROBATCHES == 0 else x


def pipelined() -> None:
    """Train a stage whose micro-batches are not alike."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe  # noqa: PLC0415 - loads a compiler

    stage = PipelineStage(Counting().cuda(), 0, 1, torch.device("cuda", 0))
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=lambda out, target: (out - target).square().sum())
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    for _ in range(3):
        rows = torch.randn(MICROBATCHES, WIDTH, device="cuda")
        try:
            schedule.step(rows, target=rows)
        except Exception as error:
            logging.warning("left out: %s", error)
        optimizer.step()
        optimizer.zero_grad()


def train(kind: str) -> None:
    """Train three steps; what of *kind* follows the model is tried, and left out where it fails."""
    parts = {"custom": kernel, "pick": pick, "graph": graph, "unlike": unlike}
    model = nn.Linear(WIDTH, WIDTH).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        out = model(torch.randn(ROWS, WIDTH, device="cuda"))
        out.sum().backward()
        try:
            parts[kind.removesuffix("-exit")](out.detach())
        except Exception as error:
            if kind.endswith("-exit"):
                sys.exit(f"cannot train: {error}")
            logging.warning("left out: %s", error)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    dist.init_process_group("nccl")
    pipelined() if sys.argv[1] == "pipeline" else train(sys.argv[1])
