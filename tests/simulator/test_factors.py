"""What factors of a calibration do to operations is what they were found to do."""

from dataclasses import replace

import pytest

from foretrace.simulator.compute.timing import ComputeModel, fixed_s
from foretrace.simulator.recorded.calibration import Calibration, Factor
from foretrace.simulator.workload.ops import Op, gemm, memory
from foretrace.topologies.catalog import load_cluster

RATES = {"products": 1.4, "attention": 0.7, "memory": 0.6, "copies": 3.0, "optimizer": 0.5}
KINDS = [
    ("products", gemm("x", 4096, 4096, 4096, "bf16")),
    ("products", replace(gemm("x", 64, 64, 64, "bf16"), count=3)),
    *(
        ("attention", Op("core", kind, 10**9, 10**6, 512, 512, 128, batch=32, kernel=kernel))
        for kind in ("attention", "attention_backward")
        for kernel in ("", "flash2", "not listed")
    ),
    ("memory", memory("norm", 10**6, "bf16", count=2)),
    ("optimizer", memory("optimizer.adam", 10**6, "bf16")),
    ("copies", memory("copy.gathered", 10**6, "bf16")),
]


@pytest.mark.parametrize(("name", "op"), KINDS)
@pytest.mark.parametrize("machine", ["dgx-h100", "localhost"])
def test_factors_are_on_what_they_were_found_on(machine: str, name: str, op: Op) -> None:
    """``f fixed + r rest``, as the times that a calibration is fitted to are taken apart."""
    cluster = load_cluster(machine)
    op = op if machine == "dgx-h100" else replace(op, dtype="fp32")
    known = Calibration(
        run="known",
        cluster=machine,
        device=cluster.device.name,
        precision=op.dtype,
        compute={name: Factor(value, 0.0) for name, value in {**RATES, "fixed": 2.0}.items()},
        network={},
    )
    before, after = (ComputeModel(one.device, op.dtype) for one in (cluster, known.applied(cluster)))
    fixed, seconds = fixed_s(op, before.device), before.op_s(op)
    assert 0 < fixed < seconds
    assert after.op_s(op) == pytest.approx(2.0 * fixed + RATES[name] * (seconds - fixed))
