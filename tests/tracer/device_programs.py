"""Programs for a GPU, each run in a child of one process that has the device: ``device_programs.py``.

Writes a line of JSON for each: its name, its value or error, and what streams and storages went through.
"""
# ruff: noqa: N812, PLC0415, T201 - programs as people write them

import copy
import json
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from foretrace.tracer.rehearse.device.installing import install

DEVICE = install(8)

import torch  # noqa: E402 - the device is there before torch
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import unset_fake_temporarily  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

PROGRAMS: dict[str, Callable[[], Any]] = {}


class Numbers(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    """Stands for a session: tells a program some number for each that it reads."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = func is torch.ops.aten._local_scalar_dense.default
        return 3 if reads else func(*args, **(kwargs or {}))


def program(function: Callable[[], Any]) -> Callable[[], Any]:
    """Have *function* run in the mode of the device, on its fourth GPU."""
    PROGRAMS[function.__name__] = function
    return function


@program
def names_of_an_older_torch() -> Any:
    return [hasattr(torch._C, name) for name in ("_cuda_setRNGState", "_cuda_getDeviceCount")]


@program
def which_devices() -> Any:
    there = torch.zeros(2, device="cuda")
    return [
        torch.cuda.is_available(),
        torch.cuda.device_count(),
        torch.cuda.current_device(),
        str(there.device),
        str((there + 1).device),
        str(torch.tensor([1, 2], device="cuda").device),
        str(torch.randn(2, device="cuda:5", generator=torch.Generator("cuda:5")).device),
        list(torch.cuda.get_device_capability()),
        str(torch.accelerator.current_accelerator()),
        there.is_cuda,
        there.type(),
        str(torch.ones(1).device),
        str(torch.zeros_like(torch.ones(2), device="cuda").device),
        torch.backends.cudnn.is_available(),
    ]


@program
def no_such_device() -> Any:
    return torch.zeros(2, device="cuda:8")


@program
def choosing_no_such_device() -> Any:
    torch.cuda.set_device(8)


@program
def host_and_device_mixed() -> Any:
    return torch.ones(3) + torch.ones(3, device="cuda")


@program
def training() -> Any:
    from torch.utils.checkpoint import checkpoint

    seen = set()
    for how in ({}, {"foreach": True}, {"fused": True}):
        with torch.device("cuda"):
            model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.RMSNorm(8))
        optimizer = torch.optim.AdamW(model.parameters(), **how)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = checkpoint(model, torch.ones(4, 8, device="cuda").requires_grad_(), use_reentrant=not how)
            kind = str(model[0](torch.ones(4, 8, device="cuda")).dtype)
        y.float().sum().backward()
        optimizer.step()
        tensors = [p.grad for p in model.parameters()] + [s["exp_avg"] for s in optimizer.state.values()]
        seen |= {kind, *(str(one.device) for one in tensors)}
    return sorted(seen)


@program
def moving() -> Any:
    model = nn.Linear(3, 3)
    optimizer, held = torch.optim.SGD(model.parameters()), model.weight
    model.to("cuda").half()
    (only,) = {str(one.device) for one in optimizer.param_groups[0]["params"]}
    data = nn.Parameter(torch.ones(2))
    data.data = data.data.cuda()
    twin = copy.deepcopy(model)
    return [only, held is model.weight, str(held.dtype), str(data.device), str(twin.weight.device)]


@program
def outside_of_the_mode() -> Any:
    found = []

    def run() -> None:
        x = torch.ones(4, 4, device="cuda:2", requires_grad=True)
        (nn.Linear(4, 4, device="cuda:2")(x) * 2).sum().backward()
        found.append([str(x.grad.device), type(x.grad).__name__, type(torch.ones(1)).__name__])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found


class Kernels(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    """Notes which attention runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).partition(".")[2].partition(".")[0]
        if name.startswith("_scaled_dot_product"):
            self.seen.append(name.removeprefix("_scaled_dot_product_").removesuffix("_attention"))
        return func(*args, **(kwargs or {}))


def qkv(
    width: int = 64, heads: int = 8, kv: int = 8, dtype: Any = torch.bfloat16, depth: int = 0
) -> list[Any]:
    shapes = [(2, heads, 128, width), (2, kv, 128, width), (2, kv, 128, depth or width)]
    return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]


@program
def attention() -> Any:
    def mask(**kinds: Any) -> Any:
        return {"attn_mask": torch.ones(128, 128, device="cuda", **kinds)}

    half, full = {"dtype": torch.bfloat16}, {"dtype": torch.float32}
    cases = {
        "plain": ({}, {"is_causal": True}),
        "fp32": (full, {}),
        "bool mask": ({}, mask(dtype=torch.bool)),
        "trained bias": (
            {},
            {"attn_mask": torch.ones(2, 8, 128, 128, device="cuda", requires_grad=True, **half)},
        ),
        "wide": ({"width": 320}, {}),
        "odd": ({"width": 100}, {}),
        "latent": ({"width": 192, "depth": 128}, {}),
        "grouped": ({"kv": 2}, {"enable_gqa": True}),
        "grouped fp32": ({"kv": 2, **full}, {"enable_gqa": True}),
        "dropout": ({}, {"dropout_p": 0.1}),
    }
    found = {}
    for name, (shape, flags) in cases.items():
        with Kernels() as kernels:
            F.scaled_dot_product_attention(*qkv(**shape), **flags).sum().backward()
        found[name] = [kernels.seen[0] if kernels.seen else "math", len(kernels.seen)]
    for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(kernel), Kernels() as kernels:
            F.scaled_dot_product_attention(*qkv())
        found[kernel.name] = [kernels.seen[0] if kernels.seen else "math", len(kernels.seen)]
    return found


