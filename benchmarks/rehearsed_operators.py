"""Rehearses what PyTorch tests itself with, and compares what is made with a real run on the CPU.

    pip install expecttest
    python benchmarks/rehearsed_operators.py operators [--first 0 --last 702]
    python benchmarks/rehearsed_operators.py modules

Every operator (``op_db`` of torch's tests) or module (``module_db``) is called with its first samples, in a
script that is really run and then rehearsed. Shapes, dtypes, strides, devices and what requires gradients are
compared, of results and of gradients; and errors. Some differ by their nature: those whose sizes depend on
numbers, and sparse ones.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import torch

N_AT_ONCE = 20
N_SAMPLES = 12

REGISTRIES = {
    "operators": ("torch.testing._internal.common_methods_invocations", "op_db"),
    "modules": ("torch.testing._internal.common_modules", "module_db"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("registry", choices=REGISTRIES)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=720)
    parser.add_argument("--made", help="where the script writes what it made")
    args = parser.parse_args()
    if args.made:
        made = {name: list(rows) for name, rows in calls(args.registry, args.first, args.last)}
        Path(args.made).write_text(json.dumps(made))
        return
    found: Counter[str] = Counter()
    for first in range(args.first, args.last, N_AT_ONCE):
        last = min(first + N_AT_ONCE, args.last)
        with tempfile.TemporaryDirectory() as folder:
            said = compared(args.registry, first, last, Path(folder))
        found.update(kind for _, kind, _ in said)
        for name, kind, words in said:
            if kind != "the same":
                print(f"{name}: {kind}: {words}")
    print(dict(found))


def compared(registry: str, first: int, last: int, folder: Path) -> list[tuple[str, str, str]]:
    """Return what became of the entries from *first* to *last*: name, kind of difference, words."""
    script = [__file__, registry, "--first", str(first), "--last", str(last), "--made"]
    real, rehearsed = folder / "real.json", folder / "rehearsed.json"
    subprocess.run([sys.executable, *script, str(real)], check=True)
    rehearsing = [
        "-m",
        "foretrace",
        "rehearse",
        "--world-size",
        "1",
        "-o",
        str(folder / "run"),
        "--",
        *script,
    ]
    done = subprocess.run(
        [sys.executable, *rehearsing, str(rehearsed)], capture_output=True, text=True, check=False
    )
    if not rehearsed.exists():
        return [(f"{first} to {last}", "not rehearsed", done.stderr.strip())]
    there = json.loads(rehearsed.read_text().replace('"cuda"', '"cpu"'))
    return [(name, *unlike(rows, there[name])) for name, rows in json.loads(real.read_text()).items()]


def unlike(real: list[Any], rehearsed: list[Any]) -> tuple[str, str]:
    """Return the kind of the first difference of two lists of samples, and its words."""
    for number, (one, other) in enumerate(zip(real, rehearsed, strict=False)):
        if "error" in other and "error" not in one:
            return "error", f"sample {number}: {other['error']}"
        if "error" not in one and one != other:
            return "differs", f"sample {number}: {one} against {other}"
    return ("the same", "") if len(real) == len(rehearsed) or not real else ("other samples", "")


def calls(registry: str, first: int, last: int) -> Iterator[tuple[str, Iterator[dict[str, Any]]]]:
    """Yield each entry of a *registry* by its name, with what it made of each of its samples."""
    module, name = REGISTRIES[registry]
    samples_of = of_operator if registry == "operators" else of_module
    for info in getattr(import_module(module), name)[first:last]:
        variant = getattr(info, "variant_test_name", "")
        yield f"{info.name}.{variant}" if variant else info.name, rows(samples_of(info))


def rows(samples: Iterator[tuple[Callable[[], Any], list[Any]]]) -> Iterator[dict[str, Any]]:
    """Yield what each of the first *samples* made, a function and the tensors with gradients, or an error."""
    try:
        for call, given in islice(samples, N_SAMPLES):
            try:
                made = tensors(call())
                ends = [one for one in made if one.requires_grad]
                starts = [one for one in given if one.requires_grad]
                gradients = (
                    torch.autograd.grad(
                        ends, starts, [torch.ones_like(one) for one in ends], allow_unused=True
                    )
                    if ends and starts
                    else ()
                )
                yield {"made": [look(one) for one in made], "gradients": [look(one) for one in gradients]}
            except Exception as error:
                yield {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    except Exception as error:
        yield {"error": f"samples: {type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def of_operator(info: Any) -> Iterator[tuple[Callable[[], Any], list[Any]]]:
    """Yield calls of an operator, each with its tensors."""
    dtypes = info.supported_dtypes("cpu")
    kinds = (torch.float32, torch.int64, torch.bool, torch.complex64, torch.int32)
    dtype = next(kind for kind in kinds if kind in dtypes)
    learns = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    torch.manual_seed(0)
    model = torch.nn.Module()
    for one in info.sample_inputs(device(), dtype, requires_grad=learns):
        model.forward = partial(info, one.input, *one.args, **one.kwargs)
        yield model, tensors([one.input, one.args, one.kwargs])


def of_module(info: Any) -> Iterator[tuple[Callable[[], Any], list[Any]]]:
    """Yield calls of a module that trains, each with its tensors."""
    made: dict[str, Any] = {"device": device(), "dtype": torch.float32}
    torch.manual_seed(0)
    for one in info.module_inputs_func(info, **made, requires_grad=True, training=True):
        if one.forward_input is not None:
            given = one.constructor_input
            module = info.module_cls(*given.args, **given.kwargs).to(**made).train()
            args, named = one.forward_input.args, one.forward_input.kwargs
            yield partial(module, *args, **named), [*tensors([args, named]), *module.parameters()]


def device() -> str:
    """Return where tensors are made: on the GPU of a rehearsal, on the CPU of a real run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def tensors(value: Any) -> list[Any]:
    """Return all tensors in *value*."""
    if hasattr(value, "element_size"):
        return [value]
    inside = value.values() if isinstance(value, dict) else value
    return [one for part in inside for one in tensors(part)] if isinstance(value, list | tuple | dict) else []


def look(tensor: Any) -> list[Any] | None:
    """Return how *tensor* looks: without the strides of sides of one, which say nothing."""
    if tensor is None or str(tensor.layout) != "torch.strided":
        return tensor if tensor is None else [list(tensor.shape), str(tensor.layout)]
    strides = zip(tensor.stride(), tensor.shape, strict=True) if tensor.numel() else ()
    kept = [stride for stride, size in strides if size > 1]
    return [list(tensor.shape), str(tensor.dtype), kept, tensor.device.type, tensor.requires_grad]


if __name__ == "__main__":
    main()
