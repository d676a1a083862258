"""Products of fp32 count as TensorFloat-32 where a GPU computes them so, which the script decides."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import read_rank, rehearsal_folder

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "tensor_floats.py"
CUDNN = ("convolution", "rnn")


def _types(folder: Path, how: str) -> tuple[set[str], set[str]]:
    """Return the types of the second step: of works of cuDNN, and of matrix products but those in bf16."""
    rehearse(Asked(command=(str(SCRIPT), how), world_size=1, ranks=(0,), warmup=1, steps=1), folder)
    tables = read_rank(rehearsal_folder(folder), 0)
    places, works = tables.places.to_pylist(), tables.works.to_pylist()
    done = [
        works[e["item"]]
        for e in tables.events.to_pylist()
        if e["what"] == 0 and places[e["place"]]["step"] == 1
    ]
    products = [work for work in done if work["kind"] == "gemm"]
    of_cudnn = {work["dtype"] for work in products if any(part in work["name"] for part in CUDNN)}
    others = {work["dtype"] for work in products if not any(part in work["name"] for part in CUDNN)}
    assert "bf16" in others
    return of_cudnn, others - {"bf16"}


@pytest.mark.parametrize(
    ("how", "of_cudnn", "others"),
    [
        ("nothing", "tf32", "fp32"),
        ("never", "fp32", "fp32"),
        ("switch", "tf32", "tf32"),
        ("precision", "tf32", "tf32"),
        ("switch_off", "tf32", "fp32"),
    ],
)
def test_convolutions_are_rounded_unless_forbidden_and_products_if_asked(
    tmp_path: Path, how: str, of_cudnn: str, others: str
) -> None:
    assert _types(tmp_path, how) == ({of_cudnn}, {others})
