"""The allocator of a rehearsal beside that of PyTorch itself: ``allocator.py TORCH... --cuda INCLUDE...``.

Random requests go through ``tracer.rehearse.device.allocator`` and through ``libc10_cuda.so`` of each
installation of PyTorch for CUDA that is named (the folder ``site-packages/torch``). No GPU is needed: a
library of stand-ins takes the place of CUDA. Needs ``g++``, ``nm`` and ``readelf``, and the headers of CUDA:
those of the packages ``nvidia-cuda-runtime-cu12`` and ``nvidia-cuda-nvcc-cu12`` (``--cuda`` for each folder
``include``).
``--golden FILE`` writes what the first installation says, as the test of the allocator reads it.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from foretrace.tracer.rehearse.device.allocator import MIB, CachingAllocator

HERE: Final = Path(__file__).parent / "allocator"

SETTINGS: Final[dict[str, Callable[[], CachingAllocator]]] = {
    "": CachingAllocator,
    "expandable_segments:True": lambda: CachingAllocator(is_expandable=True),
    "max_split_size_mb:128": lambda: CachingAllocator(max_split_bytes=128 * MIB),
}
"""What the environment may say, and an allocator that works like that."""

DRIVER: Final = re.compile(r"\bcu(?:Mem|Multicast|Device|Get|Stream|Ctx)[A-Za-z0-9]+")
Request = tuple[str, int, int, int]
"""What (``a``, ``f``, ``e``), the number of the block, bytes, stream."""


def requests(seed: int, n: int) -> list[Request]:
    """Return *n* requests: sizes that come back, as in training, and others, on up to three streams."""
    draw = random.Random(seed)
    ranges = ((1, MIB), (MIB, 10 * MIB), (10 * MIB, 200 * MIB), (1, 2048 * MIB))
    sizes = [draw.randint(*draw.choice(ranges)) for _ in range(draw.randint(3, 40))]
    streams, held, found = draw.choice((1, 2, 3)), list[int](), list[Request]()
    for number in range(n):
        chance = draw.random()
        if chance < 0.02:
            found.append(("e", 0, 0, 0))
        elif chance < 0.5 and held:
            found.append(("f", held.pop(draw.choice((-1, draw.randrange(len(held))))), 0, 0))
        else:
            size = draw.choice(sizes) if draw.random() < 0.8 else int(2 ** draw.uniform(0, 32))
            found.append(("a", number, -(-size // 512) * 512, draw.randrange(streams)))
            held.append(number)
    return found


def followed(asked: Sequence[Request], allocator: CachingAllocator) -> list[int]:
    """Return the bytes that *allocator* holds after each request."""
    held, found = {}, []
    for what, number, n_bytes, stream in asked:
        if what == "a":
            held[number] = allocator.allocate(n_bytes, stream)
        elif what == "f":
            allocator.free(held.pop(number))
        else:
            allocator.empty()
        found.append(allocator.reserved_bytes)
    return found


def built(torch: Path, include: Sequence[Path], folder: Path) -> Path:
    """Return the program that runs the allocator of *torch*, with libraries in place of CUDA beside it."""
    library = torch / "lib" / "libc10_cuda.so"
    runtime = re.findall(r"libcudart\.so\.\d+", _run("readelf", "-d", str(library)))[0]
    asked = set(re.findall(r"\bcuda[A-Z]\w+", _run("nm", "-D", "--undefined-only", str(library))))
    asked |= set(DRIVER.findall((torch / "include/c10/cuda/driver_api.h").read_text()))
    source = (HERE / "cuda.c").read_text()
    missing = sorted(one for one in asked if not re.search(rf"\b{one}\(", source))
    (folder / "cuda.c").write_text(source + "".join(f"int {one}() {{ return 0; }}\n" for one in missing))
    (folder / "nothing.c").write_text("int nvmlInit_v2() { return 0; }\n")
    (folder / "map").write_text(f"{runtime} {{ global: *; }};\n")
    for name, code in ((runtime, "cuda.c"), ("libcuda.so.1", "cuda.c"), ("libnvidia-ml.so.1", "nothing.c")):
        version = [f"-Wl,--version-script={folder / 'map'}"] if name == runtime else []
        options = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", *version]
        _run("gcc", *options, "-o", str(folder / name), str(folder / code), "-ldl")
    own = [f"-I{one}" for one in (torch / "include", *include)]
    found = [option for one in (torch / "lib", folder) for option in (f"-L{one}", f"-Wl,-rpath,{one}")]
    linked = ["-Wl,--no-as-needed", "-lc10_cuda", "-lc10", "-l:libcuda.so.1", f"-l:{runtime}"]
    program = folder / "allocator"
    options = ["-std=c++20", "-O1", "-w", "-DUSE_CUDA", *own, "-o", str(program), str(HERE / "allocator.cpp")]
    _run("g++", *options, *found, *linked, "-Wl,--allow-shlib-undefined")
    return program


def told(program: Path, asked: Sequence[Request], setting: str) -> list[int]:
    """Return the bytes that PyTorch's allocator holds after each request."""
    lines = {"a": "a {1} {2} {3}\n", "f": "f {1}\n", "e": "e\n"}
    text = "".join(lines[one[0]].format(*one) for one in asked)
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": setting}
    return [int(line) for line in _run(str(program), text=text, environment=environment).split()]


def _run(*command: str, text: str | None = None, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, input=text, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed: {done.stderr.strip()[:500]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("torch", nargs="+", type=Path)
    parser.add_argument("--cuda", nargs="+", type=Path, required=True, metavar="INCLUDE")
    parser.add_argument("--programs", type=int, default=60, help="sequences of requests for each setting")
    parser.add_argument("--requests", type=int, default=800, help="requests in each")
    parser.add_argument("--golden", type=Path)
    asked = parser.parse_args()
    for at, torch in enumerate(asked.torch):
        with tempfile.TemporaryDirectory() as folder:
            program = built(torch.absolute(), asked.cuda, Path(folder))
            version = re.search(r"'(.*?)'", (torch / "version.py").read_text().partition("__version__ =")[2])
            for setting, make in SETTINGS.items():
                listed = [requests(seed, asked.requests) for seed in range(asked.programs)]
                same = sum(followed(one, make()) == told(program, one, setting) for one in listed)
                name = version[1] if version else torch
                print(f"{name} {setting or 'as it is':26} {same} of {len(listed)} the same", flush=True)
            if asked.golden and not at:
                _write(asked.golden, program)


def _write(path: Path, program: Path) -> None:
    """Write requests and what PyTorch's allocator holds after each into *path*."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("setting", "what", "number", "bytes", "stream", "reserved"))
        for setting in SETTINGS:
            asked = requests(1, 250)
            for request, reserved in zip(asked, told(program, asked, setting), strict=True):
                rows.writerow((setting, *request, reserved))


if __name__ == "__main__":
    main()
