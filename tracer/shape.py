"""What a model and its machine look like, so that a recorded run can be simulated like any other.

Only what the process can see for sure is noted: the shapes of parameters as they are before sharding, whole
numbers that modules keep as attributes (heads, head sizes), a Hugging Face configuration where the model
carries one, and the name of the device. What it means is for the reader to work out.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Final

from foretrace.door import counted
from foretrace.tracer import internals
from foretrace.tracer.inputs import first_of
from foretrace.tracer.process import n_pretended_gpus
from foretrace.tracer.records import Block
from foretrace.tracer.wrapped import PASSING, compiled_of, held_whole, holders, inside, whole_shape

# Blocks are what a person would name, and what time is attributed to. A *layer* is a numbered child, as
# ``layers.3``, ``h.3`` or ``blocks.3``. Blocks are the layers; the children of a layer that have parts of
# their own, as attention and MLP; and what stands beside the layers, as the embedding and the head. All
# else belongs to the block around it. Whatever contains layers is *glue*.

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
    return _own_class(model)


def _own_class(module: Any) -> str:
    """Return the name of a class; FSDP2 makes one on the spot, of `FSDPModule` and the module's own."""
    bases = [base.__name__ for base in type(module).__mro__]
    return bases[2] if bases[1:2] == ["FSDPModule"] else bases[0]


def _block(module: Any, name: str, layers: Mapping[str, int], trunk: set[str]) -> Block | None:
    """Return the block that *module* is, None if it belongs to the one around it."""
    parent, _, _ = name.rpartition(".")
    if name in layers:
        return Block(name, layers[name])
    if parent in layers:
        return Block(name, layers[parent]) if [*module.children()] else None
    if name in trunk:
        return Block(name, is_glue=True)
    return Block(name) if parent in trunk else None


def _layers(names: Mapping[Any, str]) -> dict[str, int]:
    """Return the numbered modules that are not inside of another numbered module."""
    found: dict[str, int] = {}
    for name in names.values():
        parts = name.split(".")
        first = next((i for i, part in enumerate(parts) if counted(part) >= 0), None)
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


def plain_name(name: str, root: Any) -> str:
    """Return *name* without what wrappers add to it."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    # Each of them holds as `module` what it is around.
    for _ in holders(root):
        if parts[:1] == ["module"]:
            parts = parts[1:]
    return ".".join(parts)


def _twins_as_one(blocks: Mapping[Any, Block]) -> dict[Any, Block]:
    """Return *blocks*, one for a wrapper and the module of its name in it, which recomputes alone."""
    by_name: dict[str, Block] = {}
    return {module: by_name.setdefault(block.name, block) for module, block in blocks.items()}


MOST_ENTRIES: Final = 400
"""Entries of a structure that a description holds; a transformer has 10 to 30, for equal layers share one."""

COUNTERS: Final = ("_", "ds_")
"""How names of attributes begin that are no sizes: private ones, and the numbers of DeepSpeed's modules."""

_SCALARS: Final = (bool, int, float, str)


def describe_model(model: Any) -> dict[str, Any]:
    """Return the name, size, precision and structure of a ``torch.nn.Module`` that was called from outside.

    ``structure`` maps a path, in which ``*`` stands for the number of a layer, to the class of the module
    there, the shapes of its own parameters, its whole-number attributes and the layers that have it.
    """
    inner = inside(model)
    shapes = _shapes(inner)
    # By identity: a parameter that several modules share counts once.
    sizes = {identity: prod(shape) for own in shapes.values() for identity, shape in own.values()}
    found: dict[str, Any] = {
        "name": class_name(held_whole(model)),
        "n_params": sum(sizes.values()),
        "dtype": _dtype(inner),
        "structure": _structure(inner, shapes),
    }
    config = _config(inner)
    return found | ({"config": config} if config else {})


def untimed(model: Any) -> str:
    """Return what of a model's computation is not timed where it runs, empty if all is."""
    devices = {parameter.device for parameter in model.parameters()}
    if others := sorted({device.type for device in devices} - {"cpu", "cuda", "meta"}):
        return f"the model is on {', '.join(others)}: times are those of the host, which only issues its work"
    gpus = sorted(device.index for device in devices if device.type == "cuda")
    if len(gpus) > 1:
        return f"one process computes on {len(gpus)} GPUs: its computation is timed on cuda:{gpus[0]} only"
    return ""


def describe_machine(world_size: int) -> dict[str, Any]:
    """Return the device of this process, and how many processes share its machine.

    A process that has not used CUDA yet has not said which GPU is its own: asking would settle on the first.
    """
    import torch

    local = counted(os.environ.get("LOCAL_WORLD_SIZE", ""))
    per_node = local if local > 0 else world_size
    if torch.cuda.is_available() and torch.cuda.is_initialized() and not n_pretended_gpus():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        device = {"name": properties.name, "kind": "gpu", "memory_bytes": int(properties.total_memory)}
    else:
        device = {"name": "cpu", "kind": "cpu"}
    return {
        "device": device,
        "gpus_per_node": min(per_node, world_size),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
    }


