"""What torch answers about GPUs on a machine without: as for N of 80 GB, all of it free.

The script's own ``torch.device("cuda")`` objects do not change. ``torch.accelerator`` names the GPU to
scripts and libraries; torch's own code still gets the CPU.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.on_cpu import streams
from foretrace.tracer.rehearse.device import allocator, stand_ins
from foretrace.tracer.rehearse.device.installing import WHEELS, Gpu
from foretrace.tracer.rehearse.device.memory import CAPACITY_BYTES

GPU: Final = Gpu()

FOREIGN: Final = frozenset({"cuda", "xpu", "hpu", "npu", "mps", "mtia"})
"""Kinds of devices that are replaced by the CPU."""

CHECKPOINTS: Final = "torch.utils.checkpoint"
"""Module of the saved-tensor hooks that recompute."""

COMMANDS: Final = (
    *("ipc_collect", "init", "_lazy_init", "manual_seed", "manual_seed_all", "seed", "seed_all"),
    *("set_per_process_memory_fraction", "set_sync_debug_mode", "set_rng_state", "set_rng_state_all"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached", "empty_cache"),
    *(
        "reset_accumulated_memory_stats",
        "reset_peak_host_memory_stats",
        "reset_accumulated_host_memory_stats",
    ),
    *("_record_memory_history", "_dump_snapshot"),
)
"""Functions of ``torch.cuda`` and its ``memory`` that change a setting, and do nothing here."""

OF_THE_DRIVER: Final = (
    *("utilization", "memory_usage", "temperature", "power_draw", "clock_rate"),
    *("memory_reserved", "memory_cached", "max_memory_reserved", "memory_allocated", "max_memory_allocated"),
)
"""Functions of ``torch.cuda`` that read the driver, in per cent, degrees, mW, MHz and bytes: all return 0."""

HELD: Final = [
    f"{kind}_bytes.all.{when}" for kind in ("allocated", "active", "reserved") for when in ("current", "peak")
]
"""Figures of an allocator, which holds nothing."""

ANSWERS: Final[dict[str, Any]] = {
    **dict.fromkeys(COMMANDS),
    **dict.fromkeys(OF_THE_DRIVER, 0),
    "is_available": True,
    "is_bf16_supported": True,
    "can_device_access_peer": True,
    "is_initialized": False,  # else recordings would describe a GPU
    "is_current_stream_capturing": False,
    "get_device_properties": GPU,
    "get_device_capability": (GPU.major, GPU.minor),
    "get_device_name": GPU.name,
    "get_arch_list": ["sm_90"],
    "memory_summary": "",
    "memory_snapshot": [],
    "_snapshot": {"segments": [], "device_traces": []},
    "get_allocator_backend": "native",
    "get_per_process_memory_fraction": 1.0,
    "get_sync_debug_mode": 0,
    "mem_get_info": (CAPACITY_BYTES, CAPACITY_BYTES),
    "memory_stats": dict.fromkeys(("num_alloc_retries", "num_ooms", *HELD), 0),
}
"""Answers of functions of ``torch.cuda``, whatever they are asked."""

OF_ACCELERATORS: Final = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    *("memory_stats", "empty_cache", "reset_peak_memory_stats"),
)
"""Functions of ``torch.accelerator`` that give the same answer as those of ``torch.cuda`` with that name."""


def is_foreign(device: Any) -> bool:
    """Whether *device* is one that is replaced by ``cpu``; a bare number means a GPU.

    ``cpu:0``, which Accelerate uses, is replaced too.
    """
    if isinstance(device, bool) or device is None:
        return False
    if isinstance(device, int):
        return True
    kind, _, number = str(device).partition(":")
    return kind in FOREIGN or (kind == "cpu" and bool(number))


class Gpus:
    """The *n_gpus* GPUs of one process; *chosen* is the number of the current one."""

    def __init__(self, n_gpus: int) -> None:
        self.n_gpus, self.chosen = n_gpus, 0

    def install(self, torch: Any) -> None:
        """Make *torch* tell of these GPUs."""
        importlib.import_module(internals.DEVICE_MODE)
        wheel = _wheel(torch)
        _tell_of_devices(torch)
        internals.replace_devices(lambda: self.n_gpus, self._exchange)
        torch.cuda.default_generators = tuple(torch.Generator() for _ in range(self.n_gpus))
        torch.cuda.current_device = torch.accelerator.current_device_index = lambda: self.chosen
        torch.cuda.set_device = torch.accelerator.set_device_index = self.choose
        if torch.version.cuda is None:  # else torchvision compares it with its own version
            torch.version.cuda = wheel.cuda
        nccl = importlib.import_module("torch.cuda.nccl")
        for owner, name, answer in (
            (nccl, "version", wheel.nccl),
            (nccl, "is_available", True),
            (torch.backends.cuda, "is_flash_attention_available", True),
            (torch.backends.cudnn, "is_available", True),
        ):
            setattr(owner, name, _always(answer))
        random: Any = importlib.import_module("torch.cuda.random")
        random.device_count, random.current_device = torch.cuda.device_count, torch.cuda.current_device
        _tell_accelerator(torch, wheel)

    def choose(self, device: Any) -> None:
        """Make *device*, as ``torch.cuda.set_device`` takes it, the current one."""
        if isinstance(device, int):
            number = device
        else:
            kind, _, name = str(device).partition(":")
            if kind == "cpu" or not name.isdigit():
                return
            number = int(name)
        if number >= self.n_gpus:
            raise RuntimeError(
                f"invalid device ordinal {number}: --on-cpu says that there are {self.n_gpus} GPUs"
            )
        if number >= 0:
            self.chosen = number

    def _exchange(self, device: int) -> int:
        before = self.chosen
        if device >= 0:
            self.choose(device)
        return before


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: dict(answer) if isinstance(answer, dict) else answer


def _wheel(torch: Any) -> internals.Wheel:
    """Return the versions of CUDA, NCCL and cuDNN in the GPU wheel of this version; scripts ask for them."""
    own = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return next(wheel for since, wheel in WHEELS.items() if own >= since)


def _tell_of_devices(torch: Any) -> None:
    """Replace ``torch.cuda``, its modules, and the memory of ``torch.accelerator``.

    The states of its generators are never used: random numbers come from the generator of the CPU.
    """
    cuda, accelerator = torch.cuda, torch.accelerator
    names = ("memory", "random", "profiler", "nvtx")
    parts: list[Any] = [importlib.import_module(f"torch.cuda.{name}") for name in names]
    memory, random, profiler, nvtx = parts
    for name, answer in ANSWERS.items():
        setattr(cuda, name, _always(answer))
    cuda.get_rng_state = lambda device=None: torch.random.get_rng_state()
    cuda.get_rng_state_all = list
    for module in (memory, random):
        for name in ({*ANSWERS, "get_rng_state", "get_rng_state_all"}) & set(vars(module)):
            setattr(module, name, getattr(cuda, name))
    for name in OF_ACCELERATORS:
        for place in (accelerator, getattr(accelerator, "memory", None)):
            if hasattr(place, name):
                setattr(place, name, getattr(cuda, name))
    accelerator.get_memory_info = cuda.mem_get_info
    raw: Any = internals.c_of_torch()  # where libraries set it
    memory._set_allocator_settings = raw._accelerator_setAllocatorSettings = allocator.set_by_script
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(nvtx, name, _always(0))
    for module in (cuda, profiler):  # scripts may start and stop profilers of CUDA, which record nothing
        module.cudart, module.check_error = Runtime, _always(None)
    stand_ins.profile_host_only()
    streams.install()
    _take_numbers(torch)


class Runtime:
    """Replaces the CUDA runtime library: every function does nothing and returns success."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args: 0


