"""The device of a rehearsal: PyTorch's answers on a GPU that is not there; how its C++ is built."""
# ruff: noqa: PLC0415 - torch is loaded by tests that need it

import ast
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from tests.processes import ROOT

from foretrace.tracer import internals
from foretrace.tracer.rehearse.device import driver
from foretrace.tracer.rehearse.device.installing import WHEELS, fit_out, install
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.traces.errors import RunError
from foretrace.traces.private import ONLY_OWNER, private_folder

pytest.importorskip("torch")

PROGRAMS = Path(__file__).with_name("device_programs.py")
TORCH = tuple(map(int, version("torch").split("+")[0].split(".")[:2]))
OF_LSTM = 4 * 64 * 16 * 4 * 2 * 5
"""Bytes of four gates and a cell per token and layer."""


def has_compiler() -> bool:
    try:
        return bool(driver.compiler())
    except RehearsalError:
        return False


needs_compiler = pytest.mark.skipif(
    not has_compiler(), reason="the device is compiled, and there is no compiler"
)


@pytest.fixture(scope="module")
def said() -> dict[str, dict[str, Any]]:
    """What each program returned, and what happened to its streams."""
    if not has_compiler():
        pytest.skip("the device is compiled, and there is no compiler")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    done = subprocess.run(
        [sys.executable, str(PROGRAMS)], capture_output=True, text=True, check=False, env=env, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = {one["name"]: one for one in map(json.loads, done.stdout.splitlines())}
    return {name: {**one, "errors": done.stderr} for name, one in found.items()}


VALUES: dict[str, Any] = {
    "which_devices": [
        *(True, 8, 3, "cuda:3", "cuda:3", "cuda:3", "cuda:5", [9, 0], "cuda", True),
        *("torch.cuda.FloatTensor", "cpu", "cuda:3", True),
    ],
    "training": ["cuda:3", "torch.bfloat16"],
    "moving": ["cuda:3", True, "torch.float16", "cuda:3", "cuda:3"],
    "outside_of_the_mode": [["cuda:2", "FakeTensor", "Tensor"]],
    "addresses": [True, True, True],
    "pinned": [True, True, False, False, "cuda:3"],
    "layers_of_cudnn": [
        *([[5, 2, 12], [4, 2, 6], [4, 2, 6], [5, 2, 6]], [5, 2, 8], "cuda:3"),
    ],
    "which_kernels_of_attention": [[True, True, True], [False, True, False]],
    "reserve_of_layers": [OF_LSTM, 2],
    "settings": [10, 3, 10, 1],
    "fully_sharded": [[[1, 64], "cuda:3", "cuda:3"], [[1, 64], "cpu", "cpu"]],
    "flat_sharded": ["cuda:3"],
    "names_of_an_older_torch": [False, True],
    "reducer_of_ddp": [[3 * (64 * 64 + 64)], "cuda:3"],
}


@pytest.mark.parametrize("name", VALUES)
def test_programs_see_a_gpu(said: dict[str, dict[str, Any]], name: str) -> None:
    error = said[name].get("error", "")
    if error.startswith("UnsupportedOperatorException: c10d.") and TORCH < (2, 9):
        pytest.skip(
            f"torch {version('torch')} has no shapes for collectives: those are of the world, not the device"
        )
    assert said[name].get("value") == VALUES[name], error or said[name]["errors"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_device", "CUDA error: invalid device ordinal"),
        ("choosing_no_such_device", "CUDA error: invalid device ordinal"),
        ("host_and_device_mixed", "cuda:3"),
        ("no_attention_left", "No available kernel. Aborting execution."),
        ("pinning_the_device", "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"),
        ("asking_for_more", "CUDA graphs cannot be rehearsed"),
        ("asking_what_is_not_there", "a GPU that is not there has no cuda_cudaCachingAllocator_raw_alloc"),
    ],
)
def test_errors_are_those_of_a_gpu_or_one_line(
    said: dict[str, dict[str, Any]], name: str, words: str
) -> None:
    assert words in said[name]["error"]
    assert "\n" not in said[name]["error"]


def test_attention_takes_the_kernel_of_an_h100(said: dict[str, dict[str, Any]]) -> None:
    """As ``select_sdp_backend`` of builds for CUDA chose when it was told the properties of an H100."""
    cudnn_is_first = TORCH >= (2, 11)  # with the cuDNN of its wheel
    groups = TORCH >= (2, 14)
    half, masked = ("cudnn", "cudnn") if cudnn_is_first else ("flash", "efficient")
    expected = {
        "plain": half,
        "fp32": "efficient",
        "bool mask": masked,
        "trained bias": "efficient",
        "wide": "efficient",
        "odd": "flash",
        "latent": masked,
        "grouped": half,
        "grouped fp32": "efficient" if groups else "math",
        "dropout": "flash" if TORCH >= (2, 12) else half,
    }
    found = said["attention"]["value"]
    assert {name: found[name][0] for name in expected} == expected
    assert all(n == (0 if kernel == "math" else 2) for kernel, n in (found[name] for name in expected))
    assert [found[name][0] for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "MATH")] == [
        "cudnn",
        "flash",
        "math",
    ]


def test_streams_and_events_are_noted_in_order(said: dict[str, dict[str, Any]]) -> None:
    one = said["side_stream"]
    main, side, is_current, device = one["value"]
    assert (main, is_current, device) == (0, False, "cuda:3")
    log = [(entry["kind"], entry["stream"], entry["number"]) for entry in one["log"]]
    first, event = [number for kind, _, number in log if kind == "record"]
    assert log == [
        ("record", main, first),
        ("wait", side, first),
        ("record", side, event),
        ("wait", main, event),
        ("synchronize_device", 0, 0),
    ]


