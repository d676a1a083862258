"""Trains two networks against each other in old names or new ones: ``old_names.py HOW``, a step of each."""

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH, ROWS = 64, 8


def old() -> tuple[Callable[..., Tensor], Callable[[Tensor], Tensor], str]:
    """Name types of tensors of the GPU."""
    kind = torch.cuda.FloatTensor
    here, there = torch.zeros(1), torch.zeros(1).cuda()
    said = [isinstance(tensor, kind) for tensor in (here, there, there.half())]
    long = torch.cuda.LongTensor([1, 2])
    said.append(isinstance(long, torch.cuda.LongTensor))
    said += [made.is_cuda for x in (here, there) for made in (x.new([1.0]), x.new_tensor([1.0]))]
    for default in ("torch.cuda.FloatTensor", "torch.FloatTensor"):
        torch.set_default_tensor_type(default)
        said.append(torch.zeros(1).is_cuda)
    return kind, lambda x: x.type(kind), f"{said} {long.tolist()} {here.type('torch.cuda.HalfTensor').dtype}"


def listed(loss: Tensor) -> str:
    """Make tensors of lists with *loss* in them, by all old names of the host."""
    made = [
        torch.FloatTensor([loss]),
        torch.Tensor([[loss, 2.0]]),
        loss.new([loss]),
        torch.LongTensor((3, 4)),
    ]
    whole = torch.FloatTensor([1.0]).type(torch.LongTensor)
    kinds = [isinstance(made[0], torch.FloatTensor), isinstance(whole, torch.FloatTensor)]
    return f"{[one.tolist() for one in made]} {whole.dtype} {kinds} {torch.HalfTensor.dtype}"


def new() -> tuple[Callable[..., Tensor], Callable[[Tensor], Tensor], str]:
    """Name the device."""
    return lambda *shape: torch.empty(shape, device="cuda"), lambda x: x.to("cuda", torch.float32), ""


def main(how: str) -> None:
    """Train."""
    make, move, said = old() if how == "old" else new()
    maker, judge = nn.Linear(WIDTH, WIDTH).cuda(), nn.Linear(WIDTH, 1).cuda()
    optimizers = [torch.optim.Adam(model.parameters()) for model in (maker, judge)]
    lossy = nn.BCEWithLogitsLoss()
    real, valid, fake = torch.rand(ROWS, WIDTH), make(ROWS, 1).fill_(1.0), make(ROWS, 1).fill_(0.0)
    real, made = move(real), maker(make(ROWS, WIDTH).normal_())
    loss = lossy(judge(made), valid)
    loss.backward()
    optimizers[0].step()
    (lossy(judge(real), valid) + lossy(judge(made.detach()), fake)).backward()
    optimizers[1].step()
    sys.stdout.write(said + "\n")
    if how == "listed":
        sys.stdout.write(listed(loss.detach()) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
