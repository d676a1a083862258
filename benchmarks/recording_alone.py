"""A process alone in its group of gloo, that records itself: what benchmarks of hooks measure in."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def recording_alone() -> Iterator[tuple[Any, Path]]:
    """Yield the session of a recording in this process, which computes with one thread, and its directory.

    The recording ends with the block.
    """
    sys.path.insert(0, str(ROOT / "src"))
    torch, distributed = import_module("torch"), import_module("torch.distributed")
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    path = Path(tempfile.mkdtemp()) / "run"
    try:
        with import_module("foretrace").record(path) as recording:
            yield recording.session, path
    finally:
        distributed.destroy_process_group()
