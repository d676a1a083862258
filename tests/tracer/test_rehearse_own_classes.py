"""Tensors of classes of a library, shards that ranks tell each other of, and workers that others start."""

from pathlib import Path

import pytest
from tests.rehearsals import rehearse

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import RankTables, read_rank, rehearsal_folder

IN_8_BITS = """
import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

class Codes(torch.Tensor):  # as the states of optimizers in 8 bits
    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device, dtype=torch.float32)

    def __init__(self, codes):
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            args[0].codes.copy_(args[1])
            return args[0]
        plain = [one.codes.float() if isinstance(one, Codes) else one for one in args]
        return return_and_correct_aliasing(func, args, kwargs or {}, func(*plain, **(kwargs or {})))

class Momentum(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for one in self.param_groups[0]["params"]:
            state = self.state[one]
            if not state:
                state["m"] = Codes(torch.zeros(one.shape, dtype=torch.uint8, device=one.device))
            m = state["m"].lerp(one.grad, 0.1)
            state["m"].copy_(m)
            one.sub_(m)

model = torch.nn.Linear(1024, 1024, bias=False).to("cuda")
optimizer = Momentum(model.parameters())
for _ in range(3):
    model(torch.ones(1, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

SHARDED = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType

dist.init_process_group("nccl")
model = FSDP(torch.nn.Linear(64, 64, bias=False).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 64, device="cuda")).sum().backward()
    optimizer.step()
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        {name: one.size() for name, one in model.state_dict().items()}
print("saved")
"""

FROM_META = """
import os, torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

class Block(torch.nn.Linear):
    pass

class Model(torch.nn.Module):  # has something of its own beside its blocks, which are materialized before it
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(Block(64, 64), Block(64, 64))
        self.register_buffer("scale", torch.ones(64))

    def forward(self, x):
        return self.blocks(x) * self.scale

    def reset_parameters(self):
        print("reset", self.scale.device)

with torch.device("meta"):
    model = Model()
model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.cuda.current_device())
print(*{one.device for one in (*model.parameters(), *model.buffers())})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 64, device="cuda")).sum().backward()
    optimizer.step()
"""

LOADED = """
import torch

model = torch.nn.Linear(1024, 1024, bias=False)
frozen = torch.nn.Linear(1024, 1024, bias=False).requires_grad_(False)
for one in (model, frozen):  # as libraries load weights into a model without memory
    old = one.weight
    one.weight = REMADE
assert [isinstance(one, torch.nn.Parameter) for one in (model.weight, frozen.weight)] == [True, True]
model, frozen = model.to("cuda"), frozen.to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    frozen(model(torch.ones(1, 1024, device="cuda"))).sum().backward()
    optimizer.step()
    assert frozen.weight.grad is None
"""
"""Trains one of two layers, whose weights are put in place again."""


def _acted(script: Path, text: str) -> tuple[RankTables, str]:
    """Return what rank 1 of 4 does in three steps, and what the script printed."""
    script.write_text(text)
    folder = script.with_name("run")
    rehearse(Asked(command=(str(script),), world_size=4, ranks=(1,), warmup=0, steps=3), folder)
    tables = rehearsal_folder(folder)
    return read_rank(tables, 1), (tables / "rank-00001" / "output.log").read_text()


def test_states_of_an_optimizer_that_wrap_others_are_as_large_as_what_they_wrap(tmp_path: Path) -> None:
    """A weight of 4 MiB and a state of 1 MiB stay; the gradient is let go of in between.

    The class says that it is on the device of what it wraps, and operators on it are those on that.
    """
    tables, _ = _acted(tmp_path / "train.py", IN_8_BITS)
    places = tables.places.to_pylist()
    last = [event for event in tables.events.to_pylist() if places[event["place"]]["step"] == 2]
    least = min(event["allocated_bytes"] for event in last)
    assert 5 << 20 <= least < (5 << 20) + 16384
    counted = [tables.works["name"].to_pylist()[event["item"]] for event in last if event["what"] == 0]
    assert counted.count("aten.lerp") == 1
    assert counted.count("aten.sub_") == 1


def test_what_fsdp1_materializes_is_on_the_device_whatever_else_the_module_has(tmp_path: Path) -> None:
    """Blocks that were there already were taken to the host with the rest, and could not be gathered."""
    _, printed = _acted(tmp_path / "train.py", FROM_META)
    assert printed.splitlines()[-2:] == ["reset cuda:1", "cuda:1"]


