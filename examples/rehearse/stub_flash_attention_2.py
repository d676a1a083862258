"""Lets models of transformers that ask for FlashAttention 2, built on GPUs only, ask for PyTorch's own.

foretrace rehearse --world-size 512 --stub examples/rehearse/stub_flash_attention_2.py -o runs/x -- train.py
"""

# ruff: noqa: SLF001 - there is no other way in

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

checked = PreTrainedModel._check_and_adjust_attn_implementation


def instead(self: Any, name: str | None, *args: Any, **kwargs: Any) -> Any:
    """Return what transformers takes for *name*: PyTorch's operator is the same kernel on a GPU."""
    return checked(self, "sdpa" if name == "flash_attention_2" else name, *args, **kwargs)


anywhere: Any = PreTrainedModel
anywhere._check_and_adjust_attn_implementation = instead
