"""The machine that the words of a table of measurements name, and the file that describes it exactly."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from foretrace.simulator.errors import TableError
from foretrace.topologies.catalog import device_named, load_cluster, load_link, names
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.device import Device
from foretrace.topologies.errors import CatalogError
from foretrace.topologies.fabric import FabricSpec
from foretrace.topologies.parse import LINK_FIGURES

MACHINES: Final = (
    (r"jean.?zay.*v100|v100.*jean.?zay", "jean-zay-v100"),
    (r"v100.*(omni-?path|\bopa\b)", "jean-zay-v100"),
    (r"jean.?zay|omni-?path|\bopa\b", "jean-zay-a100"),
    (r"p3dn", "aws-p3dn"),
    (r"p4de", "aws-p4de"),
    (r"p4d", "aws-p4d"),
    (r"p5en|p5e", "aws-p5en"),
    (r"p6e|gb200", "gb200-nvl72"),
    (r"p6.?b300", "aws-p6-b300"),
    (r"p6", "aws-p6-b200"),
    (r"a3.?mega", "gcp-a3-mega"),
    (r"a3.?ultra", "gcp-a3-ultra"),
    (r"a3.?high|tcpx\b", "gcp-a3-high"),
    (r"\ba4.?high", "gcp-a4"),
    (r"a100.*pairwise|nc.?a100", "azure-nc-a100-v4"),
    (r"h100.*pairwise|nc.?h100", "azure-nc-h100-v5"),
    (r"p5|h100.*\b(efa|aws)\b", "aws-p5"),
    (r"a100.*\b(efa|aws)\b", "aws-p4de"),
    (r"h200.*\b(efa|aws)\b", "aws-p5en"),
    (r"b200.*\b(efa|aws)\b", "aws-p6-b200"),
    (r"gb300", "gb300-nvl72"),
    (r"b300", "dgx-b300"),
    (r"b200|\bb\b.*\bnvlink ?5|8 ?x? ?b\b", "dgx-b200"),
    (r"h200", "dgx-h200"),
    (r"h100.*pcie", "h100-pcie-8"),
    (r"h100[ -]?nvl\b", "azure-nc-h100-v5"),
    (r"a100.*pcie", "a40-8"),  # other cards on the same PCIe
    (r"h20\b", "hgx-h20"),
    (r"h100", "dgx-h100"),
    (r"h800", "hgx-h800"),
    (r"mi(250|3[0-9]+)", "mi300x"),
    (r"[pv]100", "dgx1-v100"),
    (r"^(?!.*(dgx|azure)).*a100.*\b(cx-?6|connectx-?6)", "hgx-a100-4nic"),
    (r"a100.*40 ?gb", "dgx-a100-40gb"),
    (r"[ab]?a(100|800)", "dgx-a100"),
    (r"\bt4\b|g4dn", "aws-g4dn"),
    (r"a10g|\bg5\b", "aws-g5"),
    (r"\bl4\b|\bg6\b", "aws-g6"),
    (r"g6e", "aws-g6e"),
    (r"l40|6000.?ada", "l40s-8"),
    (r"a40\b|a6000|\ba[13]0\b", "a40-8"),
    (r"3090", "rtx3090-8"),
    (r"5090", "rtx5090-8"),
    (r"4090", "rtx4090-8"),
)
"""What people write, in lower case, and the machine of the catalogue they mean; the first found counts."""

SMALLER: Final = (("dgx1-v100", 4, "jean-zay-v100"),)
"""A machine that words mean, GPUs per node, and the machine that is meant where no node has more: servers of
V100 on NVLink have eight in a cube mesh or four in a full one."""

NETWORKS: Final = (
    (r"\befa", None),  # of that instance, see MACHINES
    (r"tcpx", None),
    (r"roce|a3.?ultra", "roce-400"),
    (r"ethernet|\btcp\b", "ethernet-100"),
    (r"xdr|cx-?8|connectx-?8", "ib-xdr"),
    (r"ndr|cx-?7|connectx-?7", "ib-ndr"),
    (r"hdr|cx-?6|connectx-?6", "ib-hdr"),
    (r"\bedr|cx-?5|connectx-?5", "ib-edr"),
    (r"infiniband|\bib\b", "ib-ndr"),
)
"""The network that is named, and the link of the catalogue; its width may be given beside it."""

UNSTATED: Final = re.compile(r"not stated|unstated|unknown|unspecified")
ASSUMED: Final = "hgx-a100-4nic"
"""Words that say that the hardware is not known, and the machine it is taken to be where each node has as
many GPUs as that one: the plainest server of which owners publish figures, see its file."""

GENERATION: Final = re.compile(r"xdr|ndr|hdr|\bedr|(cx|connectx)-?\d")
"""Words that say which InfiniBand; without them it is that of the machine's own time."""

SHARP: Final = re.compile(r"(?<!nvlink )\bsharp\b|collnet")
"""Words that say that the switches between nodes reduce; NVLink SHARP is inside a node."""

