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
    parser.add_argument("--ffn", type=int, default=0, help="4 x hidden unless given")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--log-every", type=int, default=1)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--fsdp", default="", help="as of the Trainer: 'full_shard auto_wrap'")
    parser.add_argument("--fsdp-version", type=int, default=2)
    args = parser.parse_args()
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.ffn or args.hidden * 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // args.head_dim,
        num_key_value_heads=8,
        vocab_size=args.vocab,
        max_position_embeddings=args.seq_len,
    )
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulate,
        max_steps=10,
        bf16=True,
        logging_steps=args.log_every,
        gradient_checkpointing=args.recompute,
        save_strategy="no",
        report_to=[],
        **({"fsdp": args.fsdp, "fsdp_config": {"fsdp_version": args.fsdp_version}} if args.fsdp else {}),
    )
    Trainer(model=model, args=arguments, train_dataset=Tokens(args.seq_len, args.vocab)).train()


if __name__ == "__main__":
    main()
