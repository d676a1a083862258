"""The verbs about models: list the presets, show one, check one against its file or a published count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from foretrace.door import json_text
from foretrace.traces.report.format import format_share

if TYPE_CHECKING:
    from typing import Any

    from foretrace.simulator.models.model import Model

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_SEQ_LEN = click.option(
    "--seq-len",
    type=click.IntRange(1, 10**9),
    help="Tokens per sequence, for FLOPs. [default: 4096, or as many as the model has positions for]",
)


USUAL_LEN: Final = 4096
"""Tokens of a sequence that FLOPs are said of where nobody asks for others."""


def _length(one: Model, asked: int | None) -> int:
    """Return tokens per sequence: those *asked* for, at most as many as there are learned positions."""
    # A model with learned positions has none for longer sequences.
    return min(asked or USUAL_LEN, one.max_positions or asked or USUAL_LEN)


@click.group()
def model() -> None:
    """List and show models that --model takes by name, and check one against what is published."""


@model.command("list")
@click.argument("words", nargs=-1)
@_SEQ_LEN
@_JSON
def list_(words: tuple[str, ...], *, seq_len: int | None, as_json: bool) -> None:
    """List the presets.

    Of WORDS, if there are any, all have to be in the name, its ids on the hub or the kinds of its layers.

    For example: foretrace model list qwen moe
    """
    from foretrace.simulator.models.sources import load_model, names
    from foretrace.topologies.render import add_row, print_table, table_of

    rows = [_row(one, _length(one, seq_len)) for one in map(load_model, names())]
    rows = [row for row in rows if all(word.lower() in _text(row) for word in words)]
    if as_json:
        click.echo(json_text({"models": rows}))
        return
    if not rows:
        click.echo(f"no preset has {' and '.join(words)} in its name, its ids or its layers")
        return
    table = table_of("name", "params", "active", "GFLOPs", "layers of")
    for row in rows:
        add_row(table, row["name"], *_counts(row), ", ".join(row["kinds"]))
    print_table(table)
    click.echo(
        "params and active ones (those that a token meets) in billions. GFLOPs: of a token, forward and\n"
        f"backward, with the whole attention matrix of {seq_len or USUAL_LEN:,} tokens per sequence, or\n"
        "of as many as a model has positions for. model show NAME has ids and sources; --model also\n"
        "takes such an id, a config.json, or a .toml file."
    )


def _text(row: dict[str, Any]) -> str:
    return " ".join((row["name"], *row["other_names"], *row["kinds"])).lower()


def _counts(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return parameters, active ones and FLOPs of a token in billions."""
    n_params, active, flops = (row[key] / 1e9 for key in ("n_params", "n_active_params", "flops_per_token"))
    return f"{n_params:,.2f}", f"{active:,.2f}", f"{flops:,.1f}"


def _row(one: Model, seq_len: int) -> dict[str, Any]:
    from foretrace.simulator.models.sources import other_names, published_params

    published = published_params(one.name)
    kinds = dict.fromkeys(kind for layer in range(one.n_layers) for kind in one.kinds(layer))
    return {
        "name": one.name,
        "n_params": one.n_params,
        "n_active_params": one.n_active_params,
        "flops_per_token": one.flops_per_token(seq_len),
        "seq_len": seq_len,
        "n_layers": one.n_layers,
        "kinds": list(kinds),
        "other_names": [other for other, name in other_names().items() if name == one.name],
        "left_out": one.left_out,
        "source": one.source,
        "published": published._asdict() if published else None,
    }


