"""Work of convolutional networks: convolutions by groups, layouts, normalisations, softmax in autocast."""

from pathlib import Path
from typing import Any

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.tape.calls import Call
from foretrace.tracer.rehearse.tape.pricing import conversion
from foretrace.tracer.rehearse.tape.works import traffic, work_of
from foretrace.traces.rehearsal import CONVERSION, read_rank, rehearsal_folder

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "pictures.py"
N, C, OUT, SIDE, K = 2, 8, 16, 6, 3


def _convolved(groups: int, *, last: bool = False, dtype: Any = None) -> Call:
    """Return the call of a convolution that keeps the size of its pictures."""
    dtype = dtype or torch.float16
    layout = torch.channels_last if last else torch.contiguous_format
    x = torch.empty(N, C, SIDE, SIDE, dtype=dtype).contiguous(memory_format=layout)
    weight = torch.empty(OUT, C // groups, K, K, dtype=dtype).contiguous(memory_format=layout)
    out = torch.empty(N, OUT, SIDE, SIDE, dtype=dtype).contiguous(memory_format=layout)
    named = {"input": x, "weight": weight, "transposed": False, "groups": groups}
    return Call("aten.convolution", (x, weight), named, out)


def _back(call: Call, asked: tuple[bool, ...] = (True, True, False)) -> Call:
    x, weight = call.args
    named = {**call.named, "grad_output": call.out, "output_mask": asked}
    return Call("aten.convolution_backward", (call.out, x, weight), named, (x, weight))


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_a_convolution_by_groups_has_the_flops_of_its_groups(groups: int) -> None:
    """A place of an output channel adds up ``C / groups`` channels of ``K x K`` places."""
    flops = 2 * N * SIDE * SIDE * OUT * (C // groups) * K * K
    call = _convolved(groups)
    forward, backward = work_of(call), work_of(_back(call))
    assert (forward.flops, backward.flops) == (flops, 2 * flops)
    assert (forward.batch, forward.n, forward.k) == (groups, OUT // groups, C // groups * K * K)
    assert forward.bytes_moved == sum(t.nbytes for t in (*call.args, call.out))


def test_what_a_product_reads_and_writes_with_channels_outermost_is_copied_once_for_it() -> None:
    """Forward pictures, weight and result; backward the same three of either product."""
    call = _convolved(1)
    all_three = sum(t.nbytes for t in (*call.args, call.out))
    found = [conversion(one, "fp16") for one in (call, _back(call), _back(call, (False, True, False)))]
    assert [one and one.bytes_moved for one in found] == [2 * all_three, 4 * all_three, 2 * all_three]
    assert [one and one.kernels for one in found] == [3, 6, 3]


def test_a_weight_with_channels_innermost_makes_the_result_so() -> None:
    """Then only the pictures are copied, forward; backward also the gradient, for either product."""
    outer, inner = _convolved(1), _convolved(1, last=True)
    x, weight = outer.args[0], inner.args[1]
    mixed = Call(outer.name, (x, weight), {**outer.named, "weight": weight}, inner.out)
    forward, backward = conversion(mixed, "fp16"), conversion(_back(mixed), "fp16")
    assert forward is not None
    assert backward is not None
    assert forward.bytes_moved == 2 * x.nbytes
    assert backward.bytes_moved == 2 * x.nbytes  # the gradient comes as the result went


def test_nothing_is_copied_for_channels_innermost_plain_cores_or_depthwise_kernels() -> None:
    last = _convolved(1, last=True)
    assert conversion(last, "fp16") is None
    assert conversion(_back(last), "bf16") is None
    assert conversion(_convolved(1, dtype=torch.float32), "fp32") is None
    assert conversion(_convolved(1, dtype=torch.float32), "tf32") is not None
    assert conversion(_convolved(C), "fp16") is None


def test_a_normalisation_reads_for_its_moments_and_again_for_its_result() -> None:
    """Passes: 3 forward, 5 backward; 2 and 3 where the moments are known, or a row stays in a processor."""
    x = torch.empty(4, 8, 6, 6)
    size, few = x.nbytes, 8 * 8 * 4
    named = {"input": x, "training": True}
    trains = traffic(Call("aten.native_batch_norm", (x,), named, (x,)))
    knows = traffic(Call("aten.native_batch_norm", (x,), {**named, "training": False}, (x,)))
    grad, weight = torch.empty_like(x), torch.empty(8)
    back = {"grad_out": grad, "input": x, "train": True}
    whole = traffic(Call("aten.native_batch_norm_backward", (grad, x, weight), back, (x, weight)))
    known = traffic(
        Call("aten.native_batch_norm_backward", (grad, x, weight), {**back, "train": False}, (x, weight))
    )
    assert (trains, knows) == (3 * size, 2 * size)
    assert whole == pytest.approx(5 * size, abs=few)
    assert known == pytest.approx(3 * size, abs=few)
    masks = {True: (True, True, True), False: (True, False, False)}
    layer = {
        has: traffic(Call("aten.native_layer_norm_backward", (grad, x), {**back, "output_mask": mask}, (x,)))
        for has, mask in masks.items()
    }
    assert layer == {True: 5 * size, False: 3 * size}


def _kept(folder: Path, *how: str) -> list[dict[str, Any]]:
    """Return the works of the second step, in order."""
    rehearse(Asked(command=(str(SCRIPT), *how), world_size=1, ranks=(0,), warmup=1, steps=1), folder)
    tables = read_rank(rehearsal_folder(folder), 0)
    places, works = tables.places.to_pylist(), tables.works.to_pylist()
    events = tables.events.to_pylist()
    return [works[e["item"]] for e in events if e["what"] == 0 and places[e["place"]]["step"] == 1]


@pytest.mark.parametrize(("layout", "n_conversions"), [("nchw", 4), ("nhwc", 0)])
def test_a_script_that_keeps_channels_outermost_pays_for_conversions(
    tmp_path: Path, layout: str, n_conversions: int
) -> None:
    """Two convolutions, forward and backward."""
    names = [work["name"] for work in _kept(tmp_path, layout, "float16")]
    assert names.count(CONVERSION) == n_conversions


@pytest.mark.parametrize(("dtype", "read"), [("float16", 2), ("bfloat16", 4)])
def test_the_softmax_of_autocast_reads_fp16_itself_and_bf16_through_a_copy(
    tmp_path: Path, dtype: str, read: int
) -> None:
    """CUDA has a kernel that reads fp16 and writes fp32 (``half_to_float``), and none for bf16."""
    n = 4 * 32 * 8 * 8
    works = {work["name"]: work for work in _kept(tmp_path, "nhwc", dtype)}
    assert works["aten._softmax"]["bytes_moved"] == n * (read + 4)
    given = 4 + 4 + read  # gradient and result in fp32, and the gradient of the input
    assert works["aten._softmax_backward_data"]["bytes_moved"] == n * given


def test_a_group_norm_of_a_gpu_copies_pictures_with_channels_innermost(tmp_path: Path) -> None:
    """Its kernels take channels outermost only: a copy before it, and the result stays so."""
    of = {layout: _kept(tmp_path / layout, layout, "float16", "norm") for layout in ("nhwc", "nchw")}
    copies = {layout: [w["name"] for w in works].count("aten.clone") for layout, works in of.items()}
    assert copies["nhwc"] == copies["nchw"] + 1
    names = [w["name"] for w in of["nhwc"]]
    assert names[names.index("aten.native_group_norm") - 1] == "aten.clone"
