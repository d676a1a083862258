"""What a machine is made of, figure by figure, in words for people and as a row of the list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from foretrace.topologies.cluster import Cluster
from foretrace.topologies.device import KEYS, Device
from foretrace.topologies.fabric import FabricSpec
from foretrace.topologies.link import LinkSpec
from foretrace.topologies.units import (
    format_bandwidth,
    format_bytes,
    format_flops,
    format_power,
    format_time,
)


def row(cluster: Cluster) -> dict[str, Any]:
    """Return what the list shows of *cluster*."""
    nic = cluster.nic
    return {
        "name": cluster.name,
        "gpus_per_node": cluster.gpus_per_node,
        "device": cluster.device.name,
        "memory_bytes": cluster.device.memory_bytes,
        "peak_flops_per_s": dict(cluster.device.peak_flops_per_s),
        "intra_bytes_per_s": cluster.intra.bandwidth_bytes_per_s,
        "node_bytes_per_s": nic.bandwidth_bytes_per_s * cluster.nics_per_node if nic else None,
        "price_usd_per_gpu_hour": cluster.price_usd_per_gpu_hour,
        "description": cluster.description,
    }


def device_row(device: Device) -> dict[str, str]:
    """Return what the list of devices shows of *device*."""
    peaks = device.peak_flops_per_s
    return {
        "name": device.name,
        "memory": format_bytes(device.memory_bytes),
        "bandwidth": bandwidth(device.memory_bytes_per_s),
        "16 bit": flops(max(peaks.get("bf16", 0.0), peaks.get("fp16", 0.0)) or None),
        "8 bit": flops(peaks.get("fp8")),
        "products": "like another's" if device.assumed else "measured",
    }


def link_row(link: LinkSpec) -> dict[str, str]:
    """Return what the list of links shows of *link*."""
    return {
        "name": link.name,
        "kind": link.kind,
        "each way": bandwidth(link.bandwidth_bytes_per_s),
        "latency": format_time(link.latency_s),
        "GPUDirect": "yes" if link.gpu_direct else "no",
        "collectives": "measured" if link.tables else "by formula",
    }


def parts(cluster: Cluster) -> Iterator[tuple[str, dict[str, str], Mapping[str, str]]]:
    """Yield title, figures and sources of the machine, its device and its links, as a file names them."""
    spec = cluster.fabric_spec
    facts = {"gpus_per_node": str(cluster.gpus_per_node), "nics_per_node": str(cluster.nics_per_node)}
    rest = ("nics_used", "rings_out", "gpus_per_tray")
    facts |= {key: str(n) for key in rest if (n := getattr(cluster, key))}
    if cluster.cpu:
        facts["cpu"] = cluster.cpu
    if cluster.node.kind != "switch":
        facts["node.kind"] = cluster.node.kind
    if cluster.nic:
        facts |= _fabric_facts(spec)
    if spec.crowding:
        facts["fabric.crowding"] = f"{spec.crowding:g}"
    for other in cluster.others:
        facts[f"others, {other.machine.name}"] = f"the last {other.nodes} nodes"
    if cluster.cores:
        facts |= {"cores": str(cluster.cores), "time_slice": format_time(cluster.time_slice_s)}
    if cluster.price_usd_per_gpu_hour is not None:
        facts["price_per_gpu"] = f"{cluster.price_usd_per_gpu_hour:g} USD/h"
    elif not cluster.cores:
        facts["price_per_gpu"] = "not known, --price gives one"
    known = (
        ("node_power", cluster.node_power_w, format_power),
        ("node_memory", cluster.node_memory_bytes, format_bytes),
    )
    facts |= {key: words(value) for key, value, words in known if value is not None}
    yield "machine", facts, cluster.sources
    device = cluster.device
    facts = {f"peak.{dtype}": flops(peak) for dtype, peak in device.peak_flops_per_s.items()}
    facts |= {key: _figure(name, getattr(device, name)) for name, key in KEYS.items()}
    if device.gemm_tiles:
        facts["tiles.shapes"] = f"{len(device.gemm_tiles.tiles)} sizes"
        facts["tiles.processors"] = f"{device.gemm_tiles.processors}"
    for name, kernel in device.attention_kernels.items():
        facts[f"attention.kernels.{name}"] = f"{kernel.forward.efficiency:g} of the peak forward"
    yield f"device {device.name}", facts, device.sources
    for link in filter(None, (cluster.intra, cluster.node.host, cluster.nic)):
        yield f"link {link.name}", _link_facts(link), link.sources


def _fabric_facts(spec: FabricSpec) -> dict[str, str]:
    """Return what says how nodes are joined, as far as it applies to the kind of fabric."""
    facts = {"fabric.kind": spec.kind}
    if spec.shape:
        facts["fabric.shape"] = " x ".join(map(str, spec.shape))
    elif not spec.links:
        facts["fabric.nodes_per_leaf"] = str(spec.nodes_per_leaf)
        facts["fabric.oversubscription"] = f"{spec.oversubscription:g}"
    if not spec.links:
        facts["fabric.hop_latency"] = format_time(spec.hop_latency_s)
    if spec.group_nodes:
        facts["fabric.group_nodes"] = str(spec.group_nodes)
        facts["fabric.group_bandwidth"] = bandwidth(spec.group_bytes_per_s)
        facts["fabric.group_latency"] = format_time(spec.group_latency_s)
    return facts


def _link_facts(link: LinkSpec) -> dict[str, str]:
    """Return the figures of *link*; of what only some links have, those that it has."""
    facts = {
        "bandwidth": bandwidth(link.bandwidth_bytes_per_s),
        "latency": format_time(link.latency_s),
        "efficiency": f"{link.efficiency:g}",
    }
    facts |= {key: ", ".join(names) for key in ("protocols", "algorithms") if (names := getattr(link, key))}
    if link.reduces:
        facts["reduces"] = "in its switches"
    facts |= {
        key: format_bytes(size)
        for key, size in (("chunk", link.chunk_bytes), ("eager", link.eager_bytes))
        if size
    }
    if not link.gpu_direct:
        facts["gpu_direct"] = "no, copies through the host"
    if isfinite(link.experts_bytes_per_s):
        facts["experts"] = f"{bandwidth(link.experts_bytes_per_s)} by kernels, between nodes"
    if isfinite(link.flow_bytes_per_s):
        facts["flow"] = f"{bandwidth(link.flow_bytes_per_s)} per connection"
    for op, curve in link.curves.items():
        most = bandwidth(curve.efficiency * link.bandwidth_bytes_per_s)
        facts[op] = f"{most} after {format_time(curve.latency_s)}"
    return facts | {op: _extent(sorted(table.times_s)) for op, table in link.tables.items()}


def _figure(name: str, value: float) -> str:
    """Return a figure with the unit that the name of its field says."""
    ways = {"_bytes_per_s": bandwidth, "_bytes": format_bytes, "_s": format_time, "_w": _power}
    return next((way(value) for ending, way in ways.items() if name.endswith(ending)), f"{value:g}")


def _power(watts: float) -> str:
    return format_power(watts) if watts else "not known"


def _extent(ranks: list[int]) -> str:
    return f"measured on {', '.join(map(str, ranks))} GPUs"


def bandwidth(value: float | None) -> str:
    """Return a bandwidth in a fitting unit, ``"none"`` if there is none."""
    return "none" if value is None else format_bandwidth(value)


def flops(value: float | None) -> str:
    """Return a number of operations per second in a fitting unit, ``"none"`` if it is not known."""
    return "none" if value is None else format_flops(value)
