"""The Trainer of transformers on a Llama with random weights, as its documentation shows it.

foretrace rehearse --world-size 64 -o runs/trainer -- examples/rehearse/hf_trainer.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Tokens(Dataset[dict[str, Any]]):  # type: ignore[misc]  # torch is untyped here
    """Random sequences."""

    def __init__(self, n_tokens: int, vocab: int) -> None:
        self.n_tokens, self.vocab = n_tokens, vocab

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, at: int) -> dict[str, Any]:
        tokens = torch.randint(0, self.vocab, (self.n_tokens,))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--fsdp", default="")
    args = parser.parse_args()
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=args.seq_len,
    )
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=10,
        bf16=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        **({"fsdp": args.fsdp} if args.fsdp else {}),
    )
    Trainer(model=model, args=arguments, train_dataset=Tokens(args.seq_len, 32000)).train()


if __name__ == "__main__":
    main()
