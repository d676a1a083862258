"""What a rank executes: operations, communications, and the blocks of a model that are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from foretrace.simulator.models.model import Linear

DTYPE_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {"fp8": 1, "bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}
)
"""Bytes per element."""

OPERAND_BITS: Final[Mapping[str, float]] = MappingProxyType({"fp4": 4.5, "fp8": 8.0})
"""Bits of an operand of a product, scales included, where they are few; results are in 16 bit."""

PHASES: Final = ("forward", "backward", "backward_input", "backward_weight", "recompute")
"""What a block can be asked for. ``backward`` is ``backward_input`` and ``backward_weight`` interleaved."""


class Addressed(NamedTuple):
    """A kernel of an element-wise operation whose operands do not lie alike in memory.

    *n_elements*: results, each of which it computes the addresses of.
    """

    n_elements: int
    bytes_moved: int


@dataclass(frozen=True, slots=True)
class Op:
    """One operation on the device, or ``count`` of them one after another.

    Attributes:
        name: block and role, e.g. ``"mlp.up"``, ``"mlp.up.wgrad"``.
        kind: ``"gemm"``, ``"attention"`` or ``"attention_backward"`` (fused core), or ``"memory"`` (its time
            is that of the bytes it moves).
        flops: floating-point operations that are executed, over all ``count``; element-wise arithmetic is 0.
        bytes_moved: device memory read and written, over all ``count``, each operand once.
        m, n, k: shape of a matrix product, ``(m, k) @ (k, n)``, of one member if it is batched or grouped; of
            attention queries, keys and head width.
        count: kernels on the device; each has the fixed time of its kind.
        batch: members of a batched or grouped product; heads over all sequences of an attention.
        grouped: the members are a kernel each, one after another.
        v_dim: width of a value head, if it is not ``k``.
        causal: attention skips what a causal mask hides.
        window: keys that a query sees at most (sliding window); 0 means all.
        kernel: fused attention kernel, empty for the device's own choice; or how a grouped product runs.
        rate: of a product over that of a plain one of its dtype.
        launches: operations of the model that the host is charged for; None means as many as ``count``.
        rows: of each member of a grouped product, if they are not even.
        along: the dimension that they are of, ``"m"``, ``"n"`` or ``"k"``; its own is their mean then.
        n_random: random numbers that it draws, one for each score that dropout may leave out.
        addressed: those of its kernels that compute the address of each element; their bytes are among
            ``bytes_moved``.
    """

    name: str
    kind: str
    flops: int
    bytes_moved: int
    m: int = 0
    n: int = 0
    k: int = 0
    dtype: str = "bf16"
    count: int = 1
    batch: int = 1
    grouped: bool = False
    v_dim: int = 0
    causal: bool = True
    window: int = 0
    kernel: str = ""
    rate: float = 1.0
    launches: float | None = None
    rows: tuple[int, ...] = ()
    along: str = ""
    n_random: int = 0
    addressed: tuple[Addressed, ...] = ()

    @property
    def n_launches(self) -> float:
        """Operations of the model that the host launches."""
        return self.count if self.launches is None else self.launches


@dataclass(frozen=True, slots=True)
class Comm:
    """One collective that every rank of an axis takes part in.

    Attributes:
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"`` or ``"all_to_all"``.
        axis: ``"tp"``, ``"cp"``, ``"ep"``, or ``"etp"``: tensor parallelism of experts if it is not ``tp``.
        size_bytes: size of the whole array, as in nccl-tests.
        overlap_ops: how many of the operations that follow do not need its result, so that it may run beside
            them; 0 means that all of them wait.
        top_k: copies of each token in an exchange that sends a token once to a GPU, and once to a node,
            however many of its experts are there; 0: the array is sent as it is.
        max_nodes: most nodes that the experts of such a token may lie in; 0: any number.
        launches: operations of the model that the host is charged for, none inside of a CUDA graph. Half of
            one: a layer that the host is busy with all the while takes 3.31 ms on one GPU, 3.49 and 3.57 ms
            with six all-reduces among 2 and 4 (VIA-Research/vTrain f8dda84, 24 layers of 1,024 features).
    """

    kind: str
    axis: str
    size_bytes: int
    overlap_ops: int = 0
    dtype: str = "bf16"
    top_k: int = 0
    max_nodes: int = 0
    launches: float = 0.5


Phase = tuple[Op | Comm, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of the model on one rank: what it holds, and what a micro-batch does in it.

    Attributes:
        name: ``"attention"``, ``"mlp"``, ``"moe"``, ``"embedding"`` or ``"head"``.
        layer: transformer layer from 0; -1 for embedding and head.
        params: parameters on this rank, after tensor and expert and before data parallelism.
        expert_params: those of ``params`` that are routed experts; they have replicas of their own.
        phases: operations in issue order, for each of ``PHASES``.
        linears: its matrices outside routed experts and their router.
        adapters: parameters that low-rank adaptation adds; with it, these alone are trained.
        matrices: those of ``params`` outside routed experts that may be kept in 4 bits beside adapters; all
            of ``expert_params`` may.
    """

    name: str
    layer: int
    params: int
    expert_params: int
    phases: Mapping[str, Phase]
    linears: tuple[Linear, ...] = ()
    adapters: int = 0
    matrices: int = 0


