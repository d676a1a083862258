"""The memory of a rehearsed rank against what torch's own tracker says of the same tensors."""

from pathlib import Path
from typing import Any

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "tracked_memory.py"
TOLERANCE = 0.03


@pytest.mark.parametrize("kind", ["fsdp2", "plain"])
def test_peak_memory_is_that_of_torchs_tracker(kind: str, tmp_path: Path, ranks: Any) -> None:
    """``FSDPMemTracker`` for FSDP2, ``MemTracker`` without."""
    if ranks.torch() < (2, 13):
        pytest.skip("rehearsals are tried with torch 2.13")
    file = tmp_path / "peak.txt"
    asked = Asked(command=(str(SCRIPT), kind, str(file)), world_size=8, ranks=(3,), warmup=2)
    memory = rehearse(asked, tmp_path / "run").memory["3"]
    assert memory["peak_bytes"] == pytest.approx(int(file.read_text()), rel=TOLERANCE)
    assert sum(memory["bytes"].values()) == memory["peak_bytes"]
    assert memory["bytes"]["activations"] > 0.5 * memory["peak_bytes"]
