"""A script whose layers are as large as a basis that it computes, as those of symmetries are, for tests."""

import sys

import numpy as np
import torch
from torch import Tensor, nn

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"


def said(words: str) -> None:
    """Print *words* on a line of their own."""
    sys.stdout.write(f"{words}\n")


def symmetric(n: int) -> Tensor:
    """Return a basis of what permutations of three indices leave as it is; shape ``(m, n, n, n)``."""
    unit = torch.eye(n**3, dtype=torch.float64).reshape(n**3, n, n, n)
    orders = ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
    mean = sum(unit.permute(0, *(1 + place for place in order)) for order in orders) / 6.0
    projector = torch.einsum("aijk,bijk->ab", mean, mean)
    values, vectors = torch.linalg.eigh(torch.eye(n**3, dtype=torch.float64) - projector)
    return vectors.T[values.abs() < 1e-9].reshape(-1, n, n, n)


def orthonormal(rows: Tensor) -> Tensor:
    """Return as many rows as *rows* span, by Gram and Schmidt; asks for each norm."""
    kept: list[Tensor] = []
    for row in rows:
        rest = row.clone()
        for one in kept:
            rest -= torch.dot(rest, one) * one
        if 2 * rest.norm() > 1e-6:
            kept.append(rest / rest.norm())
    return torch.stack(kept)


basis = symmetric(3)
said(f"basis {tuple(basis.shape)}; zero {torch.equal(basis, torch.zeros_like(basis))}")
spanned = orthonormal(torch.cat([basis.flatten(1), basis.flatten(1) * 2.0]))
said(
    f"spanned {tuple(spanned.shape)}; {torch.allclose(spanned @ spanned.T, torch.eye(len(spanned)).double())}"
)
turn = torch.zeros(3, 3, dtype=torch.complex128)
turn[0, 2], turn[1, 1], turn[2, 0] = -1j / 2**0.5, 1, 1 / 2**0.5
real = (turn.conj().T @ turn).real
said(f"turned {torch.nonzero(real.abs() > 0.4).tolist()} {torch.linalg.matrix_rank(real).item()}")
grid = torch.from_numpy(np.linspace(0.0, 1.0, 7)).sqrt().cos().to(device)
said(f"grid {int((grid > 0.8).sum())} {grid[grid > 0.8].shape[0]} {torch.isinf(1 / (grid - 1)).sum().item()}")
model = nn.Linear(len(spanned), int((grid > 0.8).sum())).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
spanned = spanned.to(device, torch.float32)
for step in range(2):
    angles = torch.outer(torch.arange(4, device=device), torch.tensor([1.0, 0.5], device=device))
    near = (angles.cos() * angles.sin().pow_(2) > 0.05).nonzero()
    said(f"step {step}: {len(near)}")
    model(spanned.T).sum().backward()
    optimizer.step()
