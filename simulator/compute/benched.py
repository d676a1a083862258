"""Kernels that a benchmark timed: the operations of each, what the benchmark sees, what a device promises.

A kernel is one row of a table, in the columns that ``foretrace bench kernels`` writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from foretrace.simulator.compute.attention import PRODUCTS
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.errors import SimulationError, TableError
from foretrace.simulator.models.model import Linear
from foretrace.simulator.network.cost import Network
from foretrace.simulator.table import Row
from foretrace.simulator.workload.ops import DTYPE_BYTES, Op, gemm, memory, weight_gradient
from foretrace.topologies.catalog import device_named, load_cluster
from foretrace.topologies.device import Device
from foretrace.topologies.errors import TopologyError

BURST: Final = "burst"
"""A kernel that was timed in short bursts, at full clock."""

LASTING: Final = "sustained"
"""A kernel that was timed when lasting load had settled."""

REPEATED: Final = "repeated"
"""A kernel repeated without a pause, from a start at full clock: what most benchmarks do."""

LOADS: Final = (BURST, LASTING, REPEATED)

REPEATS: Final = 100
"""How often a benchmark runs a kernel.

MooreThreads/SimuMax 4dcaae5 (simu_tools/efficency_test): 100 products of which 75 count, 50 grouped ones, 30
passes of attention; other benchmarks repeat for tens of milliseconds.
"""

PASSES: Final = {"fwd": ("forward",), "bwd": ("backward",), "fwd+bwd": ("forward", "backward")}

PASSES_OVER: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {"norm": (2, 3), "activation": (5, 5), "stream": (2, 2), "optimizer": (7, 7), "launch": (2, 2)}
)
"""Kernels bound by memory, and how often they go over ``m x n`` elements forward and backward.

A norm; ``silu(gate) * up`` in two kernels; ``x + 1`` in place; fused AdamW in fp32; a tiny operation.
"""

UNFUSED: Final = "unfused"
"""The ``impl`` of attention that writes its scores to memory."""


OWN_CHOICE: Final = ("", "torch", "SDPA")
"""Values of ``impl`` that leave the kernel of attention to the library."""


def load_of(row: Row) -> str:
    """Return the load under which *row* was timed. Raises TableError if it is none of ``LOADS``."""
    if (load := row.text("load")) not in LOADS:
        raise TableError(f"load={load!r}: one of {', '.join(LOADS)}")
    return load


def model_of(device: Device, *, burst: bool) -> ComputeModel:
    """Return what computes on *device*, in a short *burst* or under lasting load."""
    if burst:
        device = replace(device, sustained_clock_fraction=1.0)
    # Any type that the device has: each row of a table brings its own.
    return ComputeModel(device, min(device.peak_flops_per_s), training=False)


class Bench:
    """A benchmark of kernels on *device*, whose figures are those at its clock under lasting load."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._burst, self._lasting = (model_of(device, burst=burst) for burst in (True, False))

    @property
    def warnings(self) -> list[str]:
        """What of the device was not measured on it."""
        return [note for note in self._lasting.notes if note.startswith("warning")]

    def seen_s(self, ops: Sequence[Op], load: str) -> float:
        """Return the seconds that the benchmark sees *ops* take, one after another.

        Power is limited by what a GPU has drawn for some time: half of what lasting load costs is there
        after ``sustained_after_s`` of it. Repeated kernels run into that, ``REPEATS`` of them for
        ``L = REPEATS t``: ``t = t_burst + (t_lasting - t_burst) L / (L + sustained_after_s)``.

        *load*: one of ``LOADS``.
        """
        burst_s, lasting_s = (sum(map(model.op_s, ops)) for model in (self._burst, self._lasting))
        if load == BURST:
            return burst_s
        if load == LASTING or not lasting_s:
            return lasting_s
        loaded_s = REPEATS * lasting_s
        return burst_s + (lasting_s - burst_s) * loaded_s / (loaded_s + self.device.sustained_after_s)


