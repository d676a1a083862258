"""Which operators a compiled backward may compute again, and what the backward of an operator reads."""

from __future__ import annotations

import functools
from typing import Final

AGAIN: Final = frozenset(
    {
        "add",
        "sub",
        "div",
        "mul",
        "max",
        "min",
        "pow",
        "rsub",
        "relu",
        "silu",
        "gelu",
        "sigmoid",
        "tanh",
        "exp",
    }
    | {"where", "clamp", "sum", "mean", "amax", "to", "_to_copy", "clone", "full_like", "var", "std", "index"}
    | {"expand", "reshape", "scalar_tensor", "ones", "new_zeros", "new_full", "new_ones", "arange", "triu"}
    | {"tril", "var_mean", "isinf", "any", "full", "zeros", "empty", "empty_like", "argmax", "maximum"}
    | {"gather", "zeros_like", "ones_like", "embedding", "index_select", "convert_element_type", "iota"}
    | {"threshold_backward", "gelu_backward", "contiguous", "copy", "fill", "zero", "lerp", "addcmul"}
    | {"linalg_vector_norm", "norm", "_unsafe_view", "view", "slice", "type_as", "softplus", "dropout"}
    | {"masked_fill", "all", "amin", "prod", "logsumexp", "glu", "mse_loss", "nll_loss_forward"}
)
"""Operators of ``get_default_op_list`` in ``torch/_functorch/partitioners.py``, and what is decomposed into
them; element-wise ones come to it by their tag."""

RANDOM: Final = frozenset({"rand_like", "randn_like", "rand", "randn", "bernoulli", "uniform", "normal"})
"""Operators that are fused, and not computed again: they would draw other numbers."""

OVERWRITES: Final = frozenset({"copy_", "fill_", "zero_", "bernoulli_", "uniform_", "normal_"})
"""Operators in place that do not read what they change."""

BY_RESULT: Final = frozenset(
    {"tanh", "sigmoid", "exp", "sqrt", "rsqrt", "reciprocal", "expm1", "_softmax", "_log_softmax", "tan"}
    | {"logsumexp", "amax", "amin", "linalg_vector_norm", "norm", "prod", "cumprod", "pow.Tensor"}
)
"""Operators whose backward reads what they make (``derivatives.yaml`` of PyTorch)."""

BY_OTHER: Final = frozenset({"mul", "div", "mm", "bmm", "atan2", "dot", "mv"})
"""Operators of two operands; the gradient of each is made of the other one."""

BY_OPERAND: Final = frozenset(
    {"gelu", "silu", "pow", "log", "log1p", "log2", "log10", "sin", "cos", "abs", "softplus", "leaky_relu"}
    | {"erf", "square", "var", "std", "var_mean", "hardswish", "hardsigmoid", "mish", "log_sigmoid_forward"}
    | {"asin", "acos", "atan", "sinh", "cosh", "elu", "glu", "celu", "selu", "linalg_vector_norm", "norm"}
    | {"amax", "amin", "prod", "logsumexp", "hardtanh", "softshrink", "erfinv", "lgamma", "digamma"}
)
"""Operators whose backward reads their first operand."""

BY_MASK: Final = frozenset({"relu", "clamp", "clamp_min", "clamp_max", "threshold", "hardtanh"})
"""Operators whose backward asks where they let a number through, which is a byte for each."""

PLAIN: Final = frozenset(
    {"add", "sub", "rsub", "neg", "sum", "mean", "_to_copy", "clone", "copy", "cat", "expand", "contiguous"}
    | {"fill", "zero", "stack", "_unsafe_view", "new_zeros", "zeros_like", "ones_like", "empty_like"}
)
"""Operators whose backward reads nothing of what they read or made."""


@functools.cache
def base_of(name: str) -> str:
    """Return the name of an operator without its namespace and the mark of a change in place.

    >>> base_of("aten.mul_"), base_of("aten._softmax")
    ('mul', '_softmax')
    """
    base = name.partition(".")[2]
    return base.removesuffix("_") if not base.endswith("__") else base


@functools.cache
def is_element_wise(name: str) -> bool:
    """Return whether PyTorch has marked the operator *name* as element-wise."""
    import torch

    namespace, _, rest = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), rest, None)
    if packet is None or not hasattr(packet, "overloads"):
        return False
    return any(torch.Tag.pointwise in getattr(packet, one).tags for one in packet.overloads())


@functools.cache
def is_again(name: str) -> bool:
    """Return whether a backward may compute the operator *name* again."""
    if not name.startswith(("aten.", "prims.")) or base_of(name) in RANDOM:
        return False
    return base_of(name) in AGAIN or is_element_wise(name)
