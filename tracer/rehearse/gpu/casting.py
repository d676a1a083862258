"""Operators that autocast of CUDA casts otherwise than that of the processor, which does its work here.

torch has a kernel per operator for each kind of autocast. Those of the processor are replaced, for regions of
a GPU, by ones that follow ``ATen/autocast_mode.h``: so operators are cast wherever they are called from, as
inside ``F.gumbel_softmax`` or ``F.interpolate``. What this version of torch does not cast on CUDA is left
alone.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

FP32: Final = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal"),
    *("rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus"),
    *("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm"),
    *("nuclear_norm.dim", "cosine_similarity", "dist", "pdist", "renorm", "logsumexp"),
    *("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d"),
    *("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa"),
)
"""``AT_FORALL_FP32``, without those that autocast of the processor casts as well."""

TOLD: Final = (
    *("softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList"),
    *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
)
"""``AT_FORALL_FP32_SET_OPT_DTYPE``, likewise: they get the dtype of the result as an argument."""

NORMS: Final = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""``AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE``: those that are called in their place, with a dtype."""

LOW: Final = (
    *("addmv", "addr", "mv", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    *("einsum", "chain_matmul", "linalg_multi_dot"),
)
"""``AT_FORALL_LOWER_PRECISION_FP``, likewise."""

RECURRENT: Final = tuple(
    f"{name}.{kind}" for name in ("gru", "rnn_tanh", "rnn_relu") for kind in ("input", "data")
)
"""Layers that cuDNN runs, which casts what it is given (ATen/cudnn/AutocastRNN.cpp); LSTM is cast anyway."""

PROMOTED: Final = (
    *("addcdiv", "addcmul", "atan2", "cross", "dot", "vdot", "index_put", "scatter_add"),
    *("bilinear", "tensordot", "grid_sampler"),
)
"""``AT_FORALL_PROMOTE``: all operands get the widest dtype among them."""

OUTERMOST: Final = ("group_norm",)
"""Those whose GPU kernels need the channels outermost, and copy other inputs after the cast; CPU kernels
accept both (ATen/native/group_norm.cpp)."""

AS_THEY_ARE: Final = (
    *(
        "avg_pool3d",
        "adaptive_avg_pool3d",
        "adaptive_max_pool3d",
        "max_pool3d",
        "max_unpool2d",
        "max_unpool3d",
    ),
    *("fractional_max_pool2d", "fractional_max_pool3d", "reflection_pad1d", "reflection_pad2d"),
    *("replication_pad1d", "replication_pad2d", "replication_pad3d", "cross_entropy_loss", "trace"),
)
"""Those that the processor casts to fp32, and CUDA does not."""

SOFTMAX: Final[Mapping[str, str]] = MappingProxyType({"softmax": "_softmax", "log_softmax": "_log_softmax"})
"""Functions with one GPU kernel that reads fp16 and writes fp32 (``half_to_float``), and that kernel."""

WIDEST_BYTES: Final = 8
"""Bytes of a number that autocast leaves alone."""

Cast = Callable[[list[Any], dict[str, Any]], None]
"""Changes the arguments of a call, positional and by name."""


def install(torch: Any, is_of_host: Callable[[], bool]) -> Any:
    """Cast as CUDA does; return what must be kept alive.

    Args:
        torch: the module.
        is_of_host: whether the present region is one of the processor, which casts as it always does.
    """
    library = torch.library.Library("aten", "IMPL")
    wide = _to(torch, lambda: torch.float32)
    low = _to(torch, lambda: torch.get_autocast_dtype("cpu"))

    def replace(name: str, other: str, of_gpu: Cast, of_host: Cast = _nothing) -> None:
        kernel = _kernel(torch, _operator(torch, other), of_gpu, of_host, is_of_host)
        plain = _kernel(torch, _operator(torch, name), of_gpu, of_host, lambda: True)
        library.impl(name, kernel if other == name else _either(kernel, plain, is_of_host), "AutocastCPU")

    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that kernels are replaced
        for names, cast in ((FP32, wide), (TOLD, _told(torch)), (NORMS, _last(torch)), (LOW, low)):
            for name in names:
                if has_kernel(f"aten::{name}", "AutocastCUDA"):
                    replace(name, NORMS.get(name, name), cast)
        for name in OUTERMOST:
            replace(name, name, _outermost(wide))
        for name in PROMOTED:
            of_host = wide if has_kernel(f"aten::{name}", "AutocastCPU") else _nothing
            replace(name, name, _promoted(torch), of_host)
        for name in RECURRENT:
            replace(name, name, low)
        for name in AS_THEY_ARE:
            if has_kernel(f"aten::{name}", "AutocastCPU"):
                kernel = _kernel(torch, _operator(torch, name), _nothing, wide, is_of_host)
                library.impl(name, _either(_parts(torch, name) or kernel, kernel, is_of_host), "AutocastCPU")
    return library


def _parts(torch: Any, name: str) -> Callable[..., Any] | None:
    """Return what does the work of an operator by others, each of which may be cast; None if it has none."""
    operator, key = _operator(torch, name), torch._C.DispatchKey.CompositeImplicitAutograd
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"):
        return None
    return lambda *args, **kwargs: operator._op_dk(key, *args, **kwargs)


def _nothing(args: list[Any], kwargs: dict[str, Any]) -> None:
    """Leave *args* and *kwargs* as they are."""


def _either(kernel: Callable[..., Any], plain: Callable[..., Any], is_of_host: Callable[[], bool]) -> Any:
    def either(*args: Any, **kwargs: Any) -> Any:
        return (plain if is_of_host() else kernel)(*args, **kwargs)

    return either


def _operator(torch: Any, name: str) -> Any:
    name, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, name), overload or "default")