def _tell_accelerator(torch: Any, wheel: internals.Wheel) -> None:
    """Report a GPU to code that asks for an accelerator and is not torch's."""
    gpu, module_of, roots = torch.device("cuda"), torch.get_device_module, str(Path(torch.__file__).parent)

    def tell(owner: Any, name: str, answer: Any) -> None:
        original = getattr(owner, name)

        def asked(*args: Any, **kwargs: Any) -> Any:
            is_torchs = sys._getframe(1).f_code.co_filename.startswith(roots)
            return original(*args, **kwargs) if is_torchs else answer

        setattr(owner, name, asked)

    for owner, name, answer in (
        (torch.accelerator, "is_available", True),
        (torch.accelerator, "device_count", torch.cuda.device_count()),
        (torch.accelerator, "current_accelerator", gpu),
        (internals.c_of_torch(), internals.ACCELERATOR, gpu),  # transformers asks this for its meshes
        (torch.backends.cuda, "is_built", True),
        (torch.backends.cudnn, "version", wheel.cudnn),
    ):
        tell(owner, name, answer)
    torch.get_device_module = lambda device=None: module_of(gpu if device is None else device)
    torch.accelerator.device_index = lambda device: nullcontext()


def differentiate_in(mode: Any) -> None:
    """Run backward passes inside *mode*, which torch leaves during a call: recomputation needs it."""

    def around(run_backward: Callable[..., Any]) -> Callable[..., Any]:
        def run_backward_in_mode(*args: Any, **kwargs: Any) -> Any:
            with mode:
                return run_backward(*args, **kwargs)

        return run_backward_in_mode

    internals.around_backward(around)


def save_in(mode: Any, graph: Any) -> None:
    """Run saved-tensor hooks inside *mode*, which torch leaves before it calls them."""
    hooks: Any = graph.saved_tensors_hooks
    made = hooks.__init__

    def in_mode(hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with mode:
                return hook(*args)

        return run

    def init(self: Any, pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        if type(self).__module__ != CHECKPOINTS:  # those recompute, in a backward that is inside the mode
            pack, unpack = in_mode(pack), in_mode(unpack)
        made(self, pack, unpack)

    hooks.__init__ = init


def _take_numbers(torch: Any) -> None:
    """Accept a bare number in ``nn.Module.to``: it means a GPU."""
    nn: Any = internals.c_of_modules()  # where nn.Module.to asks what its arguments mean
    parse = nn._parse_to

    @wraps(parse)  # torch passes the function of this name to modes
    def parse_to(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = (torch.device("cuda", args[0]), *args[1:])
        if isinstance(kwargs.get("device"), int):
            kwargs = {**kwargs, "device": torch.device("cuda", kwargs["device"])}
        return parse(*args, **kwargs)

    nn._parse_to = parse_to
