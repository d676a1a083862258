"""What people call machines and devices: other names by which those of the catalogue are found."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        # by GPU: the server it is mostly sold in
        "v100": "dgx1-v100",
        "v100-32gb": "dgx1-v100",
        "a100": "dgx-a100",
        "a100-80gb": "dgx-a100",
        "a100-sxm": "dgx-a100",
        "a100-40gb": "dgx-a100-40gb",
        "a100-pcie": "azure-nc-a100-v4",
        "h100": "dgx-h100",
        "h100-80gb": "dgx-h100",
        "h100-sxm": "dgx-h100",
        "h100-pcie": "h100-pcie-8",
        "h100-nvl": "azure-nc-h100-v5",
        "h100-96gb": "h100-96gb-8",
        "h200": "dgx-h200",
        "h200-sxm": "dgx-h200",
        "h800": "hgx-h800",
        "h20": "hgx-h20",
        "b200": "dgx-b200",
        "b200-sxm": "dgx-b200",
        "b300": "dgx-b300",
        "b300-sxm": "dgx-b300",
        "gb200": "gb200-nvl72",
        "gb300": "gb300-nvl72",
        "nvl72": "gb200-nvl72",
        "l40s": "l40s-8",
        "a40": "a40-8",
        "rtx4090": "rtx4090-8",
        "rtx-4090": "rtx4090-8",
        "4090": "rtx4090-8",
        "rtx3090": "rtx3090-8",
        "rtx-3090": "rtx3090-8",
        "3090": "rtx3090-8",
        "rtx5090": "rtx5090-8",
        "rtx-5090": "rtx5090-8",
        "5090": "rtx5090-8",
        "t4": "aws-g4dn",
        "a10g": "aws-g5",
        "l4": "aws-g6",
        "cpu": "localhost",
        # servers by other names
        "dgx-1": "dgx1-v100",
        "dgx1": "dgx1-v100",
        "dgx-v100": "dgx1-v100",
        "hgx-a100": "dgx-a100",
        "hgx-h100": "dgx-h100",
        "hgx-h200": "dgx-h200",
        "hgx-b200": "dgx-b200",
        "hgx-b300": "dgx-b300",
        "dgx-a100-80gb": "dgx-a100",
        "dgx-gb200": "gb200-nvl72",
        "dgx-gb300": "gb300-nvl72",
        "mi300": "mi300x",
        "mi300x-8": "mi300x",
        "jean-zay": "jean-zay-a100",
        "opa": "jean-zay-v100",
        "ethernet": "a100-ethernet",
        # instances by the names of their clouds
        "p3dn": "aws-p3dn",
        "p3dn-24xlarge": "aws-p3dn",
        "p4d": "aws-p4d",
        "p4d-24xlarge": "aws-p4d",
        "p4de": "aws-p4de",
        "p4de-24xlarge": "aws-p4de",
        "p5": "aws-p5",
        "p5-48xlarge": "aws-p5",
        "p5en": "aws-p5en",
        "p5en-48xlarge": "aws-p5en",
        "p6": "aws-p6-b200",
        "aws-p6": "aws-p6-b200",
        "p6-b200": "aws-p6-b200",
        "p6-b200-48xlarge": "aws-p6-b200",
        "p6-b300": "aws-p6-b300",
        "p6-b300-48xlarge": "aws-p6-b300",
        "g4dn": "aws-g4dn",
        "g4dn-metal": "aws-g4dn",
        "g5": "aws-g5",
        "g5-48xlarge": "aws-g5",
        "g6": "aws-g6",
        "g6-48xlarge": "aws-g6",
        "g6e": "aws-g6e",
        "g6e-48xlarge": "aws-g6e",
        "ndv4": "azure-ndv4",
        "nd-a100-v4": "azure-ndv4",
        "nd96asr-v4": "azure-ndv4",
        "ndmv4": "azure-ndmv4",
        "ndm-a100-v4": "azure-ndmv4",
        "nd96amsr-a100-v4": "azure-ndmv4",
        "ndv5": "azure-ndv5",
        "nd-h100-v5": "azure-ndv5",
        "nd96isr-h100-v5": "azure-ndv5",
        "nd-h200-v5": "azure-ndv5-h200",
        "nd96isr-h200-v5": "azure-ndv5-h200",
        "nc-a100-v4": "azure-nc-a100-v4",
        "nc-h100-v5": "azure-nc-h100-v5",
        "a3-high": "gcp-a3-high",
        "a3-highgpu-8g": "gcp-a3-high",
        "a3-mega": "gcp-a3-mega",
        "a3-megagpu-8g": "gcp-a3-mega",
        "a3-ultra": "gcp-a3-ultra",
        "a3-ultragpu-8g": "gcp-a3-ultra",
        "a4": "gcp-a4",
        "a4-highgpu-8g": "gcp-a4",
    }
)
"""Other names of machines of the catalogue, as ``plain`` writes them."""


WITHOUT: Final = (
    (r"tpu|v5p|v6e|trillium", "TPUs", "times of XLA's kernels and of collectives on their torus"),
    (r"trn[12]|trainium|inf2", "Trainium", "times of the Neuron compiler's kernels and of its collectives"),
    (r"gaudi", "Gaudi", "times of its kernels and of its collectives"),
)
"""Machines that people ask for and that are not there: names, what they are, what no source was found for."""


DEVICES: Final = (
    # The longer name goes first wherever it holds a shorter one: "gb200" holds "b200".
    (r"gb300", "gb300"),
    (r"gb200", "gb200"),
    (r"b300", "b300-sxm"),
    (r"b200", "b200-sxm"),
    (r"gh200", "gh200"),
    (r"h200", "h200-sxm"),
    (r"h100.*nvl\b", "h100-nvl"),
    (r"h100.*pcie", "h100-pcie"),
    (r"h100.*(96 ?gb|hbm2e)", "h100-96gb"),
    (r"h100", "h100-sxm"),
    (r"h800", "h800"),
    (r"h20\b", "h20"),
    (r"a(100|800).*pcie", "a100-pcie"),
    (r"a(100|800).*40 ?gb", "a100-40gb"),
    (r"a(100|800)", "a100-80gb"),
    (r"v100.*16 ?gb", "v100-16gb"),
    (r"v100", "v100-32gb"),
    (r"p100", "p100"),
    (r"l40s", "l40s"),
    (r"l40", "l40"),
    (r"\bl4\b", "l4"),
    (r"\bt4\b", "t4"),
    (r"a10g", "a10g"),
    (r"\ba10\b", "a10"),
    (r"\ba30\b", "a30"),
    (r"6000.?ada", "rtx-6000-ada"),
    (r"a6000", "a6000"),
    (r"a40", "a40"),
    (r"3090", "rtx-3090"),
    (r"4090", "rtx-4090"),
    (r"5090", "rtx-5090"),
    (r"mi250", "mi250x"),
    (r"mi300x?\b", "mi300x"),
    (r"mi325", "mi325x"),
    (r"mi355", "mi355x"),
)
"""What GPUs call themselves, and people them, and the device meant; the first that is found counts."""


def plain(name: str) -> str:
    """Return *name* as the catalogue writes names: in lower case, words joined by hyphens.

    >>> plain("Standard_ND96isr_H100_v5"), plain("P5.48xlarge"), plain("RTX 4090")
    ('nd96isr-h100-v5', 'p5-48xlarge', 'rtx-4090')
    """
    return re.sub(r"[ _.]+", "-", name.strip().lower()).removeprefix("standard-")