def test_a_parameter_made_by_the_type_of_another_is_that_of_its_own_class(tmp_path: Path) -> None:
    """The type of a fake parameter is that of all fake tensors, whose call would ask for a mode."""
    by_type = "type(old)(torch.randn(1024, 1024), requires_grad=old.requires_grad)"
    by_name = by_type.replace("type(old)", "torch.nn.Parameter")
    (made, _), (expected, _) = (
        _acted(tmp_path / "train.py", LOADED.replace("REMADE", way)) for way in (by_type, by_name)
    )
    assert made.works.equals(expected.works)
    assert made.events.equals(expected.events)


def test_shards_of_which_ranks_tell_each_other_may_be_saved(tmp_path: Path) -> None:
    """Every rank is taken to tell of what this one has, which would be one place of the whole four times."""
    _, printed = _acted(tmp_path / "train.py", SHARDED)
    assert printed.splitlines()[-1] == "saved"


def test_a_cluster_that_starts_the_ranks_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """A real one would be started, and its workers train unseen."""
    (tmp_path / "ray.py").write_text("def init():\n    raise SystemExit('started')\n")
    with pytest.raises(RehearsalError, match=r"Ray starts processes of its own.*num_workers=0.*stub file"):
        _acted(tmp_path / "train.py", "import ray\nray.init()\n")


def test_remote_calls_are_refused_with_what_to_do(tmp_path: Path) -> None:
    """Torch's own words were that two ranks share a name, for each was told its own."""
    with pytest.raises(RehearsalError, match=r"torch\.distributed\.rpc cannot be rehearsed.*stub file"):
        _acted(
            tmp_path / "train.py",
            "from torch.distributed import rpc\nrpc.init_rpc('a', rank=0, world_size=2)\n",
        )


WRAPPED = """
import sys, torch
from torch.utils._python_dispatch import return_and_correct_aliasing

class Weight(torch.Tensor):  # as float8's, which says how it is to be gathered
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), device=inner.device, dtype=inner.dtype
        )

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner_tensors, meta, size, stride):
        return Weight(inner_tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = [one.inner if isinstance(one, Weight) else one for one in args]
        out = func(*plain, **(kwargs or {}))
        out = Weight(out) if func.is_view else out
        return return_and_correct_aliasing(func, args, kwargs or {}, out)

model = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
if sys.argv[1] == "wrapped":
    model.weight = torch.nn.Parameter(Weight(model.weight.detach()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_parameter_that_wraps_another_tensor_has_memory_once(tmp_path: Path) -> None:
    script, held = tmp_path / "train.py", {}
    script.write_text(WRAPPED)
    for kind in ("plain", "wrapped"):
        asked = Asked(command=(str(script), kind), world_size=1, ranks=(0,))
        held[kind] = rehearse(asked, tmp_path / kind).memory["0"]["bytes"]["parameters"]
    assert held["wrapped"] == held["plain"] == 4 * 1024 * 1024


MADE_AGAIN = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
model = torch.nn.Linear(64, 64).cuda()
for name, one in list(model.named_parameters()):
    setattr(model, name, type(one)(one.data.clone(){how}))
assert len(list(model.parameters())) == 2 and type(torch.ones(1))(3, 4).shape == (3, 4)
assert type(torch.ones(1))([1.0, 2.0]).shape == (2,) and type(torch.ones(1))().numel() == 0
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(4, 64).cuda()).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("how", "is_said"), [("", True), (", requires_grad=True", False)])
def test_what_is_made_by_the_type_of_a_parameter_is_one(how: str, is_said: bool, tmp_path: Path) -> None:
    """It trains: its gradients are reduced. Where its arguments do not tell that it is one, that is said."""
    script = tmp_path / "train.py"
    script.write_text(MADE_AGAIN.format(how=how))
    found = rehearse(Asked(command=(str(script),), world_size=4, ranks=(0,)), tmp_path / "run")
    messages = read_rank(rehearsal_folder(tmp_path / "run"), 0).messages.to_pylist()
    assert [one["size_bytes"] for one in messages if one["kind"] == "all_reduce"] == [4 * (64 * 64 + 64)]
    said = [one for one in found.notes if "by the type of another" in one]
    assert said == [one for one in said if one.startswith("train.py:7 ")]
    assert bool(said) is is_said
