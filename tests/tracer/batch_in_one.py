"""A training whose model is called with a batch in a dictionary, and which puts all on the host as it ends.

Arguments: how the model is called.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

ROWS, TOKENS, WIDTH = 4, 32, 64


class Model(nn.Module):  # type: ignore[misc]
    """A table and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 1000)

    def forward(self, batch: object) -> torch.Tensor:
        """Return a loss of the tokens in *batch*."""
        while not isinstance(batch, torch.Tensor):
            batch = batch["tokens"] if isinstance(batch, dict) else batch[-1]  # type: ignore[index]
        loss: torch.Tensor = self.layer(self.table(batch)).mean()
        return loss


def main() -> None:
    """Train."""
    dist.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(Model().cuda())
    optimizer = torch.optim.Adam(model.parameters())
    try:
        for _ in range(3):
            tokens = torch.randint(100, (ROWS, TOKENS), device="cuda")
            batch = {"dict": {"tokens": tokens}, "list": [None, {"tokens": tokens}], "tensor": tokens}
            batch["labels"] = {"labels": torch.zeros(ROWS, device="cuda"), "tokens": tokens}
            optimizer.zero_grad()
            model(batch[sys.argv[1]]).backward()
            optimizer.step()
    finally:  # as Lightning does, however its training ends
        for state in optimizer.state.values():
            state.update({name: value.cpu() for name, value in state.items()})


main()
