"""Turns the tables of a TOML file into devices, links and clusters; docs/topologies.md explains the keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any, Final

from foretrace.door import counted
from foretrace.topologies.cluster import Cluster, Others
from foretrace.topologies.device import DTYPES, KEYS, NOT_GIVEN, Device
from foretrace.topologies.errors import CatalogError
from foretrace.topologies.fabric import FabricSpec, Link
from foretrace.topologies.kernel import AttentionKernel, AttentionPass, GemmTiles
from foretrace.topologies.link import COLLECTIVES, Curve, LinkSpec, Table
from foretrace.topologies.node import NodeSpec
from foretrace.topologies.reader import Section, number, text, truth, whole
from foretrace.topologies.units import (
    parse_bandwidth,
    parse_bytes,
    parse_flops,
    parse_power,
    parse_price,
    parse_time,
)


def device_from(section: Section) -> Device:
    """Return the device that *section* describes. Raises CatalogError or UnitError."""
    name, kind = section.get("name", text), section.get("kind", text, "gpu")
    tables = {
        "": section,
        **{key: section.section(key) for key in ("peak", "gemm", "memory_bound", "attention", "tiles")},
    }
    tables["attention.kernels"] = tables["attention"].section("kernels")
    found: dict[str, Any] = {}
    for field, key in KEYS.items():
        table, _, entry = key.rpartition(".")
        default = (NOT_GIVEN[field][0],) if field in NOT_GIVEN else ()
        found[field] = tables[table].get(entry, _reader(field), *default)
    peak = tables["peak"]
    peaks = {dtype: peak.get(dtype, parse_flops) for dtype in DTYPES if dtype in peak}
    found["gemm_tiles"] = tiles_from(tables["tiles"])
    found["attention_kernels"] = kernels_from(tables["attention.kernels"])
    found["attention_kernel"] = tables["attention"].get("kernel", text, "")
    found["assumed"] = section.get("assumed", text, "")
    sources = {
        KEYS[field]: f"not given: {why}" for field, (value, why) in NOT_GIVEN.items() if found[field] == value
    }
    for prefix, table_ in tables.items():
        sources |= _finish(table_, f"{prefix}." if prefix else "")
    return Device(name=name, kind=kind, peak_flops_per_s=peaks, sources=sources, **found)


def _reader(field: str) -> Callable[[Any], float]:
    """Return how the value of a field is read, from the unit in its name."""
    readers = {"_bytes_per_s": parse_bandwidth, "_bytes": parse_bytes, "_s": parse_time, "_w": parse_power}
    return next((read for ending, read in readers.items() if field.endswith(ending)), number)


def link_from(section: Section, name: str) -> LinkSpec:
    """Return the kind of link that *section* describes. Raises CatalogError or UnitError."""
    bandwidth = section.get("bandwidth", parse_bandwidth)
    curves: dict[str, Curve] = {}
    tables: dict[str, Table] = {}
    collectives = section.section("collectives")
    sizes_bytes = collectives.get("sizes", _sizes, ())
    measured = collectives.get("bandwidth", parse_bandwidth, bandwidth)
    sources: dict[str, str] = {}
    for op, inner in collectives.sections().items():
        if op not in COLLECTIVES:
            raise CatalogError(f"{inner.where}: unknown operation {op!r}; one of {', '.join(COLLECTIVES)}")
        if inner.is_table("times_us"):
            tables[op] = _table_from(inner, sizes_bytes, measured)
        else:
            curves[op] = _curve_from(inner)
        sources |= _finish(inner, f"{op}.")
    sources |= _finish(collectives, "collectives.")
    if "efficiency" not in section:
        sources["efficiency"] = "not given: all of it, or what measured times show"
    defaults = {field.name: field.default for field in fields(LinkSpec) if field.default is not MISSING}
    link = LinkSpec(
        name=section.get("name", text, name),
        **_link_figures(section, {"kind": name, **defaults}),
        curves=curves,
        tables=tables,
        sources=sources | section.sources,
    )
    section.done()
    return link


def _curve_from(section: Section) -> Curve:
    return Curve(
        efficiency=section.get("efficiency", number),
        latency_s=section.get("latency", parse_time),
        latency_per_rank_s=section.get("latency_per_rank", parse_time, 0.0),
        half_size_bytes=section.get("half_size", parse_bytes, 0),
        exponent=section.get("exponent", number, 1.0),
    )


def _table_from(section: Section, sizes_bytes: tuple[int, ...], bytes_per_s: float) -> Table:
    section.note_source("times_us")
    rows = section.section("times_us")
    times_s: dict[int, tuple[float, ...]] = {}
    for key in rows:
        if (n_ranks := counted(key)) < 0:
            raise CatalogError(f"{rows.where}: {key!r} must be a number of ranks")
        times_s[n_ranks] = tuple(t * 1e-6 for t in rows.get(key, _numbers))
    try:
        return Table(sizes_bytes=sizes_bytes, times_s=times_s, bytes_per_s=bytes_per_s)
    except CatalogError as error:
        raise CatalogError(f"{rows.where}: {error}") from None


def _wholes(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError("must be a list of whole numbers, [4, 4]")
    return tuple(whole(entry) for entry in value)


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError('must be a list of names, ["simple"]')
    return tuple(text(name) for name in value)


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError('must be a list of sizes, ["512 B", "1 KiB"]')
    return tuple(parse_bytes(size) for size in value)


def _numbers(value: object) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise TypeError("must be a list of numbers")
    return tuple(number(entry) for entry in value)


def cluster_from(
    section: Section,
    default_name: str,
    load_device: Callable[[str], Device],
    load_link: Callable[[str], LinkSpec],
    load_cluster: Callable[[str], Cluster],
) -> Cluster:
    """Return the cluster that *section* describes; names of devices, links and machines go to the loaders.

    Raises:
        CatalogError: a key is missing, unknown, or its value cannot be used.
        UnitError: a quantity has no unit that fits.
    """
    device = device_from(section.section("device")) if section.is_table("device") else None
    device = device or load_device(section.get("device", text))
    gpus_per_node = section.get("gpus_per_node", whole)
    n_gpus = section.get("n_gpus", whole, gpus_per_node)
    cores = section.get("cores", whole, 0)
    fabric_spec, fabric_sources = _fabric_from(section)
    node = section.section("node")
    host = _link(node, "host", load_link) if "host" in node else None
    others = [Others(machine=load_cluster(name), nodes=n) for name, n in section.get("others", _others, ())]
    least = min([device.memory_bytes, *(other.machine.device.memory_bytes for other in others)])
    cluster = Cluster(
        name=section.get("name", text, default_name),
        description=section.get("description", text, ""),
        device=replace(device, memory_bytes=least),
        n_gpus=1 if cores else n_gpus,
        gpus_per_node=gpus_per_node,
        intra=_link(section, "intra", load_link),
        nic=_link(section, "nic", load_link) if "nic" in section else None,
        nics_per_node=section.get("nics_per_node", whole, 0),
        nics_used=section.get("nics_used", whole, 0),
        rings_out=section.get("rings_out", whole, 0),
        cpu=section.get("cpu", text, ""),
        fabric_spec=fabric_spec,
        node=NodeSpec(kind=node.get("kind", text, "switch"), host=host),
        others=tuple(others),
        cores=cores,
        time_slice_s=section.get("time_slice", parse_time, 0.0),
        price_usd_per_gpu_hour=section.get("price_per_gpu", parse_price, None),
        node_power_w=section.get("node_power", parse_power, None),
        node_memory_bytes=section.get("node_memory", parse_bytes, None),
        gpus_per_tray=section.get("gpus_per_tray", whole, 0),
    )
    section.done()
    cluster = replace(cluster, sources=section.sources | fabric_sources | _finish(node, "node."))
    return cluster.sized(n_gpus) if cores else cluster


LINK_FIGURES: Final[Mapping[str, tuple[str, Callable[[Any], Any]]]] = {
    "kind": ("kind", text),
    "bandwidth": ("bandwidth_bytes_per_s", parse_bandwidth),
    "latency": ("latency_s", parse_time),
    "efficiency": ("efficiency", number),
    "reduces": ("reduces", truth),
    "protocols": ("protocols", _names),
    "algorithms": ("algorithms", _names),
    "chunk": ("chunk_bytes", parse_bytes),
    "eager": ("eager_bytes", parse_bytes),
    "flow": ("flow_bytes_per_s", parse_bandwidth),
    "gpu_direct": ("gpu_direct", truth),
    "experts": ("experts_bytes_per_s", parse_bandwidth),
}
"""What a table says of a link, or changes of the link that is its ``base``: key, field, how it is read."""


def _link_figures(section: Section, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a link by field; *known* has those that *section* may leave out."""
    return {
        field: section.get(key, read, *([known[field]] if field in known else []))
        for key, (field, read) in LINK_FIGURES.items()
    }