@program
def which_kernels_of_attention() -> Any:
    from torch.backends import cuda

    asked = (
        cuda.can_use_flash_attention,
        cuda.can_use_efficient_attention,
        getattr(cuda, "can_use_cudnn_attention", None),
    )
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        params = cuda.SDPAParams(*qkv(dtype=dtype), None, 0.0, False, False)
        found.append([ask(params) for ask in asked if ask])
    return found


@program
def settings() -> Any:
    before = torch.backends.cudnn.benchmark_limit
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, benchmark_limit=3):
        inside = torch.backends.cudnn.benchmark_limit
    torch.cuda.set_sync_debug_mode("warn")
    return [before, inside, torch.backends.cudnn.benchmark_limit, torch.cuda.get_sync_debug_mode()]


@program
def no_attention_left() -> Any:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(*qkv(dtype=torch.float32))


@program
def side_stream() -> Any:
    main, side, event = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Event()
    x = torch.ones(300, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x * 2
        event.record()
    main.wait_event(event)
    y.record_stream(main)
    del y
    torch.cuda.synchronize()
    return [main.cuda_stream, side.cuda_stream, side == torch.cuda.current_stream(), str(side.device)]


@program
def addresses() -> Any:
    x = torch.ones(1000, device="cuda")
    view, copied = x.view(10, 100), x.clone()
    before = copied.data_ptr()
    copied.untyped_storage().resize_(8000)
    return [x.data_ptr() == view.data_ptr(), x.data_ptr() != before, before != copied.data_ptr()]


@program
def pinned() -> Any:
    device = torch.ones(3, device="cuda")
    return [
        torch.ones(3).pin_memory().is_pinned(),
        torch.empty(3, pin_memory=True).is_pinned(),
        torch.ones(3).is_pinned(),
        device.is_pinned(),
        str(torch.ones(3).pin_memory().to("cuda", non_blocking=True).device),
    ]


@program
def pinning_the_device() -> Any:
    return torch.ones(3, device="cuda").pin_memory()


@program
def layers_of_cudnn() -> Any:
    with torch.device("cuda"):
        x = torch.ones(5, 2, 8, requires_grad=True)
        lstm, gru = nn.LSTM(8, 6, num_layers=2, bidirectional=True), nn.GRU(8, 6)
        out, (hidden, cell) = lstm(x)
        shapes = [out, hidden, cell, gru(x)[0]]
        out.sum().backward()
        F.conv2d(torch.ones(1, 3, 8, 8, requires_grad=True), torch.ones(4, 3, 3, 3)).sum().backward()
    return [
        [list(one.shape) for one in shapes],
        list(x.grad.shape),
        str(out.device),
    ]


@program
def reserve_of_layers() -> Any:
    layers, x = nn.LSTM(8, 64, num_layers=2).cuda(), torch.ones(16, 4, 8, device="cuda")
    out, states = layers(x)
    held = getattr(out.grad_fn, "_saved_result3").nbytes  # noqa: B009 - a name of autograd's
    out.sum().backward()
    return [held, len(states)]


def world(size: int = 64) -> Any:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if int(torch.__version__.split(".")[1]) < 10:
        with suppress(ImportError):  # shapes of collectives, which newer versions have at once
            import_module("torch.distributed._tools.fake_collectives")
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=size)
    with unset_fake_temporarily():  # it reads where this rank is, which nobody answers here
        return dist.device_mesh.init_device_mesh("cuda", (size,))


def layers() -> Any:
    with torch.device("cuda"):
        return nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])


@program
def fully_sharded() -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    mesh, found = world(), []
    for policy in ({}, {"offload_policy": CPUOffloadPolicy()}):
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]) if policy else layers()
        for layer in model:
            fully_shard(layer, mesh=mesh, **policy)
        fully_shard(model, mesh=mesh, **policy)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        weight = model[0].weight
        found.append([list(weight.to_local().shape), str(weight.device), str(weight.grad.device)])
    return found


@program
def flat_sharded() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    world()
    model = FullyShardedDataParallel(layers(), device_id=3, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    return [str(one.device) for one in model.parameters() if one.numel()][:1]


@program
def reducer_of_ddp() -> Any:
    world()
    setattr(dist, "_verify_params_across_processes", lambda *args: None)  # noqa: B010 - it reads memory of the host
    sizes = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP accepts its own types only
        sizes.append(bucket.buffer().numel())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model = nn.parallel.DistributedDataParallel(layers(), device_ids=[3])
    model.register_comm_hook(None, hook)
    for _ in range(1):  # the second builds other buckets, by numbers in the memory of the host
        model(torch.randn(8, 64, device="cuda")).sum().backward()
    return [sizes, str(model.module[0].weight.grad.device)]


@program
def asking_for_more() -> Any:
    return torch.cuda.CUDAGraph()


@program
def asking_what_is_not_there() -> Any:
    return torch.cuda.memory.caching_allocator_alloc(16)


def main() -> None:
    """Run the programs, each in a child of its own."""
    warnings.simplefilter("ignore")
    for name, function in PROGRAMS.items():
        sys.stdout.flush()
        if os.fork() == 0:
            torch.cuda.set_device(3)
            said: dict[str, Any] = {"name": name}
            try:
                with DEVICE.mode, Numbers():
                    said["value"] = function()
            except Exception as error:
                said["error"] = f"{type(error).__name__}: {error}"
                traceback.print_exc()
            said["log"] = [entry._asdict() for entry in DEVICE.driver.take()]
            print(json.dumps(said), flush=True)
            os._exit(0)
        if status := os.wait()[1]:
            print(json.dumps({"name": name, "error": f"ended with {status}", "log": []}))


if __name__ == "__main__":
    main()
