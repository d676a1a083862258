"""What an operator is to host and device: launches of the one, the type that the other computes in."""

from dataclasses import replace

import pyarrow as pa
import pytest
from tests.simulator.rehearsal_tables import machine, work

from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.rehearsed.works import op_of, precision_of, priced
from foretrace.traces.rehearsal import WORKS

MODEL = ComputeModel(machine(8).device, "bf16")


@pytest.mark.parametrize("tokens", [6, 60])
@pytest.mark.parametrize("passes", ["", "_backward"])
def test_a_recurrent_layer_is_one_operation_of_the_host_over_any_number_of_tokens(
    tokens: int, passes: str
) -> None:
    """Its kernels take their time on the device one after the other all the same."""
    rows = [work(name=f"aten._cudnn_rnn{passes}", kernels=2 * tokens + 1), work(kernels=3)]
    found = priced(pa.Table.from_pylist(rows, schema=WORKS), MODEL)
    assert list(found.kernels) == [1, 3]
    short = priced(pa.Table.from_pylist([{**rows[0], "kernels": 1}], schema=WORKS), MODEL)
    latency_s = MODEL.device.gemm_latency_s
    assert found.seconds[0] - short.seconds[0] == pytest.approx(2 * tokens * latency_s)


def test_tensor_float_is_fp32_on_a_device_that_has_none() -> None:
    """Elsewhere a large product is faster in it, by no more than the peaks are."""
    row, plain = work(dtype="tf32"), work(dtype="fp32")
    gpu, table = machine(8).device, pa.Table.from_pylist([row], schema=WORKS)
    seconds = priced(pa.Table.from_pylist([row, plain], schema=WORKS), MODEL).seconds
    assert 1 < seconds[1] / seconds[0] <= gpu.peak("tf32") / gpu.peak("fp32")
    assert (op_of(row, gpu).dtype, precision_of([table], gpu)) == ("tf32", "tf32")
    peaks = {name: peak for name, peak in gpu.peak_flops_per_s.items() if name != "tf32"}
    old = replace(gpu, peak_flops_per_s=peaks)
    assert (op_of(row, old).dtype, precision_of([table], old)) == ("fp32", "fp32")