def _link(section: Section, key: str, load_link: Callable[[str], LinkSpec]) -> LinkSpec:
    if not section.is_table(key):
        return load_link(section.get(key, text))
    table = section.section(key)
    return _link_over(table, load_link(table.get("base", text))) if "base" in table else link_from(table, key)


def _link_over(section: Section, base: LinkSpec) -> LinkSpec:
    """Return *base* with the figures of *section*; what was measured is scaled to the new bandwidth."""
    given = _link_figures(section, {field: getattr(base, field) for field, _ in LINK_FIGURES.values()})
    name = section.get("name", text, base.name)
    section.done()
    return replace(base, name=name, **given, sources={**base.sources, **section.sources})


def _fabric_from(section: Section) -> tuple[FabricSpec, dict[str, str]]:
    table = section.section("fabric")
    links = section.get("links", _links, ())
    spec = FabricSpec(
        kind="links" if links else table.get("kind", text, "node"),
        oversubscription=table.get("oversubscription", number, 1.0),
        nodes_per_leaf=table.get("nodes_per_leaf", whole, 32),
        hop_latency_s=table.get("hop_latency", parse_time, 0.0),
        group_nodes=table.get("group_nodes", whole, 0),
        group_bytes_per_s=table.get("group_bandwidth", parse_bandwidth, 0.0),
        group_latency_s=table.get("group_latency", parse_time, 0.0),
        shape=table.get("shape", _wholes, ()),
        crowding=table.get("crowding", number, 0.0),
        links=links,
    )
    return spec, _finish(table, "fabric.")


