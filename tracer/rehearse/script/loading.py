"""Where ``torch.load`` puts what it reads: each storage as its file says, or as the script maps that."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tracer.rehearse.errors import RehearsalError
from tracer.rehearse.gpu.devices import is_gpu
from tracer.rehearse.gpu.host import HOST

if TYPE_CHECKING:
    from tracer.rehearse.session import RehearsalSession


class _Read:
    """What stands for a storage that has been read, which is on the host until somebody moves it."""

    device: Any = "cpu"

    def to(self, device: Any = "cpu", *_: Any, **__: Any) -> _Read:
        """Move it."""
        self.device = device
        return self

    def cuda(self, device: Any = None, *_: Any, **__: Any) -> _Read:
        """Move it to a GPU."""
        del device
        return self.to("cuda")

    def cpu(self) -> _Read:
        """Move it to the host."""
        return self.to()

    def untyped(self) -> _Read:
        """Return itself."""
        return self


@contextmanager
def to(session: RehearsalSession, mapped: Any) -> Iterator[None]:
    """Put for a while what ``torch.load`` reads where its file, or what the script has *mapped*, says.

    Torch itself decides: *mapped* is a device, a dict of them, a function of a storage and where it was, or
    None. Of a fake tensor it only notes where it was.

    Raises:
        RehearsalError: this version of torch does not: before 2.7 what it reads is nowhere.
    """
    import torch
    from torch import _utils
    from torch.serialization import _get_restore_location

    anywhere: Any = _utils
    if not hasattr(anywhere, "_restore_device_fake_mode"):
        raise RehearsalError(
            f"torch.load cannot be rehearsed with torch {torch.__version__}: take 2.7 or newer, or leave "
            "loading out by an argument of the script or a stub (--stub, docs/rehearse.md section 6)"
        )
    original, place, cpu = anywhere._restore_device_fake_mode, session.placement, torch.device("cpu")
    restore = _get_restore_location(mapped)

    def restored(tensor: Any) -> Any:
        location = getattr(tensor.untyped_storage(), "_fake_device", None)
        where = "meta" if location is None else str(restore(_Read(), location).device)
        if where.startswith("meta"):
            return original(tensor)
        tensor.fake_device = cpu
        if is_gpu(where):
            place.is_met = True
            place.put(tensor)
        else:
            place.keep(tensor)
        return tensor

    anywhere._restore_device_fake_mode = restored
    try:
        with session.host.making(HOST if place.is_met else ""), _nothing_remembered():
            yield
    finally:
        anywhere._restore_device_fake_mode = original


@contextmanager
def _nothing_remembered() -> Iterator[None]:
    """Let torch remember no operators of fake tensors for a while.

    It remembers them by their arguments. Of what puts a tensor upon a storage that is the storage itself,
    which would then count as memory for good, long after the script has let go of what it has read.
    """
    import torch

    mode: Any = torch._guards.detect_fake_mode(None)
    before = mode is not None and mode.cache_enabled
    if before:
        mode.cache_enabled = False
    try:
        yield
    finally:
        if before:
            mode.cache_enabled = True