def _kernel(
    torch: Any, operator: Any, of_gpu: Cast, of_host: Cast, is_of_host: Callable[[], bool]
) -> Callable[..., Any]:
    """Return *operator* behind a cast, and without one of the operators that it consists of."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    without, name = torch._C._ExcludeDispatchKeyGuard, operator._schema.name.partition("::")[2]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        found = list(args)
        with without(keys):
            (of_host if is_of_host() else of_gpu)(found, kwargs)
            if (one := softmax(torch, name, found, kwargs)) is not None:
                return one
            return operator(*found, **kwargs)

    return kernel


def _is_cast(value: Any) -> bool:
    """Whether autocast takes *value* for one of its own: double precision is none."""
    return (
        hasattr(value, "element_size") and value.is_floating_point() and value.element_size() < WIDEST_BYTES
    )


def _to(torch: Any, dtype: Callable[[], Any]) -> Cast:
    """Return what casts all tensors to *dtype*, also those in lists."""

    def one(value: Any, to: Any) -> Any:
        if isinstance(value, list | tuple):
            return [one(part, to) for part in value]
        return value.to(to) if _is_cast(value) and value.dtype is not to else value

    def cast(args: list[Any], kwargs: dict[str, Any]) -> None:
        to = dtype()
        args[:] = [one(value, to) for value in args]
        kwargs |= {name: one(value, to) for name, value in kwargs.items()}

    return cast


def _outermost(cast: Cast) -> Cast:
    def copied(args: list[Any], kwargs: dict[str, Any]) -> None:
        cast(args, kwargs)
        args[0] = args[0].contiguous()

    return copied


def _told(torch: Any) -> Cast:
    """Return what asks for a result in fp32, where nothing else is asked for."""

    def cast(args: list[Any], kwargs: dict[str, Any]) -> None:
        if _is_cast(args[0]) and not any(isinstance(one, torch.dtype) for one in (*args, *kwargs.values())):
            kwargs["dtype"] = torch.float32

    return cast


def _last(torch: Any) -> Cast:
    """Return what asks a norm for a result in fp32, with all that comes before the dtype."""

    def cast(args: list[Any], kwargs: dict[str, Any]) -> None:
        if len(args) == 1:
            args.append(kwargs.pop("p", 2))
        if len(args) == 3:
            args.append(kwargs.pop("keepdim", False))
        kwargs["dtype"] = torch.float32 if _is_cast(args[0]) else args[0].dtype

    return cast


def _promoted(torch: Any) -> Cast:
    """Return what casts all tensors to the widest dtype among them."""
    low = (torch.float16, torch.bfloat16)

    def cast(args: list[Any], kwargs: dict[str, Any]) -> None:
        found = [one for one in (*args, *kwargs.values()) if _is_cast(one)]
        if len({one.dtype for one in found}) > 1:
            wide = torch.float32 if any(one.dtype not in low for one in found) else torch.promote_types(*low)
            _to(torch, lambda: wide)(args, kwargs)

    return cast


def softmax(torch: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the fp32 softmax of an fp16 tensor by the single kernel of a GPU; None in other cases."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    is_one = kwargs.get("dtype") is torch.float32 and isinstance(dim, int)
    if name not in SOFTMAX or not is_one or not args or args[0].dtype is not torch.float16:
        return None
    return getattr(torch, SOFTMAX[name])(args[0], dim, True)  # noqa: FBT003 - torch's own signature
