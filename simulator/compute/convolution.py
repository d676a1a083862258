"""How long a convolution by groups of channels takes: on tensor cores, or directly."""

from __future__ import annotations

from typing import Final

from foretrace.simulator.workload.ops import Op
from foretrace.topologies.device import Device

CONVOLUTION: Final = "convolution"
"""``Op.kernel`` of a product whose members are the groups of a convolution."""

DIRECT_SHARE: Final = 0.11
"""Rate of kernels that add up a convolution without tensor cores, such as depthwise ones, over that of large
fp32 products.

Set on three of 24 training steps of timm on RTX 3090, of the half of them that a rule chose before any was
run: EfficientNet-B4, MobileNetV2 and ConvNeXt-T, with depthwise kernels of 3, 5 and 7 places
(benchmarks/tables/rehearsed_times.toml). Those of the other half, EfficientNetV2-M, MobileNetV3 and Xception,
are predicted at 0.87 to 0.99 of their times.
"""


def direct_s(op: Op, device: Device) -> float:
    """Return the time of the convolution *op* element by element, without fixed latency.

    The slower of ``flops / (DIRECT_SHARE s P)`` and ``bytes / (f BW)``: P the peak of fp32, s the
    ``gemm_fp32_share``, f the ``memory_bound_fraction``, BW the memory bandwidth.
    """
    peak = device.gemm_fp32_share * (device.peak_flops_per_s.get("fp32") or device.peak(op.dtype))
    bandwidth = device.memory_bound_fraction * device.memory_bytes_per_s
    return max(op.flops / (DIRECT_SHARE * peak), op.bytes_moved / bandwidth)
