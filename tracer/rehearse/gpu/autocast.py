"""Autocast of a GPU, acted out by that of the processor, with the operators that a GPU leaves in fp32."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

IN_FP32: Final = frozenset(
    {
        "__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin", "binary_cross_entropy_with_logits",
        "cdist", "cosh", "cosine_embedding_loss", "cosine_similarity", "cross_entropy", "cumprod", "cumsum",
        "dist", "erfinv", "exp", "expm1", "group_norm", "hinge_embedding_loss", "kl_div", "l1_loss",
        "layer_norm", "log", "log10", "log1p", "log2", "log_softmax", "margin_ranking_loss", "mse_loss",
        "multi_margin_loss", "multilabel_margin_loss", "nll_loss", "norm", "normalize", "pdist",
        "poisson_nll_loss", "pow", "prod", "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss",
        "soft_margin_loss", "softmax", "softmin", "softplus", "sum", "tan", "triplet_margin_loss",
    }
)  # fmt: skip
"""Functions that autocast of CUDA runs in fp32: documentation of ``torch.amp``, "CUDA Ops that can autocast
to float32"; the list of the processor is another."""

SOFTMAX: Final[Mapping[str, str]] = MappingProxyType({"softmax": "_softmax", "log_softmax": "_log_softmax"})
"""Functions whose kernels on a GPU read fp16 and write fp32 at once (``half_to_float``), and the kernels."""

TOLD: Final = frozenset({*SOFTMAX, "cumprod", "cumsum", "prod", "sum"})
"""Those of ``IN_FP32`` that are told the type of their result, in place of a cast of what they read
(``fp32_set_opt_dtype`` in ATen/autocast_mode.h)."""


def in_fp32(torch: Any) -> Callable[[str, Any, Any], tuple[Any, Any]]:
    """Return what gives the arguments with which a function of ``IN_FP32``, by its name, results in fp32."""
    low = (torch.float16, torch.bfloat16)

    def one(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype in low else value

    def cast(
        name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        is_first_low = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype in low
        if name in TOLD and is_first_low:
            return args, {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}
        return tuple(map(one, args)), {key: one(value) for key, value in kwargs.items()}

    return cast


def softmax(torch: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the softmax in fp32 of a tensor in fp16 as the one kernel that a GPU has for it, else None."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    is_one = kwargs.get("dtype") is torch.float32 and isinstance(dim, int)
    if not is_one or not args or args[0].dtype is not torch.float16:
        return None
    return getattr(torch, SOFTMAX[name])(args[0], dim, True)  # noqa: FBT003 - torch's own signature


def install(torch: Any, is_foreign: Callable[[Any], bool]) -> None:
    """Let autocast of a GPU be that of the processor, in the type that the GPU would have taken."""
    from torch.amp import autocast_mode

    base = autocast_mode.autocast
    original, enabled, of_kind = base.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    @functools.wraps(original)
    def init(self: Any, device_type: str, dtype: Any = None, **kwargs: Any) -> None:
        if is_foreign(device_type):
            device_type, dtype = "cpu", dtype or torch.float16
        original(self, device_type, dtype=dtype, **kwargs)

    def is_enabled(device_type: str = "cpu") -> bool:
        return bool(enabled("cpu" if is_foreign(device_type) else device_type))

    def dtype_of(device_type: str = "cpu") -> Any:
        return of_kind("cpu" if is_foreign(device_type) else device_type)

    base.__init__ = init
    torch.get_autocast_gpu_dtype = lambda: of_kind("cpu")
    torch.is_autocast_enabled, torch.get_autocast_dtype = is_enabled, dtype_of
