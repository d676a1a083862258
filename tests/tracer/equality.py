# ruff: noqa: T201 - what it prints is what the test reads
"""Asks whether tensors are equal, and puts a sound together from its frequencies: a script for tests.

``equality.py DEVICE``
"""

import sys
from itertools import pairwise

import torch
import torch.distributed as dist

FRAME, HOP, LENGTH = 16, 4, 64


def main() -> None:
    """Print what is asked in every step."""
    device = sys.argv[1]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(LENGTH, LENGTH).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    windows = [getattr(torch, f"{name}_window") for name in ("hann", "hamming", "bartlett", "blackman")]
    for _ in range(2):
        sound = model(torch.ones(2, LENGTH, device=device))
        ones = torch.ones(2, LENGTH, device=device)
        print("shape", torch.equal(sound, sound[:1]), "itself", torch.equal(sound[:, 1:], sound[:, 1:]))
        print("known", torch.equal(ones, ones.clone()), torch.equal(ones, ones * 2))
        told: list[torch.Tensor] = [sound] * dist.get_world_size()
        dist.all_gather_object(told, sound.detach().sum())
        print("told", [torch.equal(one, other) for one, other in pairwise(told)])
        chosen = torch.zeros(3, dtype=torch.bool, device=device)
        chosen[0] |= ~chosen.any()
        print("chosen", int(chosen.sum()), tuple(ones[:1].expand(3, LENGTH)[chosen].shape))
        for make in windows:
            window = make(FRAME).to(device)
            print(f"{float(window.sum()):.4f} {float(window[1]):.4f}")
            heard = torch.stft(sound, FRAME, HOP, window=window, return_complex=True)
            back = torch.istft(heard, FRAME, HOP, window=window, length=LENGTH)
        told_twice = torch.full((3,), 5, dtype=torch.int64, device=device)
        print("filled", told_twice.tolist(), torch.full((3,), 5, dtype=torch.int64).tolist())
        cuts = torch.tensor([1, 5])
        print(
            "cut",
            [len(part) for part in torch.tensor_split(sound[0], cuts)],
            len(sound.tensor_split(cuts[0])),
        )
        (back - sound).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
