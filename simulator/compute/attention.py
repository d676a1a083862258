"""How long a fused attention kernel takes: rows of tiles, softmax beside the products, a tail at the end."""

from __future__ import annotations

from typing import Final

from foretrace.simulator.workload.ops import Op
from foretrace.topologies.device import Device
from foretrace.topologies.kernel import AttentionPass

PRODUCTS: Final = {"attention": (1, 1), "attention_backward": (3, 2)}
"""Matrix products over the scores, of the width of a key and of a value: scores and output; backward the
scores again and gradients of them, of queries and keys, and of values."""

RANDOM_PER_S: Final = 14e9
"""Random bytes per second and processor that a fused attention kernel draws for dropout.

Philox4x32-10 makes 16 bytes in about 80 instructions, and three more turn a byte into a mask: 8 a score, of
the 64 integer instructions a clock of a processor at 1.75 GHz. They compete with what softmax issues, so that
little is hidden (arXiv:2410.07531). Heads of 64 on a GB10 with 48 processors take 0.18 ms longer forward and
0.11 ms backward for 134 M scores: 15.7 and 25 G a second each (Dao-AILab/flash-attention pull request 2439).
"""


def attention_s(op: Op, device: Device) -> float:
    """Return the time of a fused attention kernel.

    On a device that lists the kernel, rows of queries are dealt to its processors; see ``rows_s``.
    Elsewhere: ``max(flops / (e P c), bytes / (f BW)) + t0`` with one efficiency per direction.
    """
    bandwidth = device.memory_bound_fraction * device.memory_bytes_per_s
    moving_s, fixed_s = op.bytes_moved / bandwidth, op.count * latency_of(op, device)
    one = _pass_of(op, device)
    if one is None or device.gemm_tiles is None:
        forward = op.kind == "attention"
        efficiency = device.attention_efficiency_forward if forward else device.attention_efficiency_backward
        peak = efficiency * device.peak(op.dtype) * device.sustained_clock_fraction
        return max(op.flops / peak, moving_s) + fixed_s
    # A kernel of which the clock was measured need not be as slow as products are.
    clock = max(device.sustained_clock_fraction, one.lasting_clock)
    processors = device.gemm_tiles.processors
    computing_s = rows_s(op, one, one.efficiency * device.peak(op.dtype) * clock, processors, clock)
    drawing_s = op.n_random / (RANDOM_PER_S * processors * clock)
    return max(computing_s + drawing_s, moving_s) + fixed_s


def latency_of(op: Op, device: Device) -> float:
    """Return the fixed part of a fused attention kernel, in seconds."""
    one = _pass_of(op, device)
    return device.gemm_latency_s if one is None else one.latency_s


def _pass_of(op: Op, device: Device) -> AttentionPass | None:
    """Return the constants of the direction of *op* in its kernel; None where they are not known."""
    kernel = device.attention_kernels.get(op.kernel or device.attention_kernel)
    if kernel is None or device.gemm_tiles is None or not op.k:
        return None
    return kernel.forward if op.kind == "attention" else kernel.backward


def rows_s(op: Op, one: AttentionPass, flops_per_s: float, processors: int, clock: float = 1.0) -> float:
    """Return how long *processors* take for all rows of tiles of *op*.

    A score costs ``d_k + d_v + 2 score_width`` multiply-adds' worth of time, or ``3 d_k + 2 d_v + ...``
    backward: the softmax does not depend on the width of a head, so narrow heads are less efficient; and
    never less than an exponential takes (``scores_per_s``). A causal kernel skips what the mask hides, except
    in the tiles that it cuts. Rows under a mask differ in length, and the longest one starts late enough to
    be waited for ``tail`` times; with few heads it is all that there is to wait for.

    *op*: attention, with ``m`` queries, ``n`` keys, width ``k``, and ``batch`` heads over all sequences.
    *flops_per_s*: rate of its products over the whole device. *clock*: over that in a short burst.
    """
    tile = min(one.queries, op.m)
    seen_at_most = min(op.n, op.window + one.queries) if op.window else op.n
    over_keys, over_values = PRODUCTS[op.kind]
    width = over_keys * _width(op.k, one) + over_values * _width(op.v_dim or op.k, one) + 2 * one.score_width
    score_s = 2 * width / flops_per_s
    if one.scores_per_s:
        score_s = max(score_s, 1 / (one.scores_per_s * clock))
    # Rows are rounded up: the last one of a head costs as much as a full one.
    rows = op.batch * -(-op.m // one.queries)
    seen = _seen(op, one.queries)
    work_s = op.batch * op.m * seen * score_s + rows * one.tile_overhead_s / processors
    # The work is dealt to all processors at once in ``work_s``; this one row is on a single processor.
    longest_s = tile * seen_at_most * score_s * processors
    return max(work_s + one.tail * longest_s, longest_s + one.tile_overhead_s)


def _seen(op: Op, queries: int) -> float:
    """Return the keys that a row of *queries* computes on average, tiles that masks cut counted whole.

    A causal mask cuts one tile, the far end of a window another in rows that are past it.
    """
    tile, window = min(queries, op.n), min(op.window or op.n, op.n)
    if not op.causal:
        return min(op.n, window + queries)
    # In the mean a row sees ``w (2n - w) / 2n`` keys of a window of w; one tile is cut by the mask in every
    # row, the far end cuts another in ``(n - w) / n`` of them.
    shown = window * (2 * op.n - window) / (2 * op.n) + tile / 2 * (2 - window / op.n)
    # No more than without a window: the causal half, and the tile that its mask cuts.
    return min(shown, (op.n + tile) / 2)


def _width(width: int, one: AttentionPass) -> int:
    """Return the width that a head is computed in."""
    step, width = one.wide_step, max(width, one.narrowest)
    return -(-width // step) * step if step and width > step else width
