"""Which attention kernel a GPU chooses, at the limits of its rules."""

from typing import Any

import pytest

from foretrace.tracer.rehearse.gpu.attention import _cast, chosen

torch = pytest.importorskip("torch")


def _operand(dtype: Any, width: int, heads: int = 4) -> Any:
    return torch.empty(2, heads, 16, width, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("dtype", "width", "value_width", "heads", "kernel"),
    [
        ("bfloat16", 256, 256, 4, "flash"),
        ("float16", 264, 264, 4, "efficient"),
        ("bfloat16", 64, 32, 4, "efficient"),
        ("bfloat16", 60, 60, 4, "flash"),
        ("bfloat16", 260, 260, 4, ""),
        ("float32", 64, 64, 4, "efficient"),
        ("float32", 66, 66, 4, ""),
        ("float32", 64, 66, 4, ""),
        ("float64", 64, 64, 4, ""),
        ("bfloat16", 64, 64, 2, "flash"),
        ("bfloat16", 264, 264, 2, ""),
        ("float32", 64, 64, 2, ""),
    ],
)
def test_the_kernel_follows_width_type_and_heads(
    dtype: str, width: int, value_width: int, heads: int, kernel: str
) -> None:
    """Flash has heads of up to 256; memory-efficient attention 16-byte rows, and no heads in groups."""
    query, key = _operand(getattr(torch, dtype), width), _operand(getattr(torch, dtype), width, heads)
    assert chosen(torch, query, key, _operand(key.dtype, value_width, heads), None) == kernel


def test_a_mask_is_for_memory_efficient_attention() -> None:
    query = _operand(torch.bfloat16, 64)
    mask = torch.empty(16, 16, dtype=torch.bool, device="meta")
    assert chosen(torch, query, query, query, mask) == "efficient"


def test_autocast_leaves_fp64_and_masks_of_bool_as_they_are() -> None:
    """As the policy ``lower_precision_fp`` does (``is_eligible`` in ATen/autocast_mode.h)."""
    kinds = (torch.float32, torch.float64, torch.bool)
    with torch.autocast("cpu", torch.bfloat16):
        cast = _cast(torch, *(torch.empty(2, dtype=kind) for kind in kinds), None)
    assert [None if one is None else one.dtype for one in cast] == [
        torch.bfloat16,
        torch.float64,
        torch.bool,
        None,
    ]
