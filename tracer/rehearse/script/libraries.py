"""Changes in libraries that behave differently with fake tensors, or would write them to files."""
# ruff: noqa: SLF001 - this module takes the place of parts of libraries

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.importing import Expectation
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.peers.engines import adam_of_deepspeed, pipeline_of_deepspeed

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession


def install(session: RehearsalSession) -> list[Any]:
    """Change each library once it is imported; return objects that must be kept alive."""
    return [
        kept
        for name, change in _CHANGES.items()
        for kept in when_imported(name, functools.partial(change, session))
    ]


def when_imported(name: str, change: Callable[[Any], None]) -> list[Any]:
    """Change the module *name* now, or once it is imported; return objects that must be kept alive."""
    if name in sys.modules:
        change(sys.modules[name])
        return []
    return [Expectation(name, change)]


def everywhere(name: str, original: Any, replaced: Callable[..., Any]) -> None:
    """Replace a function of torch by *replaced* in all modules that have it under this *name*."""
    for module in list(sys.modules.values()):
        if getattr(module, name, None) is original:
            setattr(module, name, replaced)


def _transformers(session: RehearsalSession, module: Any) -> None:
    """Make transformers treat fake tensors as real ones.

    It takes a fake tensor for a sign of graph tracing. It would then build a full mask where a real run uses
    causal attention, and would never check whether a batch is padded (``masking_utils.py``).
    """
    del session
    module.is_fake_tensor = lambda x: False
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # threads would load real tensors, which are not moved


def _distributions(session: RehearsalSession, module: Any) -> None:
    """Turn off argument validation in distributions: it needs the values of their parameters."""
    del session
    module.Distribution.set_default_validate_args(value=False)


def _metrics(session: RehearsalSession, module: Any) -> None:
    """Turn off input validation in torchmetrics: it needs values that are unknown."""

    def valid(*args: Any, **kwargs: Any) -> None:
        del args, kwargs
        session.warn(
            "torchmetrics checks no values, as with validate_args=False: in a real run its checks sort the "
            "values and wait for the GPU"
        )

    for name in [name for name in vars(module) if name.endswith("_tensor_validation")]:
        setattr(module, name, valid)


def _zero(session: RehearsalSession, module: Any) -> None:
    """Make ``ZeroRedundancyOptimizer`` collect states: those of other ranks are assumed to be like these."""
    del session
    module._broadcast_object = lambda obj, *args, **kwargs: obj


def _deepspeed(session: RehearsalSession, module: Any) -> None:
    """Make DeepSpeed's checks that all ranks have the same lists succeed; they still communicate."""
    del session
    compared, told = module.assert_lst_len_same_as_other_ranks, module.get_lst_from_rank0

    def compare(lst: Any) -> None:
        with suppress(RuntimeError):
            compared(lst)

    def tell(lst: Any) -> Any:
        told(lst)
        return lst

    module.assert_lst_len_same_as_other_ranks, module.get_lst_from_rank0 = compare, tell


def _accelerate(session: RehearsalSession, module: Any) -> None:
    """Make every rank read the batches that rank 0 fetches for all, so that it knows their shapes."""
    kind = module.DataLoaderDispatcher
    original = kind._fetch_batches

    def fetch(self: Any, iterator: Any) -> Any:
        own = self.state.process_index
        if not own:
            return original(self, iterator)
        self.state.process_index = 0
        try:
            with session.aside():
                _, shapes = original(self, iterator)
        finally:
            self.state.process_index = own
        return None, shapes

    kind._fetch_batches = fetch


def _sharded_tensors(session: RehearsalSession, module: Any) -> None:
    """Turn off the check that shards do not overlap: all ranks count as having this rank's shard."""
    del session
    for name in ("validate_non_overlapping_shards_metadata", "check_tensor"):
        everywhere(name, getattr(module, name), lambda *args, **kwargs: None)


def _ray(session: RehearsalSession, module: Any) -> None:
    """Refuse Ray: its workers are processes that the script does not start itself."""
    del session

    def init(*args: Any, **kwargs: Any) -> None:
        del args, kwargs
        raise RehearsalError(
            "Ray starts processes of its own, which a rehearsal does not see. If they are the ranks: "
            "rehearse what a worker runs, as torchrun would start it (with Ray Train, "
            "ScalingConfig(num_workers=0)). If they run environments or load data for other ranks: "
            "put a replacement of ray into sys.modules in a stub file (--stub, docs/rehearse.md section 6)"
        )

    module.init = init


def _rpc(session: RehearsalSession, module: Any) -> None:
    """Refuse remote procedure calls: no other rank would run them."""
    del session

    def init_rpc(*args: Any, **kwargs: Any) -> None:
        del args, kwargs
        raise RehearsalError(
            "torch.distributed.rpc cannot be rehearsed: no other rank runs what this one calls. Rehearse the "
            "part that trains with collectives, such as the DDP trainers of a parameter server: replace the "
            "remote calls in a stub file (--stub, docs/rehearse.md section 6)"
        )

    module.init_rpc = init_rpc


_CHECKED: Final = (
    "calibration_error",
    "confusion_matrix",
    "hinge",
    "precision_recall_curve",
    "ranking",
    "stat_scores",
)
"""Modules of torchmetrics with functions that check values."""

_CHANGES: Final[Mapping[str, Callable[[Any, Any], None]]] = {
    "transformers.utils.import_utils": _transformers,
    "accelerate.data_loader": _accelerate,
    "deepspeed.runtime.zero.utils": _deepspeed,
    "deepspeed.runtime.pipe.engine": pipeline_of_deepspeed,
    "deepspeed.ops.adam.fused_adam": adam_of_deepspeed,
    "ray": _ray,
    "torch.distributed._shard.sharded_tensor.api": _sharded_tensors,
    "torch.distributed.rpc": _rpc,
    "torch.distributions.distribution": _distributions,
    "torch.distributed.optim.zero_redundancy_optimizer": _zero,
    **{f"torchmetrics.functional.classification.{name}": _metrics for name in _CHECKED},
}
"""By module, the function that changes it to behave as on a GPU."""