def kernel_ops(row: Row, device: Device) -> list[Op]:
    """Return the operations of the kernel of *row* on *device*.

    Raises TableError if it is no kernel that is simulated, or a size is missing. Raises TopologyError if the
    device has no figure for its dtype.
    """
    kind, dtype = row.text("kernel"), row.text("dtype")
    device.peak(dtype)
    if kind == "attention":
        kernel = _attention_kernel(row.text("impl"), device)
        return [replace(op, kernel=kernel) if op.kind in PRODUCTS else op for op in attention_ops(row, dtype)]
    if kind == "grouped_gemm":
        kernel = "torch" if row.text("impl") == "torch" else "streams"
        return [replace(op, kernel=kernel) if op.grouped else op for op in _grouped(row, dtype)]
    if kind == "gemm":
        return product_ops(row, dtype)
    if kind in PASSES_OVER:
        return [_memory_op(row, dtype)]
    raise TableError(
        f"kernel {kind!r}: one of {', '.join(('gemm', 'grouped_gemm', 'attention', *PASSES_OVER))}"
    )


def product_ops(row: Row, dtype: str) -> list[Op]:
    """Return the matrix product of *row*, which adds to sums of ``sum_dtype`` if it has one."""
    m, n, k = (row.integer(name) for name in ("m", "n", "k"))
    batch, sum_dtype = row.integer("batch", 1), row.text("sum_dtype")
    if not sum_dtype:
        return [gemm("product", m, n, k, dtype, batch=batch)]
    return [weight_gradient("product", k, Linear("", n, m), dtype, sum_dtype=sum_dtype, batch=batch)]


def _memory_op(row: Row, dtype: str) -> Op:
    """Return the operation of a *row* whose kernel is one of ``PASSES_OVER``."""
    kind, backward = row.text("kernel"), row.text("direction") == "bwd"
    n_elements = row.integer("m") * row.integer("n", 1)
    moved = PASSES_OVER[kind][backward] * n_elements * DTYPE_BYTES[dtype]
    return memory(kind, moved, dtype, count=2 if kind == "activation" or backward else 1)


def _grouped(row: Row, dtype: str) -> list[Op]:
    """The products of a grouped kernel with m rows per group; or, forward and backward together, m in all."""
    m, n, k = (row.integer(name) for name in ("m", "n", "k"))
    groups, direction = row.integer("batch", 1), row.text("direction")
    if direction == "fwd+bwd":
        # The row says the tokens of all groups together.
        m //= groups
    forward = gemm("grouped", m, n, k, dtype, batch=groups, grouped=True)
    dgrad = gemm("grouped.dgrad", m, k, n, dtype, batch=groups, grouped=True)
    wgrad = weight_gradient(
        "grouped.wgrad", m, Linear("", n, k), dtype, sum_dtype=dtype, batch=groups, grouped=True
    )
    if direction == "fwd+bwd":
        plain = gemm("grouped.wgrad", k, n, m, dtype, batch=groups, grouped=True)
        quantised = [_quantise(op, groups) for op in (forward, dgrad, plain)] if dtype == "fp8" else []
        return [forward, dgrad, plain, *quantised]
    if direction not in ("", "fwd", "bwd_grad_act", "bwd_grad_w"):
        raise TableError(f"direction {direction!r} of a grouped product")
    return [{"bwd_grad_w": wgrad, "bwd_grad_act": dgrad}.get(direction, forward)]


def _quantise(op: Op, groups: int) -> Op:
    """Both operands of a product, read in 16 bit and written in 8, as the row's time includes."""
    elements = (op.m * op.k + op.k * op.n) * groups
    return memory(f"{op.name}.quantise", 3 * elements, "fp8", count=2)


