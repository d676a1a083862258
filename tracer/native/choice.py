"""Which hooks record in this process: compiled ones, or those in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretrace.tracer.native.build import load

if TYPE_CHECKING:
    from foretrace.tracer.native.hooks import Native
    from foretrace.tracer.session import Session


def compiled_hooks(session: Session) -> Native | None:
    """Return the compiled hooks of *session*, or None where those in Python have to do.

    Those in Python are used on a GPU, and, with a warning, where the compiled ones cannot be set up.
    """
    import torch

    module = None if torch.cuda.is_available() else load()
    if module is None:
        return None
    from foretrace.tracer.native.hooks import Native

    try:
        return Native(module, session)
    except Exception as error:  # those in Python do as well
        session.warn(f"compiled hooks not used: {type(error).__name__}: {error}")
        return None
