"""What scripts do to keep their states: collect those of shards, read what they saved, share memory."""

import json
import sys
from pathlib import Path

import pytest
from tests.processes import Runner
from tests.rehearsals import rehearse
from tests.tracer import keeping_states

from foretrace.tracer.rehearse.data.checkpoints import _Slice
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.traces.rehearsal import RankTables, read_rank, rehearsal_folder

torch = pytest.importorskip("torch")


def _rehearsed(folder: Path, how: str, ranks: tuple[int, ...]) -> tuple[list[str], list[RankTables]]:
    """Return what the first of *ranks* printed, and what each of them did."""
    command = (str(keeping_states.__file__), how, str(folder))
    rehearse(Asked(command=command, world_size=2, ranks=ranks, warmup=0, steps=2), folder / "run")
    tables = rehearsal_folder(folder / "run")
    said = (tables / f"rank-{ranks[0]:05d}" / "output.log").read_text().splitlines()
    return said, [read_rank(tables, rank) for rank in ranks]


def test_states_of_parameters_in_other_shards_are_collected(tmp_path: Path) -> None:
    """All ranks gather both moments of the whole flat parameter, though some parameters are in one shard."""
    said, tables = _rehearsed(tmp_path, "collected", (0, 1))
    assert said[-1] == "['0.bias', '0.weight', '1.bias', '1.weight']"
    size = sum((keeping_states.WIDTH * keeping_states.WIDTH + keeping_states.WIDTH, keeping_states.WIDTH + 1))
    size += size % 2  # of two shards of one size
    for table in tables:
        messages, places = table.messages.to_pylist(), table.places.to_pylist()
        found = [
            messages[event["item"]]["kind"]
            for event in table.events.to_pylist()
            if event["what"] == 1
            and places[event["place"]]["step"] == 1
            and messages[event["item"]]["size_bytes"] == 4 * size
        ]
        assert found.count("all_gather") == 1 + 2  # the parameters, and both moments after the step before


RESUMES = """
import io, os, sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

how, folder = sys.argv[1:]
path = f"{folder}/state.pt"
dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
rank, device = dist.get_rank(), "cuda" if torch.cuda.is_available() else "cpu"
os.makedirs(f"{folder}/of-{rank}", exist_ok=True)


def made():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False)).to(device)
    if how != "sharded":
        model[1].weight = model[0].weight
    else:
        for one in model:
            fully_shard(one)
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def states():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "rng": seed}


model, optimizer = made()
seed = torch.get_rng_state()
if how == "initial":
    if rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    model.load_state_dict(torch.load(path, map_location=device))
    dist.barrier()
    if rank == 0:
        os.remove(path)
for step in range(3):
    model(torch.ones(2, 8, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 0 and how != "initial":
        found = states()
        if how == "buffer":
            file = io.BytesIO()
            torch.save(found, file)
            file.seek(0)
        elif how == "sharded":
            file = f"{folder}/of-{rank}/shard.pt"
            torch.save(found, file)
        elif how == "distributed":
            dcp.save(found, checkpoint_id=f"{folder}/dcp")
        else:
            if rank == 0:
                torch.save(found, path + ".part")
                os.replace(path + ".part", path)
            dist.barrier()
            file = path
        model, optimizer = made()
        if how == "distributed":
            model(torch.ones(2, 8, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            found = states() | {"epoch": 0}
            dcp.load(found, checkpoint_id=f"{folder}/dcp")
        else:
            found = torch.load(file, map_location="cpu", weights_only=how != "sharded")
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        torch.set_rng_state(found["rng"])
        one, other = found["model"]["0.weight"], found["model"]["1.weight"]
        tied = how != "sharded" and one.data_ptr() == other.data_ptr()
        print(found["epoch"], sorted(found["model"]), one.device.type, tied)
print(len(optimizer.state_dict()["state"]), [tuple(one.shape) for one in model.parameters()])
print(rank == 1 or os.path.exists(path))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["initial", "resumed", "buffer", "sharded", "distributed"])
def test_what_a_script_saves_it_loads_as_a_real_one_does(
    how: str, tmp_path: Path, ranks: type[Runner]
) -> None:
    """First weights for all ranks, states to resume from, shards, buffers; nothing stays on the disk."""
    script, real, fake = tmp_path / "train.py", tmp_path / "real", tmp_path / "fake"
    script.write_text(RESUMES)
    real.mkdir()
    fake.mkdir()
    done = ranks.run([sys.executable, str(script), how, str(real)], ranks.env())
    assert done.status == (0, 0), done.errors
    command = (str(script), how, str(fake))
    asked = Asked(command=command, world_size=2, ranks=(0, 1), warmup=0, steps=9, has_gpu=False)
    rehearse(asked, tmp_path / "run")
    tables = rehearsal_folder(tmp_path / "run")
    said = "".join((tables / f"rank-{rank:05d}" / "output.log").read_text() for rank in (0, 1))
    if how == "distributed":  # the numbers stay where they are
        said = said.replace("cuda", "cpu")
    assert said == done.output
    assert not [file for file in fake.rglob("*") if file.is_file()]


@pytest.mark.parametrize(("how", "words"), [("torch", "No such file.*gone"), ("dcp", "CheckpointException")])
def test_what_was_not_saved_is_the_error_of_a_real_run(how: str, words: str, tmp_path: Path) -> None:
    """A path that is not there is none that could have been saved."""
    script = tmp_path / "train.py"
    loads = {
        "torch": "torch.load('gone.pt')",
        "dcp": "dist.checkpoint.load({'a': torch.ones(1)}, checkpoint_id='gone')",
    }
    head = "import torch, torch.distributed.checkpoint\nimport torch.distributed as dist\n"
    script.write_text(f"{head}dist.init_process_group('gloo')\n{loads[how]}\n")
    with pytest.raises(RehearsalError, match=rf"train\.py:4.*{words}"):
        rehearse(Asked(command=(str(script),), world_size=2, ranks=(0,)), tmp_path / "run")


def test_memory_that_processes_share_is_memory(tmp_path: Path) -> None:
    """Tensors and modules of the host go there and stay what they are."""
    said, _ = _rehearsed(tmp_path, "shared", (0,))
    assert said[-1] == "1"


def test_weights_that_are_read_from_a_file_are_the_hosts_until_they_are_moved(tmp_path: Path) -> None:
    """As safetensors reads them: a storage that lies over the file, and a tensor over that."""
    said, _ = _rehearsed(tmp_path, "mapped", (0,))
    assert said[-1] == f"['cpu', 'cuda:0'] {keeping_states.WIDTH}"


PRETRAINED = """
import sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

