"""A loop with Accelerate and its FSDP plugin on a GPT-2 with random weights, as its documentation shows it.

foretrace rehearse --world-size 64 -o runs/accelerate -- examples/rehearse/accelerate_fsdp.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel


def main() -> None:
    """Train."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"]
    )
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    model = GPT2LMHeadModel(GPT2Config(n_embd=1600, n_layer=24, n_head=25))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 50257, (16384, 1024))
    loader = DataLoader(TensorDataset(tokens), batch_size=4, shuffle=True, num_workers=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, (batch,) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {loss.item():.3f}")
        if step == 10:
            break
    accelerator.end_training()


if __name__ == "__main__":
    main()
