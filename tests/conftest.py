"""What every test shares: property tests are deterministic, and patient with a loaded machine.

Recordings use the hooks in Python, whatever was compiled here before, unless a test asks for those in C++.
"""

import os
from pathlib import Path

from hypothesis import settings

from tracer.native.build import SWITCH

settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")
os.environ[SWITCH] = "0"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what only tests start: scripts that train would do so if they were searched for doctests."""
    is_script = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if is_script else None
