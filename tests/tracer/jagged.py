"""A training on rows of many lengths, as nested tensors of jagged layout: ``jagged.py WAY DTYPE``."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

LENGTHS, WIDTH, HEADS, STEPS = (3, 5, 2, 7), 32, 2, 3


class Block(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A norm, attention, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return what becomes of *x*, of shape (rows, tokens, width)."""
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, [HEADS, WIDTH // HEADS]).transpose(1, 2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = x + self.out(seen.transpose(1, 2).flatten(-2))
        return found


def batch(way: str, dtype: torch.dtype) -> Tensor:
    """Return rows, made one by one or one behind the other."""
    if way.startswith("strided"):
        made = torch.nested.as_nested_tensor if way == "strided views" else torch.nested.nested_tensor
        return made([torch.randn(n, WIDTH) for n in LENGTHS])
    if way == "ends":
        ends = torch.tensor([0, *LENGTHS]).cumsum(0).to("cuda")
        values = torch.randn(sum(LENGTHS), WIDTH, device="cuda", dtype=dtype)
        return torch.nested.nested_tensor_from_jagged(values, ends)
    if way.startswith("loaded"):
        layout = torch.strided if way == "loaded strided" else torch.jagged
        loader = torch.utils.data.DataLoader(
            [torch.randn(n, WIDTH) for n in LENGTHS],
            batch_size=len(LENGTHS),
            collate_fn=lambda rows: {"x": torch.nested.as_nested_tensor(rows, layout=layout)},
            pin_memory=True,
        )
        loaded: Tensor = next(iter(loader))["x"].to("cuda", dtype)
        return loaded
    rows = [torch.randn(n, WIDTH, device="cuda", dtype=dtype) for n in LENGTHS]
    if way == "views":
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def main(way: str, dtype: torch.dtype) -> None:
    """Train."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    model = Block().to("cuda", dtype)
    if way == "unlike":
        batch("rows", dtype) + batch("rows", dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model(batch(way, dtype)).values().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1], getattr(torch, sys.argv[2]))
