"""Which hooks a recording puts into a process, in which order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from foretrace.tracer import internals
from foretrace.tracer.completion import Completions
from foretrace.tracer.importing import Expectation
from foretrace.tracer.parallelism import MeshHook
from foretrace.tracer.process import is_distributed

if TYPE_CHECKING:
    from foretrace.tracer.session import Session


CHECKPOINTS: Final = "torch.distributed.checkpoint"
"""Module that saves what is spread over ranks."""


class Hook(Protocol):
    """Something that watches the training and can be taken away again."""

    def remove(self) -> None:
        """Leave the training as it was."""


def install(session: Session) -> list[Hook]:
    """Put all hooks of *session* in place and return them; those that others need are attributes of it."""
    import torch

    from foretrace.tracer.backward import BackwardHook
    from foretrace.tracer.exporting import EXPORTING, ExportHook
    from foretrace.tracer.memory import PeakHook
    from foretrace.tracer.modules import ModuleHook
    from foretrace.tracer.recomputing import CheckpointHook
    from foretrace.tracer.steps import OptimizerHook, SaveHook
    from foretrace.tracer.waits import GraphHook, StreamHook

    session.backward = BackwardHook(session)
    modules = ModuleHook(session)
    exports = _when_imported(session, "modules", EXPORTING, lambda _: ExportHook(session, modules))
    hooks: list[Hook] = [session.backward, modules, exports]
    hooks += [CheckpointHook(session), OptimizerHook(session), StreamHook(session), GraphHook()]
    hooks += [SaveHook(session, torch, "save"), _when_imported(session, "modules", CHECKPOINTS, _saves)]
    hooks.append(PeakHook(session))
    return hooks + _distributed(session) if is_distributed() else hooks


def _distributed(session: Session) -> list[Hook]:
    import torch.distributed as dist

    from foretrace.tracer.collectives import CollectiveHook
    from foretrace.tracer.waits import BatchHook, BlockingHook, WaitHook

    session.completions = Completions(dist.Work.wait, session.rank)
    session.device_times.ask = session.completions.ask
    return [
        CollectiveHook(session),
        WaitHook(session),
        BatchHook(session),
        BlockingHook(session),
        MeshHook(session),
        _when_imported(session, "pipeline", internals.PIPELINING, _pipeline),
        _when_imported(session, "collectives", internals.SYMMETRIC, _symmetric),
    ]


def _when_imported(session: Session, name: str, module: str, make: Callable[[Session], Hook]) -> Hook:
    """Return hook *name* that *make* makes once *module* is there: at once, or what waits for it."""
    if module in sys.modules:
        return make(session)
    return Expectation(module, session.guarded(name, lambda _: session.add_hook(make(session))))


def _saves(session: Session) -> Hook:
    from foretrace.tracer.steps import SaveHook

    return SaveHook(session, sys.modules[CHECKPOINTS], "save", "async_save")


def _symmetric(session: Session) -> Hook:
    from foretrace.tracer.symmetric import SymmetricHook

    return SymmetricHook(session)


def _pipeline(session: Session) -> Hook:
    from foretrace.tracer.pipeline import PipelineHook

    session.pipeline = hook = PipelineHook(session)
    return hook
