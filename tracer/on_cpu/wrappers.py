"""What torch puts around models, optimizers and data, on the processor."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import functools
import inspect
from typing import Any

from foretrace.tracer.rehearse.script import compiling, shims, stand_ins


def install(torch: Any) -> None:
    """Replace wrappers of models, gradient scalers, norms over ranks, loaders."""
    from torch.distributed.fsdp import FullyShardedDataParallel, _init_utils
    from torch.utils.data import DataLoader

    cpu = torch.device("cpu")
    _given(torch.nn.parallel.DistributedDataParallel, device_ids=None, output_device=None)
    _given(FullyShardedDataParallel, device_id=cpu)
    names: Any = _init_utils
    names._check_module_states_for_sync_module_states = lambda module: None  # requires parameters on a GPU
    _given(DataLoader, pin_memory=False, pin_memory_device="")
    torch.compile, torch.nn.Module.compile = _compiled, lambda self, *args, **kwargs: None
    shims.scaler()
    stand_ins.synced_norms()


def _compiled(model: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Return *model* as it is, or what ``torch.compile`` would put around a module; compile nothing."""
    import torch

    if model is None:
        return functools.partial(_compiled, **kwargs)
    return compiling.wrapper()(model) if isinstance(model, torch.nn.Module) else model


def _given(kind: Any, **values: Any) -> None:
    """Give the constructor of *kind* these *values*, whatever the script says; they are set by name."""
    made = kind.__init__
    names = list(inspect.signature(made).parameters)

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        found = list(args)
        for name, value in values.items():
            at = names.index(name) - 1 if name in names else len(found)
            if at < len(found):
                found[at] = value
            elif name in names:
                kwargs[name] = value
        made(self, *found, **kwargs)

    kind.__init__ = init
