"""Which modules of a model are blocks: what a person would name, and what time is attributed to.

A *layer* is a numbered child, as ``layers.3``, ``h.3`` or ``blocks.3``. Blocks are the layers; the children
of a layer that have parts of their own, as attention and MLP; and what stands beside the layers, as the
embedding and the head. Everything else belongs to the block around it. Whatever contains layers is *glue*.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from foretrace.tracer.records import Block
from foretrace.tracer.wrapped import PASSING, compiled_of, holders, inside

WRAPPERS: Final = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", *PASSING.values()})
"""Names under which FSDP1, activation checkpointing, and what only passes calls on hold what they wrap."""


def find_blocks(root: Any) -> dict[Any, Block]:
    """Return the blocks of a ``torch.nn.Module`` that was called from outside of any other."""
    names = {module: plain_name(name, root) for name, module in root.named_modules()}
    layers = _layers(names)
    trunk = _trunk(names, layers)
    blocks = {root: Block(class_name(root), is_glue=bool(list(root.children())))}
    for module, name in names.items():
        if name and module not in blocks and (block := _block(module, name, layers, trunk)) is not None:
            blocks[module] = block
    return _twins_as_one(blocks)


def class_name(model: Any) -> str:
    """Return the name of a model's own class, without what data parallelism has made of it."""
    model = inside(model)
    while type(model).__name__ == "FullyShardedDataParallel":
        model = compiled_of(model.module)
    kind = type(model)
    bases = [base.__name__ for base in kind.__mro__]
    return bases[2] if bases[1:2] == ["FSDPModule"] else bases[0]


def _block(module: Any, name: str, layers: Mapping[str, int], trunk: set[str]) -> Block | None:
    """Return the block that *module* is, None if it belongs to the one around it."""
    parent, _, _ = name.rpartition(".")
    if name in layers:
        return Block(name, layers[name])
    if parent in layers:
        return Block(name, layers[parent]) if _has_parts(module) else None
    if name in trunk:
        return Block(name, is_glue=True)
    return Block(name) if parent in trunk else None


def _layers(names: Mapping[Any, str]) -> dict[str, int]:
    """Return the numbered modules that are not inside of another numbered module."""
    found: dict[str, int] = {}
    for name in names.values():
        parts = name.split(".")
        first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if first is not None and first == len(parts) - 1:
            found[name] = int(parts[first])
    return found


def _trunk(names: Mapping[Any, str], layers: Mapping[str, int]) -> set[str]:
    """Return the root and every module that contains layers but is no mere list of them."""
    lists = {layer.rpartition(".")[0] for layer in layers}
    called = {name for module, name in names.items() if not _is_container(module)}
    trunk = {""}
    for container in lists:
        parts = container.split(".")
        trunk.update(".".join(parts[:i]) for i in range(1, len(parts) + 1))
    return {name for name in trunk if name in called or not name}


def _is_container(module: Any) -> bool:
    """Whether *module* only holds others and is never called itself."""
    return type(module).__name__ in {"ModuleList", "ModuleDict"}


def _has_parts(module: Any) -> bool:
    return next(iter(module.children()), None) is not None


def plain_name(name: str, root: Any) -> str:
    """Return *name* without what wrappers add to it."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    for _ in holders(root):
        if parts[:1] == ["module"]:
            parts = parts[1:]
    return ".".join(parts)


def _twins_as_one(blocks: Mapping[Any, Block]) -> dict[Any, Block]:
    """Return *blocks*, one for a wrapper and the module of its name in it, which recomputes alone."""
    by_name: dict[str, Block] = {}
    return {module: by_name.setdefault(block.name, block) for module, block in blocks.items()}
