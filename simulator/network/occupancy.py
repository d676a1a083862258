"""What a communication takes of the GPUs that it runs on: processors for its kernels, memory bandwidth.

A channel of NCCL is one thread block, which holds a processor from launch to end. Small arrays use fewer.
What goes over the wires passes through memory several times. ``simulator/engine/slowdown.py`` says what this
does to compute. Published measurements to hold it against: compute beside communication takes 18.9 % longer
on average and 40 % at most on four H100, A100, MI250 or MI210 (Lee et al. 2025, arXiv:2507.03114); a product
takes 1.76 times as long beside an all-gather on A100 (github.com/NVIDIA/nccl/issues/1428).
"""

from __future__ import annotations

from typing import Final

from foretrace.simulator.builder.instances import Message
from foretrace.simulator.engine.slowdown import MILLION
from foretrace.simulator.network import nccl
from foretrace.simulator.network.collectives import bus_factor
from foretrace.simulator.program import Transfer
from foretrace.topologies.device import Device

CHANNELS: Final = {"near": 24, "far": 16}
"""Channels of a collective, inside a node and across nodes.

Inside: 24 on HGX A100 (github.com/NVIDIA/nccl-tests/issues/100) and 24 thread blocks of an all-gather on H100
(forums.developer.nvidia.com, thread 337991). Across: ``16 coll channels`` in the logs of 8 GPUs with 8 NICs.
"""

P2P_CHANNELS: Final = {"near": 16, "far": nccl.P2P_CHANNELS}
"""Channels of a send or receive: ``p2p channels per peer`` in NCCL's log of H800 nodes
(github.com/NVIDIA/nccl/issues/892), and of H20 nodes over the network (issue 1189)."""

CHANNEL_BYTES: Final = 512 * 64
"""Least bytes that a channel is used for: 512 threads times 64 bytes, NCCL 2.30 ``src/enqueue.cc``."""

PASSES: Final = 3
"""Times that a byte on the wire passes through memory: read, stored on arrival, read again and written.

"At least 2x for memory bandwidth ... If you add reading from or writing to user data, it can be 3x":
an author of NCCL in github.com/NVIDIA/nccl/issues/1428.
"""

PROCESSORS: Final = 132
"""Processors of a GPU whose file does not say: those of an H100 SXM5."""


def occupied(
    transfer: Transfer,
    message: Message,
    n_ranks: int,
    device: Device,
    scale: float = 1.0,
    *,
    dispatch_processors: int = 0,
) -> Transfer:
    """Return *transfer* with what it takes of each GPU that takes part.

    *device*: the GPU; a CPU has no processors set apart. *scale*: of what is taken; 0: nothing, 1: as said
    above. *dispatch_processors*: that exchanges of experts take in place of channels, whatever *scale*; 0:
    none.
    """
    own = dispatch_processors if message.top_k else 0
    if device.kind != "gpu" or not (scale or own) or transfer.wire_ns == 0:
        return transfer
    tier = "far" if transfer.far else "near"
    is_p2p = message.peer_pp >= 0
    channels = min((P2P_CHANNELS if is_p2p else CHANNELS)[tier], -(-message.size_bytes // CHANNEL_BYTES))
    n_processors = device.gemm_tiles.processors if device.gemm_tiles else PROCESSORS
    wire_bytes = message.size_bytes * (1.0 if is_p2p else bus_factor(message.kind, n_ranks))
    memory = PASSES * wire_bytes / (transfer.wire_ns / 1e9) / device.memory_bytes_per_s
    return transfer._replace(
        processors=min(round((own or scale * channels) / n_processors * MILLION), MILLION),
        memory=min(round(scale * memory * MILLION), MILLION),
    )
