"""What NCCL may do: protocols and algorithms with their latencies, and what a user forbids or demands.

Figures are those of NCCL 2.30.7, ``src/graph/tuning.cc``, since then ``src/tuning``. Its latencies between
nodes include 2.7 us of an InfiniBand network in the low-latency protocol; here the link says its own, and the
rest is the protocol's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, NamedTuple

from foretrace.simulator.errors import SimulationError


class Protocol(NamedTuple):
    """How NCCL moves bytes: what one hop costs, and what share of the wire carries data.

    Buffers of ``ll`` lie in the memory of the host, whatever the NICs reach (``src/transport/net.cc``:
    ``p != NCCL_PROTO_LL && useGdr``).

    Attributes:
        ring_base_s, tree_base_s: time of an operation without any hop.
        ring_intra_s, tree_intra_s: one hop inside a node, over NVLink.
        ring_net_s, tree_net_s: one hop between nodes, beyond the latency of the link.
    """

    ring_base_s: float
    tree_base_s: float
    ring_intra_s: float
    tree_intra_s: float
    ring_net_s: float
    tree_net_s: float
    share: float

    def net_s(self, n_local: int) -> float:
        """Return one hop of a ring between nodes of *n_local* ranks: of one rank as exposed as in a tree."""
        return self.tree_net_s if n_local == 1 else self.ring_net_s


PROTOCOLS: Final[Mapping[str, Protocol]] = MappingProxyType(
    {
        # Hops between nodes, less the 2.7 us: of NCCL's 2.7, 4.0 and 14.0 us in rings, 5.0, 8.5 and 14.0 us
        # in trees.
        "ll": Protocol(6.6e-6, 6.8e-6, 0.6e-6, 0.6e-6, 0.0, 2.3e-6, 0.5),
        "ll128": Protocol(14.0e-6, 14.0e-6, 1.9e-6, 1.25e-6, 1.3e-6, 5.8e-6, 0.92),
        "simple": Protocol(8.4e-6, 8.4e-6, 3.4e-6, 4.0e-6, 11.3e-6, 11.3e-6, 1.0),
    }
)
"""Flags beside the data (``ll``: 4 bytes in 8, ``ll128``: 120 in 128), or a fence after it (``simple``)."""

FLUSH_S: Final = 2.7e-6
"""Part of a hop between nodes in Simple that GPUs since Hopper do without: a read of what a NIC has written
to them, so that it has arrived before the kernel is told. NCCL counts it on every GPU as long as the latency
of the network ("also add the flush extra latency", ``ncclTopoTuneModel``; here of the InfiniBand in its
constants), and does it on Ampere and before (``ncclTopoNeedFlush``; NVIDIA/nccl issue 2274)."""

WITHOUT_FLUSH: Final = 9.0
"""Least compute capability of such a GPU."""

OVER_PCIE: Final[Mapping[str, Protocol]] = MappingProxyType(
    {
        "ll": PROTOCOLS["ll"]._replace(ring_intra_s=1.0e-6, tree_intra_s=1.0e-6),
        "ll128": PROTOCOLS["ll128"]._replace(ring_intra_s=2.5e-6, tree_intra_s=1.9e-6),
        "simple": PROTOCOLS["simple"]._replace(ring_intra_s=5.7e-6, tree_intra_s=4.0e-6),
    }
)
"""The protocols where hops inside a node go over PCIe. LL128 needs stores of 128 bytes that stay whole, as
NVLink has them: NCCL takes it there only if told to."""

NVLS_RANKS: Final = 5
"""Least GPUs of a node among which NCCL lets switches reduce: with 4 H200 or B200 it takes a ring, with 5 not
(stas00/ml-engineering 744d01e, network/benchmarks)."""

P2P_CHUNK_BYTES: Final = 131072
"""What a send hands to a NIC at once: ``NCCL_P2P_NET_CHUNKSIZE``."""

ALGORITHMS: Final = ("ring", "tree", "nvls", "nvls_tree", "collnet", "pat", "pairwise")
"""What NCCL chooses from; ``collnet`` where switches between nodes reduce, ``pairwise`` for all-to-all."""

FUNCTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "allreduce": "all_reduce",
        "allgather": "all_gather",
        "reducescatter": "reduce_scatter",
        "broadcast": "broadcast",
        "reduce": "reduce",
    }
)
"""Collectives that may have a setting of their own in ``NCCL_ALGO`` and ``NCCL_PROTO``, as named there."""

TEXTBOOK: Final = ("halving_doubling", "direct", "hierarchical")
"""Algorithms that NCCL does not have; used only where they are asked for by name."""

LL_MOST_BYTES_PER_S: Final[Mapping[str, tuple[float, float]]] = MappingProxyType({"amd": (22.5e9, 19.0e9)})
LL_MOST_ELSEWHERE_BYTES_PER_S: Final = (39.0e9, 20.4e9)
"""Most that LL carries out of a node, by maker of the processor, among two nodes and among more: it checks
every flag before it lets the NIC send (``llMaxBws``, ``ncclTuningGetConstantsIndexes``: "for multi-node, we
look at CPU type")."""

POSTING_S: Final[Mapping[str, float]] = MappingProxyType({"amd": 2.0e-6})
POSTING_ELSEWHERE_S: Final = 1.0e-6
POSTS_OF_SIMPLE: Final = 3
"""What the processor takes to post a message to a NIC, by maker, and how often it does in Simple: in a ring
over nodes no hop takes less, those inside a node included (``getNetOverhead``)."""

CHANNEL_BYTES_PER_S: Final[Mapping[str, tuple[tuple[float, float, float], ...]]] = MappingProxyType(
    {
        "tree/simple": (
            (26.5e9, 18.5e9, 10.0e9),
            (24.0e9, 23.6e9, 17.8e9),
            (38.7e9, 41.4e9, 36.0e9),
            (70.0e9, 42.8e9, 24.0e9),
        ),
        "tree/ll128": (
            (20e9, 20e9, 20e9),
            (20e9, 20e9, 20e9),
            (36.7e9, 36.7e9, 29.0e9),
            (55.6e9, 31.67e9, 20.0e9),
        ),
        "ring/ll128": ((20e9, 20e9, 20e9), (20e9, 20e9, 20e9), (36.7e9, 36.7e9, 36.7e9), (40e9, 40e9, 40e9)),
    }
)
"""Most that one channel carries, as bus bandwidth, on one node, on two, and on more: for Volta, Ampere,
Hopper and Blackwell (``perChMaxTreeBws``, ``perChMaxTreeLL128Bws``, ``perChMaxRingLL128Bws`` in NCCL 2.28.7,
``src/graph/tuning.cc``). NCCL chooses by them. Of trees over more than two nodes they are also what is
measured: 188 to 196 GB/s over 8 NICs of B200 on 4 to 64 nodes, where this makes 192 (two clusters,
``benchmarks/tables/collectives_reports.csv``)."""

FEW_CHANNELS: Final = 4
"""Up to so many channels, one for each NIC, NCCL makes two of each on GPUs since Hopper; on those before NICs
are too slow for that (``ncclTopoDupChannels``)."""

TREE_AS_COUNTED: Final = 10.0
"""Least compute capability of GPUs whose trees are so slow on one and on two nodes, too: 556 of 560 GB/s and
333 to 339 of 342 on B200. Two nodes of A100 are faster, 54 to 57 GB/s over two NICs where this makes 44
(NVIDIA/nccl issue 837)."""

VOLTA: Final = 7
"""Compute capability of the first of these generations."""

LL_TREE: Final = 1 / 1.9
"""What a tree in LL carries of what a ring in LL does: 1/3.8 against 1/2 of the bus."""

NVLS_INTRA_S: Final = 25.0e-6
"""Latency of the switches' part of an NVLS tree."""

NVLS_NET_S: Final = 20.9e-6 - 2.7e-6
"""One hop between nodes of an NVLS tree, beyond the latency of the link."""

COLLNET_S: Final = 31.0e-6 - 2.7e-6
"""A reduction by the switches between nodes, there and back, beyond the latency of the link."""

PAT_BASE_S: Final = 8.0e-6
PAT_RANK_S: Final = 2.8e-6
PAT_NET: Final = 1 / 3.5
PAT_SHARE: Final = 0.75
"""PAT: base, what each rank adds, part of a hop that each doubling costs, share of the bandwidth."""

SENDS: Final = ("p2p", "all_to_all")
"""What NCCL does by sends from rank to rank."""

IN_ALL: Final = ("ring", "tree")
"""Algorithms that work in every protocol; all others pass on whole chunks, in Simple alone
(``ncclTopoTuneModel`` leaves them no bandwidth in LL and LL128)."""

STAGED_BYTES_PER_S: Final = 6.4e9
STAGED_PACE: Final = 0.2
"""What a NIC that cannot reach the memory of GPUs carries each way while it sends and receives, times
``N^-STAGED_PACE`` among ``N`` nodes: processors copy, and the slowest of them sets the pace. Where the rate
of one is distributed as ``P(rate < x) ~ x^k``, the least of ``N`` goes as ``N^(-1/k)`` (Gumbel 1958). Fitted
on 5.9 GB/s per NIC of A100 among 2 nodes (microsoft/vidur 7d47513, a100_dgx), 5.1 and 5.3 per Omni-Path port
among 4, 3.4 among 16 (bigscience-workshop/bigscience, experiments/bandwidth, with the channels in the logs)
and 4.3 of V100 with one card among 8 (NVIDIA/nccl-tests issue 78); 6 is in NVIDIA/nccl issue 465."""

STAGED_ONE_WAY_BYTES_PER_S: Final = 7.7e9
"""The same while it only sends: 7.6 and 7.8 GB/s of one send from 1 MiB (microsoft/vidur 7d47513)."""

STAGED_COUNTED_BYTES_PER_S: Final = 12e9
"""What NCCL counts for such a NIC: half of PCIe 4.0 x16, 24 GB/s to it, for bytes pass that from the GPU to
the host, and again from there to the NIC (``ncclTopoComputePaths``)."""

P2P_CHANNELS: Final = 2
"""Channels of one send between nodes: NCCL's log of H20 nodes (NVIDIA/nccl issue 1189)."""

POST_S: Final = 0.8e-6
"""Time to post one message to a NIC. Fitted on sends of 0.25 to 64 MiB between two DGX H100 alone, which
reach 36 of 50 GB/s (microsoft/vidur 7d47513, MIT); NCCL's own estimate is 1 us (``NCCL_NET_OVERHEAD``)."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The algorithms and protocols that may be used, as ``NCCL_ALGO`` and ``NCCL_PROTO`` say it.

    Attributes:
        algorithms: all that NCCL has, unless a user asks for others.
        protocols: in the order of ``PROTOCOLS``.
        forced: whether a user restricted the algorithms, so that tables of NCCL's own choice do not apply.
        by_kind: for single collectives, where they may use something else.
    """

    algorithms: tuple[str, ...] = ALGORITHMS
    protocols: tuple[str, ...] = tuple(PROTOCOLS)
    forced: bool = False
    by_kind: tuple[tuple[str, Choice], ...] = ()

    def of(self, kind: str) -> Choice:
        """Return what may be used for *kind*."""
        return dict(self.by_kind).get(kind, self)


def unable(asked: Choice, kind: str, where: str, able: Iterable[str]) -> SimulationError:
    """Return the error that none of the algorithms *asked* for does *kind* in a group that lies *where*.

    NCCL stops with "no algorithm/protocol available for function" since 2.24; before, a list counted for
    all-reduces alone.
    """
    names, article = ",".join(asked.algorithms), "an" if kind.startswith("a") else "a"
    alone = "" if kind == "all_reduce" else f"; for all-reduces alone: allreduce:{names}"
    return SimulationError(
        f"algorithm {names}: none does {article} {kind} {where}, and NCCL stops there; "
        f"one of {', '.join(able)}{alone}"
    )


def choice(algorithm: str = "", protocol: str = "") -> Choice:
    """Return the choice that two settings in the syntax of NCCL leave.

    A setting is a list of names, ``"ring,tree"``, or of what to leave out, ``"^tree"``; empty means all.
    After a semicolon a list may be for one collective: ``"ring;allreduce:tree"`` (``parseList`` in
    src/graph/tuning.cc, since NCCL 2.24). Capitals, hyphens and underscores do not matter. Raises
    SimulationError if a name is unknown, or nothing is left.

    >>> choice("Tree", "^LL128").protocols
    ('ll', 'simple')
    >>> choice("ring; allreduce: tree").of("all_reduce").algorithms
    ('tree',)
    """
    algorithms, protocols = (_lists(setting) for setting in (algorithm, protocol))
    for_all = _choice(algorithms.get("", ""), protocols.get("", ""))
    by_kind = {
        kind: _choice(*(lists.get(kind, lists.get("", "")) for lists in (algorithms, protocols)))
        for kind in {*algorithms, *protocols} - {""}
    }
    return replace(for_all, by_kind=tuple(sorted(by_kind.items(), key=lambda found: found[0])))


def _choice(algorithm: str, protocol: str) -> Choice:
    algorithms = _selected(algorithm, ALGORITHMS, (*ALGORITHMS, *TEXTBOOK), "algorithm")
    protocols = _selected(protocol, PROTOCOLS, PROTOCOLS, "protocol")
    if "simple" not in protocols and not set(IN_ALL) & set(algorithms):
        raise SimulationError(
            f"algorithm {', '.join(algorithms)} with protocol {', '.join(protocols)}: only "
            f"{' and '.join(IN_ALL)} work in it, others in simple"
        )
    # A list of protocols does not count: what was measured is NCCL's choice of algorithm.
    return Choice(algorithms, protocols, bool(algorithm.strip()))


def _lists(setting: str) -> dict[str, str]:
    """Return the list of names for each collective that *setting* says, and that for all others by ``""``."""
    found: dict[str, str] = {}
    for part in setting.split(";"):
        # The last colon parts: a name may not hold one, a list neither.
        prefix, colon, names = part.rpartition(":")
        plain = re.sub(r"[\s_-]", "", prefix.lower())
        if colon and plain not in FUNCTIONS:
            raise SimulationError(
                f"collective {prefix.strip()!r} in {setting!r}: one of {', '.join(FUNCTIONS)}"
            )
        found[FUNCTIONS[plain] if colon else ""] = names
    return found


def _selected(setting: str, default: Iterable[str], known: Iterable[str], what: str) -> tuple[str, ...]:
    if not setting.strip():
        return tuple(default)
    wanted = [name.strip().lower().replace("-", "_") for name in setting.strip().lstrip("^").split(",")]
    # NCCL writes ``NVLSTree``, and has two kinds of CollNet, chain and direct.
    wanted = ["nvls_tree" if name == "nvlstree" else name for name in wanted]
    wanted = ["collnet" if name.startswith("collnet") else name for name in wanted]
    known = tuple(known)
    if unknown := [name for name in wanted if name not in known]:
        raise SimulationError(f"{what} {unknown[0]!r}: one of {', '.join(known)}")
    # What is left out is left out of NCCL's own: textbooks' algorithms only run if asked for by name.
    if setting.strip().startswith("^"):
        found = tuple(name for name in default if name not in wanted)
    else:
        # In the order of the known ones, not as typed.
        found = tuple(name for name in known if name in wanted)
    if not found:
        raise SimulationError(f"{what} {setting!r} leaves nothing of {', '.join(default)}")
    return found
