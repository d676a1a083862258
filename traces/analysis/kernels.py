"""What a device computes, by groups of kernels and by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from foretrace.traces.analysis.metrics import averaged_rows, averaged_steps, sums_by_label
from foretrace.traces.columns import int64, is_one_of
from foretrace.traces.run import Run

GROUPS: Final = (
    ("attention", r"flash|fmha|attention|attn_|sdpa|\bmla_"),
    ("normalization", r"(?<![a-z])norm(?!al)|(layer|group|batch|rms|welford)_?norm|bn_fw|bn_bw"),
    ("convolution", r"conv(?!ert)|winograd|(implicit_|\bi)gemm_|fprop|dgrad|wgrad|im2?d?2col|cudnn|miopen"),
    ("gemm", r"gemm|cutlass|cublas|xmma|Cijk_|wgmma|nvjet|matmul|\b(add|b)?mm(\b|_)|\blinear\b"),
    # Backward passes of tables hold the name of the optimizer that they apply.
    ("embedding", r"embedding|permute_sparse|index_?select|gather_kernel"),
    ("optimizer", r"adam|sgd|adagrad|multi_tensor_apply|lamb(?!da)"),
    ("softmax and loss", r"softmax|cross_entropy|loss|\bmse_"),
    ("reduction", r"reduce|sum_kernel|argmax|topk|sort|scan"),
    ("dropout and random", r"dropout|philox|distribution_|uniform|random"),
    ("copy and layout", r"copy|memcpy|memset|(?<![a-z])cat|transpose|contiguous|nchw|nhwc|pack|fill|zero"),
    ("elementwise", r"elementwise|pointwise|functor|add|mul|relu|gelu|silu"),
)
"""Groups and what the names of their kernels hold; the first that fits, ignoring case."""

OTHER: Final = "other"

_FUSED: Final = re.compile(r"triton_(poi|red|per)_")
"""Kernels that Inductor fuses: their names list operators of which they compute a part, never a product."""


@cache
def group_of(name: str) -> str:
    """Return the group of the kernel *name*: what its function is called says more than its templates.

    >>> group_of("ampere_sgemm_128x64_tn"), group_of("vectorized_elementwise_kernel<4, FillFunctor>")
    ('gemm', 'copy and layout')
    """
    if fused := _FUSED.match(name):
        whole = GROUPS[-1][0] if fused[1] == "poi" else "reduction"
        found = _fitting(name, ("normalization", "softmax and loss"))
        return found if found and fused[1] != "poi" else whole
    # Functions that apply any operation to all elements say in their templates which.
    special = [group for group, _ in GROUPS if group != "elementwise"]
    return _fitting(_function(name), special) or _fitting(name, [*special, "elementwise"]) or OTHER


def _fitting(text: str, among: Sequence[str]) -> str:
    fits = (group for group, words in GROUPS if group in among and re.search(words, text, re.IGNORECASE))
    return next(fits, "")


def _function(name: str) -> str:
    """Return what the function of a kernel is called, without its namespaces, templates and parameters.

    >>> _function("void a::(anonymous namespace)::softmax_warp_forward<float, b::less<int> >(float*)")
    'softmax_warp_forward'
    """
    return declared(name).partition("<")[0].rpartition("::")[2]


def declared(name: str) -> str:
    """Return a kernel's name without what no person reads: its return type and parameters.

    >>> declared("std::enable_if<((8)>(0)), void>::type a::(anonymous namespace)::norm<int>(float*, int)")
    'a::(anonymous namespace)::norm<int>'
    >>> declared("Memcpy HtoD (Pinned -> Device)")
    'Memcpy HtoD (Pinned -> Device)'
    """
    within: list[str] = []
    start = opened = 0
    for at, letter in enumerate(name):
        if letter in "<(":
            opened = opened if within else at
            within.append(letter)
        elif letter == ">" and within[-1:] == ["<"]:  # in parentheses it compares
            within.pop()
        elif letter == ")" and "(" in within:
            while within.pop() != "(":
                pass
            if not within and not name.startswith("::", at + 1):  # what is no namespace without a name
                return name[start:opened] or name
        elif letter == " " and not within:
            start = at + 1
    return name.removeprefix("void ")


class Peaks(NamedTuple):
    """What a device can do at most."""

    flops_per_s: Mapping[str, float]  # by data type
    memory_bytes_per_s: float
    link_bytes_per_s: float  # of the fastest machine with this device, 0 if none is known


def peaks_of(run: Run) -> Peaks | None:
    """Return what the device of *run* can do, as its description says; None where nobody knows."""
    device = (run.info.cluster or {}).get("device")
    said = device if isinstance(device, Mapping) else {}
    flops, memory = said.get("peak_flops_per_s"), said.get("memory_bytes_per_s")
    if not isinstance(flops, Mapping) or not isinstance(memory, int | float):
        return None
    known = {str(name): float(peak) for name, peak in flops.items() if isinstance(peak, int | float)}
    link = said.get("link_bytes_per_s")
    return Peaks(known, float(memory), float(link) if isinstance(link, int | float) else 0.0)


def kernel_groups(run: Run) -> list[dict[str, Any]]:
    """Return by group how long compute spans take: count, total, share of all compute, longest name."""
    found: dict[str, dict[str, Any]] = {}
    rows = kernels(run)
    total_s = sum(row["total_s"] for row in rows) or 1.0
    for row in rows:
        one = found.setdefault(
            row["group"], {"group": row["group"], "count": 0, "total_s": 0.0, "most": row["name"]}
        )
        one["count"] += row["count"]
        one["total_s"] += row["total_s"]
    for one in found.values():
        one["share"] = one["total_s"] / total_s
    return sorted(found.values(), key=lambda one: -float(one["total_s"]))


def kernels(run: Run, *, copies: bool | None = None) -> list[dict[str, Any]]:
    """Return compute and copy spans of the averaged steps by name, kind and data type, longest total first.

    Keys:
        name, kind, group, dtype: what it is.
        count, total_s, mean_s, longest_s: how often it ran, and how long, on all stored ranks.
        share: of the time of the steps.
        flops_per_s, bytes_per_s: what it reached, over calls of known FLOPs or bytes; None without any.
        of_peak: the larger of the two over what the device can do, None where nobody knows.
        nearest: which of the two that is, else the one that is known; None if neither is.

    Args:
        run: an open run.
        copies: only copies, or only what is none.
    """
    averaged, peaks = averaged_steps(run), peaks_of(run)
    wanted = {None: ("compute", "copy"), True: ("copy",), False: ("compute",)}[copies]
    # An object that equals others of its kind, so that what it finds is kept with the run.
    own = _OwnKernels(wanted, tuple(averaged))
    total: dict[tuple[str, ...], _Kernel] = {}
    for rank in run.stored_ranks:
        for key, one in run.once(own, rank).items():
            total[key] = total[key].with_more(one) if key in total else one
    window_ns = sum(row.window_ns for row in averaged_rows(run))
    found = []
    for (name, kind, dtype), one in total.items():
        flops, moved = _rate(one.flops, one.flops_ns), _rate(one.bytes_moved, one.bytes_ns)
        known = [of for of, rate in (("flops_per_s", flops), ("bytes_per_s", moved)) if rate]
        shares = _of_peak(flops, moved, dtype, kind, peaks)
        found.append(
            {
                "name": name or kind,
                "kind": kind,
                "group": group_of(name or kind),
                "dtype": dtype,
                "count": one.n,
                "total_s": one.total_ns / 1e9,
                "mean_s": one.total_ns / one.n / 1e9,
                "longest_s": one.longest_ns / 1e9,
                "share": one.total_ns / window_ns,
                "flops_per_s": flops,
                "bytes_per_s": moved,
                "of_peak": max(shares.values(), default=None),
                "nearest": max(shares, key=shares.__getitem__, default=next(iter(known), None)),
            }
        )
    return sorted(found, key=lambda row: -float(row["total_s"]))


class _Kernel(NamedTuple):
    """Calls of one kernel: how many, how long; FLOPs and bytes, and the time of calls that say them."""

    n: int
    total_ns: int
    flops: int
    flops_ns: int
    bytes_moved: int
    bytes_ns: int
    longest_ns: int

    def with_more(self, other: _Kernel) -> _Kernel:
        """Return both together."""
        sums = (a + b for a, b in zip(self, other, strict=True))
        return _Kernel(*sums)._replace(longest_ns=max(self.longest_ns, other.longest_ns))


@dataclass(frozen=True, slots=True)
class _OwnKernels:
    """Finds the kernels of one rank, in some categories and steps; equal where it finds the same."""

    categories: tuple[str, ...]
    steps: tuple[int, ...]

    def __call__(self, table: pa.Table) -> dict[tuple[str, ...], _Kernel]:
        """Return the calls by name, kind and data type."""
        is_wanted = is_one_of(table, "category", self.categories) & np.isin(int64(table, "step"), self.steps)
        rows = np.flatnonzero(is_wanted)
        duration_ns = int64(table, "duration_ns")[rows]
        amounts = [duration_ns]
        for name in ("flops", "bytes_moved"):
            amount = int64(table, name)[rows]
            amounts += [np.where(amount > 0, some, 0) for some in (amount, duration_ns)]
        found = sums_by_label(table, rows, ("name", "kind", "dtype"), amounts)
        return {key: _Kernel(*sums) for key, sums in found.items()}


def _rate(amount: int, took_ns: int) -> float | None:
    return amount / took_ns * 1e9 if took_ns else None


def _of_peak(
    flops: float | None, moved: float | None, dtype: str, kind: str, peaks: Peaks | None
) -> dict[str, float]:
    """Return the shares of what the device can do; copies from and to the host are bound by another link."""
    shares: dict[str, float] = {}
    if peaks is None:
        return shares
    if flops and (peak := peaks.flops_per_s.get(dtype)):
        shares["flops_per_s"] = flops / peak
    if moved and peaks.memory_bytes_per_s and kind not in ("host_to_device", "device_to_host"):
        each = 2 if kind == "device_to_device" else 1  # read and written
        shares["bytes_per_s"] = each * moved / peaks.memory_bytes_per_s
    return shares
