"""What a device computes, by groups of kernels and by name."""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np

from foretrace.traces.columns import factorized, int64, is_one_of, labels, summed
from foretrace.traces.run import Run

GROUPS: Final = (
    ("gemm", r"gemm|cutlass|cublas|sm\d+_xmma|Cijk_|wgmma|addmm|matmul|linear|\bmm\b|bmm|nvjet"),
    ("attention", r"flash|fmha|attention|sdpa|softmax_warp|mla_"),
    ("convolution", r"conv|winograd|implicit_con|dgrad|wgrad|im2col|miopen"),
    ("normalization", r"norm|bn_fw|bn_bw|batch_?norm"),
    ("optimizer", r"adam|sgd|adagrad|multi_tensor_apply|lamb"),
    ("embedding", r"embedding|permute_sparse|index_select|gather_kernel"),
    ("softmax and loss", r"softmax|cross_entropy|nll_loss|loss"),
    ("reduction", r"reduce|sum_kernel|argmax|topk|sort|scan"),
    ("dropout and random", r"dropout|philox|distribution|uniform|random"),
    ("copy and layout", r"copy|memcpy|memset|cat|transpose|contiguous|nchw|nhwc|pack|fill|zero"),
    ("elementwise", r"elementwise|pointwise|triton_poi|functor|add|mul|relu|gelu|silu"),
)
"""Groups and what the names of their kernels hold; the first that fits, ignoring case."""

_OTHER: Final = "other"


def group_of(name: str) -> str:
    """Return the group of the kernel *name*.

    >>> group_of("ampere_sgemm_128x64_tn"), group_of("vectorized_elementwise_kernel<4, FillFunctor>")
    ('gemm', 'copy and layout')
    """
    return next((group for group, words in GROUPS if re.search(words, name, re.IGNORECASE)), _OTHER)


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


def kernels(run: Run) -> list[dict[str, Any]]:
    """Return compute and copy spans by name and kind: count, total, mean, longest, longest total first."""
    table = run.spans()
    table = table.take(np.flatnonzero(is_one_of(table, "category", ("compute", "copy"))))
    if not table.num_rows:
        return []
    codes, names = labels(table, "name")
    kinds, kind_names = labels(table, "kind")
    key = factorized(codes, kinds)
    duration_ns = int64(table, "duration_ns")
    first, count, total_ns = summed(key, duration_ns)
    longest_ns = np.zeros(len(count), np.int64)
    np.maximum.at(longest_ns, key, duration_ns)
    found = [
        {
            "name": names[codes[row]] or kind_names[kinds[row]],
            "kind": kind_names[kinds[row]],
            "group": group_of(names[codes[row]] or kind_names[kinds[row]]),
            "count": int(count[i]),
            "total_s": int(total_ns[i]) / 1e9,
            "mean_s": int(total_ns[i]) / int(count[i]) / 1e9,
            "longest_s": int(longest_ns[i]) / 1e9,
        }
        for i, row in enumerate(first)
    ]
    return sorted(found, key=lambda row: -float(row["total_s"]))
