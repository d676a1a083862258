"""Training loops that others have written, recorded with no edits: the same losses, and what is sent."""

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from foretrace.traces.layout import Layout
from foretrace.traces.store import open_run

PARAMETERS = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
"""Numbers of a layer of the small model: attention, MLP, two norms."""

MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def model():
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3, vocab_size=128)
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes))

def sample(i):
    return (torch.arange(32) * 7 + i) % 128
"""

TRAINER = """
import sys
from transformers import Trainer, TrainingArguments

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return {"input_ids": sample(i), "labels": sample(i)}

arguments = TrainingArguments(
    sys.argv[1], per_device_train_batch_size=2, max_steps=4, gradient_accumulation_steps=2, report_to=[],
    use_cpu=True, logging_steps=1, save_strategy="no", ddp_backend="gloo", disable_tqdm=True,
)
trainer = Trainer(model(), arguments, train_dataset=Data())
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry and trainer.is_world_process_zero():
        print("loss", repr(entry["loss"]))
"""

ACCELERATE = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
net = model()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
data = torch.utils.data.DataLoader([sample(i) for i in range(32)], batch_size=2)
net, optimizer, data = accelerator.prepare(net, optimizer, data)
for x in data:
    with accelerator.accumulate(net):
        loss = net(input_ids=x, labels=x).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print("loss", repr(loss.item()))
accelerator.end_training()
"""

SHARDED = """
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, reshard_after_forward=True, cpu_offload=False,
    auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
# Without a GPU Accelerate would leave the plugin out and train by DDP.
accelerator.state._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
net = model()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
data = torch.utils.data.DataLoader([sample(i) for i in range(16)], batch_size=2)
net, optimizer, data = accelerator.prepare(net, optimizer, data)
for x in data:
    loss = net(input_ids=x, labels=x).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print("loss", repr(loss.item()))
accelerator.end_training()
"""

TUTORIAL = """
import os
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(4 * 3 * 3, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return F.log_softmax(self.fc(torch.flatten(self.dropout(x), 1)), dim=1)

def main(rank, world_size, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", port
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(64, 1, 8, 8), torch.randint(10, (64,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(Net())
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(x), y)
            loss.backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            correct = (model(data.tensors[0]).argmax(1) == data.tensors[1]).sum()
        dist.all_reduce(correct)
        if rank == 0:
            print("loss", repr(loss.item()), correct.item())
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(main, args=(2, sys.argv[1]), nprocs=2)
"""


def losses(output: str) -> list[str]:
    """Return the lines that tell losses, with all their digits."""
    return [line for line in output.splitlines() if line.startswith("loss")]


def both(tmp_path: Path, ranks: Any, script: str, launcher: list[str], *words: str) -> tuple[Any, Any]:
    """Run *script* by *launcher*, plain and recorded; return the run and what the verb said of it."""
    file, path = tmp_path / "train.py", tmp_path / "run"
    file.write_text(script)
    command = [sys.executable, *launcher, str(file), *words]
    record = [sys.executable, "-m", "foretrace", "record", "-o", str(path), "--json", "--", *command]
    plain, recorded = (
        ranks.launch(words, fresh=path, timeout_s=280, HF_HUB_OFFLINE="1")[0] for words in (command, record)
    )
    assert plain.returncode == 0, plain.stderr
    assert recorded.returncode == 0, recorded.stderr
    assert losses(plain.stdout) == losses(recorded.stderr) != []
    return open_run(path), json.loads(recorded.stdout)


TORCHRUN = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def needs(*packages: str) -> None:
    """Skip where a package is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def check_ddp(run: Any, n_steps: int, n_layers: int) -> Counter[str]:
    """Check that a run is one of DDP over two ranks with whole steps; return its collectives by kind."""
    assert run.warnings == ()
    assert run.info.finished
    assert run.info.layout == Layout(dp=2)
    for rank in (0, 1):
        spans = run.spans([rank]).to_pylist()
        assert [row["step"] for row in spans if row["category"] == "step"] == list(range(n_steps))
        assert {row["layer"] for row in spans if row["layer"] >= 0} == set(range(n_layers))
    rows = [row for row in run.spans([0]).to_pylist() if row["category"] == "collective"]
    return Counter(row["kind"] for row in rows if row["axis"] == "dp")


def test_a_loop_in_the_spirit_of_the_tutorials(tmp_path: Path, ranks: Any) -> None:
    """It spawns its own processes, evaluates between epochs, and has no layers that are numbered."""
    run, said = both(tmp_path, ranks, TUTORIAL, ["-W", "ignore"], "{port}")
    kinds = check_ddp(run, 8, 0)
    assert said["world_size"] == 2
    gradients = 4 * (4 * 9 + 4 + 36 * 10 + 10)
    rows = run.spans([1]).to_pylist()
    assert kinds["all_reduce"] >= 8
    reduced = Counter(row["size_bytes"] for row in rows if row["kind"] == "all_reduce")
    assert reduced == {gradients: 8, 8: 2}
    assert {row["name"] for row in rows if row["kind"] == "forward"} >= {"conv", "fc"}


@pytest.mark.slow
def test_the_trainer_of_transformers(tmp_path: Path, ranks: Any) -> None:
    needs("transformers", "accelerate")
    run, _ = both(tmp_path, ranks, MODEL + TRAINER, TORCHRUN, str(tmp_path / "out"))
    kinds = check_ddp(run, 4, 3)
    assert kinds["all_reduce"] >= 4
    sent = sum(
        row["size_bytes"]
        for row in run.spans([0]).to_pylist()
        if row["kind"] == "all_reduce" and row["step"] == 3 and row["axis"] == "dp"
    )
    assert sent >= 4 * (3 * PARAMETERS + 2 * 128 * 64 + 64)  # every gradient once a step, norms beside it


@pytest.mark.slow
def test_a_loop_with_accelerate(tmp_path: Path, ranks: Any) -> None:
    needs("transformers", "accelerate")
    run, _ = both(tmp_path, ranks, MODEL + ACCELERATE, TORCHRUN)
    check_ddp(run, 4, 3)


@pytest.mark.slow
def test_accelerate_with_its_fsdp_plugin(tmp_path: Path, ranks: Any) -> None:
    """Gathered are the table, each layer, and the head with the last norm: all but the head twice a step."""
    needs("transformers", "accelerate")
    run, _ = both(tmp_path, ranks, MODEL + SHARDED, TORCHRUN)
    check_ddp(run, 4, 3)
    rows = [row for row in run.spans([0]).to_pylist() if row["step"] == 3 and row["axis"] == "dp"]
    table, layer, head = 4 * 128 * 64, 4 * PARAMETERS, 4 * (128 * 64 + 64)
    scattered = Counter(row["size_bytes"] for row in rows if row["kind"] == "reduce_scatter")
    assert scattered == {table: 1, layer: 3, head: 1}
    gathered = Counter(row["size_bytes"] for row in rows if row["kind"] == "all_gather")
    assert gathered == {table: 2, layer: 6, head: 1}
