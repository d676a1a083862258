"""Operands of unlike types, and memory behind handles: what a GPU refuses and holds, a rehearsal does."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import rehearsal_folder

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "unlike.py"
RANKS, HELD_BYTES = 4, 1024 * 4
"""Ranks of the world, and the bytes of each tensor that is reduced."""

WEIGHTED = """
import torch
norm = torch.nn.LayerNorm(8, device="cuda")
norm(torch.ones(4, 8, device="cuda", dtype=torch.bfloat16))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script says in a rehearsal."""
    folder = tmp_path_factory.mktemp("unlike") / "run"
    rehearse(Asked(command=(str(SCRIPT),), world_size=RANKS, ranks=(0,), warmup=0, steps=3), folder)
    return _said((rehearsal_folder(folder) / "rank-00000" / "output.log").read_text())


def _said(printed: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    return found


def test_what_torch_refuses_for_its_types_is_refused(said: dict[str, Any], ranks: Any) -> None:
    """Calls of products, norms, rows that are put somewhere, and losses: the same as on real tensors."""
    real = ranks.run([sys.executable, str(SCRIPT)], ranks.env(), 1)
    assert real.status == (0,), real.errors
    assert said["refused"] == _said(real.output)["refused"]
    assert "mm" in said["refused"]
    assert "mm, narrow" not in said["refused"]


def test_weights_in_fp32_do_not_norm_narrower_inputs_on_a_gpu(tmp_path: Path) -> None:
    """A processor takes them; the line says what to do."""
    script = tmp_path / "weighted.py"
    script.write_text(WEIGHTED)
    with pytest.raises(RehearsalError, match=r"native_layer_norm of bfloat16 and float32.* cast one"):
        rehearse(Asked(command=(str(script),), world_size=1), tmp_path / "run")


def test_a_handle_holds_operands_until_it_is_waited_for_and_results_as_long_as_it_lives(
    said: dict[str, Any],
) -> None:
    """As works of NCCL do; one that nobody was handed holds nothing."""
    whole = RANKS * HELD_BYTES
    assert said["held"] == {
        "under way": 3 * HELD_BYTES,
        "waited for": 3 * HELD_BYTES,
        "let go": 0,
        "at once": 0,
        "gathering": whole + HELD_BYTES,
        "gathered": whole,
    }