WITH_DIRECT: Final = re.compile(r"gpu ?direct|\bgdr(dma)?\b")
WITHOUT_DIRECT: Final = re.compile(r"\b(?:no|without|w/o|not) (?:gpu ?direct|gdr)")
"""Words that say whether NICs reach the memory of GPUs."""

SHARING_ONE: Final = 4
"""GPUs of a node that share one NIC, at least, for it to be taken to hang off the processor. Behind the
same PCIe switch is room for two; NCCL goes through the host for others (``NCCL_NET_GDR_LEVEL`` is ``PXB``).
Of five servers with one card whose wiring people posted, none let NCCL reach GPUs: no GPU is beside it
(horovod issues 288 and 1523, NVIDIA/DeepLearningExamples 383), or two of eight are, and no module was loaded
(NVIDIA/nccl-tests 29, NVIDIA/nccl 465). They are posted because they were slow: likely, not counted."""

RACK: Final = 32
"""Least GPUs of an NVLink domain that spans trays, which tables count as nodes."""

_RDMA: Final = ("infiniband", "roce")

_WIDTH: Final = r"(\d[\d,]*) ?(?:Gb/s|Gbps|Gbit/s)"


def machine(words: str, n_gpus: int, n_nodes: int, most_per_node: int = 0) -> Cluster:
    """Return the machine that *words* name, with *n_nodes* nodes.

    The name of a machine of the catalogue stands for itself. A network or its width beside the GPU, as in
    ``"V100 x8 per node, IB 100 Gb/s"``, replaces that of the machine. A width alone is that of the node,
    unless it is the one of the NIC that such a machine has for each GPU.

    Args:
        words: as in a table.
        n_gpus: that took part.
        n_nodes: that they were in.
        most_per_node: GPUs of a node that ever took part where *words* stand; unknown if 0.

    Raises:
        CatalogError: the words name no machine of the catalogue, or it cannot have so many nodes.

    >>> machine("A100 (8 per node), CX-6", 16, 2).nic.name
    'ib-hdr'
    """
    text = words.lower().replace("_", "-")
    name = text if text in names() else next((name for form, name in MACHINES if re.search(form, text)), None)
    if name is None and n_nodes > 1 and assumed(words) and -(-n_gpus // n_nodes) == 8:
        name = ASSUMED
    if name is None:
        raise CatalogError(
            f"hardware {words!r} names no machine of the catalogue; one of {', '.join(names())}"
        )
    if text not in names():
        name = next((less for full, n, less in SMALLER if full == name and 0 < most_per_node <= n), name)
    cluster = load_cluster(name)
    if (per_node := -(-n_gpus // n_nodes)) > cluster.gpus_per_node:
        cluster = replace(cluster, gpus_per_node=per_node)
    if n_nodes < 2:
        return cluster.sized(cluster.gpus_per_node)
    if cluster.gpus_per_node >= RACK:  # a rack is one node; tables count its trays
        return cluster.sized(-(-n_gpus // cluster.gpus_per_node) * cluster.gpus_per_node)
    cluster = _with_network(cluster, text, words)
    return cluster.sized(n_nodes * cluster.gpus_per_node)


def assumed(words: str) -> str:
    """Return the machine that is meant where *words* say that the hardware is not stated; else nothing.

    >>> assumed("not stated (4 nodes)"), assumed("H100 DGX")
    ('hgx-a100-4nic', '')
    """
    text = words.lower()
    known = any(re.search(form, text) for form, _ in MACHINES)
    return ASSUMED if UNSTATED.search(text) and not known else ""


def _with_network(cluster: Cluster, text: str, words: str) -> Cluster:
    """Return *cluster* with the network that *text* names, if it names one."""
    name = next((name for form, name in NETWORKS if re.search(form, text)), None)
    own = cluster.nic is not None and cluster.nic.kind == "infiniband" and not GENERATION.search(text)
    nic = load_link(name) if name and not (own and name.startswith("ib-")) else cluster.nic
    n_nics = cluster.nics_per_node
    if nic is None:
        raise CatalogError(f"{cluster.name} has no network, and {text!r} names none")
    several = re.search(r"\b(\d+) ?x ?(?:[A-Za-z][\w-]* ){0,3}" + _WIDTH, words)
    named = re.search(r"\b(\d+) ?x ?(?:[ENHX]DR-?(?=\d))?(\d{3})(?: ?[ENHX]DR)?\b(?! ?G)", words)
    one = re.search(_WIDTH, words)
    if named:
        n_nics = int(named[1])
        nic = replace(nic, bandwidth_bytes_per_s=_bytes_per_s(named[2]))
    elif several:
        n_nics = int(several[1])
        nic = replace(nic, bandwidth_bytes_per_s=_bytes_per_s(several[2]))
    elif one and re.search(_WIDTH + r" per node", words):
        nic = replace(nic, bandwidth_bytes_per_s=_bytes_per_s(one[1]) / n_nics)
    elif one and name:
        rails = n_nics >= cluster.gpus_per_node and nic.bandwidth_bytes_per_s == _bytes_per_s(one[1])
        per_gpu = rails or re.search(_WIDTH + r" per GPU", words)
        n_nics = cluster.gpus_per_node if per_gpu else 1
        nic = replace(nic, bandwidth_bytes_per_s=_bytes_per_s(one[1]))
    if SHARP.search(text):
        nic = replace(nic, reduces=True)
    alone = bool(named or several or one) and n_nics == 1 and cluster.gpus_per_node >= SHARING_ONE
    if WITHOUT_DIRECT.search(text) or (alone and nic.kind in _RDMA and not WITH_DIRECT.search(text)):
        nic = replace(nic, gpu_direct=False)
    spec = cluster.fabric_spec if cluster.fabric_spec.kind != "node" else FabricSpec(kind="rail")
    return replace(cluster, nic=nic, nics_per_node=n_nics, fabric_spec=spec)


def _bytes_per_s(gigabits: str) -> float:
    return float(gigabits.replace(",", "")) * 1e9 / 8


@cache
def device_of(hardware: str) -> Device:
    """Return the device that *hardware* names, by itself or as an instance of a cloud.

    Raises:
        TableError: no device of the catalogue is meant.

    >>> device_of("H100-SXM-80GB (8xH100 nodes)").name, device_of("a3-megagpu-8g, 2 nodes").name
    ('h100-sxm', 'h100-sxm')
    """
    try:
        return device_named(hardware)
    except CatalogError as error:
        try:
            return machine(hardware, 1, 1).device
        except CatalogError:
            raise TableError(str(error)) from None


class Machines:
    """Names machines for a column ``cluster``: one of the catalogue by its name, any other by a file.

    Args:
        folder: where files are written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names: dict[Cluster, str] = {}

    def name(self, cluster: Cluster) -> str:
        """Return the name of *cluster*, whatever its size, or the path of its file."""
        key = cluster.sized(cluster.gpus_per_node)
        if key not in self._names:
            base = load_cluster(cluster.name)
            text = _over(base, cluster)
            self._names[key] = self._written(key, text) if text else cluster.name
        return self._names[key]

    def _written(self, cluster: Cluster, text: str) -> str:
        """Return the path of the file with *text*, which describes *cluster* and nothing else."""
        path = self.folder / f"{cluster.name}-{sha256(text.encode()).hexdigest()[:8]}.toml"
        path.write_text(text, encoding="utf-8")
        read = load_cluster(path, cluster.n_gpus)
        if (told := _told(read)) != (meant := _told(cluster)):
            wrong = ", ".join(key for key in meant if told[key] != meant[key])
            raise TableError(f"{path} does not describe {cluster.name} as it is meant: {wrong}")
        return str(path)


def _told(cluster: Cluster) -> dict[str, Any]:
    """Return what *cluster* is, without where its figures come from."""
    return {
        **{
            name: getattr(cluster, name) for name in ("n_gpus", "gpus_per_node", "nics_per_node", "nics_used")
        },
        **{name: getattr(cluster, name) for name in ("rings_out", "cpu", "fabric_spec", "others", "node")},
        "device": replace(cluster.device, sources={}),
        "intra": replace(cluster.intra, sources={}),
        "nic": cluster.nic and replace(cluster.nic, sources={}),
    }


def _over(base: Cluster, cluster: Cluster) -> str:
    """Return the file of *cluster*, a machine like *base* but for a few figures; empty if they are equal."""
    base = base.sized(base.gpus_per_node)
    cluster = cluster.sized(cluster.gpus_per_node)
    lines = []
    if cluster.device.name != base.device.name:
        lines.append(f'device = "{cluster.device.name}"')
    for name in ("gpus_per_node", "nics_per_node", "rings_out"):
        if getattr(cluster, name) != getattr(base, name):
            lines.append(f"{name} = {getattr(cluster, name)}")
    if (nic := cluster.nic) is not None and nic != base.nic:
        given = {field: getattr(nic, field) for field, _ in LINK_FIGURES.values()}
        known = [load_link(nic.name), *([base.nic] if base.nic else [])]
        lines += ["[nic]", f'base = "{nic.name}"']
        lines += [
            f"{key} = {_toml(field, given[field])}"
            for key, (field, _) in LINK_FIGURES.items()
            if any(getattr(one, field) != given[field] for one in known)
        ]
    if (fabric := cluster.fabric_spec) != base.fabric_spec:
        lines += ["[fabric]", f'kind = "{fabric.kind}"', f"crowding = {fabric.crowding!r}"]
    return "\n".join([f'base = "{cluster.name}"', *lines, ""]) if lines else ""


def _toml(field: str, value: object) -> str:
    """Return the figure of a link as its file has it, with the unit in the name of the *field*."""
    units = {"_bytes_per_s": "B/s", "_bytes": "B", "_s": "s"}
    units = {"_bytes_per_s": "B/s", "_bytes": "B", "_s": "s"}
    unit = next((unit for ending, unit in units.items() if field.endswith(ending)), "")
    return f'"{value!r} {unit}"' if unit else json.dumps(value)
