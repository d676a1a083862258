"""Sizes of collectives: those of nccl-tests, S being the whole array."""

from typing import Any

import pytest

from foretrace.tracer.operators import OPERATORS, dtype_name

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")  # registers the operators
N = 4
PART, WHOLE = 3 * 4, N * 3 * 4


def part() -> Any:
    """Return what one rank holds."""
    return torch.zeros(3)


def whole() -> Any:
    """Return what all ranks hold together."""
    return torch.zeros(N * 3)


def parts() -> Any:
    """Return a part of every rank."""
    return [part() for _ in range(N)]


CALLS: dict[str, tuple[tuple[Any, ...], int]] = {
    "allreduce_": (([whole()], "pg"), WHOLE),
    "allreduce_coalesced_": (([whole(), part()], "pg"), WHOLE + PART),
    "broadcast_": (([whole()], "pg"), WHOLE),
    "reduce_": (([whole()], "pg"), WHOLE),
    "_allgather_base_": ((whole(), part(), "pg"), WHOLE),
    "allgather_": (([parts()], [part()], "pg"), WHOLE),
    "allgather_coalesced_": (([parts(), parts()], [part(), part()], "pg"), 2 * WHOLE),
    "allgather_into_tensor_coalesced_": (([whole(), whole()], [part(), part()], "pg"), 2 * WHOLE),
    "_reduce_scatter_base_": ((part(), whole(), "pg"), WHOLE),
    "reduce_scatter_": (([part()], [parts()], "pg"), WHOLE),
    "reduce_scatter_tensor_coalesced_": (([part(), part()], [whole(), whole()], "pg"), 2 * WHOLE),
    "gather_": (([parts()], [part()], "pg"), WHOLE),
    "scatter_": (([part()], [parts()], "pg"), WHOLE),
    "alltoall_": ((parts(), parts(), "pg"), WHOLE),
    "alltoall_base_": ((whole(), whole(), "pg"), WHOLE),
    "barrier": ((part(), "pg"), 0),
    "send": (([part()], "pg", 1), PART),
    "recv_": (([part()], "pg", 1), PART),
}


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_the_size_is_that_of_the_whole_array(name: str) -> None:
    args, size_bytes = CALLS[name]
    operator = OPERATORS[name]
    assert operator.size(args, N) == size_bytes
    assert args[operator.group] == "pg"
    assert operator.peer < 0 or args[operator.peer] == 1
    assert dtype_name(operator.tensor(args)) == "fp32"
    assert all(isinstance(tensor, torch.Tensor) for tensor in operator.outputs(args))


def test_every_operator_that_moves_data_is_known() -> None:
    names = {
        name.removeprefix("c10d::") for name in torch._C._dispatch_get_all_op_names() if "c10d::" in name
    }
    others = {"check_for_nan", "monitored_barrier_", "recv_any_source_"}
    assert names - others - {name for name in names if "functional" in name} == set(OPERATORS)


@pytest.mark.parametrize(
    ("dtype", "name"), [("bfloat16", "bf16"), ("float16", "fp16"), ("float64", "fp64"), ("int64", "int64")]
)
def test_types_are_named_as_the_field_names_them(dtype: str, name: str) -> None:
    assert dtype_name(torch.zeros(1, dtype=getattr(torch, dtype))) == name
