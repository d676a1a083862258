"""The pre-training step of MAE, ViT-Large (facebookresearch/mae: main_pretrain.py, models_mae.py)."""

import os

import torch
import torch.distributed as dist
from timm.models.vision_transformer import Block, PatchEmbed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, SIZE, PATCH, MASKED = 64, 224, 16, 0.75


class MaskedAutoencoder(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """An encoder of a quarter of the patches, and a narrow decoder of all of them."""

    def __init__(self, width: int = 1024, depth: int = 24, inner: int = 512, inner_depth: int = 8) -> None:
        super().__init__()
        self.patches = PatchEmbed(SIZE, PATCH, 3, width)
        n = self.patches.num_patches
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.register_buffer("places", torch.zeros(1, n + 1, width))
        self.blocks = nn.ModuleList(Block(width, 16, 4, qkv_bias=True) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.narrow = nn.Linear(width, inner)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, inner))
        self.register_buffer("inner_places", torch.zeros(1, n + 1, inner))
        self.inner_blocks = nn.ModuleList(Block(inner, 16, 4, qkv_bias=True) for _ in range(inner_depth))
        self.inner_norm = nn.LayerNorm(inner)
        self.pixels = nn.Linear(inner, PATCH**2 * 3)

    def encoded(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the code of the visible patches, which are hidden, and the way back."""
        x = self.patches(images) + self.places[:, 1:]
        n, length, width = x.shape
        kept = int(length * (1 - MASKED))
        order = torch.argsort(torch.rand(n, length, device=x.device), dim=1)
        back = torch.argsort(order, dim=1)
        x = torch.gather(x, 1, order[:, :kept].unsqueeze(-1).repeat(1, 1, width))
        mask = torch.ones(n, length, device=x.device)
        mask[:, :kept] = 0
        mask = torch.gather(mask, 1, back)
        x = torch.cat(((self.token + self.places[:, :1]).expand(n, -1, -1), x), dim=1)
        for block in self.blocks:
            x = block(x)
        return self.norm(x), mask, back

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the loss on the hidden patches, with normalised pixels."""
        x, mask, back = self.encoded(images)
        x = self.narrow(x)
        hidden = self.mask_token.repeat(x.shape[0], back.shape[1] + 1 - x.shape[1], 1)
        y = torch.gather(torch.cat([x[:, 1:], hidden], 1), 1, back.unsqueeze(-1).repeat(1, 1, x.shape[2]))
        x = torch.cat([x[:, :1], y], dim=1) + self.inner_places
        for block in self.inner_blocks:
            x = block(x)
        found = self.pixels(self.inner_norm(x))[:, 1:]
        side = SIZE // PATCH
        target = images.reshape(-1, 3, side, PATCH, side, PATCH)
        target = torch.einsum("nchpwq->nhwpqc", target).reshape(-1, side**2, PATCH**2 * 3)
        target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6) ** 0.5
        loss = ((found - target) ** 2).mean(-1)
        return (loss * mask).sum() / mask.sum()


torch.backends.cudnn.benchmark = True
dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
model = MaskedAutoencoder().to(device)
model = DistributedDataParallel(model, device_ids=[device.index], find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=2.4e-3, betas=(0.9, 0.95), weight_decay=0.05)
scaler = torch.amp.GradScaler("cuda")
for _ in range(5):
    images = torch.randn(BATCH, 3, SIZE, SIZE).to(device, non_blocking=True)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(images)
    loss.item()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norms = [torch.norm(p.grad.detach(), 2.0) for p in model.parameters() if p.grad is not None]
    torch.norm(torch.stack(norms), 2.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    mean = torch.tensor(1.0, device=device)
    dist.all_reduce(mean)
