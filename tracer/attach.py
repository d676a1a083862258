"""What a process of a recorded command does: begin to record when it joins its process group."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from tracer.record import Recording, activate, wrap_init
from tracer.window import Window

RUN_VARIABLE: Final = "FORETRACE_RUN"
"""Environment variable with the absolute path of the run directory."""

NAME_VARIABLE: Final = "FORETRACE_NAME"
"""Environment variable with the name of the run."""


DEPTH_VARIABLE: Final = "FORETRACE_DEPTH"
"""Environment variable with the depth, ``light`` or ``kernels``."""

RANKS_VARIABLE: Final = "FORETRACE_RANKS"
STEPS_VARIABLE: Final = "FORETRACE_STEPS"
"""Environment variables with the ranks and steps to record, as ``Window.parsed`` takes them."""


def attach(module: Any) -> None:
    """Arrange for a recording to begin with ``init_process_group``.

    Args:
        module: ``torch.distributed.distributed_c10d``, just imported.
    """
    path = Path(os.environ[RUN_VARIABLE])
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if restart:  # what was recorded before the restart stays as it is
        path = path.with_name(f"{path.name}-restart{restart}")
    window = Window.parsed(ranks=os.environ.get(RANKS_VARIABLE, ""), steps=os.environ.get(STEPS_VARIABLE, ""))
    recording = Recording(
        path,
        name=os.environ.get(NAME_VARIABLE, ""),
        flush_s=None,
        window=window,
        depth=os.environ.get(DEPTH_VARIABLE, "light"),
    )
    activate(recording)
    wrap_init(module, recording)
