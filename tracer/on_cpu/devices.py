"""Lets a script that uses ``cuda`` run on a machine without a GPU.

``torch.cuda`` answers as for a GPU with 80 GB. Tensors on that GPU are fake CPU tensors without memory. The
script's own ``torch.device("cuda")`` objects do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer import internals
from foretrace.tracer.rehearse.device.installing import Gpu
from foretrace.tracer.rehearse.gpu import allocator
from foretrace.tracer.rehearse.gpu.meter import CAPACITY_BYTES
from foretrace.tracer.rehearse.ranks.launchers import on_node

if TYPE_CHECKING:
    from foretrace.tracer.on_cpu.streams import Streams
    from foretrace.tracer.rehearse.gpu.meter import Meter

GPU: Final = Gpu()

FOREIGN: Final = frozenset({"cuda", "xpu", "hpu", "npu", "mps", "mtia"})
"""Kinds of devices that are replaced by the CPU."""


CHECKPOINTS: Final = "torch.utils.checkpoint"
"""Module of the saved-tensor hooks that recompute."""

COMMANDS: Final = (
    *("set_device", "ipc_collect", "init", "_lazy_init", "manual_seed", "manual_seed_all", "seed"),
    *("set_per_process_memory_fraction", "set_sync_debug_mode", "seed_all"),
    *("set_rng_state", "set_rng_state_all"),
)
"""Functions of ``torch.cuda`` that change a setting, and do nothing here."""


OF_THE_DRIVER: Final = ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate")
"""Functions of ``torch.cuda`` that read the driver, in per cent, degrees, mW and MHz: all return 0."""


def local_rank() -> int:
    """Return the rank of this process on its node."""
    return on_node()[0]


def is_foreign(device: Any) -> bool:
    """Whether *device* is one that is replaced by ``cpu``; a bare number means a GPU.

    ``cpu:0``, which Accelerate uses, is replaced too: real tensors on it are on ``cpu``, but fake ones would
    keep the number and count as on another device.
    """
    if isinstance(device, bool) or device is None:
        return False
    if isinstance(device, int):
        return True
    kind, _, number = str(device).partition(":")
    return kind in FOREIGN or (kind == "cpu" and bool(number))


def is_gpu(device: Any) -> bool:
    """Whether *device* names a GPU."""
    return is_foreign(device) and not str(device).startswith("cpu")


def number_of(device: Any) -> int | None:
    """Return the GPU number in *device*, None if it names no GPU or has no number."""
    if isinstance(device, int):
        return device
    number = str(device).partition(":")[2]
    return int(number) if is_gpu(device) and number.isdigit() else None


def differentiate_in(mode: Any) -> None:
    """Run backward passes inside *mode*, which torch leaves during a call: recomputation needs it."""
    run_backward = internals.swap_run_backward()

    def run_backward_in_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_backward(*args, **kwargs)

    internals.swap_run_backward(run_backward_in_mode)


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


def answers(meter: Meter) -> dict[str, Any]:
    """Return replacements of functions of ``torch.cuda``, by name.

    Args:
        meter: knows the memory.
    """

    def constant(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    return {
        **dict.fromkeys(COMMANDS, constant(None)),
        **_of_memory(meter),
        "is_available": constant(True),  # noqa: FBT003 - a value, not a switch
        "is_initialized": constant(True),  # noqa: FBT003
        "is_bf16_supported": constant(True),  # noqa: FBT003
        "is_current_stream_capturing": constant(False),  # noqa: FBT003
        "device_count": constant(on_node()[1]),
        "current_device": local_rank,
        "get_device_properties": constant(GPU),
        "get_device_capability": constant((GPU.major, GPU.minor)),
        "get_device_name": constant(GPU.name),
        "get_arch_list": constant(["sm_90"]),
        "memory_summary": constant(""),
        "memory_snapshot": constant([]),
        "_snapshot": constant({"segments": [], "device_traces": []}),
        "get_allocator_backend": constant("native"),
        "get_per_process_memory_fraction": constant(1.0),
        "get_sync_debug_mode": constant(0),
        **dict.fromkeys(OF_THE_DRIVER, constant(0)),
        "can_device_access_peer": constant(True),  # noqa: FBT003
        "_exchange_device": lambda device: local_rank(),
        "_maybe_exchange_device": lambda device: local_rank(),
    }


def _of_memory(meter: Meter) -> dict[str, Any]:
    """Return those that report the memory of the device, or reset its peak."""

    def stats(device: Any = None) -> dict[str, int]:
        del device
        used, kept = (meter.now, meter.peak), (meter.reserved, meter.most_reserved)
        by_name = {"allocated_bytes.all": used, "active_bytes.all": used, "reserved_bytes.all": kept}
        found = {"num_alloc_retries": 0, "num_ooms": 0}
        for name, (now, peak) in by_name.items():
            found |= {f"{name}.current": now, f"{name}.peak": peak}
        return found

    return {
        **dict.fromkeys(("memory_reserved", "memory_cached"), lambda device=None: meter.reserved),
        "max_memory_reserved": lambda device=None: meter.most_reserved,
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated"), meter.reset),
        "memory_allocated": lambda device=None: meter.now,
        "max_memory_allocated": lambda device=None: meter.peak,
        "empty_cache": meter.empty,
        "mem_get_info": lambda device=None: (max(CAPACITY_BYTES - meter.reserved, 0), CAPACITY_BYTES),
        "memory_stats": stats,
    }


def stand_in(streams: Streams, meter: Meter) -> None:
    """Replace ``torch.cuda`` and ``torch.accelerator`` in this process, with arguments as for `install`."""
    import torch
    import torch.cuda.nvtx

    for name, function in answers(meter).items():
        setattr(torch.cuda, name, function)
    for name in ("memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(torch.cuda.memory, name, getattr(torch.cuda, name))
    raw: Any = torch._C  # noqa: SLF001 - where libraries set it
    memory: Any = torch.cuda.memory
    memory._set_allocator_settings = raw._accelerator_setAllocatorSettings = allocator.set_by_script  # noqa: SLF001
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *args, **kwargs: 0)
    torch.cuda.get_rng_state = lambda device=None: torch.random.get_rng_state()
    torch.cuda.get_rng_state_all = list
    streams.install(torch.cuda, torch.cpu)
    torch.cuda.StreamContext = streams.stream
    accelerator: Any = torch.accelerator
    for name in ("current_stream", "set_stream", "synchronize"):
        setattr(accelerator, name, getattr(streams, name))
    accelerator.current_device_index = local_rank
    accelerator.set_device_index = lambda device=None: torch.cuda.set_device(device)
    _numbers(torch)


def _numbers(torch: Any) -> None:
    """Accept a bare number in ``nn.Module.to``: it means a GPU."""
    nn: Any = torch._C._nn  # noqa: SLF001 - where nn.Module.to asks what its arguments mean
    parse = nn._parse_to  # noqa: SLF001

    @wraps(parse)  # torch passes the function of this name to modes
    def parse_to(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = (torch.device("cuda", args[0]), *args[1:])
        if isinstance(kwargs.get("device"), int):
            kwargs = {**kwargs, "device": torch.device("cuda", kwargs["device"])}
        return parse(*args, **kwargs)

    nn._parse_to = parse_to  # noqa: SLF001
