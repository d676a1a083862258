"""Which hooks a recording puts into a process, in which order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from foretrace.tracer import internals
from foretrace.tracer.completion import Completions
from foretrace.tracer.importing import Expectation
from foretrace.tracer.parallelism import MeshHook
from foretrace.tracer.process import is_distributed

if TYPE_CHECKING:
    from foretrace.tracer.session import Session


class Hook(Protocol):
    """Something that watches the training and can be taken away again."""

    def remove(self) -> None:
        """Leave the training as it was."""


def install(session: Session) -> list[Hook]:
    """Put all hooks of *session* in place and return them; those that others need are attributes of it."""
    from foretrace.tracer.backward import BackwardHook
    from foretrace.tracer.exporting import EXPORTING, ExportHook
    from foretrace.tracer.modules import ModuleHook
    from foretrace.tracer.recomputing import CheckpointHook
    from foretrace.tracer.steps import OptimizerHook
    from foretrace.tracer.waits import GraphHook, StreamHook

    hooks: list[Hook]
    if session.native is None:
        session.backward = BackwardHook(session)
        modules = ModuleHook(session)
        exports = _when_imported(session, "modules", EXPORTING, lambda _: ExportHook(session, modules))
        hooks = [session.backward, modules, exports]
    else:
        from foretrace.tracer.native.hooks import NativeModuleHook
        from foretrace.tracer.native.wrappers import NativeBackwardHook

        session.backward = NativeBackwardHook(session, session.native)
        hooks = [session.backward, NativeModuleHook(session, session.native)]
    hooks += [CheckpointHook(session), OptimizerHook(session), StreamHook(session), GraphHook()]
    return hooks + _distributed(session) if is_distributed() else hooks


def _distributed(session: Session) -> list[Hook]:
    import torch.distributed as dist

    from foretrace.tracer.collectives import CollectiveHook
    from foretrace.tracer.waits import BatchHook, BlockingHook, WaitHook

    hooks: list[Hook]
    if session.native is None:
        session.completions = Completions(dist.Work.wait, session.rank)
        hooks = [CollectiveHook(session), WaitHook(session), BatchHook(session)]
    else:
        from foretrace.tracer.native.hooks import NativeCollectiveHook
        from foretrace.tracer.native.wrappers import NativeWaitHook

        hooks = [NativeCollectiveHook(session, session.native), NativeWaitHook(session.native)]
    hooks += [BlockingHook(session), MeshHook(session)]
    return [
        *hooks,
        _when_imported(session, "pipeline", internals.PIPELINING, _pipeline),
        _when_imported(session, "collectives", internals.SYMMETRIC, _symmetric),
    ]


def _when_imported(session: Session, name: str, module: str, make: Callable[[Session], Hook]) -> Hook:
    """Return hook *name* that *make* makes once *module* is there: at once, or what waits for it."""
    if module in sys.modules:
        return make(session)
    return Expectation(module, session.guarded(name, lambda _: session.add_hook(make(session))))


def _symmetric(session: Session) -> Hook:
    from foretrace.tracer.symmetric import SymmetricHook

    return SymmetricHook(session)


def _pipeline(session: Session) -> Hook:
    from foretrace.tracer.pipeline import PipelineHook

    if session.native is None:
        session.pipeline = PipelineHook(session)
    else:
        from foretrace.tracer.native.wrappers import NativePipelineHook

        session.pipeline = NativePipelineHook(session, session.native)
    hook: Hook = session.pipeline
    return hook
