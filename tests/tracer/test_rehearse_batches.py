"""What a rehearsal says of a training whose batch is no plain tensor, and which cleans up as it ends."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse, rows_and_tokens

from foretrace.tracer.rehearse.rehearsing import Asked

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "batch_in_one.py"
WORLD, ROWS, TOKENS = 8, 4, 32


@pytest.mark.parametrize("kind", ["tensor", "dict", "list", "labels"])
def test_rows_are_those_of_the_batch_wherever_it_is(kind: str, tmp_path: Path) -> None:
    """A tensor in a dictionary or a list, also behind labels, is the input as one handed over by itself."""
    found = rehearse(Asked(command=(str(SCRIPT), kind), world_size=WORLD, ranks=(0,)), tmp_path / "run")
    assert found.job["input_shape"] == [ROWS, TOKENS]
    assert rows_and_tokens(found) == (WORLD * ROWS, WORLD * ROWS * TOKENS)


def test_what_is_put_on_the_host_behind_the_last_step_is_in_no_step(tmp_path: Path) -> None:
    """States of an optimizer that a script takes off the device as it ends do not count for the host."""
    asked = Asked(command=(str(SCRIPT), "tensor"), world_size=WORLD, ranks=(0,))
    memory = rehearse(asked, tmp_path / "run").memory["0"]
    n_parameters = 100 * 64 + 64 * 1000 + 1000
    assert memory["bytes"]["optimizer"] >= 2 * 4 * n_parameters
    assert memory.get("host", {"peak_bytes": 0})["peak_bytes"] < 4 * n_parameters
