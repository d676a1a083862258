"""What job a trace was of: its rehearsal, its model and its batch, each with what it is told by."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from foretrace.traces.batch import Batch
from foretrace.traces.info import RunInfo
from foretrace.traces.layout import Layout
from foretrace.traces.rehearsal import Issued, Rehearsal, write_measured, write_rank, write_rehearsal
from foretrace.traces.report.format import format_share

NO_SHAPES: Final = "no operator says the shapes of its inputs: record with record_shapes=True"
LEAST_LAYERS: Final = 2
BACKWARD: Final = frozenset({"backward", "backward_weight", "backward_input"})

REPLICAS: Final = frozenset({"all_reduce", "broadcast", "barrier"})
"""Collectives of ranks that hold the same parameters."""


def explained(info: RunInfo, issued: Mapping[int, Issued]) -> RunInfo:
    """Return *info* with what the operators of its ranks, *issued*, tell about the job."""
    job = dict(info.job or {})
    if not issued:
        return replace(info, job={**job, "explained": {}}, warnings=(*info.warnings, NO_SHAPES))
    first = issued[min(issued)]
    told = _Told(first)
    layout = info.layout or _layout(info, issued)
    facts: dict[str, Any] = {
        "ranks": sorted(issued),
        "steps": first.facts["steps"],
        "operators": first.tables.works.num_rows,
        "explained": min(one.facts["explained"] for one in issued.values()),
        "model": told.sources,
        "not_told": told.missing,
        "layout": None if layout is None else layout.degrees,
    }
    job |= {"explained": facts} | told.job | told.batch(layout).job
    return replace(info, job=job, model=info.model or told.model, layout=layout)


def lines(explained_: Mapping[str, Any]) -> list[str]:
    """Return, line by line, what is told and by what, for a person."""
    if not explained_:
        return []
    found = []
    found.append(
        f"operators: {explained_['operators']} distinct, of {format_share(explained_['explained'])} of the "
        "device's time the work is known"
    )
    found += [f"{name}: {value}" for name, value in explained_["model"].items()]
    degrees = {name: n for name, n in (explained_["layout"] or {}).items() if n > 1}
    words = (
        ", ".join(f"{name} {n}" for name, n in degrees.items()) or "one GPU (the files name no other rank)"
    )
    found.append(f"layout: {words if explained_['layout'] else 'not told by the groups'}")
    return found + [f"not told: {reason}" for reason in explained_["not_told"]]


_LAYER: Final = re.compile(r"(?:^|/)(?P<kind>[A-Za-z]\w*)_(?P<number>\d+)(?=/|$)")
_ATTENTION: Final = re.compile(r"att", re.IGNORECASE)
_SIZES: Final = re.compile(r"\d+(?:x\d+)*")


class _Told:
    """What the operators of a rank tell of its model and batch.

    Attributes:
        model: description in the fields of a transformer, or its name and type alone; None if neither.
        lookups: shape of the tokens of each lookup in a step, all in the module that does the first.
    """

    def __init__(self, issued: Issued) -> None:
        self.model: dict[str, Any] | None = None
        self.job: dict[str, Any] = {}  # further settings of the job
        self.sources: dict[str, str] = {}  # by setting, its value and what tells it
        self.lookups: list[list[int]] = []
        self.missing: list[str] = []  # what is not told, and why
        tables = issued.tables
        works, places = tables.works.to_pylist(), tables.places.to_pylist()
        columns = (tables.events[name].to_pylist() for name in ("what", "item", "place"))
        calls = [
            (places[place]["name"], works[item])
            for what, item, place in zip(*columns, strict=True)
            # The first step stands for all.
            if what == 0 and places[place]["step"] == 0
        ]
        # What wraps a model copies and casts beside it, but has no products of its own.
        named = [(path, work) for path, work in calls if path]
        within = [path for path, work in named if work["flops"]] or [path for path, _ in named]
        roots = Counter(path.partition("/")[0] for path in within).most_common(1)
        paths = [path.split("/") for path in within if path.startswith(roots[0][0])]
        # Levels of modules that all calls are in, from the outermost inwards.
        if shared := [level[0] for level in zip(*paths, strict=False) if len(set(level)) == 1]:
            self.model = {"name": re.sub(r"_\d+$", "", shared[-1])}
            self.sources["name"] = f"{self.model['name']} (the innermost module that all products are in)"
        self._precision([work for _, work in calls])
        self._passes(places)
        if reason := self._transformer(calls):
            self.missing.append(f"model: {reason}")

    def _precision(self, works: Sequence[Mapping[str, Any]]) -> None:
        flops: Counter[str] = Counter()
        for work in works:
            flops[work["dtype"]] += work["flops"]
        # Unary plus drops types without FLOPs.
        flops = +flops
        if flops:
            ((dtype, most),) = flops.most_common(1)
            share = format_share(most / sum(flops.values()))
            self.sources["precision"] = f"{dtype} (type of {share} of the FLOPs)"
            self.model = {**(self.model or {}), "dtype": dtype}

    def _passes(self, places: Sequence[Mapping[str, Any]]) -> None:
        kinds = {place["kind"] for place in places}
        if kinds & BACKWARD:
            self.sources["passes"] = "forward and backward (threads, annotations, names of kernels)"
        else:
            marked = "no backward pass" if "forward" in kinds else "neither forward nor backward"
            self.missing.append(f"passes: {marked} is marked, so whether it trained is unknown")

    def batch(self, layout: Layout | None) -> Batch:
        """Return the batch of all ranks, each of which looks up as many tokens as this one."""
        if not self.lookups:
            return Batch(unknown="the trace shows no input of tokens: simulate takes --tokens-per-step")
        if layout is None or layout.pp * layout.cp > 1:
            return Batch(
                unknown="the trace does not tell which ranks share a batch: simulate takes --tokens-per-step"
            )
        said = " + ".join(
            f"{n} × {' × '.join(map(str, shape))}" if n > 1 else " × ".join(map(str, shape))
            for shape, n in Counter(map(tuple, self.lookups)).items()
        )
        tokens = sum(map(math.prod, self.lookups)) * layout.dp
        rows = sum(shape[0] for shape in self.lookups) * layout.dp if len(self.lookups[0]) > 1 else None
        by = "shapes of the tokens that are looked up" + (", dp" if layout.dp > 1 else "")
        times = f" × {layout.dp}" if layout.dp > 1 else ""
        return Batch(rows=rows, tokens=tokens, equation=f"{f'({said})' if times else said}{times} ({by})")

    def _transformer(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Take over the shape of a transformer; return why not, empty if it is one."""
        if not any(path for path, _ in calls):
            return "no names of modules; record with with_stack=True"
        looked_up = [
            (at, path, _operands(work))
            for at, (path, work) in enumerate(calls)
            if work["name"].startswith("aten.embedding") and work["flops"] == 0
        ]
        _, own, table = looked_up[0] if looked_up else (0, "", [])
        # Each lookup by the same module in the same table begins a forward.
        forwards = [one for one in looked_up if one[1] == own and one[2][:1] == table[:1] and one[2][1:]]
        if len(forwards) > 1:
            calls = calls[: forwards[1][0]]  # each forward of a step does the same again
        kind, layers = _layers(calls)
        if len(layers) < LEAST_LAYERS:
            return "no module that is repeated with attention in it: not a stack of transformer layers"
        if len(table) < 2 or len(table[0]) != 2:
            return f"{len(layers)} x {kind}, but no table of tokens is looked up: not a language model"
        (vocab, hidden), tokens = table[0], table[1]
        self.lookups = [operands[1] for _, _, operands in forwards]
        self.job["forwards_per_step"] = len(self.lookups)
        inside = layers[min(layers)]
        products = [(path, work) for path, work in inside if work["kind"] == "gemm" and work["batch"] == 1]
        attention = [work for path, work in products if _ATTENTION.search(path)]
        mlp = [
            work
            for path, work in products
            if not _ATTENTION.search(path) and hidden in (work["n"], work["k"])
        ]
        core = next((work for _, work in inside if work["kind"] == "attention"), None)
        # Two products in attention: one for query, key and value, one behind. Four: one for each.
        if core is None or len(attention) not in {2, 4} or len(mlp) not in {2, 3}:
            return (
                f"{len(layers)} x {kind}, with {len(attention)} products in attention and {len(mlp)} beside, "
                f"{'no ' if core is None else ''}fused attention: not a shape that is known"
            )
        head_dim = core["k"]
        n_heads = attention[-1]["k"] // head_dim
        # One product makes n_heads queries and as many keys as values, each of head_dim.
        fused = (attention[0]["n"] // head_dim - n_heads) // 2
        n_kv_heads = attention[1]["n"] // head_dim if len(attention) == 4 else fused
        names = [work["name"] for _, work in inside]
        is_layer_norm = any("layer_norm" in name for name in names)
        # Other tables that are as wide as the first, and looked up behind it, are of positions.
        positions = sum(
            rows
            for at, (_, work) in enumerate(calls)
            if work["name"].startswith("aten.embedding")
            and (sizes := _operands(work))
            and sizes[0] != [vocab, hidden]
            for rows, width in [sizes[0]]
            if width == hidden and at
        )
        head = next((work for path, work in calls if work["kind"] == "gemm" and work["n"] == vocab), None)
        self.model = {
            **(self.model or {}),
            "n_layers": len(layers),
            "hidden": hidden,
            "n_heads": n_heads,
            "n_kv_heads": n_kv_heads,
            "head_dim": head_dim,
            "ffn_hidden": max(work["n"] if work["k"] == hidden else work["k"] for work in mlp),
            "gated": len(mlp) == 3,
            "vocab": vocab,
            "norm": "layernorm" if is_layer_norm else "rmsnorm",
            "qkv_bias": attention[0]["name"] == "aten.addmm",
            "proj_bias": attention[-1]["name"] == "aten.addmm",
            "mlp_bias": mlp[0]["name"] == "aten.addmm",
            "max_positions": positions,
            "causal": bool(core["causal"]),
            "tied_embeddings": head is None,
        }
        if len(tokens) == 2:
            self.job["input_shape"] = tokens
        self.sources |= {
            "layers": f"{len(layers)} (modules of the kind {kind} with attention in them)",
            "hidden, vocab": f"{hidden}, {vocab} (the first table that is looked up)",
            "heads": f"{n_heads} of {head_dim}, {n_kv_heads} of keys (fused attention, products around it)",
            "MLP": f"{self.model['ffn_hidden']}, {'gated' if len(mlp) == 3 else 'not gated'} (products)",
            "batch": f"{' x '.join(map(str, tokens))} tokens (shape of what is looked up)",
        }
        if head is None:
            self.sources["head"] = "none ran; taken as one matrix with the embedding"
        return ""


def _layers(
    calls: Sequence[tuple[str, Mapping[str, Any]]],
) -> tuple[str, dict[int, list[tuple[str, Mapping[str, Any]]]]]:
    """Return the outermost kind of module that is there several times with attention in it, and its calls."""
    found: dict[str, dict[int, list[tuple[str, Mapping[str, Any]]]]] = defaultdict(lambda: defaultdict(list))
    depth: dict[str, int] = {}
    for path, work in calls:
        for match in _LAYER.finditer(path):
            found[match["kind"]][int(match["number"])].append((path[match.end() :], work))
            depth.setdefault(match["kind"], path.count("/", 0, match.start() + 1))
    whole_ones = [
        kind
        for kind, of in found.items()
        if len(of) >= LEAST_LAYERS
        and all(any(_ATTENTION.search(path) for path, _ in own) for own in of.values())
    ]
    kind = min(whole_ones, key=lambda one: depth[one], default="")
    return kind, dict(found[kind]) if kind else {}


def _operands(work: Mapping[str, Any]) -> list[list[int]]:
    """Return the shapes of the operands of a work.

    >>> _operands({"shapes": "30522x512, 1x141 -> 1x141x512"})
    [[30522, 512], [1, 141]]
    """
    return [[int(n) for n in one.split("x")] for one in _SIZES.findall(work["shapes"].partition(" -> ")[0])]


def _layout(info: RunInfo, issued: Mapping[int, Issued]) -> Layout | None:
    """Return the layout that communication tells: one GPU, or replicas; None if it tells neither."""
    messages = [row for one in issued.values() for row in one.tables.messages.to_pylist()]
    groups = {group.id: len(group.ranks) for group in info.groups}
    n = info.world_size
    is_plain = all((n == 1 or row["kind"] in REPLICAS) and groups.get(row["group"]) == n for row in messages)
    return Layout(dp=n) if is_plain and (messages or n == 1) else None


def write_issued(folder: Path, info: RunInfo, issued: Mapping[int, Issued]) -> None:
    """Write what ranks *issued* as a rehearsal into *folder*."""
    ranks = sorted(issued)
    for rank in ranks:
        write_rank(folder, rank, issued[rank].tables)
        write_measured(folder, rank, issued[rank].measured)
    facts: dict[str, Any] = {str(rank): dict(issued[rank].facts) for rank in ranks}
    missing = info.world_size - len(ranks)
    notes = [f"{missing} ranks that the files do not hold do as rank {ranks[0]} does"] if missing else []
    notes += sorted({one.facts["note"] for one in issued.values() if one.facts.get("note")})
    write_rehearsal(
        folder,
        Rehearsal(
            world_size=info.world_size,
            ranks=tuple(ranks),
            representatives=tuple(rank if rank in issued else ranks[0] for rank in range(info.world_size)),
            name=info.name,
            command=(info.name,),
            layout=info.layout,
            groups=info.groups,
            model=info.model,
            job={
                "first_step": 0,
                "steps": min(one.facts["steps"] for one in issued.values()),
                "traced": facts,
                "batch": (info.job or {}).get("batch"),
            },
            notes=tuple(notes),
        ),
    )