dist.init_process_group("nccl")
model = LlamaForCausalLM.from_pretrained(sys.argv[1])
optimizer = torch.optim.AdamW(model.parameters())
model.to("cuda")
tied = model.lm_head.weight is model.model.embed_tokens.weight
sys.stdout.write(f"{tied} {sorted({str(one.device) for one in model.parameters()})}\\n")
parallel = DistributedDataParallel(model, device_ids=[0])
for _ in range(2):
    tokens = torch.randint(0, 99, (2, 16), device="cuda")
    parallel(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_pretrained_model_is_moved_like_any_other(tmp_path: Path) -> None:
    """With its optimizer and its tied weights: all gradients are reduced, and each is stepped."""
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**shape, vocab_size=99, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "train.py").write_text(PRETRAINED)
    command = (str(tmp_path / "train.py"), str(tmp_path / "model"))
    found = rehearse(Asked(command=command, world_size=2, ranks=(0,), warmup=0, steps=2), tmp_path / "run")
    tables = rehearsal_folder(tmp_path / "run")
    said = (tables / "rank-00000" / "output.log").read_text().splitlines()
    assert "True ['cuda:0']" in said
    table = read_rank(tables, 0)
    messages, places = table.messages.to_pylist(), table.places.to_pylist()
    reduced = sum(
        messages[event["item"]]["size_bytes"]
        for event in table.events.to_pylist()
        if event["what"] == 1
        and places[event["place"]]["step"] == 1
        and messages[event["item"]]["kind"] == "all_reduce"
    )
    n_bytes = sum(4 * one.numel() for one in model.parameters())
    assert reduced == n_bytes
    held = found.memory["0"]["bytes"]
    assert held["parameters"] - n_bytes < 512 * len(list(model.parameters()))
    assert held["optimizer"] >= 2 * n_bytes


