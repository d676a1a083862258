"""Reads PyTorch's execution traces: what the host called and with which tensors, without any times.

Schemas 1.0.1 to 1.1.1 (``torch.profiler.ExecutionTraceObserver``). Every operator that calls no other is
drawn ``DRAWN_NS`` long, in the order in which they were called: counts, sizes, FLOPs and order are the
file's, no time is. The run says so, and analyses make no claim in time.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from foretrace.tracer.ingest.events import elements, text, whole
from foretrace.tracer.ingest.groups import TraceGroups
from foretrace.tracer.ingest.kernels import UNKNOWN, collective_kind, dtype
from foretrace.tracer.ingest.recording import Recording
from foretrace.tracer.ingest.rows import rows

DRAWN_NS: Final = 1000
"""Length of an operator in a run without times."""

_COLLECTIVE: Final = re.compile(r"^(nccl|gloo|ucc|mpi|xccl|rccl):")
_MOST_RANKS: Final = 1 << 20
_MOST_ELEMENTS: Final = 1 << 56


def read_graph(nodes: list[Any], result: Recording) -> None:
    """Put the timeline of *nodes*, of an execution trace, into *result*."""
    said = [node for node in nodes if isinstance(node, dict) and whole(node.get("id")) is not None]
    result.lost["node without a number"] += len(nodes) - len(said)
    callers = {whole(node.get("ctrl_deps", node.get("parent"))) for node in said}
    groups = _groups(said, -1 if result.rank is None else result.rank)
    columns: defaultdict[str, list[Any]] = defaultdict(list)
    numbers: Counter[int] = Counter()
    for node in sorted(said, key=lambda one: int(one["id"])):
        if whole(node["id"]) in callers or text(node.get("name", "")).startswith(("[", "##")):
            continue
        row = _row(node, groups)
        row["sequence"] = numbers[row["group"]] if row["group"] >= 0 else -1
        numbers[row["group"]] += 1
        for key, value in row.items():
            columns[key].append(value)
    n = len(columns["name"])
    whole_numbers = {"group": np.int32, "sequence": np.int64, "size_bytes": np.int64, "flops": np.int64}
    result.spans = rows(
        {key: np.array(v, whole_numbers[key]) if key in whole_numbers else v for key, v in columns.items()}
        | {
            "rank": np.zeros(n, np.int32),
            "start_ns": np.arange(n, dtype=np.int64) * DRAWN_NS,
            "duration_ns": np.full(n, DRAWN_NS, np.int64),
        }
    )
    result.groups = tuple(groups.known.values())
    result.world_size = groups.world_size or None
    result.facts["times"] = "none"
    result.evidence["order"] = "order of the calls; an operator that calls others is not drawn"
    result.lost = +result.lost


def _row(node: Mapping[str, Any], groups: TraceGroups) -> dict[str, Any]:
    """Return what a node is, in columns of the timeline."""
    name = text(node.get("name", ""))[:160]
    shapes, kinds = _tensors(node, "input")
    label, width = dtype(_inner(kinds[0])) if kinds else ("", 0)
    if _COLLECTIVE.match(name):
        group = groups.of({"Process Group Name": "0", "Group size": groups.world_size or None})
        kind = collective_kind(name)
        n_elements = sum(elements(shape) for shape in shapes)
        if kind == "all_gather" and group is not None:
            n_elements *= len(group.ranks)  # the node has what a rank gives, sizes are of the whole
        return {
            "stream": "communication",
            "category": "collective" if kind != UNKNOWN else "host",
            "kind": kind if kind != UNKNOWN else "operator",
            "name": name,
            "axis": group.axis if group else "unknown",
            "group": group.id if group else -1,
            "size_bytes": n_elements * width if n_elements < _MOST_ELEMENTS else 0,
            "flops": 0,
            "dtype": label,
        }
    tid = whole(_attribute(node, "tid")) or 0
    row = {"stream": f"host {tid}", "category": "host", "kind": "operator", "name": name, "axis": ""}
    return row | {"group": -1, "size_bytes": 0, "flops": _flops(name, shapes), "dtype": label}


def _attribute(node: Mapping[str, Any], name: str) -> Any:
    """Return an attribute, in the node itself (1.0.1) or in its list of attributes (later)."""
    if name in node:
        return node[name]
    listed = node.get("attrs")
    for one in listed if isinstance(listed, list) else ():
        if isinstance(one, dict) and one.get("name") == name:
            return one.get("value")
    return None


def _tensors(node: Mapping[str, Any], side: str) -> tuple[list[Any], list[str]]:
    """Return shapes and types of the inputs, of either generation of the schema."""
    told = node.get(f"{side}s")
    shapes = told.get("shapes") if isinstance(told, dict) else node.get(f"{side}_shapes")
    kinds = told.get("types") if isinstance(told, dict) else node.get(f"{side}_types")
    return (
        shapes if isinstance(shapes, list) else [],
        [text(kind) for kind in kinds] if isinstance(kinds, list) else [],
    )


def _inner(kind: str) -> str:
    """Return the element type of a tensor, or of the first tensor of a list of them.

    >>> _inner("GenericList[Tensor(float),Tensor(float)]")
    'float'
    """
    found = re.search(r"Tensor\(([^)]*)\)", kind)
    return found[1] if found else ""


def _flops(name: str, shapes: list[Any]) -> int:
    """Return the FLOPs of a matrix product, 0 of anything else."""
    operands = {"aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2), "aten::baddbmm": (1, 2)}
    if name not in operands or len(shapes) <= max(operands[name]):
        return 0
    left, right = (shapes[at] for at in operands[name])
    if not (isinstance(left, list) and isinstance(right, list) and left and right):
        return 0
    columns = whole(right[-1])
    total = 2 * elements(left) * (columns if columns is not None and columns > 0 else 0)
    return total if total < _MOST_ELEMENTS else 0


def _groups(nodes: list[dict[str, Any]], rank: int) -> TraceGroups:
    """Return the process groups that the trace lists when it begins."""
    groups = TraceGroups(rank, 0)
    for node in nodes:
        if "process_group:init" not in text(node.get("name", "")):
            continue
        told = node.get("inputs")
        values = told.get("values") if isinstance(told, dict) else told
        try:
            listed = json.loads(text(values[0])) if isinstance(values, list) and values else []
        except (ValueError, RecursionError):  # cut off by the observer
            return groups
        for one in listed if isinstance(listed, list) else ():
            size = (whole(one.get("group_size")) if isinstance(one, dict) else 0) or 0
            if 0 < size < _MOST_RANKS:
                members = one.get("ranks")
                found = (
                    tuple(r for r in map(whole, members) if r is not None)
                    if isinstance(members, list)
                    else ()
                )
                groups.configured[text(one.get("pg_name", ""))] = (
                    text(one.get("pg_desc", "")),
                    found or tuple(range(size)),
                )
                groups.world_size = max(groups.world_size, size)
        return groups
    return groups