def attention_ops(row: Row, dtype: str) -> list[Op]:
    """Return the operations of an attention row, forward and backward as its ``direction`` says."""
    batch, seq, heads = (row.integer(name) for name in ("batch", "seq", "heads"))
    width, kv_heads = row.integer("head_dim"), row.integer("kv_heads", heads)
    v_width, window = row.integer("v_head_dim", width), row.integer("window", 0)
    causal, passes = row.flag("causal", default=False), PASSES.get(row.text("direction"))
    if passes is None:
        raise TableError(f"direction {row.text('direction')!r}: one of {', '.join(PASSES)}")
    if row.text("impl") == UNFUSED:
        return list(_unfused(batch * heads, seq, width, dtype, passes, causal=causal))
    # Two products, of 2 FLOPs for each score and feature.
    matrix = 2 * batch * heads * seq * seq * (width + v_width)
    # Read and written in 16 bits.
    moved = batch * seq * (heads + kv_heads) * (width + v_width) * 2
    forward = Op(
        *("core", "attention", matrix // 2 if causal else matrix, moved, seq, seq, width, dtype),
        batch=batch * heads,
        v_dim=v_width,
        causal=causal,
        window=window if window < seq else 0,
    )
    # Five products over the scores against two, and twice the operands.
    backward = replace(
        forward, kind="attention_backward", flops=forward.flops * 5 // 2, bytes_moved=2 * moved
    )
    return [{"forward": forward, "backward": backward}[one] for one in passes]


def _attention_kernel(impl: str, device: Device) -> str:
    """Return the kernel of *device* that a row names; empty for the device's own choice."""
    if impl in (*OWN_CHOICE, UNFUSED):
        return ""
    if impl not in device.attention_kernels:
        known = ", ".join(device.attention_kernels)
        raise TableError(
            f"impl={impl!r} was not measured on {device.name}; {known or 'no kernel by name'} was"
        )
    return impl


def _unfused(
    heads: int, seq: int, width: int, dtype: str, passes: tuple[str, ...], *, causal: bool
) -> Iterator[Op]:
    """Attention as PyTorch writes it without a fused kernel: products, and passes over every score.

    Softmax reads and writes the scores, in backward it reads its result and the gradient; dropout of nothing
    makes a copy and a byte of mask; a causal mask is read and written over, both ways. Reference:
    ``attention_pytorch`` in benchmarks/benchmark_flash_attention.py of Dao-AILab/flash-attention.
    """
    # In 16 bits.
    scores = heads * seq * seq * 2
    one = gemm("scores", seq, seq, width, dtype, batch=heads)
    for direction in passes:
        forward = direction == "forward"
        yield from [one] * (2 if forward else 4)
        yield memory("softmax", int(((3.5 if forward else 4.5) + 2 * causal) * scores), dtype, count=2)


class Promise(NamedTuple):
    """What a device promises of measured kernels.

    *times_us*: time of each kernel in µs; None where the device has no such figure.
    """

    device: str
    times_us: tuple[float | None, ...]


def promise_collectives(against: str, n_ranks: int, rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Return how long collectives over the first *n_ranks* of a machine should take, in seconds.

    *against*: a machine of the catalogue, or a machine file. *rows*: each with ``kind`` and ``size_bytes``.
    Raises TopologyError if there is no such machine, or it is too small.
    """
    network = Network(load_cluster(against, n_ranks))
    found: list[float | None] = []
    for row in rows:
        try:
            transfer = network.collective(row["kind"], row["size_bytes"], list(range(n_ranks)))
        except SimulationError:  # the machine says nothing of this kind
            found.append(None)
        else:
            found.append((transfer.latency_ns + transfer.wire_ns) / 1e9)
    return found


def promise(against: str, kernels: Sequence[Mapping[str, object]]) -> Promise:
    """Return how long *kernels* should take on the device that *against* names.

    *against*: a device or machine of the catalogue, a machine file, or what a GPU calls itself. Raises
    TopologyError if no device is meant, or a machine file is not valid.
    """
    device = device_named(against)
    times: list[float | None] = []
    for number, cells in enumerate(kernels, start=1):
        row = Row({name: "" if value == 0 else value for name, value in cells.items()}, number)
        model = model_of(device, burst=row.text("load") == BURST)
        try:
            times.append(sum(map(model.op_s, kernel_ops(row, device))) * 1e6)
        except (SimulationError, TopologyError):
            times.append(None)
    return Promise(device.name, tuple(times))
