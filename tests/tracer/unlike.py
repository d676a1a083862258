"""Says in JSON what torch refuses for its types and, on a GPU, what handles hold, after two steps."""

import json
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

ON_GPU = torch.cuda.is_available()
DEVICE, NARROW = torch.device("cuda" if ON_GPU else "cpu"), torch.bfloat16
N = 1024

wide, square = torch.ones(4, 8, device=DEVICE), torch.ones(8, 8, device=DEVICE)
picture, kernel = torch.ones(2, 4, 6, 6, device=DEVICE), torch.ones(4, 4, 3, 3, device=DEVICE)
row, four = torch.ones(8, device=DEVICE), torch.ones(4, device=DEVICE)
places = torch.arange(4, device=DEVICE)

CALLS: dict[str, Callable[[], Tensor]] = {
    "mm": lambda: wide @ square.to(NARROW),
    "mm, narrow": lambda: wide.to(NARROW) @ square.to(NARROW),
    "linear": lambda: functional.linear(wide.to(NARROW), square, row),
    "bias": lambda: functional.linear(wide, square, row.to(NARROW)),
    "mv": lambda: torch.mv(square, row.to(NARROW)),
    "bmm": lambda: torch.bmm(square[None], square[None].to(NARROW)),
    "baddbmm": lambda: torch.baddbmm(square[None].to(NARROW), square[None], square[None]),
    "convolution": lambda: functional.conv2d(picture, kernel.to(NARROW)),
    "layer norm": lambda: functional.layer_norm(wide, (8,), row.to(NARROW), row.to(NARROW)),
    "layer norm, narrow": lambda: functional.layer_norm(
        wide.to(NARROW), (8,), row.to(NARROW), row.to(NARROW)
    ),
    "layer norm, no weight": lambda: functional.layer_norm(wide.to(NARROW), (8,)),
    "group norm": lambda: functional.group_norm(picture, 2, four.to(NARROW), four.to(NARROW)),
    "put": lambda: wide.clone().index_put_((places,), wide.to(NARROW)),
    "set": lambda: wide.clone().index_put_((places,), torch.zeros((), device=DEVICE)),
    "add rows": lambda: wide.index_add(0, places, wide.to(NARROW)),
    "copy rows": lambda: wide.clone().index_copy_(0, places, wide.to(NARROW)),
    "classes": lambda: functional.cross_entropy(wide, places.int()),
    "classes, long": lambda: functional.cross_entropy(wide, places),
    "cast": lambda: torch.cat([wide, wide.to(NARROW)]) + wide.to(NARROW).repeat(2, 1),
}


def refused() -> list[str]:
    """Return the calls that end in an error."""
    found = []
    for name, call in CALLS.items():
        try:
            call()
        except RuntimeError:
            found.append(name)
    return found


def held() -> dict[str, int]:
    """Return the bytes that are held by handles, at six moments."""
    before, found = torch.cuda.memory_allocated(), {}

    def note(moment: str) -> None:
        found[moment] = torch.cuda.memory_allocated() - before

    works = [dist.all_reduce(torch.ones(N, device=DEVICE), async_op=True) for _ in range(3)]
    note("under way")
    for at in range(len(works)):
        works[at].wait()
    note("waited for")
    works.clear()
    note("let go")
    dist.all_reduce(torch.ones(N, device=DEVICE))
    note("at once")
    whole = torch.empty(N * dist.get_world_size(), device=DEVICE)
    work = dist.all_gather_into_tensor(whole, torch.ones(N, device=DEVICE), async_op=True)
    note("gathering")
    work.wait()
    note("gathered")
    return found


if ON_GPU:
    dist.init_process_group("nccl")
model = nn.Linear(8, 8).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(wide).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
sys.stdout.write(json.dumps({"refused": refused(), "held": held() if ON_GPU else {}}) + "\n")
