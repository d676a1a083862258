"""Stands in for ``flash_attn``, which is built on GPUs only: the same attention by PyTorch's own operator.

foretrace rehearse --world-size 512 --stub examples/rehearse/stub_flash_attn.py -o runs/x -- train.py
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def flash_attn_func(  # noqa: PLR0917 - the order in which it is called
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,  # noqa: FBT001, FBT002 - as flash_attn has it
    **options: Any,
) -> Tensor:
    """Return attention over ``(batch, tokens, heads, width)``; windows and slopes cost what none costs."""
    del options
    queries, keys, values = (tensor.transpose(1, 2) for tensor in (q, k, v))
    is_grouped = q.shape[2] != k.shape[2]
    out = scaled_dot_product_attention(
        queries, keys, values, None, dropout_p, causal, scale=softmax_scale, enable_gqa=is_grouped
    )
    return out.transpose(1, 2)


module: Any = ModuleType("flash_attn")
module.__spec__ = ModuleSpec("flash_attn", None)
module.__version__ = "2.8.3"
module.flash_attn_func = flash_attn_func
sys.modules["flash_attn"] = module
