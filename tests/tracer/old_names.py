"""Uses old names of types of tensors of a GPU: ``old_names.py HOW``."""

import sys

import torch

USES = {
    "made": lambda: torch.cuda.FloatTensor(2, 3),
    "listed": lambda: torch.cuda.LongTensor([1, 2]),
    "default": lambda: torch.set_default_tensor_type(torch.cuda.FloatTensor),
    "by_name": lambda: torch.set_default_tensor_type("torch.cuda.FloatTensor"),
}

if __name__ == "__main__":
    here, there = torch.zeros(1), torch.zeros(1).cuda()
    assert [isinstance(x, torch.cuda.FloatTensor) for x in (here, there, there.half())] == [
        False,
        True,
        False,
    ]
    moved = here.type(torch.cuda.FloatTensor), here.type("torch.cuda.HalfTensor")
    assert [(x.is_cuda, x.dtype) for x in moved] == [(True, torch.float32), (True, torch.float16)]
    assert [made.is_cuda for x in (here, there) for made in (x.new([1.0]), x.new_tensor([1.0]))] == [
        *[False] * 2,
        *[True] * 2,
    ]
    USES[sys.argv[1]]()
