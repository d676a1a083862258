"""What is remembered of an operator is what asking it again would give."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from tests.forked import python  # noqa: E402
from tests.rehearsals import rehearse  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from foretrace.tracer.rehearse.rehearsing import Asked  # noqa: E402
from foretrace.tracer.rehearse.tape.remembered import Memo  # noqa: E402
from foretrace.traces.rehearsal import (  # noqa: E402
    OP,
    read_rank,
    rehearsal_folder,
)

CALLS: dict[str, Callable[[Any], Any]] = {
    "new memory": lambda x: x + 1,
    "another type": lambda x: x.to(torch.bfloat16),
    "a view": lambda x: x.view(-1, 2)[1:],
    "a transposed product": lambda x: x.t() @ x,
    "several views": lambda x: x.split([1, 3], dim=1),
    "several tensors": lambda x: torch.native_layer_norm(x, (4,), None, None, 1e-5),
    "complex, conjugate": lambda x: torch.view_as_complex(x.view(-1, 2)).conj(),
    "a place": lambda x: x.topk(2),
    "over a list": lambda x: torch._foreach_mul([x, x.t()], 2.0),
    "numbers of other types": lambda x: [x.sum(dim=0), torch.full_like(x, 1), x * True],
    "parts that begin elsewhere": lambda x: [x[at : at + 2] for at in range(x.shape[0])],
    "parts counted from the end": lambda x: [x[-3:-1], x[-2:], x[:-4], x[5:2], x[9:], x[:, -2:]],
    "parts of parts, with steps": lambda x: [x[2:][at::2, 1:] for at in range(4)],
    "parts of conjugates": lambda x: [torch.view_as_complex(x.view(-1, 2)).conj()[at:] for at in range(3)],
    "made of nothing": lambda x: torch.empty(3, dtype=x.dtype),
}


class DeviceMode(FakeTensorMode):  # type: ignore[misc]  # torch is untyped here
    """Stands for the mode of the rehearsed device: tensors of torch's own mode are those of an export."""

    def place(self, tensor: Any) -> None:
        """Give *tensor* no address: there is no device."""


def _described(values: Any, source: Any) -> list[Any]:
    found = []
    for one in values if isinstance(values, list | tuple) else [values]:
        shares = one.untyped_storage()._cdata == source.untyped_storage()._cdata
        at, size = one.storage_offset(), one.untyped_storage().nbytes()
        found.append(
            (type(one), one.shape, one.stride(), at, one.dtype, one.device, shares, size, one.is_conj())
        )
    return found


