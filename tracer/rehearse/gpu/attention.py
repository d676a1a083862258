"""Chooses the attention kernel that a GPU would run.

The CPU has a fused attention of its own, but not for values of another width, for a trainable mask, or where
a script asks for a certain kernel; DTensor and context parallelism do not support it. The choice follows
``select_sdp_backend`` in ATen/native/transformers/cuda/sdp_utils.cpp on an H100: attention that cuDNN, flash
or memory-efficient attention accepts is fused; any other is computed over all scores. FLOPs and bytes are the
same for the three fused kernels. Attention with a mask is recorded as memory-efficient.
"""

from __future__ import annotations

import functools
from typing import Any, Final

WIDEST: Final = 256
"""Widest head of flash attention (``check_head_dim_size_flash``)."""

ALIGNED_BYTES: Final = 16
"""The bytes of a head must be a multiple of this for memory-efficient attention: 128 bits
(``minimum_gemm_alignment``)."""


NO_KERNEL: Final = "No available kernel. Aborting execution."
"""The error of torch if no kernel that the script allows (``sdpa_kernel``) accepts the operands."""


def install(torch: Any) -> None:
    """Replace ``scaled_dot_product_attention``.

    Dropout inside a fused kernel costs no memory traffic; without fusion it is an operator on all scores.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed.tensor import DTensor

    functional, aten = torch.nn.functional, torch.ops.aten
    original = functional.scaled_dot_product_attention

    @functools.wraps(original)
    def attention(  # noqa: PLR0917 - as it is called
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002 - as it is called
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if query.is_nested:  # nested tensors choose their own kernel (``jagged``)
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
        query, key, value, mask = _cast(torch, query, key, value, attn_mask)
        kernel = chosen(torch, query, key, value, mask) if isinstance(query, FakeTensor | DTensor) else ""
        if kernel == "flash":
            return aten._scaled_dot_product_flash_attention(  # noqa: SLF001
                query, key, value, 0.0, is_causal, scale=scale
            )[0]
        if kernel == "efficient":
            keeps = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
            bias = None if mask is None else _bias(torch, mask, query, key)
            return aten._scaled_dot_product_efficient_attention(  # noqa: SLF001
                query, key, value, bias, keeps, 0.0, is_causal, scale=scale
            )[0]
        if not torch.backends.cuda.math_sdp_enabled():
            raise RuntimeError(NO_KERNEL)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return original(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    functional.scaled_dot_product_attention = attention


def _cast(torch: Any, *tensors: Any) -> list[Any]:
    """Return *tensors* in the dtype of autocast: the operator that would cast them is skipped here."""
    if not torch.is_autocast_enabled("cpu"):
        return list(tensors)
    dtype = torch.get_autocast_dtype("cpu")
    return [
        one.to(dtype) if one is not None and one.is_floating_point() and one.dtype != torch.float64 else one
        for one in tensors
    ]


def chosen(torch: Any, query: Any, key: Any, value: Any, mask: Any) -> str:
    """Return the fused kernel that accepts these operands, empty if none does."""
    if query.dim() != 4 or query.dtype not in {torch.float16, torch.bfloat16, torch.float32}:
        return ""
    cuda, width = torch.backends.cuda, query.shape[-1]
    is_half = query.dtype != torch.float32
    is_square = width == value.shape[-1] <= WIDEST
    if is_half and is_square and mask is None and cuda.flash_sdp_enabled():
        return "flash"
    if query.shape[1] != key.shape[1]:  # only flash supports grouped heads (documentation of enable_gqa)
        return ""
    is_aligned = not any(one.shape[-1] * one.element_size() % ALIGNED_BYTES for one in (query, value))
    by_cudnn = is_half and is_square and cuda.cudnn_sdp_enabled()
    return "efficient" if is_aligned and (by_cudnn or cuda.mem_efficient_sdp_enabled()) else ""


def _bias(torch: Any, mask: Any, query: Any, key: Any) -> Any:
    """Return *mask* as a bias that is added to the scores of all heads."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