LOADS = """
import json
import subprocess
import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
path, where, when = sys.argv[1:]
model = torch.nn.Linear(64, 64, bias=False)
if when == "moved":
    model.cuda()
states = torch.load(path, map_location=eval(where))
print(states["weight"].device, torch.cuda.memory_allocated())
model.load_state_dict(states)
model.cuda()
print(torch.cuda.max_memory_allocated())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(2, 64).cuda()).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "mapped",
    [
        ("'cpu'", "both"),
        ("torch.device('cpu')", "both"),
        ("lambda storage, location: storage", "both"),
        ("lambda storage, location: torch.serialization.default_restore_location(storage, 'cpu')", "both"),
        ("{'cuda:0': 'cpu'}", "both"),
        ("'cuda'", "none"),
        ("lambda storage, location: storage.cuda(0)", "none"),
        ("{'cpu': 'cuda:0'}", "none"),
        ("None", "cpu"),
        ("{'cuda:1': 'cuda:0'}", "cpu"),
        ("lambda storage, location: None", "cpu"),
    ],
)
@pytest.mark.parametrize(("saved", "when"), [("cpu", "not yet"), ("cuda:0", "moved")])
def test_weights_of_a_real_run_are_loaded_where_it_had_them_or_the_script_maps_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped: tuple[str, str], saved: str, when: str
) -> None:
    """The device holds the model, once it is there, and states only if they were or are mapped there."""
    where, host = mapped
    is_host = host in {"both", saved}
    script, weights = tmp_path / "train.py", tmp_path / "weights.pt"
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: saved)
    torch.save(torch.nn.Linear(64, 64, bias=False).state_dict(), weights)
    script.write_text(LOADS)
    command = (str(script), str(weights), where, when)
    rehearse(Asked(command=command, world_size=2, ranks=(0,)), tmp_path / "run")
    log = rehearsal_folder(tmp_path / "run") / "rank-00000" / "output.log"
    first, peak = log.read_text().splitlines()[:2]
    size, states = 64 * 64 * 4, 0 if is_host else 64 * 64 * 4
    model = size if when == "moved" else 0
    assert first.split() == ["cpu" if is_host else "cuda:0", str(model + states)]
    assert int(peak) == size + states


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("bfloat16", "BF16"), ("float32", "F32"), ("uint8", "U8"), ("int64", "I64"), ("bool", "BOOL"),
        ("complex64", "C64"), ("float8_e4m3fn", "F8_E4M3"), ("float8_e4m3fnuz", "F8_E4M3FNUZ"),
        ("float8_e5m2", "F8_E5M2"),
    ],
)  # fmt: skip
def test_a_type_has_the_name_that_safetensors_gives_it(dtype: str, name: str) -> None:
    assert _Slice(torch.empty(2, dtype=getattr(torch, dtype))).get_dtype() == name


CAREFUL = """
import argparse, json, pickle, sys
from collections import OrderedDict
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
told = argparse.Namespace(lr=1.0)
saved = [
    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()},
    {"model": OrderedDict(model.state_dict()), "step": 3, "when": [1.0, (2, None)], "size": torch.Size([2])},
    {"model": model.state_dict(), "args": told},
    model,
]
ways = ({}, {"weights_only": False}, {"weights_only": True}, {"pickle_module": pickle})
said = []
for at, one in enumerate(saved):
    torch.save(one, f"{sys.argv[1]}.{at}.pt")
    for way in ways:
        try:
            said.append(type(torch.load(f"{sys.argv[1]}.{at}.pt", **way)).__name__)
        except Exception as error:
            said.append([type(error).__name__, "GLOBAL" in str(error)])
with torch.serialization.safe_globals([argparse.Namespace]):
    said.append(type(torch.load(f"{sys.argv[1]}.2.pt")).__name__)
with open(sys.argv[1], "w") as file:
    json.dump(said, file)
"""


def test_what_torch_refuses_to_load_is_refused(tmp_path: Path, ranks: type[Runner]) -> None:
    """A script that saves more than weights fails where it loads them, as it really does."""
    script, real, rehearsed = tmp_path / "train.py", tmp_path / "real.json", tmp_path / "rehearsed.json"
    script.write_text(CAREFUL)
    done = ranks.run([sys.executable, str(script), str(real)], ranks.env(), 1)
    assert done.status == (0,), done.errors
    rehearse(Asked(command=(str(script), str(rehearsed)), world_size=1), tmp_path / "run")
    assert json.loads(rehearsed.read_text()) == json.loads(real.read_text())