def _links(value: object) -> tuple[Link, ...]:
    if not isinstance(value, list):
        raise TypeError("must be a list of tables, [[links]]")
    found = []
    for number_, table in enumerate(value):
        entry = Section(table, f"[[links]] number {number_ + 1}", {})
        found.append(
            Link(
                ends=entry.get("between", _pair),
                bandwidth_bytes_per_s=entry.get("bandwidth", parse_bandwidth, None),
                latency_s=entry.get("latency", parse_time, None),
            )
        )
        entry.done()
    return tuple(found)


def _others(value: object) -> tuple[tuple[str, int], ...]:
    if not isinstance(value, list):
        raise TypeError("must be a list of tables, [[others]]")
    found = []
    for number_, table in enumerate(value):
        entry = Section(table, f"[[others]] number {number_ + 1}", {})
        found.append((entry.get("machine", text), entry.get("nodes", whole)))
        entry.done()
    return tuple(found)


def _pair(value: object) -> tuple[str, str]:
    if not isinstance(value, list) or [type(end) for end in value] != [str, str]:
        raise TypeError('must name two ends, ["gpu:0", "nvswitch:0"]')
    return value[0], value[1]


def _finish(section: Section, prefix: str) -> dict[str, str]:
    """Refuse what nobody read in *section*, and return its sources under *prefix*."""
    section.done()
    return {f"{prefix}{key}": source for key, source in section.sources.items()}


def tiles_from(section: Section) -> GemmTiles | None:
    """Return the tiles that *section* describes, None if it is empty. Raises CatalogError or UnitError."""
    if not list(section):
        return None
    for figure in ("shapes", "processors"):
        section.note_source(figure)
    return GemmTiles(
        processors=section.get("processors", whole),
        tiles=section.get("shapes", _shapes),
        efficiency=section.get("efficiency", number),
        operand_side=section.get("operand_side", number),
        tile_overhead_s=section.get("overhead", parse_time),
        memory_fraction=section.get("memory_fraction", number),
        wave_overlap=section.get("wave_overlap", number),
        blend=section.get("blend", number),
        throttle=section.get("throttle", number),
        throttle_s=section.get("throttle_time", parse_time),
    )


def kernels_from(section: Section) -> dict[str, AttentionKernel]:
    """Return the attention kernels that *section* describes, by name. Raises CatalogError or UnitError."""
    found = {}
    for name, table in section.sections().items():
        table.note_source("forward")
        found[name] = AttentionKernel(
            forward=_pass_from(table.section("forward")), backward=_pass_from(table.section("backward"))
        )
        section.sources |= {f"{name}": source for source in table.sources.values()}
        table.done()
    return found


def _pass_from(section: Section) -> AttentionPass:
    found = AttentionPass(
        efficiency=section.get("efficiency", number),
        score_width=section.get("score_width", number),
        tail=section.get("tail", number),
        tile_overhead_s=section.get("overhead", parse_time),
        latency_s=section.get("latency", parse_time),
        queries=section.get("queries", whole, 128),
        wide_step=section.get("wide_step", whole, 0),
        narrowest=section.get("narrowest", whole, 0),
        lasting_clock=section.get("lasting_clock", number, 0.0),
        scores_per_s=section.get("scores_per_second", number, 0.0),
    )
    section.done()
    return found


def _shapes(value: object) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, list) or not all(
        isinstance(tile, list) and [type(side) for side in tile] == [int, int] for tile in value
    ):
        raise TypeError("must be a list of tiles, [[256, 128], [128, 128]]")
    return tuple((tile[0], tile[1]) for tile in value)
