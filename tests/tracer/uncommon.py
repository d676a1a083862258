"""A step of operators that few models have: ``uncommon.py``, as rank 0 of a world on GPUs."""

import json
import sys

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.functional import ScalingType
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

STEPS, ROWS, INPUTS, WIDTH = 12, 4, 32, 48
LENGTHS = (5, 3, 2)


def padded() -> None:
    """Say what becomes of sequences without their padding in a recurrent layer, and back."""
    gru = nn.GRU(INPUTS, WIDTH, batch_first=True, device="cuda")
    sequences = torch.randn(len(LENGTHS), max(LENGTHS), INPUTS, device="cuda")
    packed = pack_padded_sequence(sequences, torch.tensor(LENGTHS), batch_first=True)
    out, lengths = pad_packed_sequence(gru(packed)[0], batch_first=True, total_length=7)
    out.sum().backward()
    words = [packed.data.shape[0], packed.batch_sizes.tolist(), list(out.shape), lengths.tolist()]
    sys.stdout.write(json.dumps(words) + "\n")


padded()

lstm = nn.LSTM(INPUTS, WIDTH, num_layers=2, device="cuda")
head = nn.Linear(WIDTH, 1, device="cuda")
optimizer = torch.optim.SGD([*lstm.parameters(), *head.parameters()], lr=0.1)
narrow = torch.randn(64, INPUTS, device="cuda").bfloat16()
eight, one = narrow.to(torch.float8_e4m3fn), torch.ones((), device="cuda")
whole = ScalingType.TensorWise
plain = nn.Linear(INPUTS, WIDTH, bias=False, device="cuda")
weights = {name: parameter.detach() for name, parameter in plain.named_parameters()}


def loss(given: dict[str, Tensor], row: Tensor) -> Tensor:
    """Return the loss of one row."""
    return functional_call(plain, given, (row,)).square().sum()


each = vmap(grad(loss), in_dims=(None, 0))
for _ in range(2):
    functional.scaled_mm(eight, eight.t(), one, whole, one, whole, output_dtype=torch.bfloat16)
    torch.bmm(narrow[None], narrow.t()[None], out_dtype=torch.float32)
    torch.cdist(narrow.float(), narrow.float())
    each(weights, torch.randn(ROWS, INPUTS, device="cuda"))
    torch.linalg.eigh(torch.randn(64, 64, device="cuda"))
    head(lstm(torch.randn(STEPS, ROWS, INPUTS, device="cuda"))[0]).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
