"""Autocast of a GPU, done by autocast of the CPU, but with the operators that CUDA keeps in fp32."""

from __future__ import annotations

import functools
import threading
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
to float32". The list of the CPU is different."""

SOFTMAX: Final[Mapping[str, str]] = MappingProxyType({"softmax": "_softmax", "log_softmax": "_log_softmax"})
"""Functions with one GPU kernel that reads fp16 and writes fp32 (``half_to_float``), and that kernel."""

TOLD: Final = frozenset({*SOFTMAX, "cumprod", "cumsum", "prod", "sum"})
"""Those of ``IN_FP32`` that get the dtype of the result as an argument, instead of a cast of their inputs
(``fp32_set_opt_dtype`` in ATen/autocast_mode.h)."""


def in_fp32(torch: Any) -> Callable[[str, Any, Any], tuple[Any, Any]]:
    """Return a function that changes the arguments of a call in ``IN_FP32`` so that its result is in fp32."""
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
    """Return the fp32 softmax of an fp16 tensor by the single kernel of a GPU; None in other cases."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    is_one = kwargs.get("dtype") is torch.float32 and isinstance(dim, int)
    if not is_one or not args or args[0].dtype is not torch.float16:
        return None
    return getattr(torch, SOFTMAX[name])(args[0], dim, True)  # noqa: FBT003 - torch's own signature


class _OfGpu(threading.local):
    """What autocast of the GPU is told, which torch keeps for each thread.

    Attributes:
        dtype: the one that operators are cast to; None: torch's own for CUDA, fp16.
        of_host: what autocast of the host had before that of the GPU was turned on by hand; None: it is off.
    """

    dtype: Any = None
    of_host: Any = None


def install(torch: Any, is_foreign: Callable[[Any], bool]) -> None:
    """Let autocast of a GPU be that of the processor, with the dtype that the GPU would use.

    Where the script is told that there is no GPU, torch itself turns autocast of a GPU off.
    """
    from torch.amp import autocast_mode

    base, told = autocast_mode.autocast, _OfGpu()
    original, enter, leave = base.__init__, base.__enter__, base.__exit__

    def dtype_of_gpu() -> Any:
        return told.dtype or torch.float16

    @functools.wraps(original)
    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        self.is_of_gpu = is_foreign(device_type) and torch.cuda.is_available()
        if self.is_of_gpu:
            device_type, dtype = "cpu", dtype or dtype_of_gpu()
        original(self, device_type, dtype, *args, **kwargs)

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        if self.is_of_gpu:
            self.dtype_before, told.dtype = told.dtype, self.fast_dtype
        return enter(self)

    @functools.wraps(leave)
    def left(self: Any, *error: Any) -> Any:
        if self.is_of_gpu:
            told.dtype = self.dtype_before
        return leave(self, *error)

    base.__init__, base.__enter__, base.__exit__ = init, entered, left
    _by_hand(torch, is_foreign, told, dtype_of_gpu)


def _by_hand(
    torch: Any, is_foreign: Callable[[Any], bool], told: _OfGpu, dtype_of_gpu: Callable[[], Any]
) -> None:
    """Replace the functions that read and set the state of autocast without a region."""
    enabled, enable = torch.is_autocast_enabled, torch.set_autocast_enabled
    dtype_of, choose = torch.get_autocast_dtype, torch.set_autocast_dtype

    def is_enabled(device_type: str = "cpu") -> bool:
        return bool(enabled("cpu" if is_foreign(device_type) else device_type))

    def dtype(device_type: str) -> Any:
        return dtype_of_gpu() if is_foreign(device_type) else dtype_of(device_type)

    def set_dtype(device_type: str, dtype: Any) -> None:
        if not is_foreign(device_type):
            choose(device_type, dtype)
            return
        told.dtype = dtype
        if enabled("cpu"):
            choose("cpu", dtype)

    def set_enabled(*args: Any) -> None:
        device_type, is_on = args if len(args) > 1 else ("cuda", *args)
        if not is_foreign(device_type):
            enable(device_type, is_on)
            return
        enable("cpu", is_on)
        if is_on and told.of_host is None:
            told.of_host = dtype_of("cpu")
        if told.of_host is not None:
            choose("cpu", dtype_of_gpu() if is_on else told.of_host)
        told.of_host = told.of_host if is_on else None

    torch.is_autocast_enabled, torch.set_autocast_enabled = is_enabled, set_enabled
    torch.get_autocast_dtype, torch.set_autocast_dtype = dtype, set_dtype
    torch.get_autocast_gpu_dtype = dtype_of_gpu
    torch.set_autocast_gpu_dtype = functools.partial(set_dtype, "cuda")
