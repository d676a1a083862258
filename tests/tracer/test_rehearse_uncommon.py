"""Operators that few models have are products where they are, and said to be unknown where they are not."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.words import NO_STEPS
from foretrace.traces.rehearsal import read_rank, rehearsal_folder

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "uncommon.py"
STEPS, ROWS, INPUTS, WIDTH = 12, 4, 32, 48
SIDE = 64

ALONE = """
import torch
model = torch.nn.Linear(8, 8, device="cuda")
for _ in range(3):
    model(torch.ones(2, 8, device="cuda")).sum().backward()
"""

Works = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Works, str]:
    """What the second step computes, and what the script says first."""
    folder = tmp_path_factory.mktemp("uncommon") / "run"
    rehearse(Asked(command=(str(SCRIPT),), world_size=2, ranks=(0,), warmup=1, steps=1), folder)
    tables = read_rank(rehearsal_folder(folder), 0)
    items = tables.works.to_pylist()
    said = (rehearsal_folder(folder) / "rank-00000" / "output.log").read_text().splitlines()[0]
    return [items[event["item"]] for event in tables.events.to_pylist() if event["what"] == 0], said


@pytest.fixture(scope="module")
def works(found: tuple[Works, str]) -> Works:
    """What the second step computes."""
    return found[0]


def _named(works: Works, name: str) -> Works:
    return [work for work in works if work["name"] == f"aten.{name}"]


def test_an_lstm_multiplies_every_token_by_all_weights_and_twice_that_backward(
    works: Works,
) -> None:
    """Four gates of inputs and of what came before; each step of a layer launches two kernels in turn."""
    flops = sum(2 * STEPS * ROWS * 4 * WIDTH * (inputs + WIDTH) for inputs in (INPUTS, WIDTH))
    (forward,), (backward,) = _named(works, "_cudnn_rnn"), _named(works, "_cudnn_rnn_backward")
    assert (forward["flops"], backward["flops"]) == (flops, 2 * flops)
    assert forward["kernels"] == 2 * (2 * STEPS + 1)


@pytest.mark.parametrize(
    ("name", "columns", "dtype"),
    [("_scaled_mm_v2", INPUTS, "fp8"), ("bmm", INPUTS, "bf16"), ("_euclidean_dist", INPUTS + 2, "fp32")],
)
def test_what_is_a_product_costs_one(name: str, columns: int, dtype: str, works: Works) -> None:
    """In eight bits, into another type, and distances of all pairs of rows."""
    found = [(work["kind"], work["flops"], work["dtype"]) for work in _named(works, name)]
    assert ("gemm", 2 * SIDE * SIDE * columns, dtype) in found


def test_a_decomposition_is_not_known(works: Works) -> None:
    """Its bytes do not tell how long it takes, so that its share is said beside the time."""
    assert [work["name"] for work in works if not work["is_known"]] == ["aten._linalg_eigh"]


def test_gradients_of_each_row_by_torch_func_are_products(works: Works) -> None:
    """One of all rows forward, and one of each row for its gradients of all weights."""
    found = [work["name"] for work in works if work["flops"] == 2 * ROWS * INPUTS * WIDTH]
    assert found == ["aten.mm", "aten.bmm"]


def test_sequences_without_padding_have_as_many_rows_as_they_are_long(found: tuple[Works, str]) -> None:
    """Of 5, 3 and 2 tokens: 10 rows, three at each of the first two steps; and padded again."""
    assert json.loads(found[1]) == [10, [3, 3, 2, 1, 1], [3, 7, WIDTH], [5, 3, 2]]


def test_a_script_without_an_optimizer_is_said_to_be_one_step(tmp_path: Path) -> None:
    """Its time is that of all its passes, whether steps are to warm up or not."""
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    asked = Asked(command=(str(script),), world_size=2, ranks=(0,), warmup=0)
    assert NO_STEPS in rehearse(asked, tmp_path / "run").notes
