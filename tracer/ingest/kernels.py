"""What the name of a kernel, of a collective or of a data type says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Final, NamedTuple

from foretrace.door import own_table
from foretrace.traces.analysis.kernels import declared

UNKNOWN: Final = "unknown"  # kind of a communication that the file does not tell
PEER: Final = "peer_to_peer"  # kind of a copy between devices

_NAMES: Final = own_table("tracer/ingest/kernels.toml")
_KINDS: Final[Mapping[str, str]] = {
    spelled: kind for kind, names in _NAMES["kinds"].items() for spelled in names.split()
}
"""Kinds of collectives by their names, without underscores."""

COMMUNICATION: Final[Mapping[str, str]] = MappingProxyType(
    {
        r"(?i:^(?:void )?(?:nccl|rccl|msccl))|(?i:[nr]ccl(?:Dev)?Kernel|mscclpp::)": "NCCL, RCCL, MSCCL++",
        r"(?i:nvshmemi?_|^(?:void )?nvshmem|rocshmem|mori_shmem)": "NVSHMEM and ROC_SHMEM",
        r"\b(?:inter|intra)node(?:_ll)?::": "kernels between and inside nodes, as DeepEP names them",
        r"(?:^|::|\s)(?:cached_)?(?:dispatch|combine|notify(?:_dispatch|_combine)?)\s*(?:[<(]|$)|"
        r"Ep(?:Dispatch|Combine)\w*Kernel": "exchange of tokens between experts, in any namespace",
        r"(?:(?<![a-z])all|All)[_-]?[rR]educe|(?:(?<![a-z])all|All)[_-]?[gG]ather|"
        r"(?:(?<![a-z])reduce|Reduce)[_-]?[sS]catter|(?:(?<![a-z])all|All)[_-]?[tT]o[_-]?[aA]ll|"
        r"collective-permute|cross_device_reduce|multimem_|[uU]serbuffers": "named after a collective",
    }
)
"""Patterns of names of kernels that communicate, and whose they are. What fits none counts as compute."""

_COMMUNICATION: Final = re.compile("|".join(COMMUNICATION))
_FUSED: Final = re.compile(r"^triton_[a-z]+_fused_")
"""Kernels of a compiler, named after the operators that they compute; none of these is a collective."""

_NCCL_KIND: Final = re.compile(
    r"(?:nccl|rccl)(?:Dev)?Kernel_(\w*?(?:AllReduce|AllGatherV|AllGather|ReduceScatter|AllToAllPivot|AllToAll|Broadcast"
    r"|SendRecv|Reduce))", re.IGNORECASE,
)  # fmt: skip

_COPIES: Final = {
    "HtoD": "host_to_device", "DtoH": "device_to_host", "PtoP": PEER, "DtoD": "device_to_device",
}  # fmt: skip
"""Kinds of copies, by what is in their names."""

_DTYPES: Final[Mapping[str, tuple[str, int]]] = {
    spelled: (short, width) for short, (width, names) in _NAMES["dtypes"].items() for spelled in names.split()
}
"""Name here, and bytes per element, of data types by their names elsewhere."""


class Kernel(NamedTuple):
    """What a kernel is: ``category`` and ``kind`` of the timeline, and the name to show."""

    category: str
    kind: str
    name: str


@cache
def kernel(category: str, name: str, also: re.Pattern[str] | None = None) -> Kernel:
    """Return what the device event *name* of the trace's *category* is; kernels that fit *also* communicate.

    >>> kernel("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)")[:2]
    ('collective', 'all_reduce')
    >>> kernel("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)")[:2]
    ('copy', 'host_to_device')
    """
    shown = _shown(name)
    if category in {"gpu_memset", "Memset"} or name.startswith("Memset"):
        return Kernel("copy", "memset", shown)
    if category in {"gpu_memcpy", "Memcpy"} or name.startswith("Memcpy"):
        kind = next((kind for short, kind in _COPIES.items() if short in name), "copy")
        # A copy between devices communicates.
        return Kernel("collective" if kind == PEER else "copy", kind, name)
    if not is_communication(name) and (also is None or not also.search(name)):
        return Kernel("compute", "kernel", shown)
    found = _NCCL_KIND.search(name)
    kind = collective_kind(found[1]) if found else _custom_kind(name)
    return Kernel("collective", kind, shown)


def is_communication(name: str) -> bool:
    """Whether a kernel of that name moves data between devices."""
    return _COMMUNICATION.search(name) is not None and not _FUSED.search(name)


@cache
def collective_kind(name: str) -> str:
    """Return the kind of the collective that some library calls *name*; ``UNKNOWN`` if it is not known.

    >>> collective_kind("_reduce_scatter_base"), collective_kind("AllGather"), collective_kind("wait")
    ('reduce_scatter', 'all_gather', 'unknown')
    """
    # As `nccl:send 0->1`: the library before the colon, ranks behind the space.
    word = name.lower().partition(" ")[0]
    return _KINDS.get(re.sub(r"[^a-z]", "", word.rpartition(":")[2]), UNKNOWN)


@cache
def dtype(name: str) -> tuple[str, int]:
    """Return name and bytes per element of the data type *name*, ``("", 0)`` if it is not known.

    >>> dtype("c10::BFloat16"), dtype("Float")
    (('bf16', 2), ('fp32', 4))
    """
    return _DTYPES.get(re.sub(r"[^a-z0-9]", "", name.lower().rpartition(":")[2]), ("", 0))


def first_dtype(names: object) -> tuple[str, int]:
    """Return what *names*, a list of data types as far as is known, says of the first; as `dtype`."""
    return dtype(str(names[0])) if isinstance(names, list) and names else ("", 0)


@cache
def kernel_dtype(name: str) -> str:
    """Return the data type in the name of an NCCL kernel, "" if there is none or if it is only bytes."""
    for word in re.split(r"[_(]", name):
        if (found := dtype(word)[0]) and found not in {"int8", "uint8"}:
            return found
    return ""


def _shown(name: str) -> str:
    """Return what a kernel is called, not too long."""
    short = declared(name)
    return short if len(short) <= 160 else short[:159] + "…"


def _custom_kind(name: str) -> str:
    lower = name.lower().replace("-", "_")
    if "collective_permute" in lower:
        return "send_recv"
    if any(word in lower for word in ("dispatch", "combine", "notify", "alltoall", "all_to_all")):
        return "all_to_all"
    if "reduce_scatter" in lower:
        return "reduce_scatter"
    if "reduce" in lower:
        return "all_reduce"
    return "all_gather" if "gather" in lower else UNKNOWN