def _shapes(model: Any) -> dict[Any, dict[str, tuple[int, list[int]]]]:
    """Return the parameters of each module's own, by name: what is the same where one is shared, and a shape.

    The first FSDP makes one flat parameter of many, of which this rank holds a part. It keeps the shapes.
    """
    flat = {
        (inside, name): shape
        for module in model.modules()
        if type(module).__name__ == internals.FSDP1
        for inside, name, shape in internals.flattened(module)
    }
    found: dict[Any, dict[str, tuple[int, list[int]]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name != internals.FLAT and (module, name) not in flat:
                found.setdefault(module, {})[name] = id(parameter), whole_shape(parameter)
    for number, ((module, name), shape) in enumerate(flat.items(), start=1):
        # Parameters in a flat one are no objects: a negative number is the identity of none.
        found.setdefault(module, {})[name] = -number, shape
    return found


def _structure(model: Any, shapes: Mapping[Any, Mapping[str, tuple[int, list[int]]]]) -> dict[str, Any]:
    """Return the modules that have parameters or whole-number attributes of their own, by path."""
    found: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        if type(module).__name__ == internals.FSDP1:  # bears the name of what it wraps
            continue
        path, layer = _path(plain_name(name, model))
        entry = _entry(module, {key: shape for key, (_, shape) in shapes.get(module, {}).items()})
        if entry is None or (len(found) >= MOST_ENTRIES and path not in found):
            continue
        key, turn = path, 1
        while key in found and {k: v for k, v in found[key].items() if k != "layers"} != entry:
            turn += 1
            key = f"{path} ({turn})"  # layers that differ, as dense ones among experts
        known = found.setdefault(key, dict(entry))
        if layer >= 0:
            known.setdefault("layers", []).append(layer)
    return found


def _entry(module: Any, shapes: Mapping[str, list[int]]) -> dict[str, Any] | None:
    """Return the class, *shapes* and attributes of *module*, None if there is nothing to say of it."""
    numbers = {
        name: value
        for name, value in vars(module).items()
        if type(value) is int and not name.startswith(COUNTERS)
    }
    if not shapes and not numbers:
        return None
    found: dict[str, Any] = {"kind": _own_class(module)}
    if shapes:
        found["shapes"] = dict(shapes)
    return found | ({"numbers": numbers} if numbers else {})


def _path(name: str) -> tuple[str, int]:
    """Return *name* with its first number replaced by ``*``, and that number, -1 if there is none.

    >>> _path("layers.3.mlp.experts.7.up")
    ('layers.*.mlp.experts.7.up', 3)
    """
    parts = name.split(".")
    for i, part in enumerate(parts):
        if (number := counted(part)) >= 0:
            return ".".join([*parts[:i], "*", *parts[i + 1 :]]), number
    return name, -1


def _dtype(model: Any) -> str:
    """Return what products are computed in: under autocast its type, else that of FSDP or the parameters."""
    import torch

    first = next(model.parameters(), None)
    if first is None:
        return ""
    kind = first.device.type
    if torch.is_autocast_enabled(kind):
        return short_name(torch.get_autocast_dtype(kind))
    chosen = (getattr(internals.mixed_precision(part), "param_dtype", None) for part in model.modules())
    return short_name(next(filter(None, chosen), first.dtype))


def short_name(dtype: Any) -> str:
    """Return the name of a type as layouts write it, e.g. ``"bf16"``."""
    name = str(dtype).removeprefix("torch.")
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(name, name)


def _config(model: Any) -> dict[str, Any]:
    """Return the plain values of a Hugging Face configuration, {} if the model has none."""
    made = getattr(getattr(model, "config", None), "to_dict", None)
    values = made() if callable(made) else {}
    if not isinstance(values, Mapping):
        return {}
    return {key: value for key, value in values.items() if isinstance(value, _SCALARS)}


# In what type a model computes. Types of parameters do not say: a model may enter autocast inside of its
# call, and what FSDP was told may be overridden. The nodes of the autograd graph that a call leaves are the
# operators that ran.

PRODUCTS: Final = frozenset(
    f"{name}Backward0"
    for name in (
        "Addmm",
        "Mm",
        "Bmm",
        "Baddbmm",
        "Addbmm",
        "Addmv",
        "Mv",
        "Linear",
        "Convolution",
        "GroupedMm",
    )
)
"""Nodes of products, most of the work of a model."""

MOST_NODES: Final = 20_000  # nodes of a graph that are looked at: a layer of a transformer has some 50


class Precision:
    """Models of which the next call tells in what type they compute.

    Attributes:
        awaited: the models, by identity; mostly empty, and looked at with each call of a module.
    """

    def __init__(self, told: Callable[[str], None]) -> None:
        self._told = told
        self.awaited: dict[int, weakref.ref[Any]] = {}

    def expect(self, model: Any) -> None:
        """The call of *model* that begins will tell."""
        self.awaited[id(model)] = weakref.ref(model)

    def ran(self, module: Any, output: Any) -> None:
        """The call of a module is over, and has returned *output*, None if it has failed."""
        # Its identity may have been that of a model that is gone.
        if (expected := self.awaited.pop(id(module), None)) is None or expected() is not module:
            return
        if (dtype := computed_in(output)) is not None:
            self._told(short_name(dtype))


def computed_in(values: Any) -> Any:
    """Return the ``torch.dtype`` of most products behind the tensors among *values*.

    Returns:
        None if no product is seen, as behind the one node of a compiled graph.
    """
    from torch import Tensor

    todo = deque(value.grad_fn for value in first_of(values) if isinstance(value, Tensor))
    seen: set[Any] = set()
    found: Counter[Any] = Counter()
    while todo and len(seen) < MOST_NODES:
        node = todo.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (dtype := _product(node)) is not None:
            found[dtype] += 1
        todo.extend(before for before, _ in node.next_functions)
    return found.most_common(1)[0][0] if found else None


def _product(node: Any) -> Any:
    """Return in what type the product of *node* is, None if it is of something else.

    A part of a model that will be recomputed has left no nodes, but remembers its autocast.
    """
    name = type(node).__name__
    if name in PRODUCTS:
        return internals.made(node)
    return internals.autocast_kept(node) if name == internals.CHECKPOINT else None
