"""Element-wise work of what ``torch.compile`` compiles is counted as the kernels that it would fuse."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import read_rank, rehearsal_folder

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "compiled.py"
ROWS, WIDTH = 1024, 256
ONE_PASS = 4 * ROWS * WIDTH
"""Bytes of the hidden states of a chain, in fp32."""


WRAPPED = """
import torch
from torch._dynamo import OptimizedModule

model = torch.nn.Linear(64, 64).cuda()
compiled = torch.compile(model)
assert isinstance(compiled, OptimizedModule)
assert compiled._orig_mod is model
assert set(compiled.state_dict()) == {"_orig_mod.weight", "_orig_mod.bias"}
assert compiled.in_features == 64
optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
for _ in range(2):
    compiled(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


Works = list[dict[str, Any]]
Done = Callable[[str, str], Works]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Return what rehearses a model once each way, and returns the works of forward and backward.

    They are those of the second step, one for each time that they are done.
    """

    @cache
    def works_of(model: str, how: str) -> Works:
        run = tmp_path_factory.mktemp("run") / "run"
        rehearse(Asked(command=(str(SCRIPT), model, how), world_size=1, ranks=(0,)), run)
        tables = read_rank(rehearsal_folder(run), 0)
        places, works = tables.places.to_pylist(), tables.works.to_pylist()
        kept = [e for e in tables.events.to_pylist() if e["what"] == 0 and places[e["place"]]["step"] == 1]
        return [works[e["item"]] for e in kept if places[e["place"]]["kind"] in {"forward", "backward"}]

    return works_of


def _traffic(done: Works, kind: str = "memory") -> int:
    """Return the bytes of the works of a *kind*."""
    return sum(work["bytes_moved"] for work in done if work["kind"] == kind)


def _products(done: Works) -> list[tuple[str, int]]:
    return [(work["name"], work["flops"]) for work in done if work["kind"] != "memory"]


@pytest.mark.parametrize("how", ["module", "in_place", "function"])
def test_element_wise_operators_between_two_products_are_one_pass(done: Done, how: str) -> None:
    """Forward reads and writes once; backward reads what was multiplied, a gradient, and what went in.

    However many operators there are; in eager mode each of them adds five passes.
    """
    few, many = (_traffic(done(f"chain{n}", how)) for n in (2, 9))
    assert many == few
    eager_few, eager_many = (_traffic(done(f"chain{n}", "eager")) for n in (2, 9))
    assert eager_many - eager_few == 7 * 5 * ONE_PASS


def test_one_operator_alone_is_the_same_compiled(done: Done) -> None:
    assert _traffic(done("chain1", "module")) == _traffic(done("chain1", "eager"))


def test_each_part_of_a_product_is_read(done: Done) -> None:
    """Two halves are read for one result, and two for their gradients, which are two: three passes more."""
    parts, one = (_traffic(done(model, "module")) for model in ("parts", "chain1"))
    assert parts - one == 3 * ONE_PASS


def test_what_is_copied_over_is_not_read(done: Done) -> None:
    assert _traffic(done("kept", "module")) == _traffic(done("kept", "eager"))


@pytest.mark.parametrize("model", ["language", "written", "gated"])
def test_products_are_those_of_eager_mode(done: Done, model: str) -> None:
    assert _products(done(model, "module")) == _products(done(model, "eager"))


def test_compilers_that_fuse_nothing_change_nothing(done: Done) -> None:
    assert done("written", "aot_eager") == done("written", "eager")


@pytest.mark.parametrize(
    ("model", "how", "least"),
    [
        ("language", "module", 1.1),
        ("written", "module", 3.0),
        ("gated", "module", 1.9),
        ("gated", "blocks", 1.9),
    ],
)
def test_traffic_is_near_what_the_compiler_itself_counts(
    done: Done, model: str, how: str, least: float
) -> None:
    """Within a fifth of what Inductor's scheduler counts for a CPU; in eager mode *least* times that."""
    counted = pytest.importorskip("tests.tracer.inductor").counted(model, by_block=how == "blocks")
    compiled, eager = (_traffic(done(model, one)) for one in (how, "eager"))
    assert 0.8 * counted < compiled < 1.05 * counted
    assert eager > least * counted


def test_rows_of_matrices_are_padded_where_a_compiler_is_asked(done: Done) -> None:
    """A vocabulary of 4099 tokens: eager products are not aligned; compiled ones are, and copies are made."""
    eager, compiled = (done("odd", how) for how in ("eager", "module"))
    unaligned = [work for work in eager if work["kind"] == "gemm" and not work["aligned"]]
    assert [work["name"] for work in unaligned] == ["aten.mm"] * 3  # forward, and two gradients
    assert all(work["aligned"] for work in compiled)
    logits = 8 * 128 * 4099 * 4
    copied = [work["bytes_moved"] for work in compiled if work["name"] == "compiled.pad"]
    assert copied == [2 * logits] * 2  # the gradient of the logits, for each of the products that read it


def test_a_compiled_module_is_wrapped_as_torch_wraps_one(tmp_path: Path) -> None:
    """Scripts unwrap it by ``_orig_mod``, strip that from names of parameters, and ask for its type."""
    (tmp_path / "script.py").write_text(WRAPPED)
    asked = Asked(command=(str(tmp_path / "script.py"),), world_size=1, ranks=(0,))
    found = rehearse(asked, tmp_path / "run")
    assert found.model is not None
    assert found.model["name"] == "Linear"
