"""Rows of many lengths, one behind the other, cost what each of them costs alone."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import booleans, integers, lists
from tests.tracer.jagged import LENGTHS, WIDTH

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked, rehearse
from foretrace.tracer.rehearse.tape.calls import Call
from foretrace.tracer.rehearse.tape.works import BACKWARD_PRODUCTS, attention
from foretrace.tracer.rehearse.world.acting import Loaded
from foretrace.traces.rehearsal import read_rank, rehearsal_folder

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "jagged.py"
TOKENS = sum(LENGTHS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("way", ["rows", "views", "ends", "loaded"])
def test_work_is_that_of_all_rows(way: str, dtype: str, tmp_path: Path, loaded: Loaded) -> None:
    """Products are of all tokens, scores of each row with itself; flash in bf16, else memory-efficient."""
    asked = Asked(command=(str(SCRIPT), way, dtype), world_size=2, ranks=(0,))
    found = rehearse(asked, tmp_path / "run", on=loaded)
    tables = read_rank(rehearsal_folder(tmp_path / "run"), 0)
    items = tables.works.to_pylist()
    works = [items[event["item"]] for event in tables.events.to_pylist() if event["what"] == 0]
    products = sum(work["flops"] for work in works if work["kind"] == "gemm")
    assert products == 3 * 2 * TOKENS * WIDTH * 4 * WIDTH
    scores = sum(n * n for n in LENGTHS) // 2
    forward = 2 * scores * 2 * WIDTH
    by_kind = {work["kind"]: work for work in works if "attention" in work["kind"]}
    assert by_kind["attention"]["flops"] == forward
    assert by_kind["attention_backward"]["flops"] == forward * BACKWARD_PRODUCTS // 2
    assert by_kind["attention"]["name"] == (
        "aten._flash_attention_forward" if dtype == "bfloat16" else "aten._efficient_attention_forward"
    )
    assert found.job["input_shape"] == [1, TOKENS, WIDTH]
    assert not found.stated


def _tensor(*shape: int) -> Any:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


@given(lists(integers(1, 500), min_size=1, max_size=8), integers(1, 8), integers(1, 16), booleans())
def test_attention_over_many_lengths_is_that_of_each(
    lengths: list[int],
    heads: int,
    width: int,
    causal: bool,
) -> None:
    """FLOPs to those of half a score a row, bytes to the byte; the shape has as many scores, to rounding."""
    total = sum(lengths)
    q = _tensor(total, heads, 8 * width)
    ends = [0]
    for n in lengths:
        ends.append(ends[-1] + n)
    bounds = torch.empty(len(ends), dtype=torch.int32, device="meta")
    named = {"query": q, "key": q, "value": q, "cum_seq_q": bounds, "cum_seq_k": bounds, "is_causal": causal}
    call = Call("aten._flash_attention_forward", tuple(named.values()), named, q, (*ends, *ends))
    together = attention(call)
    each = []
    for n in lengths:
        one = _tensor(1, heads, n, 8 * width)
        alone = {"query": one, "key": one, "value": one, "is_causal": causal}
        name = "aten._scaled_dot_product_flash_attention"
        each.append(attention(Call(name, tuple(alone.values()), alone, one)))
    assert together.bytes_moved == sum(work.bytes_moved for work in each)
    assert abs(together.flops - sum(work.flops for work in each)) <= 4 * heads * 8 * width * len(lengths)
    assert together.m * together.n * together.batch == pytest.approx(
        heads * sum(n * n for n in lengths), rel=0.5
    )


@pytest.mark.parametrize(
    ("way", "dtype", "words"),
    [
        ("strided", "float32", r"jagged\.py:\d+: nested tensors of strided layout .*jagged"),
        ("strided views", "float32", r"jagged\.py:\d+: nested tensors of strided layout .*jagged"),
        ("loaded strided", "float32", r"jagged\.py:\d+: nested tensors of strided layout .*jagged"),
        ("rows", "float64", "No viable backend for scaled_dot_product_attention was found"),
        ("unlike", "float32", "cannot call binary pointwise function add.Tensor with inputs of shapes"),
    ],
)
def test_what_is_not_rehearsed_of_nested_tensors_is_refused(
    way: str, dtype: str, words: str, tmp_path: Path, loaded: Loaded
) -> None:
    """In one line: the old layout; as by torch, attention without a fused kernel, a sum of unlike rows."""
    asked = Asked(command=(str(SCRIPT), way, dtype), world_size=2, ranks=(0,))
    with pytest.raises(RehearsalError, match=words) as error:
        rehearse(asked, tmp_path / "run", on=loaded)
    assert "\n" not in str(error.value)
