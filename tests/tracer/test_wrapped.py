"""What libraries put around a model changes neither what the model is nor what its blocks are called."""

import gc
import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretrace.tracer.parallelism import data_parallel
from foretrace.tracer.shape import describe_model, find_blocks
from foretrace.tracer.wrapped import inside
from foretrace.traces.layout import Layout
from foretrace.traces.store import open_run

torch = pytest.importorskip("torch")
nn: Any = torch.nn


@pytest.fixture(autouse=True, scope="module")
def not_frozen() -> None:
    """Modules made while tests were collected are found by what refers to their classes: not while frozen."""
    gc.unfreeze()


class Net(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A table, two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))


class Float16Module(nn.Module):  # type: ignore[misc]
    """Stands for what Megatron-core puts around a model in 16 bits."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module


class DistributedDataParallel(Float16Module):
    """Stands for that of Megatron-core, whose ``buffers`` are no method."""

    def __init__(self, module: Any, *, is_sharded: bool) -> None:
        super().__init__(module)
        self.buffers = [object()]
        self.ddp_config = SimpleNamespace(use_distributed_optimizer=is_sharded)
        self.dp_cp_group = object()


class DeepSpeedEngine(Float16Module):
    """Stands for that of DeepSpeed."""

    def __init__(self, module: Any, stage: int) -> None:
        super().__init__(module)
        self.stage = stage
        self.seq_data_parallel_group = SimpleNamespace(group_name="0")

    def zero_optimization_stage(self) -> int:
        """Return the stage of ZeRO."""
        return self.stage


class PipelineEngine(DeepSpeedEngine):
    """Stands for one that is derived of it."""


class _FabricModule(nn.Module):  # type: ignore[misc]
    """Stands for what Lightning Fabric puts around all that it has prepared, and holds twice."""

    def __init__(self, forward_module: Any, original_module: Any) -> None:
        super().__init__()
        self._forward_module = forward_module
        self._original_module = original_module


def of_fabric(holder: Any) -> Any:
    """Return what Fabric makes of a model in data parallelism."""
    return _FabricModule(holder, holder.module)


AROUND: dict[str, tuple[Any, str]] = {
    **{f"zero {stage}": (DeepSpeedEngine(Net(), stage), f"zero{stage}") for stage in (1, 2, 3)},
    "zero 0, derived": (PipelineEngine(Net(), 0), "ddp"),
    "fabric": (of_fabric(DeepSpeedEngine(Net(), 2)), "zero2"),
    "megatron": (DistributedDataParallel(Float16Module(Net()), is_sharded=False), "ddp"),
    "megatron, sharded": (DistributedDataParallel(Float16Module(Net()), is_sharded=True), "zero1"),
}


@pytest.mark.parametrize("name", AROUND)
def test_a_model_is_what_it_is_without_what_is_around_it(name: str) -> None:
    model, sharding = AROUND[name]
    settings, groups = data_parallel(model)
    assert settings == {"sharding": sharding}
    assert len(groups) == 1
    assert type(inside(model)) is Net
    assert describe_model(model) == describe_model(Net())
    assert set(find_blocks(model).values()) == set(find_blocks(Net()).values())


@pytest.mark.parametrize("name", AROUND)
def test_what_is_around_a_model_is_found_where_its_own_forward_is_called(name: str) -> None:
    """Hooks see the model alone then, as of ``ddp.forward(x)`` and of ``ddp.module(x)``."""
    holder, _ = AROUND[name]
    assert data_parallel(inside(holder)) == data_parallel(holder)
    assert data_parallel(Net()) == ({}, [])


@pytest.mark.parametrize("name", AROUND)
def test_what_is_around_a_part_of_a_model_is_found(name: str) -> None:
    """As DDP around a backbone, whose head is another's, or several around one part each."""
    holder, _ = AROUND[name]
    settings, groups = data_parallel(holder)
    assert data_parallel(nn.Sequential(holder, Net())) == (settings, groups)
    assert data_parallel(nn.Sequential(Float16Module(Net()), holder)) == (settings, groups)


def test_a_loss_around_data_parallelism_is_not_the_name_of_the_model() -> None:
    """As of sentence-transformers; a head beside the model, or a loss around a plain one, is part of it."""

    class Loss(nn.Module):  # type: ignore[misc]
        def __init__(self, *parts: Any) -> None:
            super().__init__()
            self.parts = nn.ModuleList(parts)

    around = DeepSpeedEngine(Net(), 1)
    assert describe_model(Loss(around, nn.Identity()))["name"] == "Net"
    assert describe_model(Loss(around, nn.Linear(2, 2)))["name"] == "Loss"
    assert describe_model(Loss(Net()))["name"] == "Loss"


