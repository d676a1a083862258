"""Another model for ``saved.py``, and another way to call one."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional


class Vision(nn.Module):  # type: ignore[misc]
    """Patches by a convolution, a class token, positions, a pre-norm block with GELU, and classes.

    Args:
        width: hidden size.
        heads: of the attention.
    """

    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, 65, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head, self.heads = nn.Linear(width, 1000), heads

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return logits of *pictures*, ``(batch, 3, 64, 64)``, as ``(batch, 1000)``."""
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1), x), 1) + self.places
        q, k, v = (
            self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        )
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return self.head(self.norms[2](x)[:, 0])


def sharded(model: nn.Module) -> nn.Module:
    """Return *model*, each block of which is compiled by itself and sharded by FSDP2."""
    torch.distributed.init_process_group("nccl")
    for block in model.blocks:
        block.compile()
        fully_shard(block)
    fully_shard(model)
    return model
