"""Graphs that torch takes of a model, as ``torch.distributed.pipelining.pipeline`` does to cut it.

Whoever exports a graph runs the model on fake tensors, of which the graph keeps one per operator: on a GPU
they take no memory. In a rehearsal they are of the same kind as those that stand for the device's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracer.rehearse.session import RehearsalSession


def install(session: RehearsalSession) -> None:
    """Let ``torch.export.export`` go unseen: neither its operators nor its tensors are of the device."""
    import torch

    anywhere: Any = torch.export
    original = anywhere.export

    def export(*args: Any, **kwargs: Any) -> Any:
        with session.aside():
            return original(*args, **kwargs)

    anywhere.export = export