def test_a_loss_of_torch_beside_a_model_is_not_the_name_of_the_model() -> None:
    """A list of layers has no name to give, and what else is beside the model makes it a part of another."""

    class Loss(nn.Module):  # type: ignore[misc]
        def __init__(self, *parts: Any) -> None:
            super().__init__()
            for number, part in enumerate((*parts, nn.CrossEntropyLoss())):
                self.add_module(f"part{number}", part)

    assert describe_model(Loss(Net()))["name"] == "Net"
    assert describe_model(DeepSpeedEngine(Loss(Net()), 1))["name"] == "Net"
    assert describe_model(Loss(Net(), nn.KLDivLoss()))["name"] == "Net"
    for parts in ((Net(), nn.Linear(2, 2)), (Net(), nn.Dropout()), (nn.Sequential(Net()),), ()):
        assert describe_model(Loss(*parts))["name"] == "Loss"


def test_what_deepspeed_has_cut_has_the_shape_that_it_had() -> None:
    """It numbers modules, too, which makes no layer another one than the next."""
    model = Net()
    for number, module in enumerate(model.modules()):
        module.ds_id = number
    for parameter in model.parameters():
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)
    assert describe_model(DeepSpeedEngine(model, 3)) == describe_model(Net())


NAMED = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
work = dist.all_reduce(torch.ones(4), async_op=True)
print("name", work.wait.__name__, work.wait.__qualname__, dist.Work.wait.__qualname__)
work.wait()
dist.destroy_process_group()
"""


def test_functions_of_torch_keep_their_names(tmp_path: Path, ranks: Any) -> None:
    """DeepSpeed marks what it waits for by the name of the function that waits."""
    script = tmp_path / "train.py"
    script.write_text(NAMED)
    command = [sys.executable, str(script)]
    plain, recorded = (ranks.run(command, ranks.env(*path), 2) for path in ((), (tmp_path / "run",)))
    assert plain.status == recorded.status == (0, 0), recorded.errors
    assert plain.output == recorded.output != ""


ZERO = """
import sys
import deepspeed, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
settings = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": int(sys.argv[1]), "stage3_param_persistence_threshold": 0},
}
model = Net()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
for i in range(8):
    tokens = (torch.arange(16, device=engine.device).reshape(2, 8) + i + engine.global_rank) % 16
    loss = nn.functional.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten())
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        print("loss", repr(loss.item()), flush=True)
"""
N_PARAMS = 16 * 8 + 2 * (8 * 8 + 8) + 8 * 16 + 16

SENT = {
    1: {"all_gather": 1, "all_reduce": 1},
    2: {"all_gather": 1, "all_reduce": 2},
    3: {"all_gather": 2, "reduce_scatter": 2},
}
"""By stage, how many times the bytes of all parameters are moved in a step of two micro-batches. The third
fetches in its backward only what it has let go of since, which is nothing of so small a model."""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_of_zero(stage: int, tmp_path: Path, ranks: Any) -> None:
    """Gathers and reductions of a step have the bytes of the parameters, as often as the stage has them."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    script, path = tmp_path / "train.py", tmp_path / "run"
    script.write_text(ZERO)
    command = [sys.executable, "-W", "ignore", str(script), str(stage)]
    accelerator = {"DS_ACCELERATOR": "cpu"}
    plain = ranks.run(command, ranks.env() | accelerator, 2)
    recorded = ranks.run(command, ranks.env(path) | accelerator, 2)
    assert plain.status == recorded.status == (0, 0), recorded.errors
    assert plain.losses == recorded.losses != []
    run = open_run(path)
    assert run.warnings == ()
    assert run.info.job is not None
    assert run.info.model is not None
    assert (run.info.layout, run.info.job["sharding"]) == (Layout(dp=2), f"zero{stage}")
    assert run.info.model["n_params"] == N_PARAMS
    rows = [row for row in run.spans([0]).to_pylist() if row["step"] == 2 and row["size_bytes"] > 8]
    moved = Counter(row["kind"] for row in rows if row["category"] == "collective" and row["axis"] == "dp")
    sent = {
        kind: sum(row["size_bytes"] for row in rows if row["kind"] == kind) / (4 * N_PARAMS) for kind in moved
    }
    assert {row["layer"] for row in rows if row["layer"] >= 0} <= {0, 1}
    assert sent == SENT[stage]
