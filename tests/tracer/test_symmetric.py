"""Operators on symmetric memory are noted as the collectives that they replace.

They have kernels for GPUs only; here they get some for the processor, and go the same way to them.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import foretrace
from foretrace.traces.store import open_run

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed")

ROWS, INNER, COLUMNS = 6, 8, 10


@pytest.fixture
def alone() -> Iterator[str]:
    """A world of one rank, and the name of its group."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD.group_name
    distributed.destroy_process_group()


@pytest.fixture
def kernels() -> Iterator[None]:
    """Kernels for the processor: what the operators compute in a world of one."""
    pytest.importorskip("torch.distributed._symmetric_memory")
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", lambda a, bs, *_, **__: (a.clone(), [a @ b for b in bs]), "CPU")
    library.impl("fused_matmul_reduce_scatter", lambda a, b, *_: a @ b, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("kernels")
def test_fused_operators_are_the_collectives_that_they_replace(tmp_path: Path, alone: str) -> None:
    a, b = torch.randn(ROWS, INNER), torch.randn(INNER, COLUMNS)

    class Fused(torch.nn.Linear):  # type: ignore[misc, name-defined, unused-ignore]
        def forward(self, x: Any) -> Any:
            ops = torch.ops.symm_mem
            _, (y,) = ops.fused_all_gather_matmul(x, [b], 0, alone)
            z = ops.fused_matmul_reduce_scatter(x, b, "sum", 0, alone)
            assert torch.equal(y, x @ b)
            assert torch.equal(z, x @ b)
            return super().forward(x)

    with foretrace.record(tmp_path / "run"):
        Fused(INNER, INNER)(a)
    before = len(open_run(tmp_path / "run").spans().to_pylist())
    torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, alone)  # as if there had been no recording
    run = open_run(tmp_path / "run")
    assert run.warnings == ()
    rows = [row for row in run.spans().to_pylist() if row["category"] == "collective"]
    assert len(run.spans().to_pylist()) == before
    assert [(row["kind"], row["sequence"], row["size_bytes"], row["dtype"]) for row in rows] == [
        ("all_gather", 0, 4 * ROWS * INNER, "fp32"),
        ("reduce_scatter", 1, 4 * ROWS * COLUMNS, "fp32"),
    ]
    assert {row["name"] for row in rows} == {"Fused"}


CALLS: dict[str, tuple[str, Callable[..., Any], tuple[str, ...]]] = {
    "one_shot_all_reduce_copy": ("all_reduce", lambda x, out: (torch.zeros(99), x, "sum"), ()),
    "one_shot_all_reduce_out": ("all_reduce", lambda x, out: (x, "sum"), ("out",)),
    "two_shot_all_reduce_out": ("all_reduce", lambda x, out: (x, "sum"), ("out",)),
    "multimem_all_gather_out": ("all_gather", lambda x, out: (x,), ("out",)),
    "all_to_all_vdev": ("all_to_all", lambda x, out: (x, out, torch.ones(1), torch.ones(2, 1)), ()),
    "nvshmem_broadcast": ("broadcast", lambda x, out: (x, 0), ()),
}
"""Operators, what they replace, their arguments before the name of the group, and those behind it."""


RETURNED: dict[str, Callable[..., Any]] = {
    "one_shot_all_reduce_copy": lambda *args: args[1].clone(),
    "nvshmem_broadcast": lambda *args: args[0],
    "all_to_all_vdev": lambda *args: None,
}
"""What those return that do not return their last argument."""


@pytest.mark.parametrize("name", sorted(CALLS))
def test_operators_that_only_communicate_are_noted(tmp_path: Path, alone: str, name: str) -> None:
    pytest.importorskip("torch.distributed._symmetric_memory")
    if not hasattr(torch.ops.symm_mem, name):
        pytest.skip(f"this torch has no {name}")
    kind, before, behind = CALLS[name]
    returned = RETURNED.get(name, lambda *args: args[-1])
    x, out = torch.ones(ROWS), torch.ones(ROWS)
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl(name, returned, "CPU")
    with foretrace.record(tmp_path / "run"):
        getattr(torch.ops.symm_mem, name)(*before(x, out), alone, *(out for _ in behind))
    library._destroy()
    (row,) = [
        row for row in open_run(tmp_path / "run").spans().to_pylist() if row["category"] == "collective"
    ]
    assert (row["kind"], row["size_bytes"]) == (kind, 4 * ROWS)