def test_it_has_to_be_there_before_torch() -> None:
    import torch

    with pytest.raises(RehearsalError, match="before torch is imported"):
        install(1)
    with pytest.raises(RehearsalError, match="at most 120"):
        fit_out(vars(torch)["_C"], 121, lambda words: None)


def torch_folder() -> Path:
    import torch

    return Path(torch.__file__).parent


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return driver.cache_folder()


def test_what_is_compiled_lies_where_only_its_owner_can_write(cache: Path) -> None:
    cache.parent.parent.chmod(0o2700)  # folders that are made in it have this bit, too
    assert private_folder(cache, "") == cache
    assert cache.stat().st_mode & 0o777 == ONLY_OWNER
    cache.chmod(0o770)
    with pytest.raises(RunError, match="chmod 700"):
        private_folder(cache, "")
    cache.rmdir()
    cache.symlink_to(cache.parent)
    with pytest.raises(RunError, match="or remove it"):
        private_folder(cache, "")
    cache.unlink()
    cache.parent.chmod(0o777)
    with pytest.raises(RunError, match="others can write to a folder above it"):
        private_folder(cache, "")


def test_a_library_that_others_can_write_to_is_not_loaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = tmp_path / "c++"
    made.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    made.chmod(0o755)
    monkeypatch.setenv("CXX", str(made))
    found = driver.library(torch_folder(), new_abi=True, runtime=13000)
    assert driver.library(torch_folder(), new_abi=True, runtime=13000) == found
    found.chmod(0o666)
    with pytest.raises(RehearsalError, match="others can write to it"):
        driver.library(torch_folder(), new_abi=True, runtime=13000)


def test_without_a_compiler_one_line_says_what_to_install(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RehearsalError, match=r"install g\+\+ \(apt install g\+\+"):
        driver.library(torch_folder(), new_abi=True, runtime=13000)
    assert list(cache.iterdir()) == []


def test_a_compiler_that_fails_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failing = tmp_path / "c++"
    failing.write_text("#!/bin/sh\necho 'device.cpp:1: fatal error: no headers' >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    with pytest.raises(RehearsalError, match=r"for this PyTorch: device\.cpp:1: fatal error: no headers"):
        driver.library(torch_folder(), new_abi=True, runtime=13000)
    assert list(cache.iterdir()) == []


def test_it_is_compiled_once_for_each_pytorch(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    writing = tmp_path / "c++"
    writing.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n'
        f'echo compiled > "$2"; echo run >> {tmp_path / "runs"}\n'
    )
    writing.chmod(0o755)
    monkeypatch.setenv("CXX", str(writing))
    told: list[str] = []
    first, again = (
        driver.library(torch_folder(), new_abi=True, runtime=13000, tell=told.append) for _ in range(2)
    )
    assert len(told) == 1, "it is said when it is compiled, which takes long, and only then"
    other = driver.library(torch_folder(), new_abi=False, runtime=13000)
    assert first == again != other
    assert (tmp_path / "runs").read_text() == "run\n" * 2
    assert sorted(cache.iterdir()) == sorted([first, other])


def test_versions_are_told_for_every_torch() -> None:
    assert list(WHEELS) == sorted(WHEELS, reverse=True)
    assert internals.Wheel("12.8", (2, 27, 5), 91002).runtime == 12080


def test_this_torch_has_the_private_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses import fake_tensor

    assert internals.missing() == []
    monkeypatch.delattr(fake_tensor, "init_gpu_context")
    name = "torch._subclasses.fake_tensor.init_gpu_context"
    assert internals.missing() == [(name, internals.relied_on()[name])]


def test_a_command_lists_private_names_that_are_missing() -> None:
    """In a process that has loaded no module of torch yet."""
    done = subprocess.run(
        [sys.executable, "-m", "foretrace.tracer.internals"],
        cwd=ROOT / "src", capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()[1:]) == (0, []), done.stderr
    assert done.stdout.endswith(f"lacks 0 of {len(internals.relied_on())} names\n")


def test_private_names_that_are_replaced_are_in_the_table() -> None:
    replaced = {
        keyword.value.value
        for path in (ROOT / "tracer").rglob("*.py")
        if path.name != "libraries.py"  # which are not torch's
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "replaces"
        for keyword in call.keywords
        if keyword.arg == "name" and isinstance(keyword.value, ast.Constant)
    }
    private = {str(name) for name in replaced if str(name).startswith("_") and not str(name).startswith("__")}
    assert "_rebuild_buckets" in private
    assert private <= {name.rpartition(".")[2] for name in internals.relied_on()}


def test_without_a_compiler_a_rehearsal_ends_in_one_line(tmp_path: Path) -> None:
    """That says what to install; nothing is written."""
    script, nowhere = tmp_path / "train.py", tmp_path / "bin"
    script.touch()
    nowhere.mkdir()
    kept = {name: value for name, value in os.environ.items() if name != "CXX"}
    env = {**kept, "PATH": str(nowhere), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = ["rehearse", "--world-size", "2", "-o", str(tmp_path / "run"), "--", str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "foretrace", *words],
        cwd=ROOT / "src", env=env, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(
        "Error: a GPU that is not there takes a C++ compiler, once for each version of PyTorch:"
    )
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()