def gemm(name: str, m: int, n: int, k: int, dtype: str, *, batch: int = 1, grouped: bool = False) -> Op:
    """Return *batch* matrix products ``(m, k) @ (k, n)``, one kernel or *grouped*; operands are moved once.

    >>> gemm("up", 2, 3, 4, "bf16").flops
    48
    """
    moved = (operand_bytes(m * k + k * n, dtype) + m * n * result_bytes(dtype)) * batch
    return Op(name, "gemm", 2 * m * n * k * batch, moved, m, n, k, dtype, batch=batch, grouped=grouped)


def operand_bytes(n_elements: int, dtype: str) -> int:
    """Return the size of operands of a product.

    >>> operand_bytes(16, "bf16"), operand_bytes(16, "fp4")
    (32, 9)
    """
    if dtype in OPERAND_BITS:
        return round(n_elements * OPERAND_BITS[dtype] / 8)
    return n_elements * DTYPE_BYTES[dtype]


def result_bytes(dtype: str) -> int:
    """Return the bytes of an element that a product of operands in *dtype* writes."""
    return DTYPE_BYTES["bf16"] if dtype in OPERAND_BITS else DTYPE_BYTES[dtype]


def weight_gradient(
    name: str,
    tokens: int,
    linear: Linear,
    dtype: str,
    *,
    sum_dtype: str,
    batch: int = 1,
    grouped: bool = False,
) -> Op:
    """Return the GEMM of *batch* weight gradients, which add to sums kept in *sum_dtype*.

    ``dW (n_out, n_in) += dY^T (n_out, tokens) @ X (tokens, n_in)``. The sum is read and written, as
    Megatron-LM's fused weight-gradient accumulation does.
    """
    n_in, n_out = linear.n_in, linear.n_out
    moved = operand_bytes(tokens * (n_in + n_out), dtype) + 2 * n_in * n_out * result_bytes(sum_dtype)
    flops = 2 * tokens * n_in * n_out * batch
    return Op(name, "gemm", flops, moved * batch, n_out, n_in, tokens, dtype, batch=batch, grouped=grouped)


def memory(name: str, bytes_moved: int, dtype: str, *, count: int = 1) -> Op:
    """Return an operation whose time is the bytes it moves, in *count* kernels."""
    return Op(name, "memory", 0, bytes_moved, dtype=dtype, count=count)


class Piece(NamedTuple):
    """A part of a block that has a forward and the backward of it, in its two halves.

    Attributes:
        backward: full backward, in the order in which a framework issues it.
        inputs: the half of ``backward`` that the previous layer waits for.
        weights: the other half, which may run at any later time.
    """

    forward: Phase = ()
    backward: Phase = ()
    inputs: Phase = ()
    weights: Phase = ()


def both_ways(op: Op, **backward: Any) -> Piece:
    """Return *op* and its backward: the same but for its name, and for the fields that are given."""
    return elementwise((op,), (replace(op, name=f"{op.name}.backward", **backward),))


def elementwise(forward: tuple[Op, ...], backward: tuple[Op, ...]) -> Piece:
    """Return a piece without weights worth a GEMM: all of its backward is on the way to the input."""
    return Piece(forward, backward, backward)


def replayed(pieces: list[Piece]) -> list[Piece]:
    """Return *pieces* as one CUDA graph each way: with the first operation the host launches all."""

    def once(in_order: list[Phase]) -> list[Phase]:
        waiting = iter((1,))  # for the first operation
        return [
            tuple(replace(op, launches=next(waiting, 0) if isinstance(op, Op) else 0) for op in phase)
            for phase in in_order
        ]

    forward, *back = zip(*pieces, strict=True)
    # Backward begins with the last piece.
    ways = [once([*forward]), *(once([*phase[::-1]])[::-1] for phase in back)]
    return [Piece(*phases) for phases in zip(*ways, strict=True)]


def phases(pieces: list[Piece], recompute: Phase) -> Mapping[str, Phase]:
    """Return the phases of a block made of *pieces*, which run in order forward and in reverse backward."""
    back = pieces[::-1]
    return MappingProxyType(
        {
            "forward": tuple(op for piece in pieces for op in piece.forward),
            "backward": tuple(op for piece in back for op in piece.backward),
            "backward_input": tuple(op for piece in back for op in piece.inputs),
            "backward_weight": tuple(op for piece in back for op in piece.weights),
            "recompute": recompute,
        }
    )
