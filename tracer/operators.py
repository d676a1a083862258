"""What the operators of ``torch.distributed`` mean: kind, group and size of each ``c10d`` operator.

Pure functions of an operator's arguments; importing this module does not import torch. Sizes follow
nccl-tests (``doc/PERFORMANCE.md``): S is the whole array, so the output of an all-gather and the input of a
reduce-scatter; for an all-to-all it is what one rank sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple

DTYPES: Final = MappingProxyType(
    {
        "torch.float32": "fp32",
        "torch.float64": "fp64",
        "torch.float16": "fp16",
        "torch.bfloat16": "bf16",
        "torch.float8_e4m3fn": "fp8",
        "torch.float8_e5m2": "fp8",
    }
)
"""Names of torch's floating-point types as the field writes them; others keep torch's name."""

NO_PEER: Final = -1  # in place of the position of a peer, for a collective

ANY_PEER: Final = -2
"""The same for a receive from whichever rank sends first: who that was is known when it is over."""


class Operator(NamedTuple):
    """How to read the arguments of one ``c10d`` operator."""

    kind: str  # ``kind`` column of its spans
    group: int  # position of the process group among the arguments
    size: Callable[[Any, int], int]  # returns the size in bytes from the arguments and the number of ranks
    tensor: Callable[[Any], Any]  # returns one tensor, for dtype and device
    outputs: Callable[[Any], Iterable[Any]]  # returns the tensors that somebody may wait for
    peer: int = NO_PEER  # position of the peer's rank in the group, NO_PEER or ANY_PEER
    # position of the argument that ``size`` and ``tensor`` look at, a tensor or a list of which one is as
    # good as the tensor; -1 if there is no such argument
    whole: int = -1
    filled: int = 0  # position of the tensor that is the only one of ``outputs`` then
    waits: bool = False  # whether it returns when it is over, and nothing

    @property
    def is_p2p(self) -> bool:
        """Whether it is one side of a point-to-point transfer."""
        return self.peer != NO_PEER


def tensor_bytes(tensor: Any) -> int:
    """Return the size of a tensor's elements in bytes."""
    size: int = tensor.nbytes
    return size


def dtype_name(tensor: Any) -> str:
    """Return the type of a tensor's elements, e.g. ``"bf16"``."""
    return _dtype_name(tensor.dtype)


@cache
def _dtype_name(dtype: Any) -> str:
    name = str(dtype)
    return DTYPES.get(name) or name.removeprefix("torch.")


def _total(tensors: Sequence[Any]) -> int:
    if len(tensors) == 1:  # as nearly always, and on the path of every collective
        return tensor_bytes(tensors[0])
    return sum(map(tensor_bytes, tensors))


def _in_place(kind: str) -> Operator:
    """Return a collective on a list of tensors that are both input and output."""
    return Operator(kind, 1, lambda a, n: _total(a[0]), lambda a: a[0][0], lambda a: a[0], whole=0)


OPERATORS: Final[Mapping[str, Operator]] = MappingProxyType(
    {
        "allreduce_": _in_place("all_reduce"),
        "allreduce_coalesced_": _in_place("all_reduce"),
        "broadcast_": _in_place("broadcast"),
        "reduce_": _in_place("reduce"),
        "_allgather_base_": Operator(
            "all_gather", 2, lambda a, n: tensor_bytes(a[0]), lambda a: a[0], lambda a: a[:1], whole=0
        ),
        "allgather_": Operator(
            "all_gather", 2, lambda a, n: _total(a[0][0]), lambda a: a[1][0], lambda a: a[0][0]
        ),
        # Where the arguments hold the part of one rank, the whole is as many parts as there are ranks.
        "allgather_coalesced_": Operator(
            "all_gather", 2, lambda a, n: _total(a[1]) * n, lambda a: a[1][0], lambda a: a[0][0]
        ),
        "allgather_into_tensor_coalesced_": Operator(
            "all_gather", 2, lambda a, n: _total(a[0]), lambda a: a[1][0], lambda a: a[0]
        ),
        "_reduce_scatter_base_": Operator(
            "reduce_scatter", 2, lambda a, n: tensor_bytes(a[1]), lambda a: a[1], lambda a: a[:1], whole=1
        ),
        "reduce_scatter_": Operator(
            "reduce_scatter", 2, lambda a, n: _total(a[1][0]), lambda a: a[0][0], lambda a: a[0]
        ),
        "reduce_scatter_tensor_coalesced_": Operator(
            "reduce_scatter", 2, lambda a, n: _total(a[1]), lambda a: a[1][0], lambda a: a[0]
        ),
        "gather_": Operator("gather", 2, lambda a, n: _total(a[1]) * n, lambda a: a[1][0], lambda a: ()),
        "scatter_": Operator("scatter", 2, lambda a, n: _total(a[0]) * n, lambda a: a[0][0], lambda a: a[0]),
        "alltoall_": Operator("all_to_all", 2, lambda a, n: _total(a[1]), lambda a: a[1][0], lambda a: a[0]),
        "alltoall_base_": Operator(
            "all_to_all", 2, lambda a, n: tensor_bytes(a[1]), lambda a: a[1], lambda a: a[:1], whole=1
        ),
        "barrier": Operator("barrier", 1, lambda a, n: 0, lambda a: a[0], lambda a: ()),
        "send": Operator("send", 1, lambda a, n: _total(a[0]), lambda a: a[0][0], lambda a: a[0], peer=2),
        "recv_": Operator("recv", 1, lambda a, n: _total(a[0]), lambda a: a[0][0], lambda a: a[0], peer=2),
    }
)
"""Operators of ``c10d`` that move data, by name, as of torch 2.13."""

ON_GLOO_ONLY: Final[Mapping[str, Operator]] = MappingProxyType(
    {
        "recv_any_source_": Operator(
            "recv", 1, lambda a, n: _total(a[0]), lambda a: a[0][0], lambda a: a[0], peer=ANY_PEER
        ),
        "monitored_barrier_": Operator(
            "barrier", 1, lambda a, n: 0, lambda a: a[0], lambda a: (), waits=True
        ),
    }
)
"""The others, which NCCL does not have."""

RECORDED: Final[Mapping[str, Operator]] = MappingProxyType({**OPERATORS, **ON_GLOO_ONLY})  # all of them
