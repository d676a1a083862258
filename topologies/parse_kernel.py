"""Turns the tables ``[tiles]`` and ``[attention.kernels]`` of a device into its kernels."""

from __future__ import annotations

from foretrace.topologies.kernel import AttentionKernel, AttentionPass, GemmTiles
from foretrace.topologies.reader import Section, number, whole
from foretrace.topologies.units import parse_time


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
