"""What a process of a recorded command does: begin to record when it joins its process group."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

from foretrace.tracer.importing import Expectation
from foretrace.tracer.optimizing import optimizer_steps
from foretrace.tracer.record import DEPTHS, Recording, activate, begin_now, expect
from foretrace.tracer.run_directory import RESTART
from foretrace.tracer.window import Window

RUN_VARIABLE: Final = "FORETRACE_RUN"
"""Environment variable with the absolute path of the run directory."""

NAME_VARIABLE: Final = "FORETRACE_NAME"
"""Environment variable with the name of the run."""


DEPTH_VARIABLE: Final = "FORETRACE_DEPTH"
"""Environment variable with the depth, ``light`` or ``kernels``."""

RANKS_VARIABLE: Final = "FORETRACE_RANKS"
STEPS_VARIABLE: Final = "FORETRACE_STEPS"
"""Environment variables with the ranks and steps to record, as ``Window.parsed`` takes them."""


_OPTIMIZER: Final = "torch.optim.optimizer"
"""Module in which hooks on optimizers are registered."""


def attach(module: Any) -> None:
    """Arrange for a recording to begin with ``init_process_group``.

    Args:
        module: ``torch.distributed.distributed_c10d``, just imported.
    """
    path = Path(os.environ[RUN_VARIABLE])
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if restart:  # what was recorded before the restart stays as it is
        path = path.with_name(f"{path.name}{RESTART}{restart}")
    window = Window.parsed(ranks=os.environ.get(RANKS_VARIABLE, ""), steps=os.environ.get(STEPS_VARIABLE, ""))
    recording = Recording(
        path,
        name=os.environ.get(NAME_VARIABLE, ""),
        flush_s=None,
        window=window,
        depth=os.environ.get(DEPTH_VARIABLE, DEPTHS[0]),
        is_shared=True,
    )
    activate(recording)
    expect(recording, module)
    if not recording.awaits_group:
        _begin_alone(recording)


def _begin_alone(recording: Recording) -> None:
    """Have *recording* begin with the first step of an optimizer if no process group was joined by then."""

    def register(module: Any) -> None:
        optimizer_steps(module).first = lambda: begin_now(recording)

    if _OPTIMIZER in sys.modules:
        register(sys.modules[_OPTIMIZER])
    else:
        Expectation(_OPTIMIZER, register)
