"""Export of a model as a graph, which ``torch.distributed.pipelining.pipeline`` uses to split it.

An export runs the model on fake tensors and keeps one per operator. In a real run they take no memory on the
GPU. A rehearsal could not tell them from the fake tensors that represent tensors of the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession


def install(session: RehearsalSession) -> None:
    """Ignore ``torch.export.export``: its operators and its tensors are not on the device."""
    import torch

    anywhere: Any = torch.export
    original = anywhere.export

    def export(*args: Any, **kwargs: Any) -> Any:
        with session.aside():
            return original(*args, **kwargs)

    anywhere.export = export
