"""The training step of MoCo v2 (facebookresearch/moco: main_moco.py, moco/builder.py)."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet50

KEPT, WIDTH, MOMENTUM, BATCH = 65_536, 128, 0.999, 32


def encoder() -> nn.Module:
    """Return ResNet-50 with the head of MoCo v2."""
    model = resnet50(num_classes=WIDTH)
    model.fc = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), model.fc)
    return model


def gathered(x: torch.Tensor) -> torch.Tensor:
    """Return *x* of all ranks, one after the other."""
    parts = [torch.ones_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


class MoCo(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Queries, keys of a slowly following encoder, and a queue of old keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = encoder(), encoder()
        for of_key in self.key.parameters():
            of_key.requires_grad = False
        self.register_buffer("queue", functional.normalize(torch.randn(WIDTH, KEPT), dim=0))
        self.at = 0

    @torch.no_grad()  # type: ignore[untyped-decorator]  # torch is untyped here
    def keys(self, images: torch.Tensor) -> torch.Tensor:
        """Return the keys of *images*, computed on shuffled batches."""
        for of_query, of_key in zip(self.query.parameters(), self.key.parameters(), strict=True):
            of_key.data = of_key.data * MOMENTUM + of_query.data * (1.0 - MOMENTUM)
        everything = gathered(images)
        order = torch.randperm(everything.shape[0]).to(images.device)
        dist.broadcast(order, src=0)
        back = torch.argsort(order)
        rank, world = dist.get_rank(), dist.get_world_size()
        found = functional.normalize(self.key(everything[order.view(world, -1)[rank]]), dim=1)
        return gathered(found)[back.view(world, -1)[rank]]

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Return the logits of one positive and all negative keys."""
        query = functional.normalize(self.query(first), dim=1)
        key = self.keys(second)
        positive = torch.einsum("nc,nc->n", query, key).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", query, self.queue.clone().detach())
        logits = torch.cat([positive, negative], dim=1) / 0.2
        with torch.no_grad():
            new = gathered(key)
            self.queue[:, self.at : self.at + new.shape[0]] = new.T
        self.at = (self.at + new.shape[0]) % KEPT
        return logits


torch.backends.cudnn.benchmark = True
dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
model = DistributedDataParallel(MoCo().to(device), device_ids=[device.index])
optimizer = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
loss_of = nn.CrossEntropyLoss().to(device)
for _ in range(5):
    first, second = (torch.randn(BATCH, 3, 224, 224).to(device, non_blocking=True) for _ in range(2))
    output = model(first, second)
    loss = loss_of(output, torch.zeros(BATCH, dtype=torch.long, device=device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
