"""What is kept on the host, as tasks: copies on the stream that asks for them, an optimizer between steps."""

from typing import Any

import pytest
from tests.simulator.rehearsal_tables import machine, tables, work, written

from foretrace.simulator.builder.offload import HOST_ADAM_PARAMS_PER_S
from foretrace.simulator.compute.timing import COPY_START_S, ComputeModel
from foretrace.simulator.program import to_ns
from foretrace.simulator.rehearsed.rank import RankTask
from foretrace.simulator.rehearsed.works import priced

MIB = 2**20
PRODUCT = work()
UP, DOWN = (
    work(name=f"host.{kind}", kind=kind, flops=0, bytes_moved=64 * MIB) for kind in ("to_device", "to_host")
)
ADAM = work(name="aten._fused_adamw_", kind="on_host", dtype="fp32", flops=0, bytes_moved=28 * MIB, kernels=0)


def _tasks(*events: tuple[str, int, int]) -> list[RankTask]:
    """Return the tasks of events (what, item, stream) with the works above."""
    found: Any = tables([(*event, -1) for event in events], [PRODUCT, UP, DOWN, ADAM])
    return written(found).tasks


@pytest.mark.parametrize("sharing", [1, 8])
def test_an_optimizer_in_one_pass_takes_what_every_simulation_says(sharing: int) -> None:
    """28 bytes of a parameter, as many ranks as share the processors; copies have a link to themselves."""
    device = machine(8).device
    costs = priced(tables([], [UP, DOWN, ADAM]).works, ComputeModel(device, "bf16"), sharing=sharing).seconds
    assert costs[:2] == pytest.approx([COPY_START_S + 64 * MIB / device.host_bytes_per_s] * 2)
    assert costs[2] == pytest.approx(MIB * sharing / HOST_ADAM_PARAMS_PER_S)


def test_copies_are_on_the_stream_that_asks_for_them() -> None:
    """Those beside compute wait for nothing, and two of a kind are one; others hold their stream up."""
    tasks = _tasks(("op", 1, 3), ("op", 1, 3), ("op", 0, 0), ("op", 2, 0), ("op", 0, 0))
    at = {task.stream: number for number, task in enumerate(tasks)}
    beside, held, last = tasks[at["copy.1"]], tasks[at["copy"]], tasks[at["compute"]]
    if beside.bytes_moved != 128 * MIB:
        beside, held = held, beside
    assert (beside.bytes_moved, beside.after) == (128 * MIB, ())
    assert {one.label[:2] for one in (beside, held)} == {("copy", "offload")}
    assert {one.label.name for one in (beside, held)} == {"to the device", "from the device"}
    (before,) = held.after
    assert tasks[before].stream == "compute"
    assert last.after == (tasks.index(held),)


def test_the_host_computes_when_it_has_waited_and_then_goes_on() -> None:
    """A copy down, a wait for it, the optimizer, and what is issued after it on whatever stream."""
    tasks = _tasks(("op", 2, 3), ("host_wait", -1, 3), ("op", 3, 0), ("op", 3, 0), ("op", 0, 0), ("op", 1, 4))
    at = {task.label.name: number for number, task in enumerate(tasks)}
    optimizer = tasks[at["forward on the host"]]
    assert optimizer.label.category == optimizer.stream == "host"
    assert optimizer.after == (at["from the device"],)
    assert optimizer.duration_ns == to_ns(2 * MIB / HOST_ADAM_PARAMS_PER_S)
    assert tasks[at["layers.0"]].after == tasks[at["to the device"]].after == (tasks.index(optimizer),)
