"""Element-wise kernels that go through memory in order, and those that compute an address per element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import permutations, sampled_from
from tests.rehearsals import rehearse

from foretrace.simulator.compute.timing import ComputeModel, memory_s
from foretrace.simulator.workload.ops import Addressed, Op, memory
from foretrace.topologies.catalog import load_cluster
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.tape.calls import Call
from foretrace.tracer.rehearse.tape.pricing import is_elementwise, unordered
from foretrace.tracer.rehearse.tape.works import work_of
from foretrace.traces.rehearsal import read_rank, rehearsal_folder

torch = pytest.importorskip("torch")
aten = torch.ops.aten
A100 = load_cluster("dgx-a100").device
PROCESSORS = 108
SHAPE = (4, 3, 8, 6)


def _like(order: Sequence[int]) -> Any:
    """A dense tensor of ``SHAPE`` whose dimensions lie in memory in *order*, outermost first."""
    made = torch.empty([SHAPE[place] for place in order])
    return made.permute([list(order).index(place) for place in range(len(SHAPE))])


@given(a=permutations(range(4)), b=permutations(range(4)))
def test_operands_are_in_order_if_their_dimensions_lie_alike(a: list[int], b: list[int]) -> None:
    """Whatever the order is: channels last are as good as channels first, if all tensors have them there."""
    x, y = _like(a), _like(b)
    assert unordered((x, y), torch.empty_like(x)) == (0 if a == b else prod(SHAPE))


@given(cut=sampled_from([slice(0, 4), slice(0, 2), slice(0, 4, 2)]), dim=sampled_from([0, 1]))
def test_gaps_and_several_elements_in_one_place_are_out_of_order(cut: slice, dim: int) -> None:
    whole = torch.empty(4, 4)
    part = whole[cut] if dim == 0 else whole[:, cut]
    assert bool(unordered((part,), part)) is not part.is_contiguous()
    wide = torch.empty(4, 1).expand(4, 4)
    assert unordered((wide, whole), whole) == 16


def test_numbers_and_dimensions_of_one_element_change_no_order() -> None:
    x = torch.empty(5, 1, 7)
    assert unordered((x, torch.tensor(2.0), 3), torch.empty(5, 1, 7)) == 0
    assert unordered((x.expand(5, 1, 7), x.as_strided((5, 1, 7), (7, 99, 1))), x) == 0
    assert unordered((), ()) == 0


@pytest.mark.parametrize(
    ("func", "expected"),
    [
        (aten.add.Tensor, True),
        (aten.masked_fill_.Scalar, True),
        (aten.clone.default, True),
        (aten.copy_.default, True),
        (aten.sum.dim_IntList, False),
        (aten._softmax.default, False),
        (aten.mm.default, False),
    ],
)
def test_what_works_on_each_element_alone_is_elementwise(func: Any, expected: bool) -> None:
    assert is_elementwise(str(func.overloadpacket), func) is expected


def test_of_sparse_tensors_nothing_is_known() -> None:
    x = torch.eye(3).to_sparse()
    assert unordered((x, x), x) == 0


def test_filling_anew_copies_first() -> None:
    """Twice the traffic of filling in place, but for the mask, which is read once."""
    x, mask = torch.empty(4, 8), torch.empty(8, dtype=torch.bool)
    anew = work_of(Call("aten.masked_fill", (x, mask, 0.0), {}, torch.empty(4, 8)))
    place = work_of(Call("aten.masked_fill_", (x, mask, 0.0), {}, x))
    assert anew.bytes_moved - 8 == 2 * (place.bytes_moved - 8)


@pytest.mark.parametrize(("dtype", "addresses_decide"), [("bf16", True), ("fp32", False)])
def test_the_slower_of_addresses_and_bytes_counts(dtype: str, addresses_decide: bool) -> None:
    """On A100, a sum of two tensors is bound by addresses in 16 bit, by bytes in 32 bit."""
    n, width = 10**9, {"bf16": 2, "fp32": 4}[dtype]
    in_order = memory("aten.add", 3 * n * width, dtype)
    apart = replace(in_order, addressed=(Addressed(n, in_order.bytes_moved),))
    assert memory_s(apart, A100) >= memory_s(in_order, A100)
    addressed_s = n / (A100.addressed_per_ns * 1e9 * PROCESSORS) + A100.memory_bound_latency_s
    assert (memory_s(apart, A100) == pytest.approx(addressed_s)) is addresses_decide


def test_a_report_names_no_element_wise_work_among_unaligned_products() -> None:
    compute = ComputeModel(A100, "bf16")
    compute.op_s(Op("aten.add", "memory", 0, 10**6, dtype="bf16", addressed=(Addressed(10**6, 10**6),)))
    assert not any("16 bytes" in note for note in compute.notes)


def test_a_rehearsal_tells_them_apart_for_shapes_that_are_alike(tmp_path: Path) -> None:
    """The copy of a transposed matrix after that of one that is not; a mask that is broadcast."""
    (tmp_path / "script.py").write_text(
        "import torch\n"
        "layer = torch.nn.Linear(64, 64, device='cuda')\n"
        "optimizer = torch.optim.SGD(layer.parameters())\n"
        "for _ in range(2):\n"
        "    x = torch.empty(64, 64, device='cuda')\n"
        "    x.clone(memory_format=torch.contiguous_format)\n"
        "    x.t().clone(memory_format=torch.contiguous_format)\n"
        "    x.masked_fill_(torch.ones(64, dtype=torch.bool, device='cuda'), 0.0)\n"
        "    layer(x).sum().backward()\n"
        "    optimizer.step()\n"
    )
    rehearse(Asked(command=(str(tmp_path / "script.py"),), world_size=1, ranks=(0,)), tmp_path / "run")
    works = read_rank(rehearsal_folder(tmp_path / "run"), 0).works.to_pylist()
    found = sorted((work["name"], work["m"], work["aligned"]) for work in works if "ones" not in work["name"])
    expected = [("aten.clone", 0, True), ("aten.clone", 4096, False), ("aten.masked_fill_", 4096, False)]
    assert [one for one in found if one[0] in ("aten.clone", "aten.masked_fill_")] == expected
