"""Gives a process CUDA devices that PyTorch believes in: ``install``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.importing import Expectation
from foretrace.tracer.rehearse.device.driver import MOST_DEVICES, Driver, library
from foretrace.tracer.rehearse.device.kernels import make_mode, register
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.replacing import replaces

WHEELS: Final[Mapping[tuple[int, int], internals.Wheel]] = {
    (2, 14): internals.Wheel("13.0", (2, 30, 7), 92400),
    (2, 12): internals.Wheel("13.0", (2, 29, 7), 92000),
    (2, 11): internals.Wheel("13.0", (2, 28, 9), 91900),
    (2, 8): internals.Wheel("12.8", (2, 27, 5), 91002),
    (2, 7): internals.Wheel("12.6", (2, 26, 2), 90501),
    (0, 0): internals.Wheel("12.4", (2, 21, 5), 90100),
}
"""Versions in the wheels of torch, by the version that they begin with. Scripts choose dtypes by them.

Source: what the wheels of torch 2.6.0, 2.7.1, 2.8.0, 2.10.0, 2.11.0, 2.12.1 and 2.14.1 on PyPI require.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Properties of a GPU, under the names of ``torch.cuda.get_device_properties``: those of an H100.

    A script may choose by them; the times of its work are those of the cluster that it is simulated on.
    """

    name: str = "rehearsed GPU"
    major: int = 9
    minor: int = 0
    total_memory: int = 80 * 2**30
    multi_processor_count: int = 132
    warp_size: int = 32
    is_integrated: int = 0
    gcnArchName: str = ""  # noqa: N815 - torch's name, here and below
    L2_cache_size: int = 50 * 2**20
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 48 * 2**10
    shared_memory_per_block_optin: int = 227 * 2**10
    shared_memory_per_multiprocessor: int = 228 * 2**10
    # In kHz, as CUDA tells them.
    clock_rate: int = 1_980_000
    memory_clock_rate: int = 2_619_000
    memory_bus_width: int = 5120
    is_multi_gpu_board: int = 0
    pci_bus_id: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0
    uuid: str = "00000000-0000-0000-0000-000000000000"


@dataclass(frozen=True, slots=True)
class Device:
    """The devices of this process."""

    # current devices and streams, memory, and what happened to them, in order (``driver.take``)
    driver: Driver
    mode: Any  # makes all tensors fake while it is active. Those of the device are fake at any time
    _kept: Any


NO_GRAPHS: Final = (
    "CUDA graphs cannot be rehearsed: turn them off with an argument of the script, or with a stub that "
    "replaces torch.cuda.graph (--stub, docs/rehearse.md section 6)"
)


def install(count: int, *, tell: Callable[[str], None] = lambda words: None) -> Device:
    """Import PyTorch with *count* CUDA devices that do not exist.

    Args:
        count: devices, from 0 to 120.
        tell: called with what is done if it takes long.

    Raises:
        RehearsalError: torch was imported before, there is no compiler, or it fails.
    """
    if "torch" in sys.modules:
        raise RehearsalError("the device of a rehearsal has to be there before torch is imported")
    drivers = list[Driver]()
    expected = Expectation(internals.C_OF_TORCH, lambda c: drivers.append(fit_out(c, count, tell)))
    try:
        import torch
    finally:
        expected.remove()
    if not drivers:
        raise RehearsalError("torch has no module of C++ where it used to be")
    (driver,) = drivers
    internals.count_by_driver()
    internals.lift_on_host()
    internals.make_generators()
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor is deprecated")
    mode = make_mode(driver)

    @replaces(torch.UntypedStorage)
    def resize_(original: Any, storage: Any, size: int) -> Any:  # as FSDP does
        out = original(storage, size)
        driver.resized(storage)
        return out

    # torch.library takes kernels back when their Library is collected.
    kept = register(mode, driver)
    if count:
        internals.start_device()
    return Device(driver, mode, kept)


def fit_out(c: ModuleType, count: int, tell: Callable[[str], None]) -> Driver:
    """Give PyTorch's C++, just loaded, devices, before PyTorch's Python reads it; as ``install``."""
    if not 0 <= count <= MOST_DEVICES:
        raise RehearsalError(f"{count} GPUs in one process: at most {MOST_DEVICES} are possible")
    numbers = tuple(int(part) for part in sys.modules["torch.version"].__version__.split(".")[:2])
    # The newest comes first: the first one that is not newer than this PyTorch counts.
    wheel = next(wheel for since, wheel in WHEELS.items() if numbers >= since)
    folder, abi = Path(str(c.__file__)).parent, internals.has_new_abi(c)
    built = library(folder, new_abi=abi, runtime=wheel.runtime, tell=tell)
    gpu = Gpu()
    driver = Driver(built, count, (gpu.major, gpu.minor), wheel.cudnn)
    internals.become_cuda_build(c, driver, gpu, wheel, _refused)
    return driver


def _refused(name: str) -> Exception:
    """Return the error for a function of CUDA that has no answer."""
    if "raph" in name:
        return RehearsalError(NO_GRAPHS)
    return RehearsalError(
        f"a GPU that is not there has no {name.lstrip('_')}: the script asks CUDA for more than is imitated"
    )