def _asked(call: Callable[[Any], Any], memo: Memo | None) -> list[list[Any]]:
    """Return what *call* makes, three times, of tensors of which the last has another shape."""

    class Mode(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if memo is None or func.namespace == "prim":
                return func(*args, **(kwargs or {}))
            return memo.call(func, args, kwargs or {})[0]

    with DeviceMode(), Mode():
        tensors = [torch.empty(6, 4), torch.empty(6, 4), torch.empty(10, 4)]
        return [_described(call(tensor), tensor) for tensor in tensors]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_remembered_result_is_the_one_that_fake_tensors_find(call: Callable[[Any], Any]) -> None:
    """Shapes, strides, types, shared memory and its size, also of the second call and of other shapes."""
    memo = Memo()
    assert _asked(call, memo) == _asked(call, None)
    assert memo.n_answered > 0


def test_parts_of_one_length_are_one_question_wherever_they_begin() -> None:
    """A library's loop over 512 ranks asks once, for any number of ranks."""
    memo = Memo()
    with DeviceMode():
        x = torch.empty(1024)
        parts = [
            memo.call(torch.ops.aten.slice.Tensor, (x, 0, at, at + 2), {})[0] for at in range(0, 1024, 2)
        ]
    assert memo.n_answered == len(parts) - 1
    assert [part.storage_offset() for part in parts] == [*range(0, 1024, 2)]


def test_what_is_changed_in_place_stays_the_same_tensor() -> None:
    """Also the second time, and for lists."""
    memo = Memo()
    with DeviceMode():
        for _ in range(2):
            x, y = torch.empty(3), torch.empty(3)
            assert memo.call(torch.ops.aten.add_.Tensor, (x, y), {})[0] is x
            assert memo.call(torch.ops.aten.mul.out, (x, y), {"out": y})[0] is y
            assert memo.call(torch.ops.aten._foreach_add_.List, ([x], [y]), {})[0] is None
    assert memo.n_answered == 3


def test_an_operator_that_changes_the_shape_of_its_operand_is_not_remembered() -> None:
    memo = Memo()
    with DeviceMode():
        for _ in range(2):
            flat = torch.empty(4)
            memo.call(torch.ops.aten.unsqueeze_.default, (flat, 0), {})
            assert flat.shape == (1, 4)
    assert memo.n_answered == 0


def test_lists_of_equal_tensors_are_cut_as_each_of_them_alone() -> None:
    """DTensor's answer about lists the short way is that of the long way, in a world of eight."""
    found = subprocess.run([python(), "-c", _CUT], check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-500:]
    assert found.stdout.split() == ["same"] * 5


def test_what_cuda_has_a_kernel_of_is_one_kernel_in_a_rehearsal_too(tmp_path: Path) -> None:
    """PyTorch could make these operators of others, and does so on devices without a kernel of them."""
    script = tmp_path / "one.py"
    script.write_text(_ONE)
    rehearse(Asked(command=(str(script),), world_size=1, ranks=(0,)), tmp_path / "run")
    counts = _kernels(tmp_path / "run")
    whole = ("_fused_rms_norm", "_fused_rms_norm_backward", "silu", "silu_backward", "mish_backward")
    assert [counts["aten." + name] for name in whole] == [1] * len(whole)
    assert not {"aten.pow", "aten.rsqrt", "aten.sigmoid", "aten.fill_"} & set(counts)


def _kernels(run: Path) -> Counter[str]:
    """Return how often the only rank issues each operator."""
    tables = read_rank(rehearsal_folder(run), 0)
    names = tables.works["name"].to_pylist()
    return Counter(names[row["item"]] for row in tables.events.to_pylist() if row["what"] == OP)


_ONE = """
import torch
from torch import distributed, nn
distributed.init_process_group("nccl")
model = nn.Sequential(nn.RMSNorm(64), nn.SiLU(), nn.Mish()).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def named(graph: torch.cuda.CUDAGraph | None = None) -> None:
    "Names a class that cannot be rehearsed, as transformers does."

for _ in range(3):
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

_CUT = """
from contextlib import nullcontext
from types import SimpleNamespace
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator as Asked
from torch.testing._internal.distributed.fake_pg import FakeStore
from foretrace.tracer.rehearse.world import sharding

def words(found):
    schema = found.redistribute_schema
    return str((found.output_spec, schema and schema.args_schema, found.needs_redistribute))

def both(self, schema):
    found = short(self, schema)
    if schema.op.name().startswith("aten::_foreach"):
        print("same" if words(found) == words(long(self, schema)) else "differs")
    return found

dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
long = Asked.propagate_op_sharding_non_cached
sharding.install(SimpleNamespace(aside=nullcontext))
short = Asked.propagate_op_sharding_non_cached
Asked.propagate_op_sharding_non_cached = both
mesh = init_device_mesh("cpu", (4, 2))

def tensor(shape, *placements):
    return distribute_tensor(torch.ones(shape), mesh, placements)

tensors = [tensor((8, 4), Shard(0), Shard(1)), tensor((8,), Shard(0), Replicate())] * 5
tensors.insert(3, tensor((6, 4), Shard(0), Replicate()))
others = [t + 1 for t in tensors]
partial = DTensor.from_local(torch.ones(8, 4), mesh, [Partial(), Replicate()])
torch._foreach_norm(tensors, 2.0)
torch._foreach_mul(tensors, others)
torch._foreach_add([*tensors, partial, partial], 1.0)
torch._foreach_lerp(tensors, others, 0.5)
torch._foreach_mul_(tensors, 2.0)
"""