@model.command("show")
@click.argument("name")
@_SEQ_LEN
@_JSON
def show(name: str, *, seq_len: int | None, as_json: bool) -> None:
    """Show what a model is made of: NAME is whatever --model takes.

    For example: foretrace model show Qwen/Qwen3-Next-80B-A3B-Instruct
    """
    from foretrace.simulator.errors import ModelError
    from foretrace.simulator.models.kinds import KINDS
    from foretrace.simulator.models.sources import load_model, model_fields

    one = load_model(name)
    if one.max_positions and (seq_len or 0) > one.max_positions:
        raise ModelError(f"--seq-len {seq_len}: {one.name} has positions for {one.max_positions} tokens")
    row = _row(one, length := _length(one, seq_len))
    layers = {
        kind: [layer for layer in range(one.n_layers) if kind in one.kinds(layer)] for kind in row["kinds"]
    }
    blocks = {
        kind: {
            "n_layers": len(found),
            "params": one.block_params(kind) + (one.expert_params(found[0]) if kind == "moe" else 0),
            "source": KINDS[kind].source,
            "assumed": KINDS[kind].assumed,
            "is_cut": KINDS[kind].is_cut,
        }
        for kind, found in layers.items()
    }
    if as_json:
        click.echo(json_text({**row, "fields": model_fields(one), "blocks": blocks}))
        return
    whole, active, flops = _counts(row)
    click.echo(f"{one.name}: {whole} billion parameters ({one.n_params:,}), {active} active")
    click.echo(f"{flops} GFLOPs per token, forward and backward, at {length:,} tokens per sequence")
    if tower := one.tower:
        click.echo(
            f"tower: {tower.n_params:,} of them, {tower.n_layers} layers; an image of "
            f"{f'{tower.image_tokens:,}' if tower.image_tokens else 'any number of'} tokens, each of "
            f"{tower.patches_per_token} patches"
        )
    if one.left_out:
        click.echo(f"left out: {one.left_out}")
    click.echo(f"source: {one.source}")
    if row["other_names"]:
        click.echo(f"also: {', '.join(row['other_names'])}")
    for kind, block in blocks.items():
        click.echo(f"{kind}: {block['params']:,} parameters in each of {block['n_layers']} layers")
        click.echo(f"  {block['source']}")
        if block["assumed"]:
            click.echo(f"  {block['assumed']}")
        if not block["is_cut"]:
            click.echo("  tp=1 and cp=1 alone: how ranks would share it is not known")
    sizes = ", ".join(f"{key} {value}" for key, value in model_fields(one).items() if key not in _IN_WORDS)
    click.echo(f"sizes: {sizes}")


_IN_WORDS = ("source", "left_out", "pattern", "tower")
"""Fields that ``show`` has in lines of their own."""


@model.command("check")
@click.argument("name")
@click.argument("against", required=False)
@_JSON
@click.pass_context
def check(ctx: click.Context, name: str, against: str | None, *, as_json: bool) -> None:
    """Check the parameters of a model against a published number, or its fields against a config.json.

    AGAINST is a count (8030261248, 8.03B), a config.json or the directory that has one, or another name; by
    default what is published about a preset. The status is 1 where they differ: by a thousandth, or by more
    than a rounded number leaves open.

    For example: foretrace model check glm4.5-air 106.85B
    """
    from foretrace.simulator.errors import ModelError
    from foretrace.simulator.models.sources import EXACT, Published, count_of, load_model, published_params

    one = load_model(name)
    found = count_of(against) if against else published_params(one.name)
    if found is None and against is None:
        raise ModelError(f"{one.name}: no published count is known; give one (8.03B), or a config.json")
    # A count says nothing of fields: these are compared with a model only.
    differ: dict[str, list[Any]] = {}
    if found is None:
        other = load_model(against or "")
        found = Published(source=other.source, params=other.n_params)
        differ = _differing(one, other)
    agrees = found.agrees(one.n_params) and not differ
    if as_json:
        ours = {"name": one.name, "n_params": one.n_params, "published": found._asdict()}
        click.echo(json_text({**ours, "differ": differ, "agrees": agrees}))
    else:
        rounded = found.decimals < EXACT
        theirs = f"{found.params / 1e9:g} billion, rounded" if rounded else f"{found.params:,}"
        less = f", of which {found.beside:,} are not in ours: {found.what}" if found.beside else ""
        click.echo(f"ours       {one.n_params:,} ({one.name})")
        click.echo(f"published  {theirs}{less} ({found.source})")
        within = "agrees" if found.is_near(one.n_params) else "agrees within its rounding"
        click.echo(
            f"{within if agrees else 'differs'}: "
            + format_share((one.n_params + found.beside) / found.params - 1, "+.4f")
        )
        for key, (mine, given) in differ.items():
            click.echo(f"  {key}: {mine} here, {given} there")
    ctx.exit(0 if agrees else 1)


def _differing(one: Model, other: Model) -> dict[str, list[Any]]:
    """Return the fields that differ, with both values, and the first layer that is of another kind."""
    from foretrace.simulator.models.sources import SHAPE_FIELDS

    found = {
        key: [getattr(one, key), getattr(other, key)]
        for key in SHAPE_FIELDS
        if key not in _NOT_SHAPE and getattr(one, key) != getattr(other, key)
    }
    for layer in range(min(one.n_layers, other.n_layers)):
        if (mine := one.kinds(layer)) != (given := other.kinds(layer)):
            return {**found, f"layer {layer}": ["+".join(mine), "+".join(given)]}
    return found


_NOT_SHAPE = ("source", "left_out", "expert_tp", "route_nodes", "pattern", "global_every", "n_dense_layers")
"""Fields that a file does not say, and those that say which layers are of which kind."""
