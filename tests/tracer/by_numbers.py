"""A script whose shapes depend on numbers that it makes by itself, for tests of rehearsals."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

dist.init_process_group("cpu:gloo,cuda:nccl")
rank, n_ranks = dist.get_rank(), dist.get_world_size()
text = torch.arange(5000)
model = nn.Sequential(nn.Embedding(5000, 16), nn.Linear(16, 16)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def batch() -> Tensor:
    """Cut rows out of a text at random places."""
    starts = torch.randint(len(text) - 64, (4,))
    return torch.stack([text[i : i + 64] for i in starts]).pin_memory().cuda(non_blocking=True)


def longest() -> int:
    """Return what ranks agree on as the length of rows: each has told the others its own."""
    lengths = torch.tensor([3 + rank, 7])
    told = [torch.zeros_like(lengths) for _ in range(n_ranks)]
    dist.all_gather(told, lengths)
    return int(torch.stack(told).max())


for _ in range(2):
    tokens = batch()
    padded = tokens.clone()
    padded[:, 48:] = 0
    kept = model(tokens)[padded != 0]
    counts = torch.bincount(torch.tensor([1, 1, 4]))
    alike = [torch.zeros(8, device=where) for where in ("cpu", tokens.device) for _ in range(4)]
    words = [
        f"tokens {tuple(tokens.shape)}",
        f"kept {kept.shape[0]}",
        f"longest {longest()}",
        f"counts {counts.tolist()}",
        f"distinct {torch.unique(torch.tensor([5, 5, 6, 7])).tolist()}",
        f"rows {torch.repeat_interleave(torch.tensor([2, 0, 3])).tolist()}",
        f"addresses {len({part.data_ptr() for part in (*model.parameters(), model[1].weight[1:], *alike)})}",
        f"numpy {(torch.arange(6).view(2, 3) * 2).numpy().tolist()}",
    ]
    sys.stdout.write("; ".join(words) + "\n")
    filled = torch.zeros(4, dtype=torch.int64)
    filled[1:3] += 2
    told = torch.full((2,), 9)
    dist.broadcast(told, 0)
    chosen = kept.argmax(-1)  # of activations: nobody knows
    sys.stdout.write(f"filled {filled.tolist()}; broadcast {told[1].item()}; chosen {chosen[0].item()}; ")
    sys.stdout.write(f"written {told[1]:.1f} {chosen[0] / 4:.2f}\n")
    kept.sum().backward()
    optimizer.step()
