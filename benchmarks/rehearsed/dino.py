"""The training step of DINO with ViT-S/16 and ten crops (facebookresearch/dino: main_dino.py)."""

import os

import torch
import torch.distributed as dist
from timm import create_model
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BATCH, LOCAL_CROPS, OUT, WIDTH = 64, 8, 65_536, 384


class Network(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A backbone that runs once per size of crop, and the projection head over all crops."""

    def __init__(self, drop_path: float) -> None:
        super().__init__()
        self.backbone = create_model(
            "vit_small_patch16_224", num_classes=0, drop_path_rate=drop_path, dynamic_img_size=True
        )
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 256)
        )
        self.last = nn.utils.weight_norm(nn.Linear(256, OUT, bias=False))
        self.last.weight_g.requires_grad = False

    def forward(self, crops: list[torch.Tensor]) -> torch.Tensor:
        """Return the logits of all *crops*."""
        parts = [self.backbone(torch.cat(crops[:2]))]
        if len(crops) > 2:
            parts.append(self.backbone(torch.cat(crops[2:])))
        return self.last(functional.normalize(self.mlp(torch.cat(parts)), dim=-1))


torch.backends.cudnn.benchmark = True
dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
student, teacher = Network(0.1).to(device), Network(0.0).to(device)
student = DistributedDataParallel(student, device_ids=[device.index])
for parameter in teacher.parameters():
    parameter.requires_grad = False
center = torch.zeros(1, OUT, device=device)
optimizer = torch.optim.AdamW(p for p in student.parameters() if p.requires_grad)
scaler = torch.amp.GradScaler("cuda")
for _ in range(5):
    crops = [torch.randn(BATCH, 3, 224, 224).to(device, non_blocking=True) for _ in range(2)]
    crops += [torch.randn(BATCH, 3, 96, 96).to(device, non_blocking=True) for _ in range(LOCAL_CROPS)]
    with torch.autocast("cuda", dtype=torch.float16):
        wanted, given = teacher(crops[:2]), student(crops)
        given_parts = (given / 0.1).chunk(2 + LOCAL_CROPS)
        wanted_parts = functional.softmax((wanted - center) / 0.04, dim=-1).detach().chunk(2)
        loss, n_terms = torch.zeros((), device=device), 0
        for i, q in enumerate(wanted_parts):
            for j, s in enumerate(given_parts):
                if i != j:
                    loss = loss + torch.sum(-q * functional.log_softmax(s, dim=-1), dim=-1).mean()
                    n_terms += 1
        loss = loss / n_terms
        with torch.no_grad():
            total = torch.sum(wanted, dim=0, keepdim=True)
            dist.all_reduce(total)
            center = center * 0.9 + total / (len(wanted) * dist.get_world_size()) * 0.1
    loss.item()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    for parameter in student.parameters():
        if parameter.grad is not None:
            norm = parameter.grad.data.norm(2)
            share = 3.0 / (norm + 1e-6)
            if share < 1:
                parameter.grad.data.mul_(share)
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        for s, t in zip(student.module.parameters(), teacher.parameters(), strict=True):
            t.data.mul_(0.996).add_(0.004 * s.detach().data)
    torch.cuda.synchronize()
